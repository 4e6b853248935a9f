"""The token-level call behind every dialect: messages in, exact tokens recorded, a reply out.

Invariant: every request that reaches an open attempt is recorded as at least one call, whatever its outcome, and
`close_attempt` returns when all of them are in the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol

from agl.errors import ConfigError, GatewayError
from agl.extras import install_line
from agl.mdp.faults import ANSWER_REFUSED, REFUSALS
from agl.mdp.lost_answers import RETRY
from agl.mdp.selection import DEFAULT_POLICY, Selection
from agl.mdp.types import Call, IntArray, float_array, int_array
from agl.tracing.system_prompts import SystemPrompts
from agl.trainer.engines.base import (
    Engine,
    Request,
    Sampling,
    holds_to_grammars,
)
from agl.trainer.gateway.access import Access, PendingRequest, SamplingRules
from agl.trainer.gateway.calls import (
    ChatRequest,
    Choice,
    OnTokens,
    Reply,
    ServedPolicy,
    assistant_message,
    cut_at_stop,
    rendered_prompt,
    request_record,
    stop_text_of,
)
from agl.trainer.gateway.errors import PromptTooLongError, RequestError, SchemaError, invalid_key, refusal
from agl.trainer.gateway.gate import Gate
from agl.trainer.gateway.grammars import ONE_CALL_OF_A_LIST, grammar_of, is_one_of_a_list, is_strict, with_one_call
from agl.trainer.gateway.sessions import SessionMatch
from agl.trainer.http.auth import key_of, matches
from agl.trainer.http.turns import LARGE_BYTES, LARGE_MESSAGES
from agl.trainer.rendering.digests import text_of
from agl.trainer.rendering.rendering import Rendering

OFF_LOOP_SIZE = 4096
"""Longer texts, in characters, are tokenised in a worker thread; a shorter one is done before a thread has begun."""
OFF_LOOP_MESSAGES = 32
"""So are more new messages."""

log = logging.getLogger("agl.gateway")


class CallStore(Protocol):
    """Where calls are recorded; a `Store` is one."""

    async def add_calls(self, calls: Sequence[Call]) -> None:
        """Record calls. Returns once they are stored."""
        ...


class Gateway:
    """Serves policies to agents and records every call. Lives on one event loop.

    Args:
        store: where calls are recorded.
        capture_content: whether messages are recorded in addition to the tokens.
        hold_timeout: how long an update waits for running requests before it cancels them, seconds.

    Attributes:
        base_url: where it listens; empty while it does not.
    """

    def __init__(self, store: CallStore, *, capture_content: bool = True, hold_timeout: float = 30.0) -> None:
        self.store = store
        self.capture_content = capture_content
        self.hold_timeout = hold_timeout
        self.base_url = ""
        self._policies: dict[str, ServedPolicy] = {}
        self._accesses: dict[tuple[str, int], Access] = {}
        self._gate = Gate()
        self._warned: set[str] = set()

    # -- policies -----------------------------------------------------------------------------------------------------

    def serve(self, name: str, engine: Engine, rendering: Rendering, stop_token_ids: Sequence[int] = ()) -> None:
        """Serve a policy under a name, replacing an earlier one.

        Args:
            name: the policy's.
            engine: samples its tokens.
            rendering: converts between messages and tokens.
            stop_token_ids: tokens that end an answer, in addition to the rendering's.
        """
        if (why := rendering.tools_refusal) is not None:
            log.warning("policy %r: requests with tools will be refused: %s", name, why)
        stops = tuple(dict.fromkeys((*rendering.stop_token_ids, *stop_token_ids)))
        self._policies[name] = ServedPolicy(name, engine, rendering, stops)

    def served(self, policy: str | None) -> ServedPolicy:
        """The policy of that name; None, for agents that are not selected, takes the default or the first one.

        Raises:
            RequestError: 404, nothing is served under that name.
        """
        if policy is None:
            policy = DEFAULT_POLICY if DEFAULT_POLICY in self._policies else next(iter(self._policies), "")
        if policy not in self._policies:
            raise RequestError(404, f"no policy {policy!r} is served here", code="model_not_found", param="model")
        return self._policies[policy]

    def policy_named(self, model: str, policy: str | None) -> str | None:
        """The policy that answers a request: the one of its agent, `policy`, whatever `model` the request names."""
        return policy

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the served policies."""
        return tuple(self._policies)

    def hold(self) -> AbstractAsyncContextManager[None]:
        """Hold new requests while the block runs; it starts when those in flight have ended.

        Requests still in flight after `hold_timeout` are cancelled: the client gets an error that asks it to try again,
        and its next request is held like the others.

        Raises:
            GatewayError: cancelled requests did not end.
        """
        return self._gate.hold(self.hold_timeout)

    # -- attempts -----------------------------------------------------------------------------------------------------

    def open_attempt(
        self,
        rollout_id: str,
        attempt: int,
        *,
        selection: Selection,
        seed: int = 0,
        rules: SamplingRules | None = None,
        system_prompts: SystemPrompts | None = None,
    ) -> tuple[Access, str]:
        """Open an attempt for requests. Returns its access and its key.

        Args:
            system_prompts: are put into requests of clients without agl, which replaces them in those that it sends.

        Raises:
            GatewayError: the gateway does not listen yet.
        """
        if not self.base_url:
            raise GatewayError("the gateway is not listening", hint="start it with GatewayServer.start()")
        rules = rules or SamplingRules()
        access, key = Access.opened(rollout_id, attempt, selection, seed, rules, self.base_url, system_prompts)
        self._accesses[rollout_id, attempt] = access
        return access, key

    def admit(self, access: Access) -> None:
        """Serve an attempt that another process has opened."""
        self._accesses[access.rollout_id, access.attempt] = access

    def find_attempt(self, rollout_id: str, attempt: int, headers: Mapping[str, str]) -> Access:
        """The attempt that a request belongs to.

        Raises:
            RequestError: 401, no such attempt is open or the key is not the attempt's; the client cannot tell which.
        """
        access = self._accesses.get((rollout_id, attempt))
        # The comparison comes first, so that an unknown attempt takes as long as a wrong key.
        authorized = matches(key_of(headers), b"" if access is None else access.key_hash)
        if access is None or not authorized:
            raise invalid_key(rollout_id, attempt)
        return access

    async def close_attempt(self, rollout_id: str, attempt: int) -> list[Call]:
        """End an attempt: its key dies, its running requests are cancelled, its calls are in the store.

        Returns:
            Every call it made, by index.

        Raises:
            StoreError: a call could not be stored.
        """
        access = self._accesses.pop((rollout_id, attempt), None)
        if access is None:
            return []
        closed = RequestError(499, "the attempt has ended, and its requests with it", code="attempt_closed")
        running = []
        for pending in list(access.pending):
            pending.cancel(closed)
            if pending.task is None:
                self._record_failure(pending, closed)
            else:
                running.append(pending.task)
        if running:
            await asyncio.wait(running)
        await asyncio.gather(*access.writes)
        return sorted(access.calls, key=lambda c: (c.index, c.id))

    def cancel_requests(self, cause: RequestError) -> None:
        """Cancel every running request; its client gets `cause`."""
        for access in self._accesses.values():
            for pending in list(access.pending):
                pending.cancel(cause)

    # -- requests -----------------------------------------------------------------------------------------------------

    def begin_request(
        self, access: Access, agent: str, response_id: str, span_id: str | None = None, retry: int = 0
    ) -> PendingRequest:
        """Register the arrival of a request. `complete` or `refuse` must follow.

        Args:
            access: its attempt.
            agent: the name of the agent that sent it.
            response_id: of the answer.
            span_id: of the client's span, hex.
            retry: how often the client had sent the same request before.
        """
        policy = access.selection.policy_for(agent)
        pending = PendingRequest(
            access, agent, policy, access.request_count, response_id, span_id, time.time(), retry=retry
        )
        access.request_count += 1
        access.pending.add(pending)
        return pending

    def refuse(self, pending: PendingRequest, error: Exception) -> None:
        """Record a request that could not be read: a `RequestError`, or a client that hung up."""
        self._record_failure(pending, error)

    async def complete(
        self, pending: PendingRequest, request: ChatRequest, on_tokens: OnTokens | None = None
    ) -> list[Reply]:
        """Answer a request with `request.n` replies and record each as a call.

        Raises:
            RequestError: the request cannot be served; recorded as a failed call.
            CancelledError: the awaiting task was cancelled; recorded as a cancelled call.
        """
        # The attempt was closed while the body was read.
        if pending.recorded:
            raise invalid_key(pending.access.rollout_id, pending.access.attempt)
        pending.task = asyncio.current_task()
        pending.request = request
        for other in list(pending.access.pending) if pending.retry else ():
            if pending.replaces(other):
                other.cancel(RequestError(499, "the client has sent the request again", code="sent_again"))
        choices: list[Choice] = []
        try:
            served = self.served(pending.policy)
            async with self._gate.passing(pending):
                return await self._replies(pending, served, request, choices, on_tokens)
        except asyncio.CancelledError as error:
            self._record_failure(pending, pending.cancel_cause or error, request, choices)
            if pending.cancel_cause is None:
                raise
            raise pending.cancel_cause from None
        except Exception as error:
            refused = _of_schema(request, refusal(error, pending.response_id), error)
            self._record_failure(pending, refused, request, choices)
            raise refused from error
        finally:
            pending.task = None

    async def _replies(
        self,
        pending: PendingRequest,
        served: ServedPolicy,
        request: ChatRequest,
        choices: list[Choice],
        on_tokens: OnTokens | None,
    ) -> list[Reply]:
        """Render the prompt once and sample every choice after it; `choices` is filled for the record of a failure."""
        prompt, forced, match = await self._rendered(pending, served, request)
        choices.extend(Choice(k, prompt, forced, [], []) for k in range(request.n))
        sampling = _sampling(served, pending.access.rules, request.sampling, prompt.size)
        may_call_freely = not (request.one_call or is_strict(request.tools))
        if request.sampling.grammar or request.force_tool or (request.tools and not may_call_freely):
            sampling = self._held(served, request, sampling, prompt)
        for choice in choices:
            choice.grammar = sampling.grammar
        replies = [self._reply(pending, served, request, match, choice, sampling, on_tokens) for choice in choices]
        if len(replies) == 1:
            results = [await replies[0]]
        else:
            tasks = [asyncio.ensure_future(reply) for reply in replies]
            try:
                results = list(await asyncio.gather(*tasks))
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
        pending.recorded = True
        pending.access.pending.discard(pending)
        return results

    def _held(self, served: ServedPolicy, request: ChatRequest, sampling: Sampling, prompt: IntArray) -> Sampling:
        """`sampling` with the grammar of the request's schema and of the calls that it forces or allows. Of what an
        engine without grammars does not hold to, one line says why.

        Raises:
            RequestError: 400, it asks for what the engine, or the form of the model's calls, cannot be held to.
        """
        held = holds_to_grammars(served.engine)
        if held is True:
            return replace(sampling, grammar=grammar_of(request, served, prompt))
        if request.sampling.grammar and held:
            raise RequestError(400, held, param=request.schema_field)
        if is_one_of_a_list(request, served.rendering):
            raise RequestError(400, ONE_CALL_OF_A_LIST, param="parallel_tool_calls")
        why = f"{type(served.engine).__name__} does not enforce one; agl's own does: {install_line('structured')}"
        if request.sampling.grammar:
            self._warn_once(f"an agent requests answers in a JSON schema: {why}")
        if is_strict(request.tools):
            self._warn_once(f"an agent requests strict tools, whose arguments have a schema: {why}")
        return sampling

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    async def _rendered(
        self, pending: PendingRequest, served: ServedPolicy, request: ChatRequest
    ) -> tuple[IntArray, IntArray, SessionMatch]:
        """What `rendered_prompt` returns, made on the event loop or, of a large request, in its attempt's turn."""
        access = pending.access
        match_arguments = (served.name, request.messages, request.tools, pending.agent)
        if _is_large(request.messages, LARGE_MESSAGES, LARGE_BYTES):
            async with access.turns as turn:
                match = await turn.run(access.sessions.match, *match_arguments)
                return await turn.run(rendered_prompt, served.rendering, request, match)
        match = access.sessions.match(*match_arguments)
        if not _is_large(request.messages[match.new :], OFF_LOOP_MESSAGES, OFF_LOOP_SIZE):
            return rendered_prompt(served.rendering, request, match)
        async with access.turns as turn:
            return await turn.run(rendered_prompt, served.rendering, request, match)

    async def _reply(
        self,
        pending: PendingRequest,
        served: ServedPolicy,
        request: ChatRequest,
        match: SessionMatch,
        choice: Choice,
        sampling: Sampling,
        on_tokens: OnTokens | None,
    ) -> Reply:
        """Sample one choice, parse it, record its call, and make it continuable."""
        access = pending.access
        k = choice.number
        sampling = replace(sampling, seed=access.request_seed(pending.index, k, request.sampling.seed))
        session = match.parent.session if match.parent else pending.response_id
        session = f"{session}/{k}" if k else session

        def on_sampled(
            ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[tuple[int, float]]] = ()
        ) -> None:
            choice.ids.extend(ids)
            choice.logprobs.extend(logprobs)
            choice.top.extend(top)
            assert on_tokens is not None
            on_tokens(choice, ids)

        to_sample = Request(choice.prompt, sampling, served.name, session, f"{access.rollout_id}/{access.attempt}")
        async with access.answers:
            completion = await served.engine.generate(to_sample, on_tokens=on_sampled if on_tokens else None)
        if request.one_call and request.tools and not sampling.grammar:
            completion = await _off_loop(
                completion.token_ids.size, with_one_call, completion, served.rendering, request, choice
            )
        parsed = await _off_loop(
            completion.token_ids.size,
            served.rendering.parse,
            completion.token_ids,
            request.tools,
            forced_ids=choice.forced,
            prompt_ids=choice.prompt,
            grammar=sampling.grammar,
        )
        reasoned = 0
        if parsed.reasoning:
            size = completion.token_ids.size
            places = served.rendering.reasoning_places
            reasoned = len(await _off_loop(size, places, completion.token_ids, parsed, prompt_ids=choice.prompt))
        whole = parsed
        parsed = cut_at_stop(parsed, sampling.stop)
        message, tool_call_ids = assistant_message(parsed, lambda i: access.tool_call_id(pending.index, k, i))
        called = tool_call_ids and completion.finish_reason == "stop"
        finish_reason = "tool_calls" if called else completion.finish_reason
        self._record(
            pending,
            choice,
            policy_version=completion.policy_version,
            response_ids=completion.token_ids,
            logprobs=completion.logprobs,
            temperature=sampling.temperature,
            finish_reason=finish_reason,
            parent_id=match.parent.call_id if match.parent else None,
            fork_cause=match.cause.value if match.cause else None,
            tool_call_ids=tool_call_ids,
            request=request_record(
                request, match, sampling, message, completion.versions, content=self.capture_content
            ),
            response=message if self.capture_content else {},
        )
        call_id = pending.call_id(k)
        access.sessions.remember(match, call_id, session, choice.prompt, completion.token_ids, message)
        # Calls of which the last has no end are not all that the policy wants, even where a stop token ended the last.
        # The beginning of a single call is a text that the policy has ended.
        # A stop text that the agent has asked for ends an answer anywhere.
        stop_text = stop_text_of(completion, sampling.stop, served.rendering)
        unfinished = parsed.unfinished and bool(parsed.tool_calls) and stop_text is None
        # The APIs have no finish reason for an answer that the engine aborted: to the client it is one cut short.
        shown_reason = "length" if finish_reason == "cancelled" or unfinished else finish_reason
        return Reply(
            call_id,
            message,
            completion,
            shown_reason,
            choice.prompt.size,
            reasoned,
            unfinished,
            stop_text,
            choice=choice,
            parsed=whole,
        )

    # -- records ------------------------------------------------------------------------------------------------------

    def _record(self, pending: PendingRequest, choice: Choice, **outcome: Any) -> None:
        """Record a choice as a call; `outcome` holds the fields of `Call` that are not the request's."""
        if pending.retry:
            outcome["request"] = {**outcome["request"], RETRY: pending.retry}
        call = Call(
            id=pending.call_id(choice.number),
            rollout_id=pending.access.rollout_id,
            attempt=pending.access.attempt,
            index=pending.index,
            agent=pending.agent,
            policy=pending.policy,
            prompt_ids=choice.prompt,
            span_id=pending.span_id,
            started_at=pending.started_at,
            ended_at=pending.started_at + time.monotonic() - pending.began,
            **outcome,
        )
        choice.recorded = True
        pending.access.calls.append(call)
        pending.access.writes.append(asyncio.ensure_future(self.store.add_calls([call])))

    def _record_failure(
        self,
        pending: PendingRequest,
        error: BaseException,
        request: ChatRequest | None = None,
        choices: Sequence[Choice] = (),
    ) -> None:
        """Record the choices that were not completed, with the tokens that the client may have seen."""
        if pending.recorded:
            return
        pending.recorded = True
        pending.access.pending.discard(pending)
        cancelled = pending.cancel_cause is not None or not isinstance(error, RequestError)
        why = str(error)
        code = getattr(error, "code", None)
        if why and not self.capture_content:
            # A refusal may quote the request.
            why = code or type(error).__name__
        elif code in REFUSALS:
            why = f"{code}: {error}"
        record = request_record(request, content=self.capture_content) if request else {}
        if isinstance(error, RequestError) and error.answer is not None:
            record[ANSWER_REFUSED] = error.answer
        empty = int_array([])
        for choice in choices or [Choice(0, empty, empty, [], [])]:
            if not choice.recorded:
                self._record(
                    pending,
                    choice,
                    policy_version=0,
                    response_ids=int_array(choice.ids),
                    logprobs=float_array(choice.logprobs),
                    finish_reason="cancelled" if cancelled else "error",
                    request=record,
                    error=why or "cancelled by the client",
                )


def _of_schema(request: ChatRequest, refused: RequestError, error: Exception) -> RequestError:
    """`refused`, with the field whose schema cannot be held, if that is why: see `Grammars.admitted`."""
    if not (isinstance(error, ConfigError) and "schema" in error.where):
        return refused
    names = list(dict.fromkeys(str(tool.get("function", tool).get("name")) for tool in request.tools or ()))
    names = [request.force_tool] if isinstance(request.force_tool, str) else names
    form = error.where.get("form")
    path = error.where["schema"]
    tool = names[form] if isinstance(form, int) and form < len(names) else None
    field = request.schema_field if tool is None else "tools"
    owner = field if tool is None else f"tool {tool!r}"
    text = f"{error.message} (the schema of {owner}, at {path})\n  -> {error.hint}"
    return SchemaError(text, code=refused.code, param=field, tool=tool)


def _sampling(served: ServedPolicy, rules: SamplingRules, requested: Sampling, prompt_tokens: int) -> Sampling:
    """The sampling parameters that apply: the trainer's rules, then the agent's, within the engine's context.

    Raises:
        RequestError: 400, the prompt leaves no room for an answer.
    """
    room = served.engine.max_context - prompt_tokens
    if room < 1:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens, which leaves no room in a context of "
            f"{served.engine.max_context}; shorten the history or train a model with a longer context",
            prompt_tokens,
            served.engine.max_context,
        )
    bound = room if rules.max_tokens is None else min(room, rules.max_tokens)
    return Sampling(
        max_tokens=min(requested.max_tokens or bound, bound),
        temperature=requested.temperature if rules.temperature is None else rules.temperature,
        top_p=requested.top_p if rules.top_p is None else rules.top_p,
        top_k=requested.top_k if rules.top_k is None else rules.top_k,
        stop=requested.stop,
        stop_token_ids=served.stop_token_ids,
        top_logprobs=requested.top_logprobs,
    )


def _is_large(messages: Sequence[Mapping[str, Any]], count: int, size: int) -> bool:
    """Whether there are more messages than `count`, or as many characters as `size`."""
    return len(messages) > count or sum(len(text_of(m.get("content"))) for m in messages) >= size


async def _off_loop(size: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run in a worker thread what would block the event loop: `size` is in characters or tokens."""
    if size < OFF_LOOP_SIZE:
        return function(*arguments, **keywords)
    return await asyncio.to_thread(function, *arguments, **keywords)

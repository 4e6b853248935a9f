"""The token-level call that every dialect comes down to: messages in, exact tokens recorded, a reply out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agl.errors import ContextLengthError, EngineError, GatewayError
from agl.mdp import Call, IntArray, int_array
from agl.selection import DEFAULT_POLICY, Selection
from agl.trainer.engine import Completion, Engine, Sampling
from agl.trainer.gateway.access import Access, AccessTable, SamplingRules
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.normalise import with_tool_names
from agl.trainer.gateway.rendering import ParsedMessage, Rendering
from agl.trainer.gateway.sessions import ForkCause, Place, text_of
from agl.trainer.store.base import Store

log = logging.getLogger("agl.gateway")


@dataclass(frozen=True, slots=True)
class Served:
    """A policy that the gateway serves: its engine and how its messages become tokens."""

    name: str
    engine: Engine
    rendering: Rendering


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What an agent asks for, in no dialect.

    Attributes:
        messages, tools: as OpenAI chat messages and tools. force_tool: a name, or True for any.
        sampling: as the agent asked (its `seed` is mixed with the request's own).
        n: how many answers. span_id: the client's span. asked: the sampling fields as sent, for the record.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    force_tool: str | bool | None
    sampling: Sampling
    n: int = 1
    span_id: str | None = None
    asked: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One answer.

    Attributes:
        call_id: of the recorded call. message: the assistant message in OpenAI's form.
        parsed: what the message was made from. completion: the sampled tokens.
        finish_reason: "stop", "length" or "tool_calls". prompt_tokens: P. cached_tokens: of these, continued exactly.
    """

    call_id: str
    message: Mapping[str, Any]
    parsed: ParsedMessage
    completion: Completion
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int


OnTokens = Callable[[int, Sequence[int], Sequence[float]], None]
"""(choice, token ids, log-probs) as they come."""


class Gateway:
    """Serves policies to agents and records every call. Lives on one event loop.

    Args:
        store: where calls go.
        capture_content: whether messages are recorded beside the tokens.
        hold_timeout: how long an update waits for running requests before it cancels them, seconds.
    """

    def __init__(self, store: Store, *, capture_content: bool = True, hold_timeout: float = 30.0) -> None:
        self.store = store
        self.capture_content = capture_content
        self.hold_timeout = hold_timeout
        self.base_url = ""
        self._served: dict[str, Served] = {}
        self._accesses = AccessTable()
        self._open_for_requests = asyncio.Event()
        self._open_for_requests.set()
        self._running: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # -- what is served -----------------------------------------------------------------------------------------------

    def serve(self, name: str, engine: Engine, rendering: Rendering) -> None:
        """Serve a policy under a name, in place of any before it."""
        self._served[name] = Served(name, engine, rendering)

    def served(self, policy: str | None) -> Served:
        """The policy that answers; agents that are not selected get the first one.

        Raises:
            RequestError: nothing is served under that name.
        """
        if policy is None:
            policy = DEFAULT_POLICY if DEFAULT_POLICY in self._served else next(iter(self._served), "")
        if policy not in self._served:
            raise RequestError(404, f"no policy {policy!r} is served here", code="model_not_found", param="model")
        return self._served[policy]

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the served policies."""
        return tuple(self._served)

    # -- attempts -----------------------------------------------------------------------------------------------------

    def open_attempt(
        self,
        rollout_id: str,
        attempt: int,
        *,
        selection: Selection,
        seed: int = 0,
        rules: SamplingRules | None = None,
    ) -> tuple[Access, str]:
        """Let an attempt in. Returns its access and its key.

        Raises:
            GatewayError: the gateway does not listen yet.
        """
        if not self.base_url:
            raise GatewayError("the gateway is not listening", hint="start it with GatewayServer.start()")
        return self._accesses.open(rollout_id, attempt, selection, seed, rules or SamplingRules(), self.base_url)

    def find_attempt(self, rollout_id: str, attempt: int, headers: Mapping[str, str]) -> Access:
        """The attempt that a request belongs to.

        Raises:
            RequestError: no such attempt is open, or the key is not its own (401 both, so that nothing can be probed).
        """
        access = self._accesses.find(rollout_id, attempt, headers)
        if access is None:
            raise RequestError(
                401,
                f"the key is not valid for rollout {rollout_id}, attempt {attempt}; keys end with their attempt",
                code="invalid_api_key",
            )
        return access

    async def close_attempt(self, rollout_id: str, attempt: int) -> list[Call]:
        """End an attempt: its key dies, its running requests are cancelled, its calls are in the store.

        Returns:
            Every call it made, by index.
        """
        access = self._accesses.close(rollout_id, attempt)
        if access is None:
            return []
        for task in list(access.requests):
            task.cancel()
        if access.requests:
            await asyncio.gather(*access.requests, return_exceptions=True)
        if access.recorded:
            await asyncio.gather(*access.recorded)
        return sorted(access.finished, key=lambda c: (c.index, c.id))

    # -- calls --------------------------------------------------------------------------------------------------------

    async def complete(
        self,
        access: Access,
        agent: str,
        request: ChatRequest,
        on_tokens: OnTokens | None = None,
        *,
        response_id: str,
    ) -> list[Reply]:
        """Answer a request with `request.n` replies and record each as a call under `response_id`.

        Raises:
            RequestError: the request cannot be served; recorded as a failed call.
        """
        index = access.calls
        access.calls += 1
        access.by_agent[agent] = access.by_agent.get(agent, 0) + 1
        policy = access.selection.policy_for(agent)
        started = time.time()
        task = asyncio.current_task()
        assert task is not None
        access.requests.add(task)
        try:
            served = self.served(policy)
            await self._open_for_requests.wait()
            with self._in_flight(task):
                place = access.sessions.place(served.name, request.messages, request.tools)
                size = _size(request.messages[place.new :])
                prompt, forced, place = await _off_loop(size, _prompt, served.rendering, request, place)
                sampling = self._sampling(served, access.rules, request.sampling, prompt.size)
                session = place.parent.session if place.parent else response_id
                tasks = [
                    asyncio.ensure_future(
                        self._answer(
                            served, access, request, place, prompt, forced, sampling, session, index, choice,
                            response_id, agent, policy, started, on_tokens,
                        )
                    )
                    for choice in range(request.n)
                ]  # fmt: skip
                try:
                    return list(await asyncio.gather(*tasks))
                except BaseException:
                    for t in tasks:
                        t.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    raise
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            refused = _refusal(error)
            if not any(c.index == index for c in access.finished):
                empty = np.empty(0, np.int32)
                self._record(
                    access,
                    Call(
                        response_id, access.rollout_id, access.attempt, index, agent, policy, 0, empty, empty,
                        np.empty(0, np.float32), finish_reason="cancelled" if cancelled else "error",
                        span_id=request.span_id, request=self._content(request, None),
                        error="cancelled by the client" if cancelled else str(refused or error),
                        started_at=started, ended_at=time.time(),
                    ),
                )  # fmt: skip
            if refused is not None:
                raise refused from error
            raise
        finally:
            access.requests.discard(task)

    async def _answer(
        self,
        served: Served,
        access: Access,
        request: ChatRequest,
        place: Place,
        prompt: IntArray,
        forced: IntArray,
        sampling: Sampling,
        session: str,
        index: int,
        choice: int,
        response_id: str,
        agent: str,
        policy: str | None,
        started: float,
        on_tokens: OnTokens | None,
    ) -> Reply:
        seed = access.request_seed(index, choice) ^ (request.sampling.seed & 0x7FFFFFFFFFFFFFFF)
        own = replace(sampling, seed=seed)
        completion = await served.engine.generate(
            prompt,
            own,
            policy=served.name,
            session=f"{session}/{choice}" if choice else session,
            on_tokens=None if on_tokens is None else (lambda ids, lps: on_tokens(choice, ids, lps)),
        )
        parsed = await _off_loop(
            completion.token_ids.size, served.rendering.parse, completion.token_ids, request.tools,
            forced_ids=forced, prompt_ids=prompt,
        )  # fmt: skip
        parsed = _cut_at_stop(parsed, request.sampling.stop)
        message, tool_call_ids = _message(parsed, lambda k: access.tool_call_id(index, choice, k))
        finish = completion.finish_reason
        reason = "tool_calls" if tool_call_ids and finish == "stop" else finish
        call_id = response_id if choice == 0 else f"{response_id}:{choice}"
        self._record(
            access,
            Call(
                id=call_id,
                rollout_id=access.rollout_id,
                attempt=access.attempt,
                index=index,
                agent=agent,
                policy=policy,
                policy_version=completion.policy_version,
                prompt_ids=prompt,
                response_ids=completion.token_ids,
                logprobs=completion.logprobs,
                temperature=own.temperature,
                finish_reason=reason,
                parent_id=place.parent.call_id if place.parent else None,
                fork_cause=place.cause.value if place.cause else None,
                tool_call_ids=tool_call_ids,
                span_id=request.span_id,
                request=self._content(request, place, own),
                response=message if self.capture_content else {},
                started_at=started,
                ended_at=time.time(),
            ),
        )
        access.sessions.remember(place, call_id, session, prompt, completion.token_ids, message)
        cached = place.parent.prompt_ids.size + place.parent.response_ids.size if place.parent else 0
        return Reply(call_id, message, parsed, completion, reason, prompt.size, cached)

    def _record(self, access: Access, call: Call) -> None:
        access.finished.append(call)
        task = asyncio.ensure_future(self.store.add_calls([call]))
        access.recorded.add(task)

    def _content(self, request: ChatRequest, place: Place | None, used: Sampling | None = None) -> dict[str, Any]:
        facts: dict[str, Any] = {"asked": dict(request.asked or {})}
        if used is not None:
            facts["used"] = {"temperature": used.temperature, "top_p": used.top_p, "top_k": used.top_k,
                             "max_tokens": used.max_tokens, "seed": used.seed}  # fmt: skip
        if place is not None and place.detail:
            facts["fork_detail"] = place.detail
        if self.capture_content:
            facts["messages"] = [dict(m) for m in request.messages[place.new if place else 0 :]]
            if place is None or place.parent is None:
                facts["tools"] = [dict(t) for t in request.tools or ()]
        return facts

    def _sampling(self, served: Served, rules: SamplingRules, asked: Sampling, prompt_tokens: int) -> Sampling:
        room = served.engine.max_context - prompt_tokens
        if room < 1:
            raise RequestError(
                400,
                f"the prompt has {prompt_tokens} tokens, which leaves no room in a context of "
                f"{served.engine.max_context}; shorten the history or train a model with a longer context",
                code="context_length_exceeded",
                param="messages",
            )
        bound = room if rules.max_tokens is None else min(room, rules.max_tokens)
        return Sampling(
            max_tokens=min(asked.max_tokens or bound, bound),
            temperature=asked.temperature if rules.temperature is None else rules.temperature,
            top_p=asked.top_p if rules.top_p is None else rules.top_p,
            top_k=asked.top_k if rules.top_k is None else rules.top_k,
            stop=asked.stop,
            stop_token_ids=served.rendering.stop_token_ids,
            top_logprobs=asked.top_logprobs,
        )

    # -- updates ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_flight(self, task: asyncio.Task[Any]) -> Any:
        self._running.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold new requests while the block runs, after those in flight have ended or `hold_timeout` cancelled them."""
        self._open_for_requests.clear()
        try:
            try:
                await asyncio.wait_for(self._idle.wait(), self.hold_timeout)
            except TimeoutError:
                log.warning("cancelling %d request(s) that outlasted the wait for an update", len(self._running))
                for task in list(self._running):
                    task.cancel()
                await self._idle.wait()
            yield
        finally:
            self._open_for_requests.set()


def _prompt(rendering: Rendering, request: ChatRequest, place: Place) -> tuple[IntArray, IntArray, Place]:
    """Prompt ids, the forced beginning of the answer in them, and where the request stands after all."""
    if place.parent is not None:
        parent = place.parent
        new = with_tool_names(request.messages)[place.new :]
        system = request.messages[0].get("role") in ("system", "developer")
        arguments = (parent.prompt_ids, parent.response_ids, new, request.tools)
        extended = rendering.extend(*arguments, history_has_system=system)
        if extended is not None:
            forced = rendering.force(extended, request.tools, request.force_tool) if request.force_tool else None
            return (extended, int_array([]), place) if forced is None else (forced.ids, forced.forced_ids, place)
        why = rendering.why_not(*arguments, history_has_system=system)
        place = Place(None, 0, ForkCause.TEMPLATE, why, place.digests, place.tools)
    whole = rendering.prompt(request.messages, request.tools, force_tool=request.force_tool)
    return whole.ids, whole.forced_ids, place


async def _off_loop(size: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run in a worker thread what would hold up the event loop: `size` is in characters or tokens. A short text is done
    before a thread would have begun."""
    if size < 4096:
        return function(*arguments, **keywords)
    return await asyncio.to_thread(function, *arguments, **keywords)


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(text_of(m.get("content"))) for m in messages)


def _cut_at_stop(parsed: ParsedMessage, stop: Sequence[str]) -> ParsedMessage:
    """The stop text itself is not part of the answer's text, though its tokens are part of what was sampled."""
    ends = [at for s in stop if s and (at := parsed.content.find(s)) >= 0]
    return replace(parsed, content=parsed.content[: min(ends)]) if ends else parsed


def _message(parsed: ParsedMessage, tool_call_id: Callable[[int], str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The assistant message in OpenAI's form, and the ids minted for its tool calls."""
    ids = tuple(tool_call_id(k) for k in range(len(parsed.tool_calls)))
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if ids:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for i, c in zip(ids, parsed.tool_calls, strict=True)
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message, ids


def _refusal(error: BaseException) -> RequestError | None:
    """How an error is told to the client; None for one that is not the request's."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ContextLengthError):
        return RequestError(400, error.message, code="context_length_exceeded", param="messages")
    if isinstance(error, EngineError):
        return RequestError(503, error.message, code="engine_error")
    if isinstance(error, asyncio.CancelledError):
        return None
    if isinstance(error, Exception):
        from agl.errors import AglError

        if isinstance(error, AglError):
            return RequestError(400, error.message, code="invalid_request")
    return None

"""The token-level call that every dialect comes down to: messages in, exact tokens recorded, a reply out.

Invariant: every request that reaches an open attempt is recorded as at least one call, whatever becomes of it, and
`close_attempt` returns when all of them are in the store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from agl.errors import GatewayError
from agl.mdp.outcomes import TOOL_RESULTS, UNKNOWN_TOOLS
from agl.mdp.selection import DEFAULT_POLICY, Selection
from agl.mdp.types import Call, IntArray, float_array, int_array
from agl.trainer.engines.base import Engine, Sampling
from agl.trainer.gateway.access import Access, AccessTable, SamplingRules
from agl.trainer.gateway.calls import (
    ChatRequest,
    Choice,
    OnTokens,
    PendingRequest,
    Reply,
    ServedPolicy,
    assistant_message,
    cut_at_stop,
    tool_results,
    unknown_tools,
)
from agl.trainer.gateway.errors import RequestError, invalid_key, refusal
from agl.trainer.gateway.gate import Gate
from agl.trainer.gateway.sessions import ForkCause, SessionMatch, text_of
from agl.trainer.rendering.normalise import with_tool_names
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.store.base import Store

OFF_LOOP_SIZE = 4096
"""Longer texts, in characters, are tokenised in a worker thread; a shorter one is done before a thread has begun."""


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
        self._served: dict[str, ServedPolicy] = {}
        self._accesses = AccessTable()
        self._gate = Gate()

    # -- what is served -----------------------------------------------------------------------------------------------

    def serve(self, name: str, engine: Engine, rendering: Rendering, stop_token_ids: Sequence[int] = ()) -> None:
        """Serve a policy under a name, in place of any before it; `stop_token_ids` beside the rendering's own."""
        stops = tuple(dict.fromkeys((*rendering.stop_token_ids, *stop_token_ids)))
        self._served[name] = ServedPolicy(name, engine, rendering, stops)

    def served(self, policy: str | None) -> ServedPolicy:
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

    def hold(self) -> AbstractAsyncContextManager[None]:
        """Hold new requests while the block runs, after those in flight have ended or `hold_timeout` cancelled them.

        A client whose request is cancelled is told to try again, and is then held like the others.

        Raises:
            GatewayError: requests did not let themselves be cancelled.
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
            raise invalid_key(rollout_id, attempt)
        return access

    async def close_attempt(self, rollout_id: str, attempt: int) -> list[Call]:
        """End an attempt: its key dies, its running requests are cancelled, its calls are in the store.

        Returns:
            Every call it made, by index.

        Raises:
            StoreError: a call could not be stored.
        """
        access = self._accesses.close(rollout_id, attempt)
        if access is None:
            return []
        ended = RequestError(499, "the attempt has ended, and its requests with it", code="attempt_closed")
        running = []
        for wire in list(access.unsettled):
            wire.cancel(ended)
            if wire.task is None:
                self._settle(wire, ended, None)
            else:
                running.append(wire.task)
        if running:
            await asyncio.wait(running)
        await asyncio.gather(*access.writes)
        return sorted(access.finished, key=lambda c: (c.index, c.id))

    def cancel_requests(self, why: RequestError) -> None:
        """Cancel every running request and tell its client why."""
        for access in self._accesses:
            for wire in list(access.unsettled):
                wire.cancel(why)

    # -- calls --------------------------------------------------------------------------------------------------------

    def begin_request(self, access: Access, agent: str, response_id: str, span_id: str | None = None) -> PendingRequest:
        """Note that a request came in. `complete` or `refuse` must follow.

        Args:
            access: its attempt. agent: who asks. response_id: of the answer. span_id: the client's span (hex).
        """
        policy = access.selection.policy_for(agent)
        wire = PendingRequest(access, agent, policy, access.arrived, response_id, span_id, time.time())
        access.arrived += 1
        access.unsettled.add(wire)
        return wire

    def refuse(self, wire: PendingRequest, error: Exception) -> None:
        """Record a request that could not be read: a `RequestError`, or one whose client hung up."""
        self._settle(wire, error, None)

    async def complete(
        self, wire: PendingRequest, request: ChatRequest, on_tokens: OnTokens | None = None
    ) -> list[Reply]:
        """Answer a request with `request.n` replies and record each as a call.

        Raises:
            RequestError: the request cannot be served; recorded as a failed call.
            CancelledError: the awaiting task was cancelled; recorded as a cancelled call.
        """
        if wire.settled:
            raise invalid_key(wire.access.rollout_id, wire.access.attempt)
        wire.task = asyncio.current_task()
        choices: list[Choice] = []
        try:
            served = self.served(wire.policy)
            async with self._gate.passing(wire):
                return await self._answers(wire, served, request, choices, on_tokens)
        except asyncio.CancelledError as error:
            self._settle(wire, wire.why or error, request, choices)
            if wire.why is None:
                raise
            raise wire.why from None
        except Exception as error:
            refused = refusal(error)
            self._settle(wire, refused, request, choices)
            raise refused from error
        finally:
            wire.task = None

    async def _answers(
        self,
        wire: PendingRequest,
        served: ServedPolicy,
        request: ChatRequest,
        choices: list[Choice],
        on_tokens: OnTokens | None,
    ) -> list[Reply]:
        place = wire.access.sessions.place(served.name, request.messages, request.tools)
        size = sum(len(text_of(m.get("content"))) for m in request.messages[place.new :])
        prompt, forced, place = await _off_loop(size, _prompt, served.rendering, request, place)
        choices.extend(Choice(k, prompt, forced, [], []) for k in range(request.n))
        sampling = self._sampling(served, wire.access.rules, request.sampling, prompt.size)
        answers = [self._answer(wire, served, request, place, choice, sampling, on_tokens) for choice in choices]
        if len(answers) == 1:
            replies = [await answers[0]]
        else:
            tasks = [asyncio.ensure_future(answer) for answer in answers]
            try:
                replies = list(await asyncio.gather(*tasks))
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
        wire.settled = True
        wire.access.unsettled.discard(wire)
        return replies

    async def _answer(
        self,
        wire: PendingRequest,
        served: ServedPolicy,
        request: ChatRequest,
        place: SessionMatch,
        choice: Choice,
        sampling: Sampling,
        on_tokens: OnTokens | None,
    ) -> Reply:
        access, k = wire.access, choice.number
        own = replace(sampling, seed=access.request_seed(wire.index, k, request.sampling.seed))
        session = place.parent.session if place.parent else wire.response_id
        session = f"{session}/{k}" if k else session

        def sampled(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            choice.ids.extend(ids)
            choice.logprobs.extend(logprobs)
            assert on_tokens is not None
            on_tokens(choice, ids)

        completion = await served.engine.generate(
            choice.prompt, own, policy=served.name, session=session, on_tokens=sampled if on_tokens else None
        )
        parsed = await _off_loop(
            completion.token_ids.size, served.rendering.parse, completion.token_ids, request.tools,
            forced_ids=choice.forced, prompt_ids=choice.prompt,
        )  # fmt: skip
        parsed = cut_at_stop(parsed, own.stop)
        message, tool_call_ids = assistant_message(parsed, lambda i: access.tool_call_id(wire.index, k, i))
        finish = completion.finish_reason
        reason = "tool_calls" if tool_call_ids and finish == "stop" else finish
        self._record(
            access,
            Call(
                id=wire.call_id(k),
                rollout_id=access.rollout_id,
                attempt=access.attempt,
                index=wire.index,
                agent=wire.agent,
                policy=wire.policy,
                policy_version=completion.policy_version,
                prompt_ids=choice.prompt,
                response_ids=completion.token_ids,
                logprobs=completion.logprobs,
                temperature=own.temperature,
                finish_reason=reason,
                parent_id=place.parent.call_id if place.parent else None,
                fork_cause=place.cause.value if place.cause else None,
                tool_call_ids=tool_call_ids,
                span_id=wire.span_id,
                request=self._content(request, place, own, message),
                response=message if self.capture_content else {},
                started_at=wire.started,
                ended_at=time.time(),
            ),
        )
        choice.recorded = True
        access.sessions.remember(place, wire.call_id(k), session, choice.prompt, completion.token_ids, message)
        cached = place.parent.prompt_ids.size + place.parent.response_ids.size if place.parent else 0
        # The wire has no word for an answer that the engine gave up: to the client it is one cut short.
        told = "length" if reason == "cancelled" else reason
        return Reply(wire.call_id(k), message, parsed, completion, told, choice.prompt.size, cached)

    def _settle(
        self, wire: PendingRequest, error: BaseException, request: ChatRequest | None, choices: Sequence[Choice] = ()
    ) -> None:
        """Record what was not answered, with the tokens that the client may have seen."""
        if wire.settled:
            return
        wire.settled = True
        wire.access.unsettled.discard(wire)
        cancelled = wire.why is not None or not isinstance(error, RequestError)
        empty = int_array([])
        for choice in choices or [Choice(0, empty, empty, [], [])]:
            if choice.recorded:
                continue
            self._record(
                wire.access,
                Call(
                    id=wire.call_id(choice.number),
                    rollout_id=wire.access.rollout_id,
                    attempt=wire.access.attempt,
                    index=wire.index,
                    agent=wire.agent,
                    policy=wire.policy,
                    policy_version=0,
                    prompt_ids=choice.prompt,
                    response_ids=int_array(choice.ids),
                    logprobs=float_array(choice.logprobs),
                    finish_reason="cancelled" if cancelled else "error",
                    span_id=wire.span_id,
                    request=self._content(request, None) if request else {},
                    error=str(error) or "cancelled by the client",
                    started_at=wire.started,
                    ended_at=time.time(),
                ),
            )

    def _record(self, access: Access, call: Call) -> None:
        access.finished.append(call)
        access.writes.append(asyncio.ensure_future(self.store.add_calls([call])))

    def _content(
        self,
        request: ChatRequest,
        place: SessionMatch | None,
        used: Sampling | None = None,
        answer: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        facts: dict[str, Any] = {"asked": dict(request.asked or {})}
        if used is not None:
            facts["used"] = {"temperature": used.temperature, "top_p": used.top_p, "top_k": used.top_k,
                             "max_tokens": used.max_tokens, "seed": used.seed}  # fmt: skip
        if place is not None and place.detail:
            facts["fork_detail"] = place.detail
        new = place.new if place else 0
        if results := tool_results(request, new):
            facts[TOOL_RESULTS] = results
        if answer is not None and (unknown := unknown_tools(request, answer)):
            facts[UNKNOWN_TOOLS] = unknown
        if self.capture_content:
            facts["messages"] = [dict(m) for m in request.messages[new:]]
            if place is None or place.parent is None:
                facts["tools"] = [dict(t) for t in request.tools or ()]
        return facts

    def _sampling(self, served: ServedPolicy, rules: SamplingRules, asked: Sampling, prompt_tokens: int) -> Sampling:
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
            stop_token_ids=served.stop_token_ids,
            top_logprobs=asked.top_logprobs,
        )


def _prompt(rendering: Rendering, request: ChatRequest, place: SessionMatch) -> tuple[IntArray, IntArray, SessionMatch]:
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
        place = replace(place, parent=None, new=0, cause=ForkCause.TEMPLATE, detail=why)
    whole = rendering.prompt(request.messages, request.tools, force_tool=request.force_tool)
    return whole.ids, whole.forced_ids, place


async def _off_loop(size: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run in a worker thread what would hold up the event loop: `size` is in characters or tokens."""
    if size < OFF_LOOP_SIZE:
        return function(*arguments, **keywords)
    return await asyncio.to_thread(function, *arguments, **keywords)

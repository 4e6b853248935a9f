"""The rows of the conformance suite for calls that stay open: streams, cancellation, and what must not be left behind.

A request belongs to the call in which it was made, never to a call that happens to be open.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from agl import semconv, tracing
from agl.agents import frameworks as plugins
from agl.testing.capabilities import capability
from agl.testing.provider import Provider, Reply, Script, serve
from agl.testing.runs import ASK, context, do, of
from agl.testing.subject import KEY, Subject
from agl.tracing.context import RolloutContext
from agl.tracing.open_span import OpenSpan

PATIENCE_S = 30
"""How long a case waits at most for another thread or task."""


class OpenCalls:
    """Calls that are open while others are made, that are left early, and that are cancelled."""

    @pytest.fixture
    def others(self, subject: Subject) -> Iterator[Provider]:
        """The provider of the calls that are made while a call of the subject's agent is open."""
        with serve(subject.script()) as server:
            yield server

    @pytest.fixture
    def held(self) -> Iterator[threading.Event]:
        """What streams wait for before their last event; set when the case ends, so that no thread stays."""
        event = threading.Event()
        yield event
        event.set()

    @capability("a call made while a stream is open belongs to its caller", needs="reads")
    def test_a_call_inside_an_open_stream_is_its_callers(
        self, subject: Subject, read: str, provider: Provider, gateway: Provider, others: Provider
    ) -> None:
        agent = subject.agent(provider.url, "solver")
        critic = subject.agent(others.url, "critic")
        rollout = context(subject, gateway, agents="solver")

        def bare_calls() -> None:
            if subject.names_agents:
                bare_call(others)
            for kind, name in ((semconv.INVOKE_AGENT, "helper"), (semconv.OPERATION, "check")):
                with tracing.span(kind, name, agent=name):
                    bare_call(others)

        def between() -> None:
            bare_calls()
            with tracing.span(semconv.INVOKE_AGENT, "critic", agent="critic"):
                do(subject, critic)

        async def between_async() -> None:
            bare_calls()
            with tracing.span(semconv.INVOKE_AGENT, "critic", agent="critic"):
                await getattr(critic, subject.async_ways[0])(ASK)

        with plugins.switched_on([subject.tracer()]), tracing.running(rollout):
            if read in subject.sync_reads:
                read_with(getattr(agent, read)(ASK), between)
            else:
                asyncio.run(read_async_with(getattr(agent, read)(ASK), between_async))
        assert provider.seen == []
        routed = [s for s in of(rollout, semconv.CHAT) if semconv.ROUTED in s.attributes]
        assert {s.agent for s in routed} == {"solver"}
        assert sorted(s.span_id for s in routed) == sorted(seen.traceparent_span for seen in gateway.seen)
        own = [s for s in of(rollout, semconv.CHAT) if semconv.ROUTED not in s.attributes]
        assert len(own) == len(others.seen)
        callers = {"helper", "check", "critic"} | ({"outer"} if subject.names_agents else set())
        assert {s.agent for s in own} == callers
        assert {s.attributes[semconv.WIRE_CALLS] for s in (*routed, *own)} == {1}
        parents = {s.span_id: s for s in rollout.spans}
        for span in own:
            above = parents[span.parent_id or ""]
            assert above.agent == span.agent
        chats = {s.span_id for s in of(rollout, semconv.CHAT)}
        assert not [s.name for s in rollout.spans if s.parent_id in chats]

    @capability("two streams that are read in turn are two calls", needs="reads")
    def test_two_streams_read_in_turn_are_two_calls(
        self, subject: Subject, read: str, provider: Provider, others: Provider
    ) -> None:
        one = subject.agent(provider.url, "solver")
        two = subject.agent(others.url, "critic")
        rollout = context(subject)
        with plugins.switched_on([subject.tracer()]), tracing.running(rollout):
            if read in subject.sync_reads:
                in_turn(getattr(one, read)(ASK), getattr(two, read)(ASK))
            else:
                asyncio.run(in_turn_async(getattr(one, read)(ASK), getattr(two, read)(ASK)))
        for server, name in ((provider, "solver"), (others, "critic")):
            chats = [s for s in of(rollout, semconv.CHAT) if str(s.attributes[semconv.URL]).startswith(server.root)]
            assert len(chats) == len(server.seen)
            assert {s.agent for s in chats} == {name if subject.names_agents else "solver"}
            assert {s.attributes[semconv.WIRE_CALLS] for s in chats} == {1}

    @capability("a stream that is left leaves nothing open", needs="reads")
    def test_a_stream_that_is_left_leaves_nothing_open(
        self, subject: Subject, read: str, provider: Provider, held: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # pytest keeps what a framework raises when its generator is dropped, with all that is in its frames.
        monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
        provider.script = holding(provider.script, held)
        agent = subject.agent(provider.url, "solver")
        rollout = context(subject)
        with plugins.switched_on([subject.tracer()]), tracing.running(rollout):
            if read in subject.sync_reads:
                leave(getattr(agent, read)(ASK), held)
                soon(lambda: alone(rollout))
                assert still_there(rollout) == []
            else:
                close = subject.closes_reads
                asyncio.run(leave_async(lambda: getattr(agent, read)(ASK), rollout, held, close=close))
        assert len(of(rollout, semconv.CHAT)) == len(provider.seen)
        # Some frameworks cancel what they do in the background for a reader that stops early.
        assert {s.attributes.get(semconv.ERROR_TYPE) for s in rollout.spans} <= {None, "CancelledError"}

    @capability("a call that is cancelled ends, and what follows belongs to its caller", needs="cancels")
    def test_a_cancelled_call_ends_and_what_follows_is_its_callers(
        self, subject: Subject, provider: Provider, gateway: Provider, others: Provider, held: threading.Event
    ) -> None:
        answer = gateway.script

        def slow(body: dict[str, Any]) -> Reply:
            held.wait(PATIENCE_S)
            return answer(body)

        gateway.script = slow
        agent = subject.agent(provider.url, "solver")
        rollout = context(subject, gateway, agents="solver")

        async def main() -> None:
            for way in subject.async_ways:
                arrived = len(gateway.seen)
                limit = asyncio.timeout(None)
                watch = asyncio.create_task(expire(limit, lambda n=arrived: len(gateway.seen) > n))
                with contextlib.suppress(TimeoutError):
                    async with limit:
                        await getattr(agent, way)(ASK)
                await watch
                with tracing.span(semconv.OPERATION, "fallback", agent="fallback"):
                    bare_call(others)
                await soon_async(lambda: alone(rollout))
                assert still_there(rollout) == []

        with plugins.switched_on([subject.tracer()]), tracing.running(rollout):
            asyncio.run(main())
        cancelled = [s for s in of(rollout, semconv.CHAT) if semconv.ROUTED in s.attributes]
        assert len(cancelled) == len(gateway.seen) == len(subject.async_ways)
        assert {s.attributes.get(semconv.ERROR_TYPE) for s in cancelled} == {"CancelledError"}
        fallbacks = [s for s in of(rollout, semconv.CHAT) if semconv.ROUTED not in s.attributes]
        assert [s.agent for s in fallbacks] == ["fallback"] * len(others.seen)
        if subject.names_agents:
            agents = [s for s in of(rollout, semconv.INVOKE_AGENT) if s.agent == "solver"]
            assert [s.attributes.get(semconv.ERROR_TYPE) for s in agents] == ["CancelledError"] * len(cancelled)


def bare_call(provider: Provider) -> None:
    """One call of a bare openai client."""
    import openai

    with openai.OpenAI(base_url=provider.url, api_key=KEY, max_retries=0) as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "bare"}])


def holding(script: Script, event: threading.Event) -> Script:
    """The script, with streams of the final answer that wait for the event before they end."""

    def held(body: dict[str, Any]) -> Reply:
        reply = script(body)
        return dataclasses.replace(reply, holds=None if reply.content is None else event)

    return held


def read_with(pieces: Iterator[Any], between: Callable[[], None]) -> None:
    """Read all of a stream; `between` runs after its first piece, in the reader's context."""
    next(pieces)
    between()
    for _ in pieces:
        pass


async def read_async_with(pieces: Any, between: Callable[[], Awaitable[None]]) -> None:
    await anext(pieces)
    await between()
    async for _ in pieces:
        pass


def in_turn(one: Iterator[Any], two: Iterator[Any]) -> None:
    """Read two streams, the second one while the first is open."""
    next(one)
    next(two)
    for _ in two:
        pass
    for _ in one:
        pass


async def in_turn_async(one: Any, two: Any) -> None:
    await anext(one)
    await anext(two)
    async for _ in two:
        pass
    async for _ in one:
        pass


def leave(pieces: Iterator[Any], held: threading.Event) -> None:
    """Read one piece, and drop the stream, whose end may wait for the thread that reads the answer."""
    for _ in pieces:
        held.set()
        break


async def leave_async(
    open_stream: Callable[[], Any], rollout: RolloutContext, held: threading.Event, *, close: bool
) -> None:
    """Read one piece of a stream, drop or close it, and wait until nothing of it is left."""

    async def leave() -> None:
        stream = open_stream()
        async for _ in stream:
            break
        if close:
            await stream.aclose()

    await leave()
    held.set()
    await soon_async(lambda: alone(rollout))
    assert still_there(rollout) == []


def alone(rollout: RolloutContext) -> bool:
    """Whether only its own scope is open, once the collector has closed what was dropped in a cycle."""
    gc.collect()
    return len(rollout.open) == 1


def still_there(rollout: RolloutContext) -> list[str]:
    """The spans, other than the rollout's own, that are open, or that anything still refers to with their texts."""
    gc.collect()
    [own] = (scope for scope in rollout.open if scope.parent is None)
    trace_id = own.span.get_span_context().trace_id
    # By type: some objects, such as proxies of what is not installed, answer `isinstance` by an import.
    spans = [o for o in gc.get_objects() if type(o) is OpenSpan and o is not own.span]
    return [span.name for span in spans if span.get_span_context().trace_id == trace_id]


def soon(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, or patience ends."""
    until = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)


async def soon_async(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < until:
        await asyncio.sleep(0.02)


async def expire(limit: asyncio.Timeout, condition: Callable[[], bool]) -> None:
    """Have a time limit end now, once the condition holds."""
    await soon_async(condition)
    limit.reschedule(asyncio.get_running_loop().time())

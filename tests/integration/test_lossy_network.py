"""What an agent never received is not trained: real SDKs, a real gateway, and a network that loses answers."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from late import installed
from lossy_agents import APIS, Chat, converse
from lossy_proxy import LAST, LATE, LOSSES, REFUSE, RESET, WHOLE, losing
from scripted import Asked, Attempt, ScriptedEngine, in_loop, quick_tokenizer, serving

from agl import tracing
from agl.adapters.anthropic import AnthropicTracer
from agl.adapters.google_genai import GoogleGenAITracer
from agl.adapters.openai import OpenAITracer
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.rewards.trace import Trace
from agl.tracing.context import RolloutContext
from agl.trainer.store.lost_answers import mark_lost_answers

MISSING = {"google": "google.genai"}


@pytest.fixture(autouse=True)
def tracers() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(OpenAITracer())
        stack.enter_context(AnthropicTracer())
        if installed("google.genai"):
            stack.enter_context(GoogleGenAITracer())
        yield


def counting(*, alike: bool = False) -> ScriptedEngine:
    """Each answer is another text, or the same text in other tokens."""
    tokenizer, made = quick_tokenizer(), []

    def answer(asked: Asked) -> Any:
        made.append(asked)
        return "the same" if alike else f"answer {len(made)}"

    return ScriptedEngine(tokenizer, answer)


def api_of(name: str, url: str, key: str) -> Chat:
    if not installed(MISSING.get(name, "agl")):
        pytest.skip(f"{name} is not installed")
    return APIS[name](url, key)


async def recorded(attempt: Attempt, spans: list[Span]) -> list[Call]:
    """The attempt's calls, as the run's end leaves them in the store."""
    await mark_lost_answers(attempt.rig.store, await attempt.close(), spans)
    calls = await attempt.rig.store.query_calls(attempt.access.rollout_id, attempt.access.attempt)
    return sorted(calls, key=lambda call: call.index)


def trained(calls: list[Call], spans: list[Span]) -> list[Call]:
    built = build_trajectory(calls[0].rollout_id, 1, "group", SpanIndex(calls, spans), select(None))
    return [t.call for t in built.trajectory.transitions if t.trainable]


def text(call: Call) -> str:
    return str(call.response["content"])


def check(calls: list[Call], spans: list[Span], answers: list[str]) -> None:
    """The agent's answers are trained and no other; each continues the one that the agent got before."""
    own = trained(calls, spans)
    assert [text(call) for call in own] == answers
    assert [call.parent_id for call in own] == [None, *(call.id for call in own[:-1])]
    lost = [call for call in calls if call not in own]
    assert {call.finish_reason for call in lost} <= {"cancelled"}
    assert all(call.error for call in lost)
    trace = Trace.of_attempt(calls[0].rollout_id, 1, spans, calls)
    assert [m["content"] for _, m in trace.conversation if m["role"] == "assistant"][-1] == answers[-1]


async def played(
    api: str, plan: list[str], *, stream: bool, is_async: bool = False, turns: int = 3, alike: bool = False
) -> tuple[list[Call], list[Span], list[str]]:
    """A conversation of a traced agent in which these answers are lost."""
    async with serving(counting(alike=alike)) as rig:
        attempt = await rig.attempt()
        port = urllib.parse.urlsplit(attempt.access.url).port
        assert port is not None
        with losing(port, *plan) as proxy:
            context = RolloutContext(
                attempt.access.rollout_id, 1, "agent", select(None), gateway_url=proxy.url, key=attempt.key
            )
            sdk = api_of(api, "http://provider.invalid/v1", "sk-own")

            def agent() -> list[str]:
                with tracing.running(context):
                    return converse(sdk, turns, stream=stream, is_async=is_async)

            answers = await asyncio.to_thread(agent)
            tracing.close(context)
        spans = list(context.spans)
        return await recorded(attempt, spans), spans, answers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
@in_loop
async def test_calls_trained_are_those_whose_answer_the_agent_got(api: str, stream: bool) -> None:
    """Every way to lose an answer, first and in mid-conversation, and twice in a row."""
    plan = [RESET, WHOLE, *LOSSES, WHOLE, LATE, RESET]
    calls, spans, answers = await played(api, plan, stream=stream)
    assert len(calls) > len(answers) == 3
    check(calls, spans, answers)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
@in_loop
async def test_async_clients(api: str, stream: bool) -> None:
    plan = [LATE, WHOLE, LAST, RESET]
    calls, spans, answers = await played(api, plan, stream=stream, is_async=True)
    assert len(calls) > len(answers) == 3
    check(calls, spans, answers)


@pytest.mark.parametrize("api", APIS)
@in_loop
async def test_a_conversation_continues_from_the_answer_that_was_received(api: str) -> None:
    """Of two answers with the same text, too."""
    calls, spans, answers = await played(api, [RESET, WHOLE, LATE], stream=False, alike=True)
    assert len(calls) == 5
    check(calls, spans, answers)


@pytest.mark.parametrize("loss", [RESET, REFUSE, LATE])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@in_loop
async def test_a_program_without_spans_is_known_by_its_retries(api: str, loss: str) -> None:
    """Its SDK counts them in a header, in whatever language it is written; here nothing of agl's runs in it."""
    async with serving(counting()) as rig:
        attempt = await rig.attempt()
        port = urllib.parse.urlsplit(attempt.access.url).port
        assert port is not None
        with losing(port, loss, WHOLE, loss, loss) as proxy:
            url = attempt.url().replace(rig.gateway.base_url, proxy.url)
            sdk = api_of(api, url, attempt.key)
            answers = await asyncio.to_thread(converse, sdk, 3, stream=False, is_async=False)
        calls = await recorded(attempt, [])
        assert {call.span_id for call in calls} == {None}
        check(calls, [], answers)


@in_loop
async def test_equal_requests_that_are_no_retries_are_all_trained() -> None:
    """An agent asks the same four times and gets each answer; one of them at the second try."""
    async with serving(counting()) as rig:
        attempt = await rig.attempt()
        port = urllib.parse.urlsplit(attempt.access.url).port
        assert port is not None
        with losing(port, WHOLE, WHOLE, RESET) as proxy:
            url = attempt.url().replace(rig.gateway.base_url, proxy.url)
            sdk = api_of("chat", url, attempt.key)
            asked = [await asyncio.to_thread(sdk.ask, [("user", "begin")], stream=False) for _ in range(4)]
        calls = await recorded(attempt, [])
        assert len(calls) == 5
        assert [text(call) for call in trained(calls, [])] == asked

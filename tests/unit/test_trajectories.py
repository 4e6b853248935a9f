"""Calls, spans and rewards joined by ids; a rollout that would train on nothing is refused, and the error says why."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from subjects import LangChain

import agl
from agl import semconv, tracing
from agl.adapters.openai import OpenAITracer
from agl.errors import BypassedGatewayError, LostCallError, MisroutedCallError, NoAgentMatchedError, NoLLMCallError
from agl.mdp.builder import AttemptTrajectory, build_trajectory, require_trainable
from agl.mdp.selection import Selection, select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call, float_array, int_array
from agl.testing.provider import Provider, serve
from agl.testing.subject import uses_add
from agl.tracing.context import RolloutContext


def call(index: int, span: Any, *, agent: str = "main", policy: str | None = "policy", **more: Any) -> Call:
    span_id = span if span is None or isinstance(span, str) else span.span_id
    return Call(
        f"c{index}", "ro", 1, index, agent, policy, 0, int_array([1, 2]), int_array([3]), float_array([-0.5]),
        span_id=span_id, **more,
    )  # fmt: skip


def rollout(agents: Any = None) -> RolloutContext:
    return RolloutContext("ro", 1, "main", select(agents))


def join(context: RolloutContext, calls: list[Call]) -> AttemptTrajectory:
    return build_trajectory("ro", 1, "g", SpanIndex(calls, context.spans), context.selection)


def credited(built: AttemptTrajectory) -> dict[float, str | None]:
    return {reward.value: call_id for reward, call_id in built.credited}


def test_a_reward_goes_to_the_call_that_earned_it() -> None:
    with tracing.running(context := rollout()):
        with tracing.span(semconv.CHAT, "m") as first:
            agl.emit_reward(1.0)
        with tracing.span(semconv.EXECUTE_TOOL, "t", attributes={semconv.TOOL_CALL_ID: "call_1"}):
            agl.emit_reward(2.0)
            with agl.operation("deeper"):
                agl.emit_reward(3.0)
            thread = threading.Thread(target=agl.emit_reward, args=(4.0,))
            thread.start()
            thread.join()
        with tracing.span(semconv.CHAT, "m") as second:
            pass
        with tracing.span(semconv.EXECUTE_TOOL, "t", attributes={semconv.TOOL_CALL_ID: "unknown"}):
            agl.emit_reward(5.0)
        agl.emit_reward(6.0)
    built = join(context, [call(0, first, tool_call_ids=("call_0", "call_1")), call(1, second)])
    assert credited(built) == {1.0: "c0", 2.0: "c0", 3.0: "c0", 4.0: "c0", 5.0: None, 6.0: None}
    trajectory = built.trajectories["policy"]
    assert [t.reward for t in trajectory.transitions] == [10.0, 0.0]
    assert (trajectory.final_reward, trajectory.total_reward, built.reward) == (11.0, 21.0, 21.0)


def test_a_reward_in_an_inner_agent_goes_to_its_last_call() -> None:
    with tracing.running(context := rollout()):
        with tracing.span(semconv.CHAT, "m") as before:
            pass
        with tracing.span(semconv.INVOKE_AGENT, "sub", agent="sub"):
            with tracing.span(semconv.CHAT, "m") as one:
                pass
            with tracing.span(semconv.CHAT, "m") as two:
                pass
            agl.emit_reward(1.0)
        with tracing.span(semconv.INVOKE_AGENT, "silent", agent="silent"):
            agl.emit_reward(2.0)
    calls = [call(0, before), call(1, one, agent="sub"), call(2, two, agent="sub")]
    assert credited(join(context, calls)) == {1.0: "c2", 2.0: None}


def test_a_reward_never_goes_to_a_call_that_failed() -> None:
    """It is no transition, so that the reward would be in no trajectory."""
    with tracing.running(context := rollout()), tracing.span(semconv.INVOKE_AGENT, "sub", agent="sub"):
        with tracing.span(semconv.CHAT, "m") as one:
            pass
        with tracing.span(semconv.CHAT, "m") as two:
            agl.emit_reward(1.0)
        agl.emit_reward(2.0)
    calls = [call(0, one, agent="sub"), call(1, two, agent="sub", error="cut"), call(2, two, agent="sub", error="cut")]
    built = join(context, calls)
    assert credited(built) == {1.0: None, 2.0: "c0"}
    assert built.trajectories["policy"].total_reward == built.reward == 3.0


def test_a_reward_of_an_untrained_call_counts_for_the_whole_rollout() -> None:
    with tracing.running(context := rollout("main")):
        with tracing.span(semconv.CHAT, "m") as trained:
            pass
        with tracing.span(semconv.INVOKE_AGENT, "judge", agent="judge"), tracing.span(semconv.CHAT, "m") as judged:
            agl.emit_reward(1.0)
    built = join(context, [call(0, trained), call(1, judged, agent="judge", policy=None)])
    assert credited(built) == {1.0: None}
    assert [t.call.id for t in built.trajectories["policy"].transitions] == ["c0"]
    assert built.agents == ("main", "judge")


def test_every_policy_has_its_trajectory_and_the_whole_rollouts_reward() -> None:
    with tracing.running(context := rollout({"a": "pa", "b": "pb"})):
        agl.emit_reward({"reward": 1.0, "style": 9.0})
    calls = [call(0, None, agent="a", policy="pa"), call(1, None, agent="b", policy="pb"),
             call(2, None, agent="a", policy="pa")]  # fmt: skip
    built = join(context, calls)
    assert {p: [t.call.id for t in x.transitions] for p, x in built.trajectories.items()} == {
        "pa": ["c0", "c2"], "pb": ["c1"],
    }  # fmt: skip
    assert [t.total_reward for t in built.trajectories.values()] == [1.0, 1.0]
    assert (built.reward, built.n_calls) == (1.0, 3)


def test_transitions_are_in_order_of_arrival_in_whatever_order_the_calls_were_stored() -> None:
    with tracing.running(context := rollout()):
        pass
    built = join(context, [call(2, None), call(0, None, agent="first"), call(1, None)])
    assert [t.call.index for t in built.trajectory.transitions] == [0, 1, 2]
    assert built.agents == ("first", "main")


def test_a_failed_call_is_no_transition_but_is_counted() -> None:
    with tracing.running(context := rollout()):
        pass
    built = join(context, [call(0, None), call(1, None, error="engine stopped")])
    assert [c.id for c in built.failed_calls] == ["c1"]
    assert built.n_calls == 1
    assert built.reward is None


def chat_span(agent: str = "main", span_id: str = "s1", **attributes: Any) -> Span:
    own = {semconv.OPERATION_NAME: semconv.CHAT, semconv.AGENT_NAME: agent, **attributes}
    return Span("t" * 32, span_id, None, "ro", 1, "chat m", 0.0, 1.0, attributes=own)


def refused(calls: list[Call], spans: list[Span], selection: Selection) -> None:
    require_trainable(build_trajectory("ro", 1, "g", SpanIndex(calls, spans), selection), selection)


def test_no_call_at_all() -> None:
    with pytest.raises(NoLLMCallError, match="the agent made no LLM call") as caught:
        refused([], [], select(None))
    assert "rollout=ro, attempt=1" in str(caught.value)
    assert "llm.endpoint" in str(caught.value)


def test_a_filter_that_matches_nobody_lists_the_agents_seen() -> None:
    calls = [call(0, "s0", agent="writer", policy=None)]
    with pytest.raises(NoAgentMatchedError, match=r"agents='writter', 'x\*' matched none .*: 'writer', 'judge'"):
        refused(calls, [chat_span("judge")], select(["writter", "x*"]))


def test_an_agent_that_was_taken_for_one_of_a_glob_is_not_trained() -> None:
    selection = select("worker [1]")
    calls = [call(0, "s0", agent="worker 1"), call(1, "s1", agent="worker [1]")]
    with pytest.raises(MisroutedCallError, match=r"'worker \[1\]' was read as a pattern .* agent 'worker 1'"):
        refused(calls, [], selection)
    # Where the other is known, its provider has answered it.
    at_its_provider = chat_span("worker 1", **{semconv.URL: "http://elsewhere"})
    refused(calls[1:], [at_its_provider], selection.knowing(["worker [1]"]))
    refused(calls[:1], [], selection)


def test_a_call_past_the_gateway_names_the_client_and_its_url() -> None:
    client = {semconv.CLIENT: "ChatOllama", semconv.URL: "http://ollama:11434"}
    expected = "1 LLM call.* of agent 'main' bypassed the gateway: client ChatOllama, URL http://ollama:11434"
    with pytest.raises(BypassedGatewayError, match=expected) as caught:
        refused([call(0, "s0")], [chat_span(**client)], select(None))
    assert "span=s1" in str(caught.value)
    refused([call(0, "s0")], [chat_span("somebody else", **client)], select("main"))
    refused([call(0, "s1")], [chat_span(**client)], select(None))


def test_a_call_to_the_attempts_url_by_an_unknown_client_is_no_bypass() -> None:
    """Its request carries no traceparent, so the gateway's record of it is not joined with the span."""
    url = "http://127.0.0.1:1/rollouts/{}/attempts/1/bearer/k/agents/main/v1"
    refused([call(0, "")], [chat_span("inner", **{semconv.URL: url.format("ro")})], select(None))
    with pytest.raises(BypassedGatewayError, match="bypassed"):
        refused([call(0, "")], [chat_span("inner", **{semconv.URL: url.format("other")})], select(None))


def test_a_call_that_left_no_record_is_lost() -> None:
    with pytest.raises(LostCallError, match=r"1 LLM call.* of agent 'main' went to the gateway"):
        refused([call(0, "s0")], [chat_span(**{semconv.ROUTED: True})], select(None))


def test_an_agent_that_goes_on_without_its_model_is_refused() -> None:
    failed = replace(call(0, "s0"), finish_reason="error", error="the engine died")
    with pytest.raises(LostCallError, match=r"every one of 1 LLM call\(s\) failed; the first: the engine died"):
        refused([failed], [], select(None))
    refused([failed, call(1, "s1")], [], select(None))


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


def test_a_bypass_in_earnest_a_model_that_no_hook_reaches(provider: Provider) -> None:
    """A LangChain model of another make: its call is seen by LangChain's hooks, but its client is not hooked."""
    from langchain_core.language_models import FakeListChatModel

    class ElsewhereChat(FakeListChatModel):
        base_url: str = ""

    context = RolloutContext("ro", 1, "main", select(None), provider.root, "k")
    with LangChain.tracer(), tracing.running(context):
        ElsewhereChat(responses=["hi"], base_url="http://elsewhere:1/v1").invoke("q")
    with pytest.raises(BypassedGatewayError, match="client ElsewhereChat, URL http://elsewhere:1/v1"):
        refused([], context.spans, context.selection)


def test_joined_over_the_wire_by_traceparent(provider: Provider) -> None:
    """What a gateway learns from the requests is enough to credit a tool's reward to the call that issued it."""
    context = RolloutContext("ro", 1, "main", select(None), provider.root, "k")
    client = openai.OpenAI(base_url="http://never.invalid/v1", api_key="k")
    messages: list[Any] = [{"role": "user", "content": "2+3"}]
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with OpenAITracer(), tracing.running(context):
        answer = client.chat.completions.create(model="m", messages=messages, tools=tools)
        [issued] = answer.choices[0].message.tool_calls or []
        with tracing.span(semconv.EXECUTE_TOOL, "add", attributes={semconv.TOOL_CALL_ID: issued.id}):
            agl.emit_reward(0.25)
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "again"}])
    [first, second] = provider.seen
    calls = [call(0, first.traceparent_span, tool_call_ids=(issued.id,)), call(1, second.traceparent_span)]
    built = join(context, calls)
    assert credited(built) == {0.25: "c0"}
    assert built.bypassed == ()


def test_every_second_of_an_attempt_went_somewhere_once() -> None:
    def span(name: str, start: float, end: float, parent: str | None = "root", **attributes: Any) -> Span:
        return Span("t", name, parent, "ro", 1, name, start, end, attributes=attributes)

    def of(operation: str, **more: Any) -> dict[str, Any]:
        return {semconv.OPERATION_NAME: operation, **more}

    spans = [
        span("root", 100, 120, None, **of(semconv.INVOKE_AGENT), **{semconv.GRADING_SECONDS: 3.0}),
        span("first", 101, 104, **of(semconv.CHAT)),
        span("beside", 103, 106, **of(semconv.CHAT)),
        # A tool that asks a model itself, and one that runs beside it to a later end.
        span("agent as tool", 107, 111, **of(semconv.EXECUTE_TOOL)),
        span("inside", 108, 110, "agent as tool", **of(semconv.CHAT)),
        span("slow tool", 109, 113, **of(semconv.EXECUTE_TOOL)),
        span("judge", 117, 119, **of(semconv.CHAT), **{semconv.UNTRAINED: True}),
    ]
    assert SpanIndex([], spans).seconds() == {"models": 7.0, "tools": 4.0, "grading": 3.0, "agent": 6.0}
    ungraded = [replace(s, attributes=of(semconv.INVOKE_AGENT)) if s.span_id == "root" else s for s in spans]
    assert SpanIndex([], ungraded).seconds() == {"models": 7.0, "tools": 4.0, "grading": 2.0, "agent": 7.0}
    assert SpanIndex([], spans[1:]).seconds() == {}

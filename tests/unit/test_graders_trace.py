"""Graders of what agents did: tools and collaboration, over the spans of real frameworks and over made ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl
from agl import semconv, tracing
from agl.adapters.scopes import tool_end, tool_run
from agl.agents.agent import RolloutInfo
from agl.errors import ConfigError, RewardError
from agl.mdp.selection import select
from agl.rewards import Consensus, RequiredTools, Rounds, TokenBudget, ToolBudget, ToolSuccess, Trace
from agl.testing.provider import Provider, Reply, serve
from agl.trainer.graders.tools import reports_failure

QUESTION = {"question": "q"}


@contextlib.contextmanager
def rollout(agent: str = "main", capture_content: bool = True) -> Iterator[tracing.RolloutContext]:
    context = tracing.RolloutContext("ro", 1, agent, select(None), capture_content=capture_content)
    with tracing.running(context):
        yield context


def used(name: str, result: str | None = "fine", error: str | None = None, agent: str | None = None) -> None:
    facts = {semconv.TOOL_NAME: name, semconv.TOOL_CALL_RESULT: result}
    scope = tracing.start(semconv.EXECUTE_TOOL, name, agent=agent, attributes=facts)
    assert scope is not None
    tracing.end(scope, error=error)


def spoke(agent: str, *texts: str, tokens: int | None = 5) -> None:
    """One turn of an agent: a run of it with a call for each text."""
    with tracing.span(semconv.INVOKE_AGENT, agent, agent=agent):
        for text in texts:
            facts = {
                semconv.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": text}]),
                semconv.INPUT_TOKENS: 10,
                semconv.OUTPUT_TOKENS: tokens,
            }
            with tracing.span(semconv.CHAT, "m", attributes=facts):
                pass


# -- a real framework ---------------------------------------------------------------------------------------------


def divide(a: float, b: float) -> str:
    """a / b"""
    return str(a / b) if b else "Error: division by zero"


def explode() -> str:
    """Raises."""
    raise ValueError("boom")


def answers(body: dict[str, Any]) -> Reply:
    results = sum(m["role"] == "tool" for m in body["messages"])
    calls = [("divide", {"a": 4, "b": 2}), ("divide", {"a": 1, "b": 0}), ("divide", {"a": 9, "b": 3})]
    return Reply(tools=(calls[results],)) if results < 3 else Reply("it is 3")


def langchain_agent(provider: Provider, reward: Any, tools: list[Any]) -> agl.Agent:
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=provider.url, api_key="sk")  # type: ignore[arg-type]
    return agl.wrap(create_agent(model, [tool(t) for t in tools], name="worker"), reward=reward)


def run(agent: agl.Agent) -> Any:
    async def main() -> Any:
        with contextlib.ExitStack() as stack:
            for tracer in agent.tracers:
                stack.callback(tracer.uninstrument)
                tracer.instrument()
            stack.enter_context(rollout(agent.name))
            return await agent.run(QUESTION, {}, RolloutInfo("ro", 1))  # type: ignore[misc]

    return asyncio.run(main()).reward


def test_a_real_agents_tools_rounds_and_tokens() -> None:
    grader = ToolSuccess() + RequiredTools(["divide", "search"]) + ToolBudget(2) + Rounds(1) + TokenBudget(6, limit=18)
    with serve(answers) as provider:
        reward = run(langchain_agent(provider, grader, [divide]))
    assert reward["tool_success"] == pytest.approx(2 / 3)  # one result says "Error" without raising
    assert reward["required_tools"] == 0.5
    assert reward["tool_budget"] == pytest.approx(2 / 3)
    assert reward["rounds"] == 1.0
    assert reward["token_budget"] == pytest.approx(0.5)  # 4 calls of 3 tokens each


# -- tools --------------------------------------------------------------------------------------------------------


def test_the_share_of_tool_calls_that_succeeded() -> None:
    with rollout():
        assert ToolSuccess()(None, None) == 0.0
        assert ToolSuccess(without_calls=1.0)(None, None) == 1.0
        used("a")
        used("b", error="ValueError: no")
        used("c", '{"isError": true}')
        used("d", "")
        assert ToolSuccess()(None, None) == 0.5
        assert ToolSuccess(failure=-1, empty=-0.5)(None, None) == pytest.approx((1 - 1 - 1 - 0.5) / 4)
        assert ToolSuccess(failure=-1, empty=-0.5).range == (-1, 1)
        assert ToolSuccess(failed=lambda text: text == "fine")(None, None) == 0.5
        assert ToolSuccess(agents="other")(None, None) == 0.0
        used("e", agent="other")
        assert ToolSuccess(agents="oth*")(None, None) == 1.0


def test_a_rule_of_ones_own_judges_what_was_returned_but_not_what_was_raised() -> None:
    with rollout():
        for returned, error in (({"error": "none left"}, None), ("fine", None), ("fine", ValueError("no"))):
            scope = tool_run("a", {}, None)
            assert scope is not None
            tool_end(scope, returned, error=error)
        assert ToolSuccess()(None, None) == pytest.approx(1 / 3)
        assert ToolSuccess(failed=lambda text: False)(None, None) == pytest.approx(2 / 3)
        assert ToolSuccess(failed=lambda text: True)(None, None) == 0.0


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        ("Error: no such file", True), ("error", True), ("Traceback (most recent call last):\n", True),
        ("Failed to connect", True), ('{"error": "x"}', True), ('{"is_error": true}', True),
        ('{"success": false}', True),
        ('{"status": "error"}', True), ('"Error: x"', True), ("fine", False), ("", False), ('{"error": null}', False),
        ('{"status": "ok", "errors": 0}', False), ("[1]", False), ("Errors were found in 0 files", False), ("7", False),
    ],
)  # fmt: skip
def test_results_that_tell_of_failure(result: str, failed: bool) -> None:
    assert reports_failure(result) is failed


def test_required_tools_in_any_order_or_in_theirs() -> None:
    with rollout():
        used("b")
        used("a")
        used("c", error="no")
        assert RequiredTools(["a", "b"])(None, None) == 1.0
        assert RequiredTools(["a", "b"], ordered=True)(None, None) == 0.5
        assert RequiredTools(["b", "a"], ordered=True)(None, None) == 1.0
        assert RequiredTools(["c"])(None, None) == 0.0
    with pytest.raises(ConfigError, match="give the names"):
        RequiredTools("search")  # type: ignore[arg-type]


def test_a_budget_of_tool_calls() -> None:
    with rollout():
        assert ToolBudget(1)(None, None) == 1.0
        for name in ("a", "a", "b", "b"):
            used(name)
        assert ToolBudget(4)(None, None) == 1.0
        assert ToolBudget(1)(None, None) == 0.25
        assert ToolBudget(1, tools=["a"])(None, None) == 0.5


@given(st.lists(st.sampled_from(["fine", "", "Error: x", None])), st.floats(-5, 5), st.floats(-5, 5))
def test_values_lie_in_the_range(results: list[str | None], failure: float, empty: float) -> None:
    with rollout():
        for result in results:
            used("a", result)
        for grader in (ToolSuccess(failure=failure, empty=empty), ToolBudget(2), RequiredTools(["a", "b"])):
            low, high = grader.range
            assert low <= grader(None, None) <= high


# -- collaboration ------------------------------------------------------------------------------------------------


def test_rounds_are_the_turns_of_who_had_most() -> None:
    with rollout():
        assert Rounds(1)(None, None) == 1.0
        for _ in range(3):
            spoke("a", "one call", "another in the same turn")
            spoke("b", "x")
        spoke("a", "x")
        trace = Trace.now()
        assert trace is not None
        assert trace.turns == {"a": 4, "b": 3}
        assert trace.agents == ("a", "b")
        assert Rounds(4)(None, None) == 1.0
        assert Rounds(2, limit=6)(None, None) == 0.5
        assert Rounds(1)(None, None) == 0.0
        assert Rounds(2, limit=6, agents="b")(None, None) == 0.75
    with pytest.raises(ConfigError):
        Rounds(3, limit=3)


def test_consensus_of_the_last_answers() -> None:
    with rollout():
        spoke("a", "I think Rome.")
        assert Consensus()(None, None) == 0.0  # nobody to agree with
        spoke("b", "Paris")
        spoke("c", "Rome", "the PARIS")
        assert Consensus()(None, None) == pytest.approx(2 / 3)
        assert Consensus(quorum=0.6)(None, None) == 1.0
        assert Consensus(quorum=1.0)(None, None) == 0.0
        assert Consensus(agents=["b", "c"])(None, None) == 1.0
        spoke("a", "pariss")
        assert Consensus(similarity=0.9)(None, None) == 1.0
        assert Consensus(pick=lambda text: text if "P" in text else None)(None, None) == pytest.approx(2 / 3)


def test_consensus_of_answers_in_the_output() -> None:
    votes = {"votes": {"a": "x", "b": "X", "c": "y", "d": "x"}}
    assert Consensus(answers="votes")(None, votes) == 0.75
    assert Consensus(answers=lambda output: output["votes"].values())(None, votes) == 0.75
    assert Consensus(answers="nowhere")(None, votes) == 0.0


def test_tokens_of_all_or_of_some() -> None:
    with rollout():
        assert TokenBudget(10)(None, None) == 1.0
        spoke("a", "x", "y")
        spoke("b", "z", tokens=10)
        assert TokenBudget(20)(None, None) == 1.0
        assert TokenBudget(15, limit=25)(None, None) == 0.5
        assert TokenBudget(10)(None, None) == 0.0
        assert TokenBudget(10, agents="a")(None, None) == 1.0
        assert TokenBudget(40, limit=60, count="all")(None, None) == 0.5


def test_what_spans_do_not_tell_is_an_error() -> None:
    with rollout():
        spoke("a", "x", tokens=None)
        spoke("b", "y")
        with pytest.raises(RewardError, match=r"agent 'a' reports no gen_ai\.usage\.output_tokens"):
            TokenBudget(10)(None, None)
        with tracing.span(semconv.CHAT, "m", agent="c"):
            pass
        with pytest.raises(RewardError, match=r"do not hold the response of agent 'c'[^\0]*rollout=ro"):
            Consensus()(None, None)
    for grader in (ToolSuccess(), RequiredTools(["a"]), ToolBudget(1), Rounds(1), Consensus(), TokenBudget(1)):
        with pytest.raises(RewardError, match="no rollout runs here"):
            grader(None, None)


def test_what_runs_outside_of_training_is_not_counted() -> None:
    with rollout():
        spoke("a", "x")
        with tracing.untrained("judge"):
            spoke("judge", "y")
            used("look")
        trace = Trace.now()
        assert trace is not None
        assert trace.agents == ("a",)
        assert trace.tools == ()
        assert len(trace.spans) == 6


def test_a_trace_can_be_passed() -> None:
    with rollout():
        used("a")
        trace = Trace.now()
    assert ToolSuccess()(None, None, trace) == 1.0
    assert ToolSuccess()(None, None, trace=trace) == 1.0

"""A LangChain agent over ten turns with tools: every prompt is the one before plus what was sampled, exactly."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from scripted import Attempt, in_loop, serving, tool_call

from agl import tracing
from agl.adapters.langchain import LangChainTracer
from agl.mdp.builder import AttemptTrajectory, build_trajectory
from agl.mdp.selection import select
from agl.mdp.sequence import merge, merge_report
from agl.mdp.span_index import SpanIndex


@tool
def calculator(expression: str) -> str:
    """Work out a sum."""
    left, right = expression.split(" + ")
    return str(int(left) + int(right))


def _agent() -> Any:
    model = ChatOpenAI(model="gpt-4o-mini", base_url="http://provider.invalid/v1", api_key="sk-provider")  # type: ignore[arg-type]
    return create_agent(model, [calculator], system_prompt="Use the calculator, — carefully!", name="solver")


def _lines(turns: int) -> list[str]:
    """Per turn a tool call, with spaces in its JSON that a client drops when it writes it again, and an answer."""
    lines = []
    for i in range(turns):
        call = tool_call(f"{i} + {i}")
        lines += [call.replace('"arguments": ', '"arguments":   '), f"It is {2 * i} — naïvely  "]
    return lines


class _Conversation:
    """A context and the attempt that it stands for."""

    def __init__(self, attempt: Attempt, gateway_url: str) -> None:
        self.attempt = attempt
        access = attempt.access
        self.context = tracing.RolloutContext(
            access.rollout_id, access.attempt, "outer", select(None), gateway_url, attempt.key
        )

    async def end(self) -> AttemptTrajectory:
        calls = await self.attempt.close()
        where = (self.attempt.access.rollout_id, self.attempt.access.attempt, "group")
        return build_trajectory(*where, SpanIndex(calls, self.context.spans), select(None))


@in_loop
async def test_ten_turns_drift_by_nothing() -> None:
    async with serving(_lines(10)) as rig:
        talk = _Conversation(await rig.attempt(), rig.gateway.base_url)
        with LangChainTracer(), tracing.running(talk.context):
            messages: list[Any] = []
            for i in range(10):
                messages.append(HumanMessage(f"what is {i} and {i}?"))
                messages = (await _agent().ainvoke({"messages": messages}))["messages"]
        built = await talk.end()

    (trajectory,) = built.trajectories.values()
    calls = [t.call for t in trajectory.transitions]
    assert len(calls) == 20
    for before, after in itertools.pairwise(calls):
        assert after.parent_id == before.id
        np.testing.assert_array_equal(after.prompt_ids[: before.ids.size], before.ids)
    rows = merge(trajectory, dict.fromkeys((c.id for c in calls), 1.0))
    report = merge_report([trajectory], rows)
    assert (report.rows, report.forks) == (1, {})
    assert rows[0].is_chain
    assert rows[0].n_actions == sum(c.response_ids.size for c in calls)
    assert report.tokens == calls[-1].ids.size
    assert {c.agent for c in calls} == {"solver"}
    assert all(c.span_id in {s.span_id for s in talk.context.spans} for c in calls)


@in_loop
async def test_a_client_that_rewrites_history_forks_and_says_why() -> None:
    async with serving(["first answer", "second answer", "third answer", "fourth answer", "fifth answer"]) as rig:
        talk = _Conversation(await rig.attempt(), rig.gateway.base_url)
        model = ChatOpenAI(model="m", base_url="http://provider.invalid/v1", api_key="sk-provider")  # type: ignore[arg-type]
        with LangChainTracer(), tracing.running(talk.context):
            brief = SystemMessage("be brief")
            first = await model.ainvoke([brief, HumanMessage("one")])
            edited = AIMessage("a better first answer")
            await model.ainvoke([brief, HumanMessage("one"), edited, HumanMessage("two")])
            await model.ainvoke([brief, HumanMessage("uno"), first, HumanMessage("two")])
            await model.bind_tools([calculator]).ainvoke([brief, HumanMessage("one"), first, HumanMessage("two")])
            await model.ainvoke([brief, HumanMessage("one"), first, HumanMessage("two")])
        built = await talk.end()

    (trajectory,) = built.trajectories.values()
    calls = [t.call for t in trajectory.transitions]
    causes = [None, "assistant_rewritten", "history_rewritten", "tools_changed", None]
    assert [c.fork_cause for c in calls] == causes
    assert "message 2 (assistant)" in calls[1].request["fork_detail"]
    assert calls[4].parent_id == calls[0].id
    report = merge_report([trajectory], merge(trajectory, dict.fromkeys((c.id for c in calls), 1.0)))
    assert report.forks == {"assistant_rewritten": 1, "history_rewritten": 1, "tools_changed": 1}


@in_loop
async def test_a_reward_in_a_tool_goes_to_the_call_that_issued_it() -> None:
    import agl

    @tool
    async def grade(expression: str) -> str:
        """Reward what is asked."""
        agl.emit_reward(float(expression))
        return "graded"

    two_calls = tool_call("0.25", "grade") + "\n" + tool_call("0.5", "grade")
    async with serving(["hello", two_calls, tool_call("0.125", "grade"), "done"]) as rig:
        talk = _Conversation(await rig.attempt(), rig.gateway.base_url)
        model = ChatOpenAI(model="m", base_url="http://provider.invalid/v1", api_key="sk-provider")  # type: ignore[arg-type]
        with LangChainTracer(), tracing.running(talk.context):
            await model.ainvoke("hi")
            await create_agent(model, [grade], name="grader").ainvoke({"messages": [HumanMessage("go")]})
            agl.emit_reward(1.0)
        built = await talk.end()

    (trajectory,) = built.trajectories.values()
    assert [sorted(r.value for r in t.rewards) for t in trajectory.transitions] == [[], [0.25, 0.5], [0.125], []]
    assert trajectory.final_reward == 1.0
    assert trajectory.total_reward == 1.875
    arguments = [json.loads(c["function"]["arguments"]) for c in trajectory.transitions[1].call.response["tool_calls"]]
    assert arguments == [{"expression": "0.25"}, {"expression": "0.5"}]

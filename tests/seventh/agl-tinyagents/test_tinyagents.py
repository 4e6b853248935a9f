"""tinyagents agents under agl's own trainer, as a user of both runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import tinyagents
from agl_tinyagents import TinyAgentsTracer
from scripted import ScriptedRollouts, calls_once

import agl
from agl import semconv
from agl.mdp.selection import select
from agl.testing.conformance import Reply, add, serve, uses_add
from agl.tracing import RolloutContext, running


def plans(body: dict[str, Any]) -> Reply:
    """The planner's own model: it asks the solver, and repeats what that says."""
    last = body["messages"][-1]
    return Reply(last["content"]) if last["role"] == "tool" else Reply(None, (("solver", {"question": "2+3?"}),))


def test_one_of_two_agents_is_trained(tmp_path: Path) -> None:
    with serve(plans) as provider:

        def agent(name: str, tools: list[Any]) -> tinyagents.Agent:
            client = openai.AsyncOpenAI(base_url=provider.url, api_key="sk-own")
            return tinyagents.Agent(name, f"gpt-{name}", async_client=client, tools=tools)

        program = agent("planner", [agent("solver", [add])])
        policy = ScriptedRollouts(calls_once("add", {"a": 2, "b": 3}, "5"))
        trainer = agl.Trainer(policy, agents=["solver"], directory=tmp_path, progress=False)
        trainer.fit(agl.wrap(program, reward=lambda task, output: float(output == task["answer"])), [
            {"question": "what is 2+3?", "answer": "5"}, {"question": "what is 2+4?", "answer": "6"},
        ])  # fmt: skip
        assert {seen.body["model"] for seen in provider.seen} == {"gpt-planner"}
        assert {seen.headers["authorization"] for seen in provider.seen} == {"Bearer sk-own"}
    assert policy.rewards == [1.0, 0.0]
    for calls, spans in zip(policy.calls, policy.spans, strict=True):
        assert [(c.agent, c.policy, c.finish_reason) for c in calls] == [
            ("solver", "policy", "tool_calls"), ("solver", "policy", "stop"),
        ]  # fmt: skip
        by_id = {s.span_id: s for s in spans}
        [add_run, solver_run] = sorted(
            (s for s in spans if s.operation == semconv.EXECUTE_TOOL), key=lambda s: s.attributes[semconv.TOOL_NAME]
        )
        assert (add_run.agent, by_id[str(add_run.parent_id)].name) == ("solver", "invoke_agent solver")
        assert by_id[str(by_id[str(add_run.parent_id)].parent_id)] is solver_run
        assert solver_run.agent == "planner"


def test_streams_read_in_turn_keep_their_own_names() -> None:
    """A generator runs in its reader's context: there the other agent's scope may be current."""
    with serve(uses_add()) as provider:
        client = openai.OpenAI(base_url=provider.url, api_key="sk-own")
        first, second = (tinyagents.Agent(name, "m", client=client, tools=[add]) for name in ("first", "second"))
        with TinyAgentsTracer(), running(rollout := RolloutContext("ro", 1, "outer", select("nobody"))):
            said = [a + b for a, b in zip(first.stream("2+3?"), second.stream("2+3?"), strict=True)]
    assert "".join(said).split() == ["sum", "sum", "5", "5"]
    agents = {s.span_id: s.agent for s in rollout.spans if s.operation == semconv.INVOKE_AGENT}
    steps = [s for s in rollout.spans if s.operation in (semconv.CHAT, semconv.EXECUTE_TOOL)]
    assert sorted(str(s.agent) for s in steps) == ["first"] * 3 + ["second"] * 3
    assert all(agents[str(s.parent_id)] == s.agent for s in steps)


def test_a_stream_that_is_not_read_to_its_end_ends_its_spans() -> None:
    with serve(lambda body: Reply("one two three")) as provider:
        agent = tinyagents.Agent("solver", "m", client=openai.OpenAI(base_url=provider.url, api_key="sk-own"))
        with TinyAgentsTracer(), running(rollout := RolloutContext("ro", 1, "outer", select("nobody"))):
            pieces = agent.stream("count")
            assert [next(pieces), next(pieces)] == ["", "one "]
            pieces.close()  # type: ignore[attr-defined]
            ended = {s.operation: s.status for s in rollout.spans}
    assert ended == {semconv.CHAT: "unset", semconv.INVOKE_AGENT: "unset"}

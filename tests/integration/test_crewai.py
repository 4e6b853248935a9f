"""crewai by its base classes' methods: names, tools, crews with several agents and tasks, copies, streams, rewards."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("crewai")

from rewarded import NOWHERE, calls_of, rewarded
from scripted import in_loop
from subject_crewai import build, crew_of

import agl
from agl import semconv, tracing
from agl.adapters.crewai import CrewAITracer, wrap
from agl.agents.agent import RolloutInfo
from agl.errors import ConfigError
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.testing.provider import Provider, Reply, last_said, serve
from agl.testing.subject import uses_add
from agl.tracing.context import RolloutContext


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    with CrewAITracer(), tracing.running(context):
        yield context


def of(rollout: RolloutContext, operation: str) -> list[Span]:
    return [s for s in rollout.spans if s.operation == operation]


def agents(rollout: RolloutContext) -> list[str | None]:
    return [s.agent for s in of(rollout, semconv.CHAT)]


def check_nesting(rollout: RolloutContext) -> None:
    """Chats and tools lie directly in a span of the agent whose name they carry."""
    by_id = {s.span_id: s for s in rollout.spans}
    for span in of(rollout, semconv.CHAT) + of(rollout, semconv.EXECUTE_TOOL):
        parent = by_id[span.parent_id or ""]
        assert (parent.operation, parent.agent) == (semconv.INVOKE_AGENT, span.agent)


def test_a_tools_exception_is_told_to_the_model_and_recorded_in_its_span(
    provider: Provider, rollout: RolloutContext
) -> None:
    provider.script = uses_add(a=-1)
    assert "a is negative" in build(provider.url, "solver").kickoff("2+3").raw
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert (span.status, span.attributes[semconv.ERROR_TYPE]) == ("error", "ToolFailed")
    assert "a is negative" in str(span.status_message)
    assert {s.status for s in rollout.spans if s is not span} == {"unset"}


@pytest.mark.parametrize("native", [False, True])
def test_a_crews_agents_keep_their_names(provider: Provider, rollout: RolloutContext, native: bool) -> None:
    crew = crew_of(build(provider.url, "left"), build(provider.url, "right"))
    if native:
        asyncio.run(crew.akickoff({"question": "2+3"}))
    else:
        crew.kickoff({"question": "2+3"})
    assert agents(rollout) == ["left", "left", "right", "right"]
    assert [s.agent for s in of(rollout, semconv.INVOKE_AGENT)] == ["left", "right"]
    check_nesting(rollout)


def test_tasks_that_run_together_keep_their_agents(provider: Provider, rollout: RolloutContext) -> None:
    crew = crew_of(build(provider.url, "left"), build(provider.url, "right"), build(provider.url, "last"))
    for task in crew.tasks[:2]:
        task.async_execution = True
    crew.kickoff({"question": "2+3"})
    assert sorted(map(str, agents(rollout))) == ["last", "last", "left", "left", "right", "right"]
    check_nesting(rollout)


def test_a_role_with_inputs_is_one_name(provider: Provider, rollout: RolloutContext) -> None:
    crew = crew_of(build(provider.url, " {topic} expert\n"))
    for topic in ("sea", "sky"):
        crew.kickoff({"question": "2+3", "topic": topic})
    assert agents(rollout) == ["{topic} expert"] * 4
    assert "You are  sky expert" in provider.last.body["messages"][0]["content"]


def delegates(body: dict[str, Any]) -> Reply:
    names = [t["function"]["name"] for t in body.get("tools") or ()]
    if "delegate_work_to_coworker" in names and last_said(body)[0] != "tool":
        arguments = {"task": "2+3", "context": "none", "coworker": "helper"}
        return Reply(None, (("delegate_work_to_coworker", arguments),))
    return uses_add()(body) if "add" in names and "delegate_work_to_coworker" not in names else Reply("5")


def test_a_coworker_is_named_separately(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = delegates
    boss, helper = build(provider.url, "boss", allow_delegation=True), build(provider.url, "helper")
    crew = crew_of(boss)
    crew.agents.append(helper)
    assert crew.kickoff({"question": "2+3"}).raw == "5"
    assert agents(rollout) == ["boss", "helper", "helper", "boss"]
    spans = {s.name: s for s in rollout.spans}
    delegation, inner = spans["execute_tool delegate_work_to_coworker"], spans["invoke_agent helper"]
    assert (delegation.agent, inner.parent_id) == ("boss", delegation.span_id)
    assert (spans["execute_tool add"].agent, spans["execute_tool add"].parent_id) == ("helper", inner.span_id)
    check_nesting(rollout)


def test_a_manager_has_its_own_name(provider: Provider, rollout: RolloutContext) -> None:
    from crewai import Process

    provider.script = delegates
    helper = build(provider.url, "helper")
    crew = crew_of(helper, process=Process.hierarchical, manager_llm=helper.llm)
    crew.kickoff({"question": "2+3"})
    assert agents(rollout) == ["Crew Manager", "helper", "helper", "Crew Manager"]
    check_nesting(rollout)


def test_parallel_tool_calls_each_have_their_span(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if last_said(body)[0] == "tool":
            return Reply("done")
        return Reply(None, tuple(("add", {"a": k - 1, "b": k}) for k in range(4)))

    provider.script = script
    build(provider.url, "solver").kickoff("go")
    said = next(m for m in provider.last.body["messages"] if m.get("tool_calls"))["tool_calls"]
    tools = {s.attributes[semconv.TOOL_CALL_ID]: s for s in of(rollout, semconv.EXECUTE_TOOL)}
    assert len(tools) == 4
    for call in said:
        arguments, span = json.loads(call["function"]["arguments"]), tools[call["id"]]
        assert json.loads(span.attributes[semconv.TOOL_CALL_ARGUMENTS]) == arguments
        if arguments["a"] < 0:
            assert span.attributes[semconv.ERROR_TYPE] == "ToolFailed"
        else:
            assert span.attributes[semconv.TOOL_CALL_RESULT] == str(arguments["a"] + arguments["b"])
    check_nesting(rollout)


def in_text(a: int) -> Any:
    """A policy that calls `add` in a text, as crewai asks of models that cannot call tools."""

    def script(body: dict[str, Any]) -> Reply:
        text = json.dumps(body["messages"][2:])
        if "Observation:" in text:
            return Reply("Thought: I know.\nFinal Answer: done")
        return Reply(f'Thought: I add.\nAction: add\nAction Input: {{"a": {a}, "b": 3}}')

    return script


@pytest.mark.parametrize("a", [2, -1])
def test_a_call_in_a_text_is_one_tool_run_however_often_it_is_tried(
    provider: Provider, rollout: RolloutContext, monkeypatch: pytest.MonkeyPatch, a: int
) -> None:
    agent = build(provider.url, "solver")
    monkeypatch.setattr(type(agent.llm), "supports_function_calling", lambda self: False)
    provider.script = in_text(a)
    assert agent.kickoff("2+3").raw == "done"
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert json.loads(tool.attributes[semconv.TOOL_CALL_ARGUMENTS]) == {"a": a, "b": 3}
    assert tool.attributes[semconv.ISSUED_BY] == of(rollout, semconv.CHAT)[0].span_id
    if a < 0:
        assert tool.attributes[semconv.ERROR_TYPE] == "ToolFailed"
    else:
        assert "5" in tool.attributes[semconv.TOOL_CALL_RESULT]
    check_nesting(rollout)


def test_a_system_prompt_is_replaced_at_the_wire(provider: Provider, rollout: RolloutContext) -> None:
    agent = build(provider.url, "solver")
    agent.kickoff("2+3")
    own = provider.last.body["messages"][0]["content"]
    rollout.system_prompts = {"solver": {own: ("better", "Use the tool.")}}
    agent.kickoff("2+3")
    assert own.startswith("You are solver")
    assert provider.last.body["messages"][0] == {"role": "system", "content": "Use the tool."}


def output(agent: agl.Agent, task: Any) -> Any:
    async def once() -> Any:
        result: Any = agent.run(task, {}, RolloutInfo("ro", 1))
        return (await result).output

    return once()


@pytest.mark.parametrize("kind", ["agent", "crew"])
def test_twenty_runs_of_a_wrapped_one_share_nothing_and_print_nothing(
    provider: Provider, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from crewai.events.event_listener import event_listener

    monkeypatch.setattr(event_listener.formatter, "verbose", True)
    agent = build(provider.url, "solver")
    wrapped = wrap(crew_of(agent, stream=True, name="team") if kind == "crew" else agent)
    assert wrapped.name == ("team" if kind == "crew" else "solver")
    rollouts = [RolloutContext(f"ro-{k:02}", 1, "outer", select(None), provider.root, "key") for k in range(20)]

    async def once(rollout: RolloutContext) -> str:
        with tracing.running(rollout):
            return await output(wrapped, {"question": rollout.rollout_id})

    async def main() -> list[str]:
        return await asyncio.gather(*(once(r) for r in rollouts))

    with CrewAITracer():
        assert set(asyncio.run(main())) == {"sum 5"}
    for rollout in rollouts:
        mine = [s for s in provider.seen if f"/{rollout.rollout_id}/attempts/1/agents/solver/" in s.path]
        assert [len(s.body["messages"]) for s in mine] == [2, 4]
        assert {rollout.rollout_id in json.dumps(s.body["messages"][1]) for s in mine} == {True}
        assert [s.span_id for s in of(rollout, semconv.CHAT)] == [s.traceparent_span for s in mine]
        check_nesting(rollout)
    assert capsys.readouterr().out == ""
    if kind == "crew":
        # A crew that is not verbose, and so each copy of it, silences crewai as a whole.
        return
    agent.kickoff("2+3")
    assert "solver" in capsys.readouterr().out


def test_threads_with_crews_of_their_own_never_mix(provider: Provider) -> None:
    rollouts = [RolloutContext(f"ro-{k:02}", 1, "outer", select(None), provider.root, "key") for k in range(10)]

    def run(rollout: RolloutContext) -> None:
        with tracing.running(rollout):
            crew_of(build(provider.url, "left"), build(provider.url, "right")).kickoff({"question": "2+3"})

    with CrewAITracer():
        threads = [threading.Thread(target=run, args=(r,)) for r in rollouts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rollout in rollouts:
        assert agents(rollout) == ["left", "left", "right", "right"]
        check_nesting(rollout)


def test_a_structured_output_is_scored(provider: Provider) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        value: int

    provider.script = lambda body: Reply('{"value": 5}')
    crew = crew_of(build(provider.url, "solver", ()))
    crew.tasks[-1].output_pydantic = Answer
    crew.tasks[-1].tools, crew.agents[0].tools = [], []
    assert asyncio.run(output(wrap(crew), "2+3")).value == 5


def test_a_memory_is_refused(provider: Provider) -> None:
    with pytest.raises(ConfigError, match="memory"):
        wrap(crew_of(build(provider.url, "solver"), memory=True))


@in_loop
async def test_air_rewards_tools_and_refused_calls_at_the_calls_that_asked_for_them() -> None:
    agent = build(NOWHERE, "solver")
    script = [
        calls_of(("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 5})),
        calls_of(("add", {"a": -1, "b": 3})),
        calls_of(("nothing", {"a": 1})),
        calls_of(("add", {"a": "two"})),
        "done",
    ]
    told, credited, calls = await rewarded(CrewAITracer(), script, lambda: agent.kickoff_async("sum?"))
    assert [event[:2] for event in told] == [("success", "add")] * 2 + [
        ("failure", "add"), ("failure", "nothing"), ("failure", "add"),
    ]  # fmt: skip
    assert told[2][2] == "ToolFailed: a is negative"
    assert credited == [(1.0, 0), (1.0, 0), (-1.0, 1), (-1.0, 2), (-1.0, 3)]
    assert len(calls) == 5

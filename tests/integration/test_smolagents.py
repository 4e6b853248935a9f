"""smolagents by its base classes' methods: names, tools, executed code, managed agents, copies, streams, rewards."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("smolagents")

from rewarded import NOWHERE, calls_of, rewarded
from scripted import in_loop
from smolagents import CodeAgent, LogLevel, Tool, ToolCallingAgent
from subject_smolagents import build, mcp_tools

import agl
from agl import semconv, tracing
from agl.adapters.smolagents import SmolagentsTracer, wrap
from agl.adapters.smolagents.copying import fresh_copy
from agl.agents.agent import RolloutInfo
from agl.errors import ConfigError
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.testing.provider import Provider, Reply, last_said, serve
from agl.tracing.context import RolloutContext


class Doubling(Tool):
    """A tool of another form, which calls its base class."""

    name = "double"
    description = "Double a number."
    inputs = {"a": {"type": "integer", "description": "the number"}}  # noqa: RUF012
    output_type = "integer"

    def forward(self, a: int) -> int:
        return 2 * a

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def answers(a: int = 2, name: str = "add") -> Callable[[dict[str, Any]], Reply]:
    """A policy that calls `add`, and then answers with what was observed."""

    def script(body: dict[str, Any]) -> Reply:
        _, text = last_said(body)
        if "Observation:" in text or "Error:" in text:
            return Reply(None, (("final_answer", {"answer": text.partition("Observation:\n")[2] or text}),))
        return Reply(None, ((name, {"a": a, "b": 3}),))

    return script


def writes(*codes: str) -> Callable[[dict[str, Any]], Reply]:
    """A policy that writes these pieces of code, one after the other."""
    left = iter(codes)
    return lambda body: Reply(f"Thought: so.\n<code>\n{next(left)}\n</code>")


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(answers()) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    with SmolagentsTracer(), tracing.running(context):
        yield context


BRIEF = "Be brief."
"""A prompt that fits into the tiny policy's context; smolagents' own are thousands of tokens."""


def of(rollout: RolloutContext, operation: str) -> list[Span]:
    return [s for s in rollout.spans if s.operation == operation]


def agents(rollout: RolloutContext) -> list[str | None]:
    return [s.agent for s in of(rollout, semconv.CHAT)]


def check_nesting(rollout: RolloutContext) -> None:
    """Chats lie directly in a span of the agent whose name they carry, tools in it or in its executed code."""
    by_id = {s.span_id: s for s in rollout.spans}
    for span in of(rollout, semconv.CHAT) + of(rollout, semconv.EXECUTE_TOOL):
        parent = by_id[span.parent_id or ""]
        inside = (
            (semconv.INVOKE_AGENT,) if span.operation == semconv.CHAT else (semconv.INVOKE_AGENT, semconv.EXECUTE_TOOL)
        )
        assert parent.operation in inside
        assert parent.agent == span.agent


def test_a_tools_exception_is_told_to_the_model_and_recorded_in_its_span(
    provider: Provider, rollout: RolloutContext
) -> None:
    provider.script = answers(a=-1)
    assert "a is negative" in build(provider.url).run("2+3")
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert (span.status, span.attributes[semconv.ERROR_TYPE]) == ("error", "ToolFailed")
    assert span.status_message == "ToolFailed: a is negative"
    assert {s.status for s in rollout.spans if s is not span} == {"unset"}


def test_an_agent_without_a_name_speaks_for_the_one_around_it(provider: Provider, rollout: RolloutContext) -> None:
    build(provider.url, name=None).run("2+3")
    assert agents(rollout) == ["outer", "outer"]
    assert of(rollout, semconv.INVOKE_AGENT) == []


def test_a_subclasss_tool_has_one_span(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = writes("x = double(4)\nfinal_answer(double(x))")
    assert build(provider.url, cls=CodeAgent, tools=[Doubling()]).run("q") == 16
    *doubled, code = of(rollout, semconv.EXECUTE_TOOL)
    assert [json.loads(s.attributes[semconv.TOOL_CALL_ARGUMENTS]) for s in doubled] == [{"a": 4}, {"a": 8}]
    assert [s.attributes[semconv.TOOL_CALL_RESULT] for s in doubled] == ["8", "16"]
    assert {s.parent_id for s in doubled} == {code.span_id}


def test_parallel_tool_calls_each_have_their_span(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if "Observation:" in last_said(body)[1]:
            return Reply(None, (("final_answer", {"answer": "done"}),))
        return Reply(None, tuple(("add", {"a": k // 2, "b": 1}) for k in range(4)))

    provider.script = script
    build(provider.url).run("go")
    tools = of(rollout, semconv.EXECUTE_TOOL)
    assert len({s.attributes[semconv.TOOL_CALL_ID] for s in tools}) == 4
    assert sorted(s.attributes[semconv.TOOL_CALL_RESULT] for s in tools) == ["1", "1", "2", "2"]
    check_nesting(rollout)


@pytest.mark.parametrize("stream", [False, True])
def test_code_is_a_tool_and_what_it_calls_lies_in_it(provider: Provider, rollout: RolloutContext, stream: bool) -> None:
    provider.script = writes("x = add(2, b=3)\nprint(x)", "final_answer(x)")
    agent = build(provider.url, cls=CodeAgent, stream_outputs=stream)
    assert agent.run("2+3") == 5
    added, first, second = of(rollout, semconv.EXECUTE_TOOL)
    assert [s.attributes[semconv.TOOL_NAME] for s in (added, first, second)] == [
        "add", "python_interpreter", "python_interpreter",
    ]  # fmt: skip
    assert (added.parent_id, added.agent) == (first.span_id, "solver")
    assert json.loads(added.attributes[semconv.TOOL_CALL_ARGUMENTS]) == {"a": 2, "b": 3}
    assert json.loads(first.attributes[semconv.TOOL_CALL_ARGUMENTS]) == {"code": "x = add(2, b=3)\nprint(x)"}
    chats = of(rollout, semconv.CHAT)
    assert [s.attributes[semconv.ISSUED_BY] for s in (first, second)] == [s.span_id for s in chats]
    assert {s.status for s in rollout.spans} == {"unset"}
    check_nesting(rollout)


def test_failed_code_and_the_tool_that_failed_in_it_keep_their_errors(
    provider: Provider, rollout: RolloutContext
) -> None:
    provider.script = writes("add(-1, 3)", "import os", "final_answer('gave up')")
    assert build(provider.url, cls=CodeAgent).run("q") == "gave up"
    added, *codes = of(rollout, semconv.EXECUTE_TOOL)
    assert (added.attributes[semconv.ERROR_TYPE], added.status_message) == ("ToolFailed", "ToolFailed: a is negative")
    assert [s.status for s in codes] == ["error", "error", "unset"]
    assert "os" in str(codes[1].status_message)


def delegating(provider: Provider) -> None:
    def script(body: dict[str, Any]) -> Reply:
        names = [t["function"]["name"] for t in body["tools"]]
        if "helper" in names and "Observation:" not in last_said(body)[1]:
            return Reply(None, (("helper", {"task": "2+3"}),))
        return answers()(body)

    provider.script = script


def test_a_managed_agent_is_named_separately(provider: Provider, rollout: RolloutContext) -> None:
    delegating(provider)
    boss = build(provider.url, "boss", tools=(), managed_agents=[build(provider.url, "helper")])
    assert "5" in boss.run("go")
    assert agents(rollout) == ["boss", "helper", "helper", "boss"]
    spans = {s.name: s for s in rollout.spans}
    delegation, inner = spans["execute_tool helper"], spans["invoke_agent helper"]
    assert (delegation.agent, delegation.parent_id) == ("boss", spans["invoke_agent boss"].span_id)
    assert inner.parent_id == delegation.span_id
    assert (spans["execute_tool add"].agent, spans["execute_tool add"].parent_id) == ("helper", inner.span_id)
    assert delegation.attributes[semconv.TOOL_CALL_ID]
    check_nesting(rollout)


def test_code_calls_a_managed_agent(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if body.get("tools"):
            return answers()(body)
        return Reply("<code>\nfinal_answer(helper('2+3'))\n</code>")

    provider.script = script
    helper = build(provider.url, "helper")
    boss = build(provider.url, "boss", CodeAgent, tools=(), managed_agents=[helper])
    assert "5" in boss.run("go")
    assert agents(rollout) == ["boss", "helper", "helper"]
    spans = {s.name: s for s in rollout.spans}
    assert spans["invoke_agent helper"].parent_id == spans["execute_tool helper"].span_id
    assert spans["execute_tool helper"].parent_id == spans["execute_tool python_interpreter"].span_id
    check_nesting(rollout)


def test_streams_read_in_turn_nest_each_in_its_own_agent(provider: Provider, rollout: RolloutContext) -> None:
    streams = [build(provider.url, name, stream_outputs=True).run("2+3", stream=True) for name in ("left", "right")]
    while streams:
        for stream in [*streams]:
            if next(stream, None) is None:
                streams.remove(stream)
            here = tracing.current()
            assert here is not None
            assert here.agent == "outer"
    assert sorted(str(a) for a in agents(rollout)) == ["left", "left", "right", "right"]
    assert {s.status for s in rollout.spans} == {"unset"}
    check_nesting(rollout)


def test_a_stream_broken_off_leaves_the_rest_in_order(provider: Provider, rollout: RolloutContext) -> None:
    stream = build(provider.url).run("2+3", stream=True)
    next(stream)
    # smolagents yields in a `finally`, so an agent that is closed in the middle of a step raises; one read so far not.
    while not hasattr(next(stream), "step_number"):
        pass
    stream.close()
    build(provider.url, "other").run("2+3")
    assert agents(rollout) == ["solver", "other", "other"]
    assert {s.status for s in rollout.spans} == {"unset"}
    check_nesting(rollout)


def test_a_failed_call_leaves_its_error(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = lambda body: Reply(status=400)
    with pytest.raises(Exception, match="scripted 400") as caught:
        build(provider.url).run("2+3")
    assert type(caught.value).__name__ == "AgentGenerationError"
    [chat] = of(rollout, semconv.CHAT)
    assert (chat.status, chat.attributes[semconv.ERROR_TYPE]) == ("error", "BadRequestError")


def output(agent: agl.Agent, task: Any) -> Any:
    done: Any = agent.run(task, {}, RolloutInfo("ro", 1))
    return done.output


@pytest.mark.parametrize("cls", [ToolCallingAgent, CodeAgent])
def test_twenty_runs_of_a_wrapped_agent_share_nothing(provider: Provider, cls: Any) -> None:
    def code(body: dict[str, Any]) -> Reply:
        return Reply(
            "<code>\nx = add(2, 3)\n</code>" if len(body["messages"]) == 2 else "<code>\nfinal_answer(x)\n</code>"
        )

    if cls is CodeAgent:
        provider.script = code
    agent = build(provider.url, cls=cls, stream_outputs=True, verbosity_level=LogLevel.INFO)
    wrapped = wrap(agent)
    rollouts = [RolloutContext(f"ro-{k:02}", 1, "outer", select(None), provider.root, "key") for k in range(20)]
    given: dict[str, Any] = {}

    def once(rollout: RolloutContext) -> None:
        with tracing.running(rollout):
            given[rollout.rollout_id] = output(wrapped, {"question": rollout.rollout_id})

    with SmolagentsTracer():
        threads = [threading.Thread(target=once, args=(r,)) for r in rollouts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [str(given[r.rollout_id]) for r in rollouts] == ["5"] * 20
    assert (agent.memory.steps, agent.state) == ([], {})
    for rollout in rollouts:
        mine = [s for s in provider.seen if f"/{rollout.rollout_id}/attempts/1/agents/solver/" in s.path]
        assert [rollout.rollout_id in json.dumps(s.body["messages"]) for s in mine] == [True, True]
        assert [s.span_id for s in of(rollout, semconv.CHAT)] == [s.traceparent_span for s in mine]
        check_nesting(rollout)


def test_a_copy_does_not_print_and_keeps_the_users_callbacks(
    provider: Provider, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[Any] = []
    agent = build(provider.url, verbosity_level=LogLevel.INFO, step_callbacks=[lambda step: steps.append(step)])
    new = fresh_copy(agent)
    new.run("2+3")
    assert capsys.readouterr().out == ""
    assert len(steps) == 2
    assert (len(new.monitor.step_durations), len(agent.monitor.step_durations)) == (2, 0)
    agent.run("2+3")
    assert "Final answer" in capsys.readouterr().out


def test_code_that_runs_elsewhere_is_refused(provider: Provider) -> None:
    from smolagents.local_python_executor import PythonExecutor

    class Elsewhere(PythonExecutor):
        def send_tools(self, tools: Any) -> None: ...
        def send_variables(self, variables: Any) -> None: ...
        def __call__(self, code_action: str) -> Any: ...

    with pytest.raises(ConfigError, match="Elsewhere"):
        wrap(build(provider.url, cls=CodeAgent, executor=Elsewhere()))


def test_a_full_result_is_scored_by_its_output(provider: Provider) -> None:
    assert output(wrap(build(provider.url, return_full_result=True)), {"question": "2+3"}) == "5"


@in_loop
async def test_air_rewards_tools_refused_calls_and_code_at_the_calls_that_asked_for_them() -> None:
    agent = build(NOWHERE, prompt=BRIEF)
    script = [
        calls_of(("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 5})),
        calls_of(("add", {"a": -1, "b": 3})),
        calls_of(("nothing", {"a": 1})),
        calls_of(("add", {"a": "two"})),
        calls_of(("final_answer", {"answer": "9"})),
    ]
    told, credited, calls = await rewarded(SmolagentsTracer(), script, lambda: asyncio.to_thread(agent.run, "sum?"))
    assert [event[:2] for event in told] == [("success", "add")] * 2 + [
        ("failure", "add"), ("failure", "nothing"), ("failure", "add"),
    ]  # fmt: skip
    assert told[2][2] == "ToolFailed: a is negative"
    assert credited == [(1.0, 0), (1.0, 0), (-1.0, 1), (-1.0, 2), (-1.0, 3)]
    assert len(calls) == 5


@in_loop
async def test_air_rewards_code_and_what_it_calls_at_the_call_that_wrote_it() -> None:
    agent = build(NOWHERE, cls=CodeAgent, prompt=BRIEF)
    script = ["<code>\nx = add(2, 3)\n</code>", "<code>\nadd(-1, 3)\n</code>", "<code>\nfinal_answer(x)\n</code>"]
    told, credited, _ = await rewarded(SmolagentsTracer(), script, lambda: asyncio.to_thread(agent.run, "sum?"))
    assert sorted((*event[:2], value, call) for event, (value, call) in zip(told, credited, strict=True)) == [
        ("failure", "add", -1.0, 1), ("failure", "python_interpreter", -1.0, 1),
        ("success", "add", 1.0, 0), ("success", "python_interpreter", 1.0, 0),
        ("success", "python_interpreter", 1.0, 2),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("a", [2, -1], ids=["succeeds", "fails"])
def test_an_mcp_server_tells_in_code_too_whether_its_tool_failed(rollout: RolloutContext, a: int) -> None:
    pytest.importorskip("mcpadapt")
    script = writes(f"print(add(a={a}, b=3))", "final_answer('done')")
    with serve(script) as provider, mcp_tools() as tools:
        assert build(provider.url, "solver", CodeAgent, tools=tools).run("2+3") == "done"
    [ran] = [s for s in rollout.spans if s.name == "execute_tool add"]
    assert ran.status == ("unset" if a == 2 else "error")
    assert ("5" if a == 2 else "a is negative") in str(ran.attributes[semconv.TOOL_CALL_RESULT])

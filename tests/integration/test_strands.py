"""Strands through its own middleware stages: names, tools, structure, several agents, copies, streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("strands")

from pydantic import BaseModel
from scripted import in_loop, serving, tool_call
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel
from strands.multiagent import GraphBuilder, Swarm

import agl
from agl import semconv, tracing
from agl.adapters.strands import StrandsTracer, wrap
from agl.adapters.strands.copying import fresh_copy
from agl.agents.agent import RolloutInfo
from agl.errors import ConfigError
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.testing.provider import Provider, Reply, serve
from agl.testing.subject import KEY, add, uses_add
from agl.tracing.context import RolloutContext

add_tool = tool(add)


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    with StrandsTracer(), tracing.running(context):
        yield context


def model(url: str, **config: Any) -> OpenAIModel:
    return OpenAIModel(client_args={"base_url": url, "api_key": KEY, "max_retries": 0}, model_id="m", **config)


def build(url: str, name: str | None = "solver", tools: Any = (add_tool,), **options: Any) -> Agent:
    return Agent(model=model(url), tools=list(tools), name=name, callback_handler=None, **options)


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
    assert "a is negative" in str(build(provider.url)("2+3"))
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert (span.status, span.attributes[semconv.ERROR_TYPE]) == ("error", "ToolFailed")
    assert "a is negative" in span.attributes[semconv.TOOL_CALL_RESULT]
    assert {s.status for s in rollout.spans if s is not span} == {"unset"}


def test_an_agent_without_a_name_speaks_for_the_one_around_it(provider: Provider, rollout: RolloutContext) -> None:
    build(provider.url, name=None)("2+3")
    assert agents(rollout) == ["outer", "outer"]
    assert of(rollout, semconv.INVOKE_AGENT) == []


def test_calls_name_the_session_as_conversation(provider: Provider, rollout: RolloutContext, tmp_path: Path) -> None:
    from strands.session.file_session_manager import FileSessionManager

    build(provider.url, session_manager=FileSessionManager(session_id="thread-1", storage_dir=str(tmp_path)))("2+3")
    assert {s.attributes[semconv.CONVERSATION_ID] for s in of(rollout, semconv.CHAT)} == {"thread-1"}


def test_an_agent_made_before_instrumentation_is_traced(provider: Provider) -> None:
    agent = build(provider.url)
    with StrandsTracer(), tracing.running(rollout := RolloutContext("ro", 1, "outer", select(None))):
        agent("2+3")
    assert agents(rollout) == ["solver", "solver"]


def test_parallel_tool_calls_each_have_their_span(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("done")
        return Reply(None, tuple(("graded_add", {"a": k, "b": k}) for k in range(4)))

    provider.script = script

    @tool
    def graded_add(a: int, b: int) -> int:
        """Add."""
        agl.emit_reward(float(a))
        return a + b

    build(provider.url, tools=[graded_add])("go")
    tools = {s.span_id: s for s in of(rollout, semconv.EXECUTE_TOOL)}
    said = next(m for m in provider.last.body["messages"] if m.get("tool_calls"))["tool_calls"]
    for call in said:
        [span] = [s for s in tools.values() if s.attributes[semconv.TOOL_CALL_ID] == call["id"]]
        arguments = json.loads(call["function"]["arguments"])
        assert json.loads(span.attributes[semconv.TOOL_CALL_ARGUMENTS]) == arguments
        assert span.attributes[semconv.TOOL_CALL_RESULT] == str(2 * arguments["a"])
    for reward in of(rollout, semconv.REWARD):
        arguments = json.loads(tools[reward.parent_id or ""].attributes[semconv.TOOL_CALL_ARGUMENTS])
        assert reward.attributes[semconv.REWARD_VALUE] == arguments["a"]
    assert len(tools) == len(of(rollout, semconv.REWARD)) == 4
    check_nesting(rollout)


def delegating(via: str) -> Any:
    def script(body: dict[str, Any]) -> Reply:
        names = [t["function"]["name"] for t in body.get("tools") or ()]
        if via not in names or body["messages"][-1]["role"] == "tool":
            return uses_add()(body)
        return Reply(None, ((via, {"input": "2+3"}),))

    return script


def test_an_agent_as_a_tool_is_named_separately(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = delegating("helper")
    boss = build(provider.url, "boss", [build(provider.url, "helper").as_tool(name="helper")])
    boss("go")
    assert agents(rollout) == ["boss", "helper", "helper", "boss"]
    spans = {s.name: s for s in rollout.spans}
    delegation, inner = spans["execute_tool helper"], spans["invoke_agent helper"]
    assert (delegation.agent, delegation.parent_id) == ("boss", spans["invoke_agent boss"].span_id)
    assert inner.parent_id == delegation.span_id
    assert (spans["execute_tool add"].agent, spans["execute_tool add"].parent_id) == ("helper", inner.span_id)
    check_nesting(rollout)


def test_an_agent_in_a_function_tool_is_named_separately(provider: Provider, rollout: RolloutContext) -> None:
    @tool
    def ask_helper(input: str) -> str:
        """Ask the helper."""
        return str(build(provider.url, "helper")(input))

    provider.script = delegating("ask_helper")
    build(provider.url, "boss", [ask_helper])("go")
    assert agents(rollout) == ["boss", "helper", "helper", "boss"]
    check_nesting(rollout)


def graph(url: str) -> Any:
    builder = GraphBuilder().set_max_node_executions(10)
    builder.add_node(build(url, "left"), "a")
    builder.add_node(build(url, "right"), "b")
    builder.add_node(build(url, "last", ()), "c")
    builder.add_edge("a", "c")
    builder.add_edge("b", "c")
    builder.set_entry_point("a")
    builder.set_entry_point("b")
    return builder.build()


def test_a_graphs_agents_keep_their_names_while_they_run_together(provider: Provider, rollout: RolloutContext) -> None:
    graph(provider.url)("2+3")
    assert sorted(str(a) for a in agents(rollout)) == ["last", "left", "left", "right", "right"]
    assert len(of(rollout, semconv.INVOKE_AGENT)) == 3
    check_nesting(rollout)


def test_a_swarms_agents_keep_their_names(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        first = "first" in json.dumps(body["messages"][0])
        if first and body["messages"][-1]["role"] != "tool":
            return Reply(None, (("handoff_to_agent", {"agent_name": "second", "message": "take over"}),))
        return Reply("done")

    provider.script = script
    first = build(provider.url, "first", (), system_prompt="you are first")
    second = build(provider.url, "second", (), system_prompt="you are the other")
    Swarm([first, second])("go")
    assert set(agents(rollout)) == {"first", "second"}
    assert {s.agent for s in of(rollout, semconv.EXECUTE_TOOL)} == {"first"}
    check_nesting(rollout)


def test_streams_read_in_turn_nest_each_in_its_own_agent(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        streams = [build(provider.url, n).stream_async("2+3") for n in ("left", "right")]
        while streams:
            for stream in [*streams]:
                if await anext(stream, None) is None:
                    streams.remove(stream)
                here = tracing.current()
                assert here is not None
                assert here.agent == "outer"

    asyncio.run(main())
    assert sorted(str(a) for a in agents(rollout)) == ["left", "left", "right", "right"]
    check_nesting(rollout)


def test_a_stream_broken_off_leaves_the_rest_in_order(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        stream: Any = build(provider.url).stream_async("2+3")
        async for event in stream:
            if "data" in event or "current_tool_use" in event:
                break
        await stream.aclose()
        await build(provider.url, "other").invoke_async("2+3")

    asyncio.run(main())
    # Strands leaves its inner generators to the event loop, which closes them in its own time.
    assert sorted(str(a) for a in agents(rollout)) == ["other", "other", "solver"]
    assert {s.status for s in rollout.spans} == {"unset"}
    check_nesting(rollout)


class Answer(BaseModel):
    """The answer."""

    value: int


def test_structured_output_keeps_the_name(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = lambda body: Reply(None, (("Answer", {"value": 5}),))
    assert build(provider.url, tools=())("q", structured_output_model=Answer).structured_output == Answer(value=5)
    provider.script = lambda body: Reply('{"value": 6}')
    with pytest.warns(DeprecationWarning, match="structured_output"):
        assert build(provider.url, tools=()).structured_output(Answer, "q") == Answer(value=6)
    assert agents(rollout) == ["solver", "solver"]
    assert all(s.attributes[semconv.WIRE_CALLS] == 1 for s in of(rollout, semconv.CHAT))
    check_nesting(rollout)


def test_the_users_own_middleware_comes_first(provider: Provider, rollout: RolloutContext) -> None:
    from strands.middleware import ExecuteToolStage

    def doubled(context: Any) -> Any:
        use = context.tool_use
        return context.replace(tool_use={**use, "input": {**use["input"], "a": 20}})

    agent = build(provider.url)
    agent.add_middleware(ExecuteToolStage.Input, doubled)
    agent("2+3")
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert json.loads(span.attributes[semconv.TOOL_CALL_ARGUMENTS]) == {"a": 20, "b": 3}
    assert span.attributes[semconv.TOOL_CALL_RESULT] == "23"


def run(agent: agl.Agent, task: Any) -> Any:
    async def once() -> Any:
        result: Any = agent.run(task, {}, RolloutInfo("ro", 1))
        return (await result).output

    return once()


def test_each_run_of_a_wrapped_agent_starts_from_the_same_history(provider: Provider) -> None:
    agent = build(provider.url, messages=[{"role": "user", "content": [{"text": "before"}]}])
    wrapped = wrap(agent)
    rollouts = [RolloutContext(f"ro-{k:02}", 1, "outer", select(None), provider.root, "key") for k in range(20)]

    async def once(rollout: RolloutContext) -> str:
        with tracing.running(rollout):
            return await run(wrapped, {"question": rollout.rollout_id})

    async def main() -> list[str]:
        return await asyncio.gather(*(once(r) for r in rollouts))

    with StrandsTracer():
        assert {text.strip() for text in asyncio.run(main())} == {"sum 5"}
    assert len(agent.messages) == 1
    for rollout in rollouts:
        mine = [s for s in provider.seen if f"/{rollout.rollout_id}/attempts/1/agents/solver/" in s.path]
        assert [len(s.body["messages"]) for s in mine] == [2, 4]
        assert {rollout.rollout_id in json.dumps(s.body["messages"][1]) for s in mine} == {True}
        assert [s.span_id for s in of(rollout, semconv.CHAT)] == [s.traceparent_span for s in mine]
        check_nesting(rollout)


def test_a_copy_does_not_print(provider: Provider, capsys: pytest.CaptureFixture[str]) -> None:
    agent = Agent(model=model(provider.url), tools=[add_tool])
    fresh_copy(agent)("2+3")
    assert capsys.readouterr().out == ""
    agent("2+3")
    assert "sum 5" in capsys.readouterr().out


def test_a_question_to_a_human_is_no_error(provider: Provider, rollout: RolloutContext) -> None:
    @tool(name="add", context=True)
    def asking(a: int, b: int, tool_context: Any) -> str:
        """Add, if a human agrees."""
        return str(tool_context.interrupt("agree", reason="may I?"))

    agent = build(provider.url, tools=[asking])
    stopped = agent("2+3")
    assert stopped.stop_reason == "interrupt"
    assert stopped.interrupts
    agent([{"interruptResponse": {"interruptId": stopped.interrupts[0].id, "response": "yes"}}])
    assert {s.status for s in rollout.spans} == {"unset"}
    asked, answered = of(rollout, semconv.EXECUTE_TOOL)
    assert (asked.is_tool_run, answered.is_tool_run) == (False, True)
    assert semconv.TOOL_CALL_RESULT not in asked.attributes
    assert answered.attributes[semconv.TOOL_CALL_RESULT] == "yes"


def test_a_copy_has_hooks_and_delegates_of_its_own(provider: Provider) -> None:
    provider.script = delegating("helper")
    helper = build(provider.url, "helper")
    boss = build(provider.url, "boss", [helper.as_tool(name="helper", preserve_context=True)])
    one, other = fresh_copy(boss), fresh_copy(boss)
    one("go")
    assert (len(helper.messages), len(boss.messages), len(other.messages)) == (0, 0, 0)
    assert one.conversation_manager is not boss.conversation_manager
    assert one.model is boss.model


def test_a_wrapped_graph_answers_with_its_last_agent(provider: Provider) -> None:
    wrapped = wrap(graph(provider.url), name="team")

    async def main() -> list[Any]:
        return await asyncio.gather(*(run(wrapped, "2+3") for _ in range(3)))

    assert wrapped.name == "team"
    assert all("sum 5" in text for text in asyncio.run(main()))


def test_what_cannot_be_copied_is_refused_at_once(provider: Provider, tmp_path: Any) -> None:
    from strands.session.file_session_manager import FileSessionManager

    session = FileSessionManager(session_id="s", storage_dir=str(tmp_path))
    for agent in (build(provider.url, session_manager=session), Swarm([build(provider.url)])):
        with pytest.raises(ConfigError, match="cannot make a copy") as caught:
            wrap(agent)
        assert "@agl.rollout" in str(caught.value)


def test_the_users_own_telemetry_gets_the_tree_that_it_gets_without_us(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from strands.telemetry.tracer import get_tracer

    exporter, users = InMemorySpanExporter(), TracerProvider()
    users.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(get_tracer(), "tracer", users.get_tracer("strands"))

    @tool(name="add")
    def traced_add(a: int, b: int) -> int:
        """Add."""
        with users.get_tracer("mine").start_as_current_span("within"):
            return a + b

    def tree() -> list[tuple[str, str | None]]:
        exporter.clear()
        build(provider.url, tools=[traced_add])("2+3")
        spans = exporter.get_finished_spans()
        names = {s.context.span_id: s.name for s in spans if s.context}
        return [(s.name, names.get(s.parent.span_id) if s.parent else None) for s in spans]

    without = tree()
    with StrandsTracer(), tracing.running(rollout := RolloutContext("ro", 1, "outer", select(None))):
        assert tree() == without
    assert ("chat", "execute_event_loop_cycle") in without
    assert ("within", "execute_tool add") in without
    assert agents(rollout) == ["solver", "solver"]


@pytest.mark.parametrize("api", [OpenAIModel, OpenAIResponsesModel])
def test_a_rollout_through_the_gateway_is_recorded_call_by_call(api: Any) -> None:
    @tool
    def calculator(expression: str) -> str:
        """Work out a sum."""
        return "5"

    @in_loop
    async def main() -> None:
        async with serving([tool_call("2 + 3"), "the answer is 5"]) as rig:
            attempt = await rig.attempt()
            root, _, _ = attempt.access.url.partition("/rollouts/")
            rollout = RolloutContext(attempt.access.rollout_id, 1, "outer", select(None), root, attempt.key)
            asked = api(client_args={"base_url": "http://agl.invalid/v1", "api_key": KEY}, model_id="m")
            agent = Agent(model=asked, tools=[calculator], name="solver", callback_handler=None)
            with StrandsTracer(), tracing.running(rollout):
                result = await agent.invoke_async("2 + 3")
            assert str(result).strip() == "the answer is 5"
            first, second = await attempt.close()
        assert [c.agent for c in (first, second)] == ["solver", "solver"]
        chats = of(rollout, semconv.CHAT)
        assert [s.span_id for s in chats] == [c.span_id for c in (first, second)]
        assert {s.attributes[semconv.PROVIDER_NAME] for s in chats} == {"openai"}
        assert (second.parent_id, second.fork_cause) == (first.id, None)
        [span] = of(rollout, semconv.EXECUTE_TOOL)
        assert span.attributes[semconv.TOOL_CALL_ID] == first.tool_call_ids[0]
        assert span.attributes[semconv.TOOL_CALL_RESULT] == "5"

    main()

"""Agent Framework around its own telemetry layers: names, tools, structure, workflows, middleware, streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("agent_framework")
pytest.importorskip("agent_framework_openai")

from agent_framework import Agent, WorkflowBuilder, chat_middleware, function_middleware, tool
from pydantic import BaseModel
from scripted import in_loop, serving, tool_call
from subject_agent_framework import chat_client, responses_client

import agl
from agl import semconv, tracing
from agl.adapters.agent_framework import AgentFrameworkTracer, wrap
from agl.agents.agent import RolloutInfo
from agl.errors import ConfigError
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.messages import read as messages
from agl.testing.provider import Provider, Reply, says, serve
from agl.testing.subject import add, uses_add
from agl.tracing.context import RolloutContext

add_tool = tool(add)


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    with AgentFrameworkTracer(), tracing.running(context):
        yield context


def build(url: str, name: str | None = "solver", tools: Any = (add_tool,), **options: Any) -> Any:
    return Agent(chat_client(url), name=name, tools=list(tools), **options)


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


async def read(stream: Any) -> str:
    return "".join([update.text async for update in stream]).strip()


def test_a_tools_exception_is_told_to_the_model_and_recorded_in_its_span(
    provider: Provider, rollout: RolloutContext
) -> None:
    provider.script = uses_add(a=-1)
    assert "Error" in asyncio.run(build(provider.url).run("2+3")).text
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert (span.status, span.status_message) == ("error", "ToolFailed: a is negative")
    assert span.attributes[semconv.ERROR_TYPE] == "ToolFailed"
    assert {s.status for s in rollout.spans if s is not span} == {"unset"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_call_is_recorded_and_raised_unchanged(
    stream: bool, provider: Provider, rollout: RolloutContext
) -> None:
    from agent_framework.exceptions import ChatClientException

    provider.script = lambda body: Reply(status=400)

    async def main() -> None:
        run = build(provider.url).run("2+3", stream=stream)
        await (read(run) if stream else run)

    with pytest.raises(ChatClientException, match="scripted 400"):
        asyncio.run(main())
    assert {s.attributes[semconv.ERROR_TYPE] for s in rollout.spans} == {"ChatClientException"}
    assert {s.operation for s in rollout.spans} == {semconv.CHAT, semconv.INVOKE_AGENT}


def test_an_agent_without_a_name_speaks_for_the_one_around_it(provider: Provider, rollout: RolloutContext) -> None:
    asyncio.run(build(provider.url, name=None).run("2+3"))
    assert agents(rollout) == ["outer", "outer"]
    assert of(rollout, semconv.INVOKE_AGENT) == []


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_each_have_their_span(stream: bool, provider: Provider, rollout: RolloutContext) -> None:
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

    async def main() -> None:
        run = build(provider.url, tools=[graded_add]).run("go", stream=stream)
        await (read(run) if stream else run)

    asyncio.run(main())
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
    [first] = messages.said(of(rollout, semconv.CHAT)[0])
    assert [json.loads(c.json_arguments) for c in first.tool_calls] == [{"a": k, "b": k} for k in range(4)]
    check_nesting(rollout)


def test_an_agent_as_a_tool_is_named_separately(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        names = [t["function"]["name"] for t in body.get("tools") or ()]
        if "helper" not in names or body["messages"][-1]["role"] == "tool":
            return uses_add()(body)
        return Reply(None, (("helper", {"task": "2+3"}),))

    provider.script = script
    boss = build(provider.url, "boss", [build(provider.url, "helper").as_tool()])
    asyncio.run(boss.run("go"))
    assert agents(rollout) == ["boss", "helper", "helper", "boss"]
    spans = {s.name: s for s in rollout.spans}
    delegation, inner = spans["execute_tool helper"], spans["invoke_agent helper"]
    assert (delegation.agent, delegation.parent_id) == ("boss", spans["invoke_agent boss"].span_id)
    assert inner.parent_id == delegation.span_id
    assert (spans["execute_tool add"].agent, spans["execute_tool add"].parent_id) == ("helper", inner.span_id)
    check_nesting(rollout)


@pytest.mark.parametrize("stream", [False, True])
def test_a_workflows_agents_keep_their_names(stream: bool, provider: Provider, rollout: RolloutContext) -> None:
    start, left, right = (build(provider.url, name) for name in ("start", "left", "right"))
    workflow = WorkflowBuilder(start_executor=start).add_fan_out_edges(start, [left, right]).build()

    async def main() -> None:
        if stream:
            assert [event async for event in workflow.run("2+3", stream=True)]
        else:
            await workflow.run("2+3")

    asyncio.run(main())
    assert agents(rollout)[:2] == ["start", "start"]
    assert {"left", "right"} == {str(a) for a in agents(rollout)[2:]}
    assert sorted(s.agent or "" for s in of(rollout, semconv.INVOKE_AGENT)) == ["left", "right", "start"]
    check_nesting(rollout)


def test_the_users_own_middleware_comes_first(provider: Provider, rollout: RolloutContext) -> None:
    @function_middleware
    async def larger(context: Any, call_next: Any) -> None:
        context.arguments = {**context.arguments, "a": 20}
        await call_next()

    @chat_middleware
    async def look(context: Any, call_next: Any) -> None:
        assert tracing.current() is not None
        await call_next()

    asyncio.run(build(provider.url, middleware=[larger, look]).run("2+3"))
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert json.loads(span.attributes[semconv.TOOL_CALL_ARGUMENTS]) == {"a": 20, "b": 3}
    assert span.attributes[semconv.TOOL_CALL_RESULT] == "23"
    assert agents(rollout) == ["solver", "solver"]


def test_streams_read_in_turn_nest_each_in_its_own_agent(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        streams = [build(provider.url, n).run("2+3", stream=True) for n in ("left", "right")]
        while streams:
            for stream in [*streams]:
                if await anext(stream, None) is None:
                    streams.remove(stream)
                here = tracing.current()
                assert here is not None
                assert here.agent == "outer"

    asyncio.run(main())
    assert sorted(str(a) for a in agents(rollout)) == ["left", "left", "right", "right"]
    assert {s.agent for s in of(rollout, semconv.EXECUTE_TOOL)} == {"left", "right"}
    check_nesting(rollout)


def test_a_stream_broken_off_leaves_the_rest_in_order(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        stream = build(provider.url).run("2+3", stream=True)
        async with stream:
            async for _ in stream:
                break
        await build(provider.url, "other").run("2+3")

    asyncio.run(main())
    assert agents(rollout) == ["solver", "other", "other"]
    assert {s.status for s in rollout.spans} == {"unset"}
    check_nesting(rollout)


def test_the_responses_client_is_traced_too(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = says("hello")
    agent: Any = Agent(responses_client(provider.url), name="solver")
    assert asyncio.run(agent.run("hi")).text == "hello"
    [chat] = of(rollout, semconv.CHAT)
    assert provider.last.path.endswith("/responses")
    assert (chat.agent, chat.attributes[semconv.WIRE_CALLS]) == ("solver", 1)
    assert str(chat.attributes[semconv.RESPONSE_ID]).startswith("resp_")


class Answer(BaseModel):
    """The answer."""

    value: int


def test_wrapped_agents_take_a_question_and_give_text_or_a_value(provider: Provider) -> None:
    def run(agent: agl.Agent, task: Any) -> Any:
        async def once() -> Any:
            result: Any = agent.run(task, {}, RolloutInfo("ro", 1))
            return (await result).output

        return asyncio.run(once())

    wrapped = wrap(build(provider.url))
    assert [run(wrapped, {"question": "2+3"}) for _ in range(2)] == ["sum 5"] * 2
    assert [len(s.body["messages"]) for s in provider.seen] == [1, 3] * 2, "no run knows of the other"
    loud = wrap(build(provider.url, tools=()), input=str.upper, output=lambda response: response.text + "!")
    assert run(loud, "hi") == "you said HI!"
    provider.script = says('{"value": 6}')
    typed = build(provider.url, tools=(), default_options={"response_format": Answer})
    assert run(wrap(typed), "q") == Answer(value=6)
    assert wrap(build(provider.url, name=None)).name == "agent"


def test_a_workflow_is_refused_with_the_way_out(provider: Provider) -> None:
    workflow = WorkflowBuilder(start_executor=build(provider.url)).build()
    for agent in (workflow, workflow.as_agent()):
        with pytest.raises(ConfigError, match="runs once at a time") as caught:
            wrap(agent)
        assert "@agl.rollout" in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
def test_the_users_own_telemetry_gets_the_tree_that_it_gets_without_us(
    stream: bool, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent_framework import observability
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, users = InMemorySpanExporter(), TracerProvider()
    users.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(observability, "get_tracer", lambda *_, **__: users.get_tracer("agent_framework"))

    def tree() -> list[tuple[str, str | None]]:
        async def main() -> None:
            run = build(provider.url).run("2+3", stream=stream)
            await (read(run) if stream else run)

        exporter.clear()
        asyncio.run(main())
        spans = exporter.get_finished_spans()
        names = {s.context.span_id: s.name for s in spans if s.context}
        return [(s.name, names.get(s.parent.span_id) if s.parent else None) for s in spans]

    without = tree()
    with AgentFrameworkTracer(), tracing.running(rollout := RolloutContext("ro", 1, "outer", select(None))):
        assert tree() == without
    assert ("chat m", "invoke_agent solver") in without
    assert agents(rollout) == ["solver", "solver"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", [chat_client, responses_client])
def test_a_rollout_through_the_gateway_is_recorded_call_by_call(client: Any, stream: bool) -> None:
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
            agent: Any = Agent(client("http://agl.invalid/v1"), name="solver", tools=[calculator])
            with AgentFrameworkTracer(), tracing.running(rollout):
                run = agent.run("2 + 3", stream=stream)
                answer = await (run.get_final_response() if stream else run)
            assert answer.text == "the answer is 5"
            first, second = await attempt.close()
        assert [c.agent for c in (first, second)] == ["solver", "solver"]
        chats = of(rollout, semconv.CHAT)
        assert [s.span_id for s in chats] == [c.span_id for c in (first, second)]
        assert (second.parent_id, second.fork_cause) == (first.id, None)
        assert [m.text for m in messages.said(chats[1])] == ["the answer is 5"]
        [span] = of(rollout, semconv.EXECUTE_TOOL)
        assert span.attributes[semconv.TOOL_CALL_ID] == first.tool_call_ids[0]
        assert span.attributes[semconv.TOOL_CALL_RESULT] == "5"

    main()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_handoff_is_a_span_of_the_tool_call_that_made_it(
    streamed: bool, provider: Provider, rollout: RolloutContext
) -> None:
    """`HandoffBuilder` answers the call itself, and its agents are copies of the user's."""
    orchestrations = pytest.importorskip("agent_framework_orchestrations")

    def script(body: dict[str, Any]) -> Reply:
        tools = [t["function"]["name"] for t in body.get("tools") or ()]
        if "handoff_to_poet" in tools and not any(m["role"] == "tool" for m in body["messages"]):
            return Reply(tools=(("handoff_to_poet", {}),))
        return Reply("a poem")

    provider.script = script
    triage, poet = (
        build(provider.url, name, (), require_per_service_call_history_persistence=True) for name in ("triage", "poet")
    )
    workflow = (
        orchestrations.HandoffBuilder(participants=[triage, poet])
        .add_handoff(triage, [poet])
        .with_start_agent(triage)
        .build()
    )

    async def main() -> None:
        if streamed:
            async for _ in workflow.run("write a poem", stream=True):
                pass
        else:
            await workflow.run("write a poem")

    asyncio.run(main())
    [span] = of(rollout, semconv.HANDOFF)
    facts = span.attributes
    assert (facts[semconv.HANDOFF_FROM], facts[semconv.HANDOFF_TO]) == ("triage", "poet")
    [answer] = messages.said(of(rollout, semconv.CHAT)[0])
    [call] = answer.tool_calls
    assert facts[semconv.TOOL_CALL_ID] == call.id
    assert agents(rollout) == ["triage", "poet"]

"""Pydantic AI through a capability of each run: names, tools, structure, several agents, streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel
from pydantic_ai import Agent, CallDeferred, DeferredToolRequests, UnexpectedModelBehavior, UserError
from pydantic_ai.agent import WrapperAgent
from pydantic_ai.capabilities import AbstractCapability, Instrumentation, ProcessHistory
from pydantic_ai.models.instrumented import InstrumentationSettings
from scripted import in_loop, serving, tool_call_of
from subject_pydantic_ai import chat_model

import agl
from agl import semconv, tracing
from agl.adapters.openai import OpenAITracer
from agl.adapters.pydantic_ai import PydanticAITracer, wrap
from agl.agents.agent import RolloutInfo
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.testing.provider import Provider, Reply, serve
from agl.testing.subject import add, uses_add
from agl.tracing.context import RolloutContext
from agl.tracing.inferred import completed


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    with PydanticAITracer(), tracing.running(context):
        yield context


def build(url: str, name: str | None = "solver", tools: Any = (add,), **options: Any) -> Agent[Any, Any]:
    return Agent(chat_model(url), name=name, tools=[*tools], **options)


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


def test_an_agent_without_a_name_speaks_for_the_one_around_it(provider: Provider, rollout: RolloutContext) -> None:
    build(provider.url, None).run_sync("2+3", infer_name=False)
    assert agents(rollout) == ["outer", "outer"]
    assert of(rollout, semconv.INVOKE_AGENT) == []


def test_calls_name_their_conversation(provider: Provider, rollout: RolloutContext) -> None:
    build(provider.url).run_sync("2+3", conversation_id="thread-1")
    assert {s.attributes[semconv.CONVERSATION_ID] for s in of(rollout, semconv.CHAT)} == {"thread-1"}


def test_a_history_that_is_emptied_is_the_frameworks_own_error(provider: Provider, rollout: RolloutContext) -> None:
    agent = build(provider.url, capabilities=[ProcessHistory(lambda messages: [])])
    with pytest.raises(UserError, match="empty"):
        agent.run_sync("2+3")


def test_an_unnamed_agent_that_is_wrapped_gets_no_name_of_ours(provider: Provider) -> None:
    solver = build(provider.url, None)
    assert run(wrapped := wrap(solver), {"question": "2+3"}) == "sum 5"
    assert (wrapped.name, solver.name) == ("agent", None)


def test_an_agent_made_before_instrumentation_and_a_wrapper_are_traced(provider: Provider) -> None:
    agent = WrapperAgent(build(provider.url))
    with PydanticAITracer(), tracing.running(rollout := RolloutContext("ro", 1, "outer", select(None))):
        agent.run_sync("2+3")
    assert agents(rollout) == ["solver", "solver"]
    assert PydanticAITracer.handles(agent)
    assert wrap(agent).name == "solver"


def test_parallel_tool_calls_each_have_their_span(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("done")
        return Reply(None, tuple(("graded_add", {"a": k, "b": k}) for k in range(4)))

    provider.script = script

    def graded_add(a: int, b: int) -> int:
        """Add."""
        agl.emit_reward(float(a))
        return a + b

    build(provider.url, tools=[graded_add]).run_sync("go")
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


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_that_a_tool_asks_is_named_separately(
    provider: Provider, rollout: RolloutContext, streamed: bool
) -> None:
    def script(body: dict[str, Any]) -> Reply:
        names = [t["function"]["name"] for t in body.get("tools") or ()]
        if "ask_helper" not in names or body["messages"][-1]["role"] == "tool":
            return uses_add()(body)
        return Reply(None, (("ask_helper", {"question": "2+3"}),))

    provider.script = script
    helper = build(provider.url, "helper")

    async def ask_helper(question: str) -> str:
        """Ask the helper."""
        if not streamed:
            return (await helper.run(question)).output
        async with helper.run_stream(question) as stream:
            return await stream.get_output()

    build(provider.url, "boss", [ask_helper]).run_sync("go")
    assert agents(rollout) == ["boss", "helper", "helper", "boss"]
    check_nesting(rollout)


@pytest.mark.parametrize("way", ["iter", "run_stream_events"])
def test_runs_that_are_read_in_turn_keep_their_own_names(provider: Provider, rollout: RolloutContext, way: str) -> None:
    async def main() -> None:
        left, right = (build(provider.url, name) for name in ("left", "right"))
        async with getattr(left, way)("2+3") as first, getattr(right, way)("2+3") as second:
            streams: list[AsyncIterator[Any]] = [aiter(first), aiter(second)]
            while streams:
                for stream in [*streams]:
                    if await anext(stream, None) is None:
                        streams.remove(stream)

    asyncio.run(main())
    assert sorted(str(a) for a in agents(rollout)) == ["left", "left", "right", "right"]
    assert sorted(str(s.agent) for s in of(rollout, semconv.EXECUTE_TOOL)) == ["left", "right"]
    assert {s.status for s in rollout.spans} == {"unset"}
    check_nesting(rollout)


def test_a_stream_broken_off_leaves_the_rest_in_order(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        async with build(provider.url).iter("2+3") as nodes:
            async for _ in nodes:
                break
        async with build(provider.url).run_stream("2+3") as stream:
            async for _ in stream.stream_text(debounce_by=None):
                break
        await build(provider.url, "other").run("2+3")

    asyncio.run(main())
    assert agents(rollout)[-2:] == ["other", "other"]
    assert {s.status for s in rollout.spans} == {"unset"}
    check_nesting(rollout)


class Answer(BaseModel):
    """The answer."""

    value: int


def test_structured_output_is_no_tools_run(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = lambda body: Reply(None, (("final_result", {"value": 5}),))
    assert run(wrap(build(provider.url, tools=(), output_type=Answer)), "q") == Answer(value=5)
    assert agents(rollout) == ["solver"]
    assert of(rollout, semconv.EXECUTE_TOOL) == []


def test_nor_is_it_one_in_a_conversation_that_goes_on(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = lambda body: Reply(None, (("final_result", {"value": 5}),))
    agent = build(provider.url, tools=(), output_type=Answer)
    rollout.prompts = True
    with OpenAITracer():  # records what is sent
        agent.run_sync("again", message_history=agent.run_sync("q").all_messages())
    assert len(of(rollout, semconv.CHAT)) == 2
    assert len(provider.seen[1].body["messages"]) > len(provider.seen[0].body["messages"])
    assert {s.operation for s in completed(rollout.spans)} == {semconv.INVOKE_AGENT, semconv.CHAT}


def test_a_call_that_does_not_fit_is_a_failure(provider: Provider, rollout: RolloutContext) -> None:
    answers = iter([("add", {"a": "x"}), ("subtract", {"a": 1}), ("add", {"a": 2, "b": 3})])
    provider.script = lambda body: Reply(None, (call,)) if (call := next(answers, None)) else Reply("done")
    assert build(provider.url, retries=3).run_sync("go").output == "done"
    tools = of(rollout, semconv.EXECUTE_TOOL)
    assert [(s.attributes[semconv.TOOL_NAME], s.status) for s in tools] == [
        ("add", "error"), ("subtract", "error"), ("add", "unset"),
    ]  # fmt: skip
    assert len({s.attributes[semconv.TOOL_CALL_ID] for s in tools}) == 3
    check_nesting(rollout)


def test_too_many_failures_end_the_run(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = lambda body: Reply(None, (("subtract", {"a": 1}),))
    with pytest.raises(UnexpectedModelBehavior, match="subtract"):
        build(provider.url).run_sync("go")
    assert [s.attributes[semconv.ERROR_TYPE] for s in of(rollout, semconv.INVOKE_AGENT)] == ["UnexpectedModelBehavior"]


def test_a_tool_that_is_deferred_is_no_error(provider: Provider, rollout: RolloutContext) -> None:
    def asking(a: int, b: int) -> int:
        """Add, elsewhere."""
        raise CallDeferred

    asking.__name__ = "add"
    output = build(provider.url, tools=[asking], output_type=[str, DeferredToolRequests]).run_sync("2+3").output
    assert isinstance(output, DeferredToolRequests)
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert semconv.TOOL_CALL_RESULT not in span.attributes
    assert {s.status for s in rollout.spans} == {"unset"}


def test_what_the_users_own_capability_changes_is_recorded(provider: Provider, rollout: RolloutContext) -> None:
    class Twenty(AbstractCapability[Any]):
        async def before_tool_execute(self, ctx: Any, *, call: Any, tool_def: Any, args: Any) -> Any:
            return args | {"a": 20}

    build(provider.url, capabilities=[Twenty()]).run_sync("2+3")
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert span.attributes[semconv.TOOL_CALL_RESULT] == "23"


def test_the_frameworks_own_spans_are_the_same_with_ours(provider: Provider) -> None:
    exporter, users = InMemorySpanExporter(), TracerProvider()
    users.add_span_processor(SimpleSpanProcessor(exporter))
    agent = build(provider.url, capabilities=[Instrumentation(InstrumentationSettings(tracer_provider=users))])

    def tree() -> list[tuple[str, str | None]]:
        agent.run_sync("2+3")
        spans = exporter.get_finished_spans()
        names = {s.get_span_context().span_id: s.name for s in spans}
        exporter.clear()
        return [(s.name, names.get(s.parent.span_id) if s.parent else None) for s in spans]

    alone = tree()
    with PydanticAITracer(), tracing.running(rollout := RolloutContext("ro", 1, "outer", select(None))):
        assert tree() == alone
    assert len(alone) == 4
    assert agents(rollout) == ["solver", "solver"]


def run(agent: agl.Agent, task: Any) -> Any:
    async def once() -> Any:
        result: Any = agent.run(task, {}, RolloutInfo("ro", 1))
        return (await result).output

    return asyncio.run(once())


@in_loop
async def test_one_of_two_agents_is_sent_to_the_policy_and_continues_exactly() -> None:
    with serve(lambda body: Reply("checked")) as provider:
        solver, critic = build(provider.url), build(provider.url, "critic", ())
        async with serving([tool_call_of("add", {"a": 2, "b": 3}), "5"]) as rig:
            attempt = await rig.attempt(agents="solver")
            access = attempt.access
            context = RolloutContext(access.rollout_id, 1, "outer", select("solver"), rig.gateway.base_url, attempt.key)
            with PydanticAITracer(), tracing.running(context):
                async with solver.run_stream("2+3") as stream:
                    said = await stream.get_output()
                assert (said, (await critic.run(said)).output) == ("5", "checked")
            calls = await attempt.close()
    assert [(c.agent, c.parent_id, c.fork_cause) for c in calls] == [
        ("solver", None, None), ("solver", calls[0].id, None),
    ]  # fmt: skip
    assert len(provider.seen) == 1
    tools = [s for s in context.spans if s.operation == semconv.EXECUTE_TOOL]
    assert [s.attributes[semconv.TOOL_CALL_ID] for s in tools] == [*calls[0].tool_call_ids]

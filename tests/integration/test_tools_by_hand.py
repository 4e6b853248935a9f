"""Tools that a program runs itself, without the id of the model's tool call: one run, one span, joined to its call."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("langgraph")

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt
from scripted import in_loop, serving, tool_call
from subject_smolagents import adder
from subjects import chat_model

import agl
from agl import semconv, tracing
from agl.adapters.agent_framework import AgentFrameworkTracer
from agl.adapters.autogen import AutoGenTracer
from agl.adapters.langgraph import LangGraphTracer
from agl.adapters.openai import OpenAITracer
from agl.adapters.openai_agents import OpenAIAgentsTracer
from agl.adapters.pydantic_ai import PydanticAITracer
from agl.adapters.smolagents import SmolagentsTracer
from agl.adapters.strands import StrandsTracer
from agl.agents.frameworks import switched_on
from agl.mdp.builder import build_trajectory
from agl.mdp.outcomes import tool_outcomes
from agl.mdp.selection import select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.testing.provider import Reply, serve
from agl.testing.subject import add, uses_add
from agl.tracing.context import RolloutContext
from agl.tracing.inferred import completed


def tools_of(spans: Sequence[Span]) -> list[tuple[Any, ...]]:
    found = [s for s in completed(spans) if s.operation == semconv.EXECUTE_TOOL]
    names = (semconv.TOOL_NAME, semconv.TOOL_CALL_ID, semconv.TOOL_CALL_RESULT, semconv.INFERRED)
    return [(s.agent, *(s.attributes.get(name) for name in names)) for s in found]


# -- a graph as LangChain's own courses write it --------------------------------------------------------------------


def course_graph(model: Any, tools: list[Any], **options: Any) -> Any:
    """A node that asks the model, and one that runs the tools by hand; `question` is put to a person."""
    by_name = {t.name: t for t in tools}

    async def llm_call(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def tool_node(state: Any) -> Any:
        results = []
        for call in state["messages"][-1].tool_calls:
            if call["name"] == "question":
                observation = f"The person says: {interrupt(call['args'])}"
            else:
                observation = await by_name[call["name"]].ainvoke(call["args"])
            results.append(ToolMessage(str(observation), tool_call_id=call["id"]))
        return {"messages": results}

    graph = StateGraph(MessagesState)
    graph.add_node("llm_call", llm_call)
    graph.add_node("tool_node", tool_node)
    graph.add_edge(START, "llm_call")
    graph.add_conditional_edges("llm_call", lambda state: "tool_node" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tool_node", "llm_call")
    return graph.compile(**options)


@tool
def calculator(expression: str) -> Any:
    """Work out a sum."""
    return {"error": "no sum"} if expression == "1 / 0" else {"result": 2}


@tool
def question(text: str) -> str:
    """Ask the person."""
    raise AssertionError("a person answers")


def in_the_order_of(seen: list[Any]) -> agl.AIR:
    """+1 for a success, -1 for a failure; each outcome is noted."""
    air = agl.AIR()

    @air.on_tool_success
    def ok(tool_name: str, tool_call_id: str, agent: str, output: str) -> float:
        seen.append((tool_name, tool_call_id, agent, output))
        return 1.0

    @air.on_tool_failure
    def bad(tool_name: str, tool_call_id: str, agent: str, error: str) -> float:
        seen.append((tool_name, tool_call_id, agent, error))
        return -1.0

    return air


@in_loop
async def test_a_tool_by_hand_is_one_span_and_its_reward_goes_to_the_call_that_asked() -> None:
    app = course_graph(chat_model("http://provider.invalid/v1").bind_tools([calculator]), [calculator])
    async with serving([tool_call("1 / 0"), tool_call("1 + 1"), "It is 2"]) as rig:
        attempt = await rig.attempt(agents=["llm_call"])
        access, url = attempt.access, attempt.access.url.partition("/rollouts/")[0]
        selection = select(["llm_call"])
        rollout = RolloutContext(access.rollout_id, access.attempt, "outer", selection, url, attempt.key)
        with LangGraphTracer(), tracing.running(rollout):
            await app.ainvoke({"messages": [{"role": "user", "content": "1 / 0, then 1 + 1"}]})
        calls = await attempt.close()
        index = SpanIndex(calls, rollout.spans)
        built = build_trajectory(access.rollout_id, 1, "group", index, selection)
    seen: list[Any] = []
    rewards = in_the_order_of(seen).rewards(built, index, selection)
    assert [(r.value, call) for r, call in rewards] == [(-1.0, calls[0].id), (1.0, calls[1].id)]
    asked = [call.tool_call_ids[0] for call in calls[:2]]
    assert seen == [
        ("calculator", asked[0], "llm_call", '{"error": "no sum"}'),
        ("calculator", asked[1], "llm_call", '{"result": 2}'),
    ]
    ran = [s for s in completed(rollout.spans, calls) if s.operation == semconv.EXECUTE_TOOL]
    assert [(s.agent, s.attributes[semconv.TOOL_CALL_ID], s.status) for s in ran] == [
        ("llm_call", asked[0], "error"), ("llm_call", asked[1], "unset"),
    ]  # fmt: skip


def test_a_tool_call_that_a_person_answers_is_no_tools_run() -> None:
    def script(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("done")
        asks = (("calculator", {"expression": "1 + 1"}), ("question", {"text": "which colour?"}))
        return Reply(None, asks)

    async def program(url: str) -> None:
        tools = [calculator, question]
        model = chat_model(url).bind_tools(tools)
        app = course_graph(model, tools, checkpointer=InMemorySaver())
        thread: Any = {"configurable": {"thread_id": "1"}}
        state = await app.ainvoke({"messages": [{"role": "user", "content": "go"}]}, thread)
        assert "__interrupt__" in state
        await app.ainvoke(Command(resume=[{"type": "response", "args": "light blue"}]), thread)

    rollout = RolloutContext("ro", 1, "outer", select(None), prompts=True)
    with serve(script) as provider, LangGraphTracer(), tracing.running(rollout):
        asyncio.run(program(provider.url))
    # The node begins anew after the pause, and so does the tool before it.
    assert [name for _, name, *_ in tools_of(rollout.spans)] == ["calculator", "calculator"]
    assert len({id for _, _, id, *_ in tools_of(rollout.spans)}) == 1
    assert [o.tool for o in tool_outcomes(SpanIndex((), completed(rollout.spans)))] == ["calculator"] * 2


# -- other frameworks' tools, run by hand -----------------------------------------------------------------------------


async def langchain_tool(arguments: dict[str, Any]) -> Any:
    return await tool(add).ainvoke(arguments)


async def autogen_core_tool(arguments: dict[str, Any]) -> Any:
    from autogen_core import CancellationToken
    from autogen_core.tools import FunctionTool

    return await FunctionTool(add, "Add two numbers.").run_json(arguments, CancellationToken())


async def agent_framework_tool(arguments: dict[str, Any]) -> Any:
    from agent_framework import tool

    [content] = await tool(add).invoke(arguments=arguments)
    return content.text


async def smolagents_tool(arguments: dict[str, Any]) -> Any:
    return adder()(**arguments)


async def strands_tool(arguments: dict[str, Any]) -> Any:
    from strands import Agent
    from strands import tool as strands_tool

    agent: Any = Agent(tools=[strands_tool(add)], callback_handler=None)
    result = await asyncio.to_thread(agent.tool.add, **arguments)
    return result["content"][0]["text"]


async def openai_agents_tool(arguments: dict[str, Any]) -> Any:
    from agents import function_tool
    from agents.tool_context import ToolContext

    text = json.dumps(arguments)
    context: Any = ToolContext(context=None, tool_name="add", tool_call_id="", tool_arguments=text)
    return await function_tool(add).on_invoke_tool(context, text)


async def pydantic_ai_tool(arguments: dict[str, Any]) -> Any:
    from pydantic_ai import FunctionToolset, RunContext
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.usage import RunUsage

    tools, context = FunctionToolset([add]), RunContext(deps=None, model=TestModel(), usage=RunUsage())
    return await tools.call_tool("add", arguments, context, (await tools.get_tools(context))["add"])


async def mcp_tool(arguments: dict[str, Any]) -> Any:
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    from agl.testing.mcp_server import ARGUMENTS, COMMAND

    server = StdioServerParameters(command=COMMAND, args=[*ARGUMENTS])
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        result: Any = await session.call_tool("add", arguments)
        return result.content[0].text


@pytest.mark.parametrize(
    ("package", "tracer", "run"),
    [
        ("langchain_core", LangGraphTracer, langchain_tool),
        ("autogen_core", AutoGenTracer, autogen_core_tool),
        ("agent_framework", AgentFrameworkTracer, agent_framework_tool),
        ("smolagents", SmolagentsTracer, smolagents_tool),
        ("strands", StrandsTracer, strands_tool),
    ],
)
@pytest.mark.parametrize("content", [True, False])
def test_two_equal_runs_by_hand_are_the_two_calls(
    package: str, tracer: Any, run: Callable[[dict[str, Any]], Awaitable[Any]], content: bool
) -> None:
    """A bare client asks, and a framework's tool runs, for two calls of one answer, equal but for their ids."""
    rollout, ids = two_calls(package, tracer, run, content=content)
    if not content:
        # Nothing tells which calls were asked for; the gateway's calls do, where there is one.
        assert [name for _, name, *_ in tools_of(rollout.spans)] == ["add", "add"]
        return
    assert tools_of(rollout.spans) == [("solver", "add", id, "5", None) for id in ids]
    outcomes = tool_outcomes(SpanIndex((), rollout.spans))
    assert [(o.tool, o.tool_call_id, o.error) for o in outcomes] == [("add", id, None) for id in ids]


@pytest.mark.parametrize(
    ("package", "tracer", "run"),
    [
        ("agents", OpenAIAgentsTracer, openai_agents_tool),
        ("pydantic_ai", PydanticAITracer, pydantic_ai_tool),
        ("mcp", OpenAITracer, mcp_tool),
    ],
)
def test_runs_that_the_framework_does_not_show_are_inferred_once_each(
    package: str, tracer: Any, run: Callable[[dict[str, Any]], Awaitable[Any]]
) -> None:
    rollout, ids = two_calls(package, tracer, run, content=True)
    assert tools_of(rollout.spans) == [("solver", "add", id, "5", True) for id in ids]


def two_calls(
    package: str, tracer: Any, run: Callable[[dict[str, Any]], Awaitable[Any]], *, content: bool
) -> tuple[RolloutContext, list[str]]:
    """The rollout of a program whose model asks for two equal calls, and the ids of these."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    import openai

    def script(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("sum")
        return Reply(None, (("add", {"a": 2, "b": 3}), ("add", {"a": 2, "b": 3})))

    async def program(url: str) -> list[str]:
        client = openai.AsyncOpenAI(base_url=url, api_key="sk")
        messages: list[Any] = [{"role": "user", "content": "2+3"}]
        definition: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[definition])
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = await run(json.loads(call.function.arguments))  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        await client.chat.completions.create(model="m", messages=messages)
        await client.close()
        return [call.id for call in message.tool_calls or ()]

    rollout = RolloutContext("ro", 1, "solver", select(None), capture_content=content, prompts=True)
    with serve(script) as provider, switched_on([tracer(), OpenAITracer()]), tracing.running(rollout):
        return rollout, asyncio.run(program(provider.url))


@pytest.mark.skipif(importlib.util.find_spec("strands") is None, reason="strands is not installed")
@pytest.mark.parametrize("recorded", [True, False])
def test_a_tool_of_strands_run_before_its_agent_is_one_span_and_the_agents_own_runs_have_their_ids(
    recorded: bool,
) -> None:
    from strands import Agent
    from strands import tool as strands_tool
    from strands.models.openai import OpenAIModel

    rollout = RolloutContext("ro", 1, "outer", select(None), prompts=True)
    with serve(uses_add()) as provider, switched_on([StrandsTracer()]), tracing.running(rollout):
        client = {"base_url": provider.url, "api_key": "sk"}
        model = OpenAIModel(client_args=client, model_id="m")
        agent: Any = Agent(model, tools=[strands_tool(add)], callback_handler=None, name="solver")
        agent.tool.add(a=1, b=1, record_direct_tool_call=recorded)
        assert str(agent("2 + 3")).strip() == "sum 5"
        [issued] = [call["id"] for message in provider.last.body["messages"] for call in message.get("tool_calls") or ()
                    if json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}]  # fmt: skip
    assert [found[1:] for found in tools_of(rollout.spans)] == [("add", None, "2", None), ("add", issued, "5", None)]

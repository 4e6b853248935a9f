"""LangGraph: nodes are agents by name, in branches, subgraphs, loops, interrupts and streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import pytest

pytest.importorskip("langgraph")

import openai
from langchain.agents import create_agent
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, Send, interrupt
from scripted import in_loop, serving, tool_call
from subjects import chat_model

import agl
from agl import semconv, tracing
from agl.adapters.langchain import LangChainTracer
from agl.adapters.langchain import tracer as langchain
from agl.adapters.langgraph import LangGraphTracer, wrap
from agl.adapters.openai import OpenAITracer
from agl.agents.agent import RolloutInfo
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.testing.provider import Provider, Reply, serve
from agl.testing.subject import add, uses_add
from agl.tracing.context import RolloutContext


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    # LangChain's own adapter and the SDK's are on as well, which must change nothing.
    with LangChainTracer(), LangGraphTracer(), OpenAITracer(), tracing.running(context):
        yield context


def of(rollout: RolloutContext, operation: str) -> list[Span]:
    return [s for s in rollout.spans if s.operation == operation]


def agents(rollout: RolloutContext) -> list[str | None]:
    return [s.agent for s in of(rollout, semconv.CHAT)]


def path(rollout: RolloutContext, span: Span) -> list[str]:
    """The names of the spans around one, from within."""
    by_id = {s.span_id: s for s in rollout.spans}
    names = []
    while (parent := by_id.get(span.parent_id or "")) is not None:
        names.append(parent.name)
        span = parent
    return names


def ask(text: str = "2+3") -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def speaker(url: str) -> Any:
    """A node that asks a model."""
    model = chat_model(url)
    return lambda state: {"messages": [model.invoke(state["messages"])]}


def async_speaker(url: str) -> Any:
    model = chat_model(url)

    async def node(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return node


def graph_of(nodes: dict[str, Any], *edges: tuple[str, str], **options: Any) -> Any:
    graph = StateGraph(MessagesState)
    for name, node in nodes.items():
        graph.add_node(name, node)
    for source, target in edges:
        graph.add_edge(source, target)
    return graph.compile(**options)


def test_every_node_that_asks_a_model_is_an_agent(provider: Provider, rollout: RolloutContext) -> None:
    def grade(state: Any) -> Any:
        agl.emit_reward(1.0)
        return {}

    app = graph_of(
        {"writer": speaker(provider.url), "grade": grade, "critic": speaker(provider.url)},
        (START, "writer"), ("writer", "grade"), ("grade", "critic"), name="team",
    )  # fmt: skip
    app.invoke(ask())
    assert agents(rollout) == ["writer", "critic"]
    assert [s.name for s in rollout.spans if s.operation in (semconv.INVOKE_AGENT, semconv.OPERATION)] == [
        "invoke_agent writer", "operation grade", "invoke_agent critic",
    ]  # fmt: skip
    assert {s.attributes[semconv.OPERATION_NAME] for s in rollout.spans if s.name == "operation grade"} == {"operation"}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_parallel_branches_keep_their_names(provider: Provider, asynchronous: bool) -> None:
    together = threading.Barrier(3)

    def script(body: dict[str, Any]) -> Reply:
        together.wait(10)
        return Reply("ok")

    provider.script = script
    make = async_speaker if asynchronous else speaker
    names = ("left", "middle", "right")
    app = graph_of({n: make(provider.url) for n in names}, *((START, n) for n in names))
    with serve(script) as gateway, LangGraphTracer():
        rollout = RolloutContext("ro", 1, "outer", select(None), gateway.root, "key")
        with tracing.running(rollout):
            asyncio.run(app.ainvoke(ask())) if asynchronous else app.invoke(ask())
        assert sorted(agents(rollout), key=str) == sorted(names)
        for name in names:
            [seen] = [s for s in gateway.seen if f"/agents/{name}/" in s.path]
            [chat] = [s for s in of(rollout, semconv.CHAT) if s.agent == name]
            assert seen.traceparent_span == chat.span_id
            assert path(rollout, chat) == [f"invoke_agent {name}", "invoke_agent outer"]


class Jobs(TypedDict):
    messages: Annotated[list[Any], add_messages]


def test_a_fan_out_is_one_agent_many_times(provider: Provider, rollout: RolloutContext) -> None:
    graph = StateGraph(Jobs)
    graph.add_node("worker", speaker(provider.url))
    graph.add_conditional_edges(START, lambda s: [Send("worker", ask(str(i))) for i in range(8)], ["worker"])
    graph.compile().invoke(Jobs(messages=[]))
    assert agents(rollout) == ["worker"] * 8
    assert len({s.parent_id for s in of(rollout, semconv.CHAT)}) == 8


def test_a_subgraphs_nodes_are_agents_within_the_node_that_holds_it(
    provider: Provider, rollout: RolloutContext
) -> None:
    inner = graph_of({"planner": speaker(provider.url)}, (START, "planner"))
    called = graph_of({"editor": speaker(provider.url)}, (START, "editor"))
    app = graph_of(
        {"team": inner, "office": lambda state: called.invoke(state)}, (START, "team"), ("team", "office"),
    )  # fmt: skip
    app.invoke(ask())
    assert [(s.agent, *path(rollout, s)) for s in of(rollout, semconv.CHAT)] == [
        ("planner", "invoke_agent planner", "invoke_agent team"),
        ("editor", "invoke_agent editor", "invoke_agent office"),
    ]


def test_a_named_agent_keeps_its_name_and_an_unnamed_one_has_its_nodes(
    provider: Provider, rollout: RolloutContext
) -> None:
    named = create_agent(chat_model(provider.url), [tool(add)], name="researcher")
    unnamed = create_agent(chat_model(provider.url), [tool(add)])
    app = graph_of({"first": named, "second": lambda _: unnamed.invoke(ask())}, (START, "first"), ("first", "second"))
    app.invoke(ask())
    assert agents(rollout) == ["researcher", "researcher", "second", "second"]
    assert [s.agent for s in of(rollout, semconv.EXECUTE_TOOL)] == ["researcher", "second"]


def test_an_unnamed_deep_agent_has_the_name_around_it(provider: Provider, rollout: RolloutContext) -> None:
    """`create_deep_agent` is `create_agent` whose metadata names deepagents as its maker."""
    made = create_agent(chat_model(provider.url), [tool(add)])
    deep = made.with_config({"metadata": {"ls_integration": "deepagents"}})
    deep.invoke(ask())
    assert agents(rollout) == [rollout.agent] * 2
    assert [s.agent for s in of(rollout, semconv.EXECUTE_TOOL)] == [rollout.agent]
    assert [s.agent for s in of(rollout, semconv.INVOKE_AGENT)] == []


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
def test_a_prebuilt_agent_has_the_name_that_it_was_given(way: str, provider: Provider, rollout: RolloutContext) -> None:
    agent = create_react_agent(chat_model(provider.url), [tool(add)], name="poetry_expert")
    ask = {"messages": [("user", "2+3")]}
    if way == "ainvoke":
        asyncio.run(agent.ainvoke(ask))
    else:
        list(getattr(agent, way)(ask))
    assert agents(rollout) == ["poetry_expert", "poetry_expert"]
    assert [s.agent for s in of(rollout, semconv.EXECUTE_TOOL)] == ["poetry_expert"]
    names = [s.agent for s in of(rollout, semconv.INVOKE_AGENT)]
    assert "agent" not in names


def test_prebuilt_agents_are_told_apart(provider: Provider, rollout: RolloutContext) -> None:
    """As nodes of another graph, as langgraph-supervisor and langgraph-swarm have them, and without a name."""
    model = chat_model(provider.url)
    graph = StateGraph(MessagesState)
    graph.add_node("poet", create_react_agent(model, [], name="poet"))
    graph.add_node("critic", create_react_agent(model, [], name="the critic"))
    graph.add_edge(START, "poet")
    graph.add_edge("poet", "critic")
    graph.compile(name="boss").invoke({"messages": [("user", "2+3")]})
    create_react_agent(model, []).invoke({"messages": [("user", "2+3")]})
    assert agents(rollout) == ["poet", "the critic", "agent"]


def test_a_users_node_called_agent_is_an_agent_of_that_name(provider: Provider, rollout: RolloutContext) -> None:
    model = chat_model(provider.url)
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_edge(START, "agent")
    graph.compile(name="mine").invoke({"messages": [("user", "2+3")]})
    assert agents(rollout) == ["agent"]


def test_a_graph_in_an_agents_tool_does_not_inherit_the_agents_name(
    provider: Provider, rollout: RolloutContext
) -> None:
    prompt = ChatPromptTemplate.from_template("say {word}") | chat_model(provider.url)
    helper = graph_of({"helper": lambda _: {"messages": [prompt.invoke({"word": "x"})]}}, (START, "helper"))

    @tool("add")
    def delegate(a: int, b: int) -> str:
        """Add."""
        return helper.invoke(ask())["messages"][-1].content

    create_agent(chat_model(provider.url), [delegate], name="boss").invoke(ask())
    assert agents(rollout) == ["boss", "helper", "boss"]
    [chat] = [s for s in of(rollout, semconv.CHAT) if s.agent == "helper"]
    assert path(rollout, chat)[:3] == ["invoke_agent helper", "execute_tool add", "invoke_agent boss"]


def looping(url: str, *, name: str = "planner") -> Any:
    """The loop of the documentation: a model's node and a `ToolNode`."""
    model = chat_model(url).bind_tools([tool(add)])
    graph = StateGraph(MessagesState)

    def planner(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph.add_node(name, planner)
    graph.add_node("tools", ToolNode([tool(add)]))
    graph.add_edge(START, name)
    graph.add_conditional_edges(name, tools_condition)
    graph.add_edge("tools", name)
    return graph.compile(name="loop")


def test_a_tool_nodes_tools_are_the_agents_that_asked(provider: Provider, rollout: RolloutContext) -> None:
    looping(provider.url).invoke(ask())
    assert agents(rollout) == ["planner", "planner"]
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert span.agent == "planner"
    assert span.attributes[semconv.TOOL_CALL_ID] == provider.last.body["messages"][-1]["tool_call_id"]
    assert path(rollout, span) == ["operation tools"]


def test_a_raw_client_in_a_node_speaks_for_the_node(provider: Provider, rollout: RolloutContext) -> None:
    client = openai.OpenAI(base_url=provider.url, api_key="k")
    async_client = openai.AsyncOpenAI(base_url=provider.url, api_key="k")
    question: Any = [{"role": "user", "content": "q"}]

    def node(state: Any) -> Any:
        answer = client.chat.completions.create(model="m", messages=question)
        return {"messages": [("assistant", answer.choices[0].message.content)]}

    async def anode(state: Any) -> Any:
        answer = await async_client.chat.completions.create(model="m", messages=question)
        return {"messages": [("assistant", answer.choices[0].message.content)]}

    graph_of({"solver": node}, (START, "solver")).invoke(ask())
    asyncio.run(graph_of({"asolver": anode}, (START, "asolver")).ainvoke(ask()))
    assert [(s.agent, path(rollout, s)[0]) for s in of(rollout, semconv.CHAT)] == [
        ("solver", "invoke_agent solver"), ("asolver", "invoke_agent asolver"),
    ]  # fmt: skip


def test_an_interrupt_is_no_error_and_the_graph_goes_on_in_the_same_rollout(
    provider: Provider, rollout: RolloutContext
) -> None:
    speak = speaker(provider.url)

    def writer(state: Any) -> Any:
        said = speak(state)
        return {"messages": [*said["messages"], ("user", interrupt("go on?"))]}

    app = graph_of(
        {"writer": writer, "critic": speaker(provider.url)},
        (START, "writer"), ("writer", "critic"), checkpointer=InMemorySaver(),
    )  # fmt: skip
    thread: Any = {"configurable": {"thread_id": "1"}}
    assert "__interrupt__" in app.invoke(ask(), thread)
    assert tracing.current() is not None
    app.invoke(Command(resume="yes"), thread)
    assert agents(rollout) == ["writer", "writer", "critic"]
    assert {s.attributes[semconv.CONVERSATION_ID] for s in of(rollout, semconv.CHAT)} == {"1"}
    assert {s.status for s in rollout.spans} == {"unset"}
    assert {s.trace_id for s in rollout.spans} == {rollout.spans[0].trace_id}


def test_going_to_another_graph_is_no_error(provider: Provider, rollout: RolloutContext) -> None:
    def leave(state: Any) -> Any:
        return Command(goto="critic", graph=Command.PARENT)

    inner = graph_of({"leave": leave}, (START, "leave"))
    graph = StateGraph(MessagesState)
    graph.add_node("team", inner, destinations=("critic",))
    graph.add_node("critic", speaker(provider.url))
    graph.add_edge(START, "team")
    graph.compile().invoke(ask())
    assert agents(rollout) == ["critic"]
    assert {s.status for s in rollout.spans} == {"unset"}


def test_a_nodes_exception_is_recorded_and_goes_on_unchanged(provider: Provider, rollout: RolloutContext) -> None:
    error = LookupError("lost")

    def fail(state: Any) -> Any:
        raise error

    with pytest.raises(LookupError) as caught:
        graph_of({"fail": fail}, (START, "fail"), ("fail", END)).invoke(ask())
    assert caught.value is error
    [span] = rollout.spans
    assert (span.name, span.status, span.attributes[semconv.ERROR_TYPE]) == ("operation fail", "error", "LookupError")


def test_streams_read_in_turn_keep_their_nodes(provider: Provider, rollout: RolloutContext) -> None:
    streams = [looping(provider.url, name=n).stream(ask()) for n in ("left", "right")]
    for _ in range(3):
        for stream in streams:
            next(stream)
    assert [[*s] for s in streams] == [[], []]
    assert agents(rollout) == ["left", "right", "left", "right"]
    assert all(path(rollout, s)[0] == f"invoke_agent {s.agent}" for s in of(rollout, semconv.CHAT))


def test_a_task_of_the_functional_api_is_an_agent(provider: Provider) -> None:
    model = chat_model(provider.url)

    @task
    def draft(text: str) -> str:
        return str(model.invoke(text).content)

    @entrypoint()
    def flow(text: str) -> str:
        return draft(text).result()

    rollout = RolloutContext("ro", 1, "outer", select(None))
    with LangGraphTracer(), tracing.running(rollout):
        assert flow.invoke("hi") == "you said hi"
    assert agents(rollout) == ["draft"]


def test_without_the_tracer_nodes_are_no_agents(provider: Provider) -> None:
    rollout = RolloutContext("ro", 1, "outer", select(None))
    app = graph_of({"writer": speaker(provider.url)}, (START, "writer"))
    with LangChainTracer():
        with LangGraphTracer():
            pass
        with tracing.running(rollout):
            app.invoke(ask())
    assert [s.name for s in rollout.spans] == ["chat m", "invoke_agent outer"]


def test_wrapped_graphs_take_a_question_and_give_text(provider: Provider) -> None:
    graph = looping(provider.url)
    agent = wrap(graph, lambda task, output: len(output), name="solver")
    assert (agent.name, wrap(graph).name) == ("solver", "loop")
    result: Any = agent.run({"question": "2+3"}, {}, RolloutInfo("ro", 1))
    outcome = asyncio.run(result)
    assert (outcome.reward, outcome.output) == (5, "sum 5")


@in_loop
async def test_two_nodes_and_their_reward_through_the_gateway() -> None:
    model = chat_model("http://provider.invalid/v1").bind_tools([tool(calculator)])

    async def planner(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def critic(state: Any) -> Any:
        said = await chat_model("http://provider.invalid/v1").ainvoke(state["messages"][-1:])
        return {"messages": [said]}

    graph = StateGraph(MessagesState)
    graph.add_node("planner", planner)
    graph.add_node("tools", ToolNode([tool(calculator)]))
    graph.add_node("critic", critic)
    graph.add_edge(START, "planner")
    graph.add_conditional_edges("planner", tools_condition, {"tools": "tools", END: "critic"})
    graph.add_edge("tools", "planner")
    app = graph.compile()
    async with serving([tool_call("1 + 1"), "It is 2", "well done"]) as rig:
        attempt = await rig.attempt()
        access = attempt.access
        url = access.url.partition("/rollouts/")[0]
        rollout = RolloutContext(access.rollout_id, access.attempt, "outer", select(None), url, attempt.key)
        with LangGraphTracer(), tracing.running(rollout):
            result = await app.ainvoke(ask("1 + 1"))
        assert result["messages"][-1].content == "well done"
        calls = await attempt.close()
        built = build_trajectory(access.rollout_id, 1, "group", SpanIndex(calls, rollout.spans), select(None))
    assert [c.agent for c in calls] == ["planner", "planner", "critic"]
    assert (built.bypassed, built.lost, built.n_calls) == ((), (), 3)
    [(reward, call)] = built.credited
    assert (reward.value, call) == (0.5, calls[0].id)


def calculator(expression: str) -> str:
    """Work out a sum."""
    agl.emit_reward(0.5)
    return "2"


def test_an_endless_rollout_knows_the_issuers_of_the_last_tool_calls(
    rollout: RolloutContext, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(langchain, "_MOST_ISSUERS", 2)
    agent = create_agent(chat_model(provider.url), [tool(add)], name="solver")
    for _ in range(4):
        agent.invoke({"messages": [("user", "2 + 3?")]})
    handler: Any = langchain._handler()
    assert len(handler.issuers[rollout]) == 2
    assert len(of(rollout, semconv.EXECUTE_TOOL)) == 4

"""LangChain through its own hooks: names, tools, structure, in threads, tasks, streams and batches."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.callbacks import CallbackManager
from langchain_core.messages import ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel
from subjects import chat_model

import agl
from agl import semconv, tracing
from agl.adapters.langchain import LangChainTracer, wrap
from agl.agents.agent import RolloutInfo
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.messages import read
from agl.testing.provider import Provider, Reply, says, serve
from agl.testing.subject import add, uses_add
from agl.tracing.context import RolloutContext
from agl.tracing.inferred import completed
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.real import Expert


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    with LangChainTracer(), tracing.running(context):
        yield context


def of(rollout: RolloutContext, operation: str) -> list[Span]:
    return [s for s in rollout.spans if s.operation == operation]


def ask(text: str = "2+3") -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def agents(rollout: RolloutContext) -> list[str | None]:
    return [s.agent for s in of(rollout, semconv.CHAT)]


def test_a_bare_model_speaks_for_the_agent_around_it(provider: Provider, rollout: RolloutContext) -> None:
    model = chat_model(provider.url)
    model.invoke("a")
    list(model.stream("c"))
    model.batch(["d", "e"])

    async def more() -> None:
        await model.ainvoke("b")
        await model.abatch(["f", "g"])
        [_ async for _ in model.astream("h")]

    asyncio.run(more())
    chats = of(rollout, semconv.CHAT)
    assert agents(rollout) == ["outer"] * 8
    assert len({s.parent_id for s in chats}) == 1
    assert all(s.attributes[semconv.WIRE_CALLS] == 1 for s in chats)


def test_outside_a_rollout_langchain_has_no_handler_to_call() -> None:
    with LangChainTracer():
        assert CallbackManager.configure().handlers == []
        with tracing.running(RolloutContext("ro", 1, "outer", select(None))):
            assert len(CallbackManager.configure().handlers) == 1
        assert CallbackManager.configure().handlers == []


def test_a_chain_is_no_agent_and_its_model_is_seen(provider: Provider, rollout: RolloutContext) -> None:
    chain = ChatPromptTemplate.from_template("say {word}") | chat_model(provider.url) | StrOutputParser()
    assert chain.invoke({"word": "x"}) == "you said say x"
    assert asyncio.run(chain.ainvoke({"word": "y"})) == "you said say y"
    assert len(chain.batch([{"word": "z"}] * 3)) == 3
    assert agents(rollout) == ["outer"] * 5
    assert of(rollout, semconv.INVOKE_AGENT) == []


class Answer(BaseModel):
    """The answer."""

    value: int


def test_structured_output_keeps_the_name(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = lambda body: Reply(None, (("Answer", {"value": 5}),))
    model = chat_model(provider.url).with_structured_output(Answer, method="function_calling")
    assert model.invoke("q") == Answer(value=5)
    assert asyncio.run(model.ainvoke("q")) == Answer(value=5)
    provider.script = says('{"value": 6}')
    assert chat_model(provider.url).with_structured_output(Answer, method="json_schema").invoke("q") == Answer(value=6)
    provider.script = lambda body: Reply(None, (("Answer", {"value": 7}),))
    agent = create_agent(chat_model(provider.url), [], response_format=Answer, name="solver")
    assert agent.invoke(ask())["structured_response"] == Answer(value=7)
    assert agents(rollout) == ["outer", "outer", "outer", "solver"]


def test_an_agents_structured_answer_is_no_tools_run(provider: Provider, rollout: RolloutContext) -> None:
    class Sum(BaseModel):
        value: int

    provider.script = lambda body: Reply(None, (("Sum", {"value": 5}),))
    agent = create_agent(
        chat_model(provider.url),
        tools=[],
        response_format=ToolStrategy(Sum),
        checkpointer=InMemorySaver(),
        name="solver",
    )
    rollout.prompts = True
    for text in ("2+3", "again"):
        said = agent.invoke(ask(text), {"configurable": {"thread_id": "1"}})
        assert said["structured_response"] == Sum(value=5)
    assert [m["role"] for m in provider.seen[1].body["messages"]] == ["user", "assistant", "tool", "user"]
    assert {s.operation for s in completed(rollout.spans)} == {semconv.INVOKE_AGENT, semconv.CHAT}


def test_an_agent_in_a_thread_of_its_own(provider: Provider, rollout: RolloutContext) -> None:
    agent = create_agent(chat_model(provider.url), [tool(add)], name="solver")
    thread = threading.Thread(target=lambda: agent.invoke(ask()))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(agent.invoke, [ask(), ask()]))
    assert agents(rollout) == ["solver"] * 6
    assert len(of(rollout, semconv.INVOKE_AGENT)) == 3
    check_nesting(rollout)


def check_nesting(rollout: RolloutContext) -> None:
    """Chats and tools lie directly in a span of the agent whose name they carry."""
    by_id = {s.span_id: s for s in rollout.spans}
    for span in of(rollout, semconv.CHAT) + of(rollout, semconv.EXECUTE_TOOL):
        parent = by_id[span.parent_id or ""]
        assert (parent.operation, parent.agent) == (semconv.INVOKE_AGENT, span.agent)


def test_parallel_tool_calls_each_have_their_span(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("done")
        return Reply(None, tuple(("slow_add", {"a": k, "b": k}) for k in range(4)))

    provider.script = script
    together = threading.Barrier(4)

    @tool
    def slow_add(a: int, b: int) -> int:
        """Add."""
        together.wait(10)
        agl.emit_reward(float(a))
        return a + b

    agent = create_agent(chat_model(provider.url), [slow_add], name="solver")
    for run in (agent.invoke, lambda x: asyncio.run(agent.ainvoke(x))):
        rollout.spans.clear()
        run(ask())
        tools = {s.span_id: s for s in of(rollout, semconv.EXECUTE_TOOL)}
        said = provider.last.body["messages"][1]["tool_calls"]
        assert {s.attributes[semconv.TOOL_CALL_ID] for s in tools.values()} == {c["id"] for c in said}
        for call in said:
            [span] = [s for s in tools.values() if s.attributes[semconv.TOOL_CALL_ID] == call["id"]]
            arguments = json.loads(call["function"]["arguments"])
            assert json.loads(span.attributes[semconv.TOOL_CALL_ARGUMENTS]) == arguments
            assert span.attributes[semconv.TOOL_CALL_RESULT] == str(2 * arguments["a"])
        rewards = of(rollout, semconv.REWARD)
        assert len(rewards) == 4
        for reward in rewards:
            arguments = json.loads(tools[reward.parent_id or ""].attributes[semconv.TOOL_CALL_ARGUMENTS])
            assert reward.attributes[semconv.REWARD_VALUE] == arguments["a"]
        [solver] = of(rollout, semconv.INVOKE_AGENT)
        assert {s.parent_id for s in tools.values()} == {solver.span_id}


def test_an_error_that_a_tool_returns_is_an_error_of_its_span_only(provider: Provider, rollout: RolloutContext) -> None:
    @tool("add")
    def failing(a: int, b: int) -> ToolMessage:
        """Add."""
        return ToolMessage("no numbers today", tool_call_id="x", status="error")

    agent = create_agent(chat_model(provider.url), [failing], name="solver")
    assert agent.invoke(ask())["messages"][-1].content == "sum no numbers today"
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert (span.status, span.status_message) == ("error", "no numbers today")
    assert {s.status for s in rollout.spans if s is not span} == {"unset"}


def test_an_error_that_a_tool_handles_is_an_error_of_its_span_only(provider: Provider, rollout: RolloutContext) -> None:
    from langchain_core.tools import ToolException

    @tool("add")
    def failing(a: int, b: int) -> int:
        """Add."""
        raise ToolException("out of order")

    failing.handle_tool_error = True
    agent = create_agent(chat_model(provider.url), [failing], name="solver")
    assert agent.invoke(ask())["messages"][-1].content == "sum out of order"
    [span] = of(rollout, semconv.EXECUTE_TOOL)
    assert (span.status, span.status_message) == ("error", "out of order")


def test_an_agent_as_a_tool_is_named_separately(provider: Provider, rollout: RolloutContext) -> None:
    helper = create_agent(chat_model(provider.url), [tool(add)], name="helper")

    @tool
    def delegate(question: str) -> str:
        """Ask the helper."""
        return helper.invoke(ask(question))["messages"][-1].content

    @tool
    async def adelegate(question: str) -> str:
        """Ask the helper."""
        return (await helper.ainvoke(ask(question)))["messages"][-1].content

    def script(name: str) -> Callable[[dict[str, Any]], Reply]:
        def answer(body: dict[str, Any]) -> Reply:
            if body["tools"][0]["function"]["name"] == "add" or body["messages"][-1]["role"] == "tool":
                return uses_add()(body)
            return Reply(None, ((name, {"question": "2+3"}),))

        return answer

    for via in (delegate, adelegate):
        rollout.spans.clear()
        boss = create_agent(chat_model(provider.url), [via], name="boss")
        provider.script = script(via.name)
        run = boss.invoke if via is delegate else lambda x, boss=boss: asyncio.run(boss.ainvoke(x))
        assert run(ask())["messages"][-1].content == "sum sum 5"
        assert agents(rollout) == ["boss", "helper", "helper", "boss"]
        spans = {s.name: s for s in rollout.spans}
        outer, inner = spans["invoke_agent boss"], spans["invoke_agent helper"]
        delegation, addition = spans[f"execute_tool {via.name}"], spans["execute_tool add"]
        assert (delegation.agent, delegation.parent_id) == ("boss", outer.span_id)
        assert inner.parent_id == delegation.span_id
        assert (addition.agent, addition.parent_id) == ("helper", inner.span_id)
        assert [s.parent_id for s in of(rollout, semconv.CHAT)] == [
            outer.span_id, inner.span_id, inner.span_id, outer.span_id,
        ]  # fmt: skip


def test_an_agent_inside_itself_has_a_span_for_each_run(provider: Provider, rollout: RolloutContext) -> None:
    with tracing.span(semconv.INVOKE_AGENT, "solver", agent="solver"):
        create_agent(chat_model(provider.url), [tool(add)], name="solver").invoke(ask())
    assert agents(rollout) == ["solver", "solver"]


def test_streams_read_in_turn_nest_each_in_its_own_agent(provider: Provider, rollout: RolloutContext) -> None:
    left, right = (create_agent(chat_model(provider.url), [tool(add)], name=n) for n in ("left", "right"))

    streams = [left.stream(ask()), right.stream(ask())]
    for _ in range(3):
        for stream in streams:
            next(stream)
    assert [[*stream] for stream in streams] == [[], []]

    async def main() -> None:
        streams = [left.astream(ask()), right.astream(ask())]
        for _ in range(3):
            for stream in streams:
                await anext(stream)
        for stream in streams:
            assert [_ async for _ in stream] == []

    asyncio.run(main())
    assert agents(rollout) == ["left", "right", "left", "right"] * 2
    check_nesting(rollout)


def test_runs_that_never_end_are_forgotten_with_their_rollout(provider: Provider) -> None:
    from agl.adapters.langchain.tracer import _handler

    agent = create_agent(chat_model(provider.url), [tool(add)], name="solver")
    held = []
    with LangChainTracer():
        for k in range(2):
            with tracing.running(RolloutContext(f"ro-{k}", 1, "outer", select(None))):
                held.append(stream := agent.stream(ask()))
                next(stream)
        with tracing.running(RolloutContext("ro-2", 1, "outer", select(None))):
            agent.invoke(ask())
    handler: Any = _handler()
    assert not handler.runs


def test_a_stream_broken_off_leaves_the_rest_in_order(provider: Provider, rollout: RolloutContext) -> None:
    agent = create_agent(chat_model(provider.url), [tool(add)], name="solver")
    for _ in agent.stream(ask()):
        break

    async def abroad() -> None:
        async for _ in agent.astream(ask(), stream_mode="messages"):
            break

    asyncio.run(abroad())
    other = create_agent(chat_model(provider.url), [tool(add)], name="other")
    rollout.spans.clear()
    other.invoke(ask())
    assert agents(rollout) == ["other", "other"]
    check_nesting(rollout)


def test_wrapped_agents_take_a_question_and_give_text(provider: Provider) -> None:
    graph = create_agent(chat_model(provider.url), [tool(add)], name="solver")
    info = RolloutInfo("ro", 1)

    chain = ChatPromptTemplate.from_template("say {word}") | chat_model(provider.url) | StrOutputParser()
    counted = wrap(graph, input=lambda task: ask(task.upper()), output=lambda result: len(result["messages"]))

    async def run(agent: agl.Agent, task: Any) -> Any:
        result: Any = agent.run(task, {}, info)
        return (await result).output

    async def main() -> None:
        assert await run(wrap(graph), {"question": "2+3"}) == "sum 5"
        assert await run(counted, "q") == 4
        assert await run(wrap(chain), {"word": "x"}) == "you said say x"
        assert await run(wrap(chat_model(provider.url)), "hello") == "you said hello"
        with pytest.raises(agl.AglError, match="which field of the task is the question") as caught:
            await run(wrap(graph), {"a": 1})
        assert "agl.wrap(..., input=" in str(caught.value)

    asyncio.run(main())
    assert wrap(chain).name == "agent"


def test_a_model_that_no_sdk_calls_is_recorded_with_its_request(rollout: RolloutContext) -> None:
    """Of another provider, or one that runs here: seen red, recorded runs of such a model could not be imitated."""
    build_agent(Expert(), system_prompt="Count.").invoke(ask("What is 12 * 34?"))
    first, second = of(rollout, semconv.CHAT)
    assert [(m.role, m.text) for m in read.sent(first)] == [("system", "Count."), ("user", "What is 12 * 34?")]
    assert [t["function"]["name"] for t in read.offered(first)] == ["calculator"]
    call, result = read.sent(second)[-2:]
    assert call.tool_calls[0].json_arguments == '{"expression": "12 * 34"}'
    assert result.tool_results[0].content == "408"
    assert [m.text for m in read.said(second)] == ["408"]


@pytest.mark.parametrize("what", ["model", "tool"])
def test_a_call_outside_any_agent_ends_when_it_is_cancelled(
    what: str, provider: Provider, rollout: RolloutContext
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def slow(body: dict[str, Any]) -> Reply:
        asked.set()
        answered.wait(30)
        return Reply("late")

    @tool
    async def wait() -> str:
        """Wait."""
        asked.set()
        await asyncio.sleep(30)
        return "late"

    async def main() -> None:
        provider.script = slow
        call = chat_model(provider.url).ainvoke("q") if what == "model" else wait.ainvoke({})
        limit = asyncio.timeout(None)

        async def expire() -> None:
            while not asked.is_set():
                await asyncio.sleep(0.01)
            limit.reschedule(asyncio.get_running_loop().time())

        watch = asyncio.create_task(expire())
        with pytest.raises(TimeoutError):
            async with limit:
                await call
        await watch
        answered.set()
        provider.script = says("in time")
        await chat_model(provider.url).ainvoke("and now?")

    asyncio.run(main())
    assert [scope.parent for scope in rollout.open] == [None]
    operation = semconv.CHAT if what == "model" else semconv.EXECUTE_TOOL
    assert of(rollout, operation)[0].attributes[semconv.ERROR_TYPE] == "CancelledError"
    last = of(rollout, semconv.CHAT)[-1]
    assert (last.status, [m.text for m in read.said(last)]) == ("unset", ["in time"])
    assert {span.parent_id for span in rollout.spans} == {next(iter(rollout.open)).span_id}


def test_a_failed_call_ends_no_run_around_it(provider: Provider, rollout: RolloutContext) -> None:
    """Even where the context holds a scope that another thread has ended."""
    model = chat_model(provider.url)

    async def node(_: Any) -> str:
        scope = tracing.start(semconv.OPERATION, "elsewhere")
        assert scope is not None
        ending = threading.Thread(target=tracing.end, args=(scope,))
        ending.start()
        ending.join()
        provider.script = lambda body: Reply(status=400)
        with pytest.raises(openai.BadRequestError):
            await model.ainvoke("first")
        provider.script = says("second")
        return (await model.ainvoke("again")).text

    agent = RunnableLambda(node).with_config(run_name="solver", metadata={"lc_agent_name": "solver"})
    assert asyncio.run(agent.ainvoke({})).strip() == "second"
    [solver] = [s for s in rollout.spans if s.operation == semconv.INVOKE_AGENT and s.agent == "solver"]
    assert solver.status == "unset"
    assert [(s.status, s.parent_id) for s in of(rollout, semconv.CHAT)] == [
        ("error", solver.span_id),
        ("unset", solver.span_id),
    ]

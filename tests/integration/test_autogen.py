"""AutoGen's agents, teams and tools: names, structure, fresh copies, and what the gateway sampled for them."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("autogen_agentchat")

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import HandoffTermination, MaxMessageTermination, TextMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_agentchat.tools import AgentTool
from autogen_core import (
    AgentId,
    CancellationToken,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    message_handler,
)
from autogen_core.models import UserMessage
from autogen_core.tools import TextResultContent, ToolResult, Workbench
from scripted import in_loop, serving, tool_call
from subject_autogen import assistant, model_client

import agl
from agl import semconv, tracing
from agl.adapters.autogen import AutoGenTracer, wrap
from agl.adapters.openai import OpenAITracer
from agl.agents.agent import Agent, Outcome, RolloutInfo
from agl.errors import ConfigError
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.testing.provider import Provider, Reply, says, serve
from agl.testing.subject import uses_add
from agl.tracing.context import RolloutContext


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "outer", select(None))
    with AutoGenTracer(), tracing.running(context):
        yield context


def of(rollout: RolloutContext, operation: str) -> list[Span]:
    return [s for s in rollout.spans if s.operation == operation]


def tree(rollout: RolloutContext) -> dict[str, str]:
    """Each invoked agent -> the agent (or tool) around it."""
    by_id = {s.span_id: s for s in rollout.spans}
    names = {s.span_id: s.name.partition(" ")[2] for s in rollout.spans}
    return {
        names[s.span_id]: names.get(s.parent_id or "", "the rollout") if s.parent_id in by_id else "the rollout"
        for s in of(rollout, semconv.INVOKE_AGENT)
    }


def check_nesting(rollout: RolloutContext) -> None:
    """Chats and tools lie directly in a span of the agent whose name they carry."""
    by_id = {s.span_id: s for s in rollout.spans}
    for span in of(rollout, semconv.CHAT) + of(rollout, semconv.EXECUTE_TOOL):
        parent = by_id[span.parent_id or ""]
        assert (parent.operation, parent.agent) == (semconv.INVOKE_AGENT, span.agent)


def speakers(rollout: RolloutContext) -> list[str | None]:
    return [s.agent for s in of(rollout, semconv.CHAT)]


# -- teams ------------------------------------------------------------------------------------------------------------


def test_each_member_of_a_team_speaks_under_its_name(provider: Provider, rollout: RolloutContext) -> None:
    members = [assistant(provider.url, "writer"), assistant(provider.url, "critic", ())]
    team = RoundRobinGroupChat([*members], termination_condition=MaxMessageTermination(3))
    asyncio.run(team.run(task="2+3"))
    assert speakers(rollout) == ["writer", "writer", "critic"]
    assert tree(rollout) == {"writer": "the rollout", "critic": "the rollout"}
    check_nesting(rollout)


def test_a_team_that_chooses_its_speakers_speaks_as_its_manager(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = lambda body: Reply("b" if "Select" in str(body["messages"][0]) else "done")
    team = SelectorGroupChat(
        [assistant(provider.url, "a", ()), assistant(provider.url, "b", ())],
        model_client=model_client(provider.url),
        selector_prompt="Select one of {participants}. {roles} {history}",
        termination_condition=TextMessageTermination("b"),
    )
    asyncio.run(team.run(task="go"))
    assert speakers(rollout) == ["SelectorGroupChatManager", "b"]
    check_nesting(rollout)


def test_a_handoff_is_a_tool_and_the_next_agent_speaks(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if any(t["function"]["name"] == "transfer_to_b" for t in body.get("tools", ())):
            return Reply(None, (("transfer_to_b", {}),))
        return Reply("done")

    provider.script = script
    first = assistant(provider.url, "a", (), handoffs=["b"])
    stop = HandoffTermination("user") | TextMessageTermination("b")
    asyncio.run(Swarm([first, assistant(provider.url, "b", ())], termination_condition=stop).run(task="go"))
    assert speakers(rollout) == ["a", "b"]
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert (tool.agent, tool.attributes[semconv.TOOL_NAME]) == ("a", "transfer_to_b")
    assert tool.attributes[semconv.TOOL_CALL_ID].startswith("call_")


def test_an_agent_used_as_a_tool_nests_in_the_tool(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["role"] != "tool" and body.get("tools"):
            return Reply(None, (("helper", {"task": "help"}),))
        return Reply("helped")

    provider.script = script
    for stream in (False, True):
        rollout.spans.clear()
        helper = AgentTool(assistant(provider.url, "helper", (), model_client_stream=stream))
        boss = assistant(provider.url, "boss", (helper,), model_client_stream=stream)
        asyncio.run(boss.run(task="go"))
        assert speakers(rollout) == ["boss", "helper", "boss"]
        [tool] = of(rollout, semconv.EXECUTE_TOOL)
        assert "helped" in tool.attributes[semconv.TOOL_CALL_RESULT]
        inner = next(s for s in of(rollout, semconv.INVOKE_AGENT) if s.agent == "helper")
        assert (inner.parent_id, tool.agent) == (tool.span_id, "boss")


@dataclass
class Ask:
    text: str


class CoreAgent(RoutedAgent):
    def __init__(self, url: str) -> None:
        super().__init__("an agent")
        self.url = url

    @message_handler
    async def answer(self, message: Ask, ctx: MessageContext) -> Ask:
        result = await model_client(self.url).create([UserMessage(content=message.text, source="user")])
        return Ask(str(result.content))


def test_an_agent_of_autogen_core_speaks_under_its_type(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> Any:
        runtime = SingleThreadedAgentRuntime()
        await CoreAgent.register(runtime, "own_agent", lambda: CoreAgent(provider.url))
        runtime.start()
        answer = await runtime.send_message(Ask("hi"), AgentId("own_agent", "default"))
        await runtime.stop_when_idle()
        return answer

    assert asyncio.run(main()).text == "you said hi"
    assert speakers(rollout) == ["own_agent"]
    check_nesting(rollout)


def test_a_runtime_that_rollouts_share_keeps_them_apart(provider: Provider) -> None:
    rollouts = [RolloutContext(f"ro-{i}", 1, "outer", select(None), provider.root, "agl-key") for i in range(5)]

    async def main() -> None:
        runtime = SingleThreadedAgentRuntime()
        await CoreAgent.register(runtime, "own_agent", lambda: CoreAgent("http://provider.invalid/v1"))
        runtime.start()

        async def run(rollout: RolloutContext) -> None:
            with tracing.running(rollout):
                await runtime.send_message(Ask(rollout.rollout_id), AgentId("own_agent", rollout.rollout_id))

        await asyncio.gather(*(run(r) for r in rollouts))
        await runtime.stop_when_idle()

    with AutoGenTracer():
        asyncio.run(main())
    for rollout in rollouts:
        [seen] = [s for s in provider.seen if rollout.rollout_id in str(s.body["messages"])]
        assert f"/rollouts/{rollout.rollout_id}/attempts/1/agents/own_agent/" in seen.path
        assert [s.span_id for s in of(rollout, semconv.CHAT)] == [seen.traceparent_span]
        check_nesting(rollout)


# -- streams ----------------------------------------------------------------------------------------------------------


def test_two_streams_read_in_turn_stay_apart(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        names = ("a", "b")
        streams = [assistant(provider.url, n, model_client_stream=True).run_stream(task="2+3") for n in names]
        before = tracing.current()
        while streams:
            for stream in list(streams):
                if await anext(stream, None) is None:
                    streams.remove(stream)
                assert tracing.current() is before

    asyncio.run(main())
    assert sorted(speakers(rollout), key=str) == ["a", "a", "b", "b"]
    assert tree(rollout) == {"a": "the rollout", "b": "the rollout"}
    check_nesting(rollout)


def test_a_stream_that_is_broken_off_ends_its_span(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        agent = assistant(provider.url, model_client_stream=True)
        messages = [TextMessage(content="2+3", source="user")]
        stream: Any = agent.on_messages_stream(messages, CancellationToken())
        await anext(stream)
        await stream.aclose()

    asyncio.run(main())
    [agent] = of(rollout, semconv.INVOKE_AGENT)
    assert (agent.agent, agent.status) == ("solver", "unset")


# -- tools ------------------------------------------------------------------------------------------------------------


def test_parallel_tool_calls_each_have_their_span_in_their_thread(provider: Provider, rollout: RolloutContext) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("done")
        return Reply(None, tuple(("slow_add", {"a": k, "b": k}) for k in range(4)))

    provider.script = script
    together = threading.Barrier(4)

    def slow_add(a: int, b: int) -> int:
        """Add."""
        together.wait(10)
        agl.emit_reward(float(a))
        return a + b

    asyncio.run(assistant(provider.url, "solver", (slow_add,)).run(task="go"))
    tools = {s.attributes[semconv.TOOL_CALL_ID]: s for s in of(rollout, semconv.EXECUTE_TOOL)}
    said = next(m for m in provider.last.body["messages"] if m.get("tool_calls"))["tool_calls"]
    assert tools.keys() == {c["id"] for c in said}
    for call in said:
        arguments = json.loads(call["function"]["arguments"])
        assert json.loads(tools[call["id"]].attributes[semconv.TOOL_CALL_ARGUMENTS]) == arguments
        assert tools[call["id"]].attributes[semconv.TOOL_CALL_RESULT] == str(2 * arguments["a"])
    parents = {r.attributes[semconv.REWARD_VALUE]: r.parent_id for r in of(rollout, semconv.REWARD)}
    assert parents == {
        float(json.loads(t.attributes[semconv.TOOL_CALL_ARGUMENTS])["a"]): t.span_id for t in tools.values()
    }


def test_a_failing_tool_is_recorded_and_the_agent_goes_on(provider: Provider, rollout: RolloutContext) -> None:
    provider.script = uses_add(a=-1)
    result = asyncio.run(assistant(provider.url).run(task="go"))
    assert result.messages[-1].content == "sum a is negative"
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert (tool.status, tool.attributes[semconv.ERROR_TYPE]) == ("error", "ToolFailed")
    assert {s.status for s in rollout.spans if s is not tool} == {"unset"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_reaches_no_tool_is_a_failed_tool(
    provider: Provider, rollout: RolloutContext, stream: bool
) -> None:
    provider.script = lambda body: (
        Reply("sorry") if body["messages"][-1]["role"] == "tool" else Reply(None, (("no_such_tool", {"x": 1}),))
    )
    asyncio.run(assistant(provider.url, model_client_stream=stream).run(task="go"))
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert (tool.name, tool.status) == ("execute_tool no_such_tool", "error")
    assert "not found" in tool.attributes[semconv.TOOL_CALL_RESULT]
    assert tool.attributes[semconv.TOOL_CALL_ID].startswith("call_")
    check_nesting(rollout)


class Remote(Workbench):
    """A workbench whose tools run elsewhere, as MCP's do."""

    async def list_tools(self) -> list[Any]:
        return [{"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}]

    async def call_tool(
        self, name: str, arguments: Any = None, cancellation_token: Any = None, call_id: str | None = None
    ) -> ToolResult:
        return ToolResult(name=name, result=[TextResultContent(content="no network")], is_error=True)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset(self) -> None: ...

    async def save_state(self) -> dict[str, Any]:
        return {}

    async def load_state(self, state: Any) -> None: ...


def test_a_remote_tool_has_a_span_and_its_error(provider: Provider, rollout: RolloutContext) -> None:
    agent = AssistantAgent(
        "solver", model_client=model_client(provider.url), workbench=Remote(), reflect_on_tool_use=True
    )
    asyncio.run(agent.run(task="go"))
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert (tool.name, tool.status) == ("execute_tool add", "error")
    assert tool.attributes[semconv.TOOL_CALL_RESULT] == "no network"
    assert tool.attributes[semconv.TOOL_CALL_ID].startswith("call_")


# -- switching on and off ---------------------------------------------------------------------------------------------


def test_an_agent_class_of_the_users_own_is_traced_even_if_defined_later(
    provider: Provider, rollout: RolloutContext
) -> None:
    class Own(BaseChatAgent):
        @property
        def produced_message_types(self) -> Any:
            return (TextMessage,)

        async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
            result = await model_client(provider.url).create([UserMessage(content="hi", source="user")])
            return Response(chat_message=TextMessage(content=str(result.content), source=self.name))

        async def on_reset(self, cancellation_token: Any) -> None: ...

    traced = Own.on_messages
    asyncio.run(Own("own", "").run(task="go"))
    assert speakers(rollout) == ["own"]
    AutoGenTracer().uninstrument()
    assert Own.on_messages is not traced
    asyncio.run(Own("own", "").run(task="go"))
    assert speakers(rollout) == ["own"]


def test_the_users_own_tracer_of_the_client_stays_on() -> None:
    with OpenAITracer() as own:
        with AutoGenTracer():
            pass
        assert own.instrumented
    with AutoGenTracer():
        assert OpenAITracer().instrumented
    assert not OpenAITracer().instrumented


# -- wrapping ---------------------------------------------------------------------------------------------------------


def run(agent: Agent, task: Any = "2+3") -> Any:
    done: Any = agent.run(task, {}, RolloutInfo("ro", 1))
    return done


def length(task: Any, output: Any) -> float:
    return float(len(output))


@pytest.mark.parametrize("kind", ["agent", "team", "nested team", "agent as a tool"])
def test_concurrent_rollouts_of_one_agent_share_no_conversation(provider: Provider, kind: str) -> None:
    provider.script = lambda body: Reply(str(len(body["messages"])))

    def member(name: str, tools: Any = ()) -> Any:
        return assistant(provider.url, name, tools, system_message=None)

    def team(*members: Any) -> Any:
        return RoundRobinGroupChat([*members], termination_condition=MaxMessageTermination(3))

    built: Any = {
        "agent": lambda: member("a"),
        "team": lambda: team(member("a"), member("b")),
        "nested team": lambda: team(team(member("a"), member("b")), member("c")),
        "agent as a tool": lambda: member("a", (AgentTool(member("b")),)),
    }[kind]()
    agent = wrap(built, length)

    async def main() -> list[Outcome]:
        return await asyncio.gather(*(run(agent, f"task {i}") for i in range(8)))

    first = asyncio.run(main())
    assert asyncio.run(main()) == first
    assert len(set(map(repr, first))) == 1
    for seen in provider.seen:
        assert len({m["content"] for m in seen.body["messages"] if "task " in str(m["content"])}) == 1


def test_a_function_that_builds_the_agent_is_called_for_each_rollout(provider: Provider) -> None:
    built = []

    async def build() -> Any:
        built.append(assistant(provider.url, "solver"))
        return built[-1]

    agent = wrap(build, length, name="mine")
    assert (agent.name, [type(t) for t in agent.tracers]) == ("mine", [AutoGenTracer])
    assert asyncio.run(run(agent)) == asyncio.run(run(agent)) == Outcome(5.0, "sum 5")
    assert len(built) == 2


def test_a_function_of_the_task_runs_autogen_itself(provider: Provider) -> None:
    async def solve(task: Any) -> str:
        return (await assistant(provider.url).run(task=task)).messages[-1].content

    agent = wrap(solve, length)
    assert (agent.name, [type(t) for t in agent.tracers]) == ("solve", [AutoGenTracer])
    assert asyncio.run(run(agent)) == Outcome(5.0, "sum 5")


def test_what_cannot_be_copied_says_what_to_do(provider: Provider) -> None:
    holder: Any = assistant(provider.url)
    holder.lock = threading.Lock()
    shared = RoundRobinGroupChat([assistant(provider.url)], runtime=SingleThreadedAgentRuntime())
    for agent in (holder, shared):
        with pytest.raises(ConfigError, match=r"(every|each) rollout"):
            asyncio.run(run(wrap(agent, length)))


# -- the gateway ------------------------------------------------------------------------------------------------------


def calculator(expression: str) -> str:
    """Work out a sum."""
    return {"1 + 2": "3", "3 + 4": "7"}[expression]


def routed(attempt: Any, agents: Any = None) -> RolloutContext:
    access = attempt.access
    url = attempt.rig.gateway.base_url
    return RolloutContext(access.rollout_id, access.attempt, "outer", select(agents), url, attempt.key)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_loop_of_tool_calls_through_the_gateway_is_one_chain(stream: bool) -> None:
    options: Any = {"reflect_on_tool_use": False, "max_tool_iterations": 3, "model_client_stream": stream}
    async with serving([tool_call("1 + 2"), tool_call("3 + 4"), "It is 7."]) as rig:
        attempt = await rig.attempt()
        with AutoGenTracer(), tracing.running(context := routed(attempt)):
            agent = assistant("http://provider.invalid/v1", "solver", (calculator,), **options)
            result = await agent.run(task="1 + 2 + 4?")
        calls = await attempt.close()
    assert result.messages[-1].content == "It is 7."
    assert [(c.agent, c.fork_cause) for c in calls] == [("solver", None)] * 3
    assert [c.span_id for c in calls] == [s.span_id for s in of(context, semconv.CHAT)]
    for before, after in itertools.pairwise(calls):
        assert after.parent_id == before.id
        np.testing.assert_array_equal(after.prompt_ids[: before.ids.size], before.ids)
    tools = of(context, semconv.EXECUTE_TOOL)
    assert [(t.attributes[semconv.TOOL_CALL_ID],) for t in tools] == [c.tool_call_ids for c in calls[:2]]
    assert [t.attributes[semconv.TOOL_CALL_RESULT] for t in tools] == ["3", "7"]


@in_loop
async def test_reflection_asks_without_tools_and_says_so() -> None:
    async with serving([tool_call("1 + 2"), "It is 3."]) as rig:
        attempt = await rig.attempt()
        with AutoGenTracer(), tracing.running(routed(attempt)):
            await assistant("http://provider.invalid/v1", "solver", (calculator,)).run(task="1 + 2?")
        calls = await attempt.close()
    assert [(c.agent, c.fork_cause) for c in calls] == [("solver", None), ("solver", "tools_changed")]


@in_loop
async def test_only_the_selected_member_of_a_team_goes_to_the_gateway() -> None:
    with serve(says("fine")) as provider:
        async with serving(["a draft"]) as rig:
            attempt = await rig.attempt(agents=["writer"])
            members = [assistant(provider.url, "writer", ()), assistant(provider.url, "critic", ())]
            team = RoundRobinGroupChat([*members], termination_condition=MaxMessageTermination(4))
            with AutoGenTracer(), tracing.running(routed(attempt, ["writer"])):
                result = await team.run(task="write")
            calls = await attempt.close()
    assert [str(getattr(m, "content", "")) for m in result.messages] == ["write", "a draft", "fine", "a draft"]
    assert [c.agent for c in calls] == ["writer", "writer"]
    assert len(provider.seen) == 1

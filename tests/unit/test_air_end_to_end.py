"""Tool outcomes and handoffs of every framework, through the gateway, credited to the calls that caused them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from all_subjects import SUBJECTS
from rewarded import NOWHERE, calls_of, rewarded, watched
from scripted import ScriptedEngine, in_loop, quick_tokenizer, rendering_of
from subject_openai import BareOpenAI
from subjects import chat_model

import agl
from agl.adapters.anthropic import AnthropicTracer
from agl.adapters.openai import OpenAITracer
from agl.errors import RewardError
from agl.mdp.outcomes import TOOL_RESULTS
from agl.mdp.span_index import SpanIndex
from agl.testing.subject import NO_NUMBERS, Subject, add
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.report.explain import describe, render
from agl.trainer.run.run import Algorithm, Run
from agl.trainer.run.workplace import Workplace
from agl.trainer.store import open_store

every_subject = pytest.mark.parametrize(
    "subject", [s for s in SUBJECTS if "ainvoke" in s.async_ways], ids=lambda s: s.name
)


@every_subject
@in_loop
async def test_parallel_tool_calls_are_credited_to_the_call_that_made_them(subject: Subject) -> None:
    agent = subject.agent(NOWHERE, "solver")
    script = [calls_of(("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 5})), "done"]
    told, credited, calls = await rewarded(subject.tracer(), script, lambda: agent.ainvoke("sum?"))
    who = "solver" if subject.names_agents else "outer"
    assert told == [("success", "add", "5", who), ("success", "add", "9", who)]
    assert credited == [(1.0, 0), (1.0, 0)]
    assert len(calls) == 2


@every_subject
@in_loop
async def test_a_result_that_says_it_failed_is_a_failure(subject: Subject) -> None:
    if not subject.traces_tools or "tool_reports" in subject.gaps:
        pytest.skip("no tool can say so")
    agent = subject.reporting(NOWHERE, "solver")
    script = [calls_of(("add", {"a": -1, "b": 3}), ("add", {"a": -4, "b": 5})), "done"]
    told, credited, _ = await rewarded(subject.tracer(), script, lambda: agent.ainvoke("sum?"))
    assert [event[:2] for event in told] == [("failure", "add")] * 2
    assert credited == [(-1.0, 0), (-1.0, 0)]


@every_subject
@in_loop
async def test_a_tool_that_does_not_exist_is_a_failure(subject: Subject) -> None:
    if subject.name.startswith("openai_agents"):
        pytest.skip("the SDK ends the run")
    agent = subject.agent(NOWHERE, "solver")
    script = [calls_of(("add", {"a": 2, "b": 3})), calls_of(("subtract", {"a": 2, "b": 3})), "done"]
    if subject.name == "autogen":
        script.pop(0)  # it reflects after one round of tools
    told, credited, _ = await rewarded(subject.tracer(), script, lambda: agent.ainvoke("sum?"))
    assert [event[:2] for event in told][-1:] == [("failure", "subtract")]
    assert credited[-1] == (-1.0, len(script) - 2)
    assert len(credited) == len(script) - 1


@in_loop
async def test_bare_clients_in_every_dialect() -> None:
    chat = BareOpenAI().agent(NOWHERE, "x")
    script = [calls_of(("add", {"a": 1, "b": 1})), calls_of(("add", {"a": 2, "b": 2})), "done"]
    told, credited, calls = await rewarded(OpenAITracer(), script, lambda: chat.ainvoke("sum?"))
    assert told == [("success", "add", "2", "outer"), ("success", "add", "4", "outer")]
    assert credited == [(1.0, 0), (1.0, 1)]
    assert TOOL_RESULTS in calls[1].request

    async def responses() -> None:
        client = openai.AsyncOpenAI(base_url=NOWHERE, api_key="k", max_retries=0)
        tools: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
        first = await client.responses.create(model="m", input="sum?", tools=tools)
        items: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
            for item in first.output
            if item.type == "function_call"
        ]
        await client.responses.create(model="m", input=items, tools=tools, previous_response_id=first.id)

    told, credited, _ = await rewarded(OpenAITracer(), [script[0], "done"], responses)
    assert (told, credited) == ([("success", "add", "2", "outer")], [(1.0, 0)])

    async def messages() -> None:
        import anthropic

        client = anthropic.AsyncAnthropic(base_url=NOWHERE, api_key="k", max_retries=0)
        asked: Any = {"model": "m", "max_tokens": 100, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
        history: list[Any] = [{"role": "user", "content": "sum?"}]
        answer = await client.messages.create(messages=history, **asked)
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": text,
                **({"is_error": True} if text == "no" else {}),
            }
            for block, text in zip((b for b in answer.content if b.type == "tool_use"), ("2", "no"), strict=True)
        ]
        history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        await client.messages.create(messages=history, **asked)

    two = calls_of(("add", {"a": 1, "b": 1}), ("add", {"a": -1, "b": 1}))
    told, credited, _ = await rewarded(AnthropicTracer(), [two, "done"], messages)
    assert told == [("success", "add", "2", "outer"), ("failure", "add", "no", "outer")]
    assert credited == [(1.0, 0), (-1.0, 0)]


# -- agents of agents, retries, handoffs ------------------------------------------------------------------------------


@in_loop
async def test_langchain_retries_and_an_agent_as_a_tool() -> None:
    from langchain.agents import create_agent
    from langchain.agents.middleware import ToolRetryMiddleware
    from langchain.tools import tool

    tries: list[int] = []

    @tool
    def flaky(word: str) -> str:
        """Look a word up."""
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("not yet")
        return "found"

    retry: Any = ToolRetryMiddleware(max_retries=3, initial_delay=0.0, jitter=False)
    helper = create_agent(chat_model(NOWHERE), [flaky], name="helper", middleware=[retry])

    @tool
    async def ask_helper(question: str) -> str:
        """Ask the helper."""
        done = await helper.ainvoke({"messages": [{"role": "user", "content": question}]})
        return done["messages"][-1].content

    boss = create_agent(chat_model(NOWHERE), [ask_helper], name="boss")
    script = [calls_of(("ask_helper", {"question": "q"})), calls_of(("flaky", {"word": "w"})), "it is here", "done"]

    def run() -> Any:
        tries.clear()
        return boss.ainvoke({"messages": [{"role": "user", "content": "go"}]})

    from agl.adapters.langchain import LangChainTracer

    told, credited, _ = await rewarded(LangChainTracer(), script, run)
    assert told == [
        ("success", "ask_helper", "it is here", "boss"),
        ("failure", "flaky", "ConnectionError: not yet", "helper"),
        ("failure", "flaky", "ConnectionError: not yet", "helper"),
        ("success", "flaky", "found", "helper"),
    ]
    assert credited == [(1.0, 0), (-1.0, 1), (-1.0, 1), (1.0, 1)]


@in_loop
async def test_langchain_a_call_that_middleware_refuses_is_a_failure() -> None:
    from langchain.agents import create_agent
    from langchain.agents.middleware import ToolCallLimitMiddleware
    from langchain.tools import tool

    from agl.adapters.langchain import LangChainTracer

    limit: Any = ToolCallLimitMiddleware(run_limit=1)
    agent = create_agent(chat_model(NOWHERE), [tool(add)], name="solver", middleware=[limit])
    script = [calls_of(("add", {"a": 1, "b": 1})), calls_of(("add", {"a": 2, "b": 2})), "done"]
    told, credited, _ = await rewarded(LangChainTracer(), script, lambda: agent.ainvoke({"messages": "go"}))
    assert [event[:2] for event in told] == [("success", "add"), ("failure", "add")]
    assert credited == [(1.0, 0), (-1.0, 1)]


@in_loop
async def test_langgraph_a_tool_that_waits_for_a_human_ends_once() -> None:
    from langchain.agents import create_agent
    from langchain.tools import tool
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command, interrupt

    from agl.adapters.langchain import LangChainTracer

    @tool
    def ask(question: str) -> str:
        """Ask a human."""
        return interrupt(question)

    agent = create_agent(chat_model(NOWHERE), [ask], name="solver", checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}

    async def run() -> None:
        await agent.ainvoke({"messages": "go"}, config)  # type: ignore[arg-type]
        await agent.ainvoke(Command(resume="yes"), config)

    told, credited, _ = await rewarded(LangChainTracer(), [calls_of(("ask", {"question": "q"})), "done"], run)
    assert (told, credited) == ([("success", "ask", "yes", "solver")], [(1.0, 0)])


@in_loop
async def test_a_handoff_of_the_openai_agents_sdk() -> None:
    from agents import Agent, Runner, function_tool, handoff
    from subject_openai_agents import chat_model as model

    from agl.adapters.openai_agents import OpenAIAgentsTracer

    writer = Agent(name="writer", instructions="Write.", model=model(NOWHERE), tools=[function_tool(add)])
    critic = Agent(name="critic", instructions="Judge.", model=model(NOWHERE))
    options: Any = {"tool_name_override": "over_to_you"}
    triage = Agent(
        name="triage", instructions="Go.", model=model(NOWHERE), handoffs=[handoff(writer, **options), critic]
    )
    both = calls_of(("over_to_you", {}), ("transfer_to_critic", {}))
    script = [both, calls_of(("add", {"a": 1, "b": 1})), "done"]
    told, credited, _ = await rewarded(OpenAIAgentsTracer(), script, lambda: Runner.run(triage, "go"))
    assert told == [
        ("failure", "transfer_to_critic", "Multiple handoffs detected, ignoring this one.", "triage"),
        ("success", "add", "2", "writer"),
        ("handoff", "triage", "writer"),
    ]
    assert credited == [(-1.0, 0), (1.0, 1), (0.5, 0)]


@in_loop
async def test_a_handoff_in_an_autogen_swarm() -> None:
    from autogen_agentchat.conditions import TextMessageTermination
    from autogen_agentchat.teams import Swarm
    from subject_autogen import assistant

    from agl.adapters.autogen import AutoGenTracer

    first = assistant(NOWHERE, "a", (), handoffs=["b"])
    team = Swarm([first, assistant(NOWHERE, "b", ())], termination_condition=TextMessageTermination("b"))
    script = [calls_of(("transfer_to_b", {})), "done"]
    told, credited, _ = await rewarded(AutoGenTracer(), script, lambda: team.run(task="go"))
    assert (told, credited) == ([("handoff", "a", "b")], [(0.5, 0)])


@in_loop
async def test_a_handoff_in_a_strands_swarm() -> None:
    from strands.multiagent import Swarm
    from subject_strands import Strands, build

    swarm = Swarm([build(NOWHERE, "first"), build(NOWHERE, "second")])
    wrong = calls_of(("handoff_to_agent", {"agent_name": "nobody", "message": "you"}))
    right = calls_of(("handoff_to_agent", {"agent_name": "second", "message": "you"}))
    told, credited, _ = await rewarded(Strands.tracer(), [wrong, right, "done"], lambda: swarm.invoke_async("go"))
    assert told[0][:2] == ("failure", "handoff_to_agent")
    assert told[1:] == [("handoff", "first", "second")]
    assert credited == [(-1.0, 0), (0.5, 1)]


@in_loop
async def test_a_handoff_by_command_in_langgraph() -> None:
    from typing import Annotated

    from langchain.agents import create_agent
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import InjectedToolCallId, tool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import InjectedState
    from langgraph.types import Command

    from agl.adapters.langgraph import LangGraphTracer

    def transfer(state: Any, call_id: str) -> Any:
        """Hand over to bob."""
        answer = ToolMessage("over to bob", tool_call_id=call_id)
        return Command(goto="bob", graph=Command.PARENT, update={"messages": [*state["messages"], answer]})

    transfer.__annotations__ = {
        "state": Annotated[dict, InjectedState], "call_id": Annotated[str, InjectedToolCallId], "return": Command,
    }  # fmt: skip
    graph = StateGraph(MessagesState)
    graph.add_node("alice", create_agent(chat_model(NOWHERE), [tool("transfer_to_bob")(transfer)], name="alice"))
    graph.add_node("bob", create_agent(chat_model(NOWHERE), [], name="bob"))
    graph.add_edge(START, "alice")
    swarm = graph.compile(name="swarm")
    script = [calls_of(("transfer_to_bob", {})), "done"]
    told, credited, _ = await rewarded(LangGraphTracer(), script, lambda: swarm.ainvoke({"messages": "go"}))  # type: ignore[arg-type]
    assert (told, credited) == ([("handoff", "alice", "bob")], [(0.5, 0)])


# -- a run ------------------------------------------------------------------------------------------------------------


class _Scripted(Algorithm):
    """An algorithm that trains nothing and serves a policy that answers by script."""

    def __init__(self, script: list[Any], n: int = 1) -> None:
        self.script, self.n, self.results = script, n, []

    async def run(self, run: Run) -> None:
        engine = ScriptedEngine(quick_tokenizer(), self.script)
        workplace = Workplace(run)
        await workplace.start(
            lambda mode: SamplingRules(),
            "policy",
            register=lambda gateway: gateway.serve("policy", engine, rendering_of(quick_tokenizer())),
        )
        try:
            self.results += await workplace.rollouts([(0, "sum?")], mode="train", step=0)
        finally:
            await workplace.stop()

    async def dev(self, run: Run, n_tasks: int) -> None:
        await self.run(run)


def fitted(directory: Path, air: agl.AIR | None, script: list[Any], **options: Any) -> tuple[_Scripted, agl.Result]:
    algorithm = _Scripted(script)
    loop = BareOpenAI().agent(NOWHERE, "x")
    agent = agl.wrap(loop.ainvoke, reward=lambda task, output: 10.0, name="solver")
    trainer = agl.Trainer(algorithm, air=air, directory=directory, progress=False, max_attempts=1, **options)
    return algorithm, trainer.fit(agent, ["sum?"])


SCRIPT = [calls_of(("add", {"a": 1, "b": 1}), ("subtract", {"a": 1, "b": 1})), "done"]


def test_a_runs_rewards_are_stored_reach_credit_and_are_explained(tmp_path: Path) -> None:
    air, _ = watched()
    air.on_call(name="brief", primary=False)(lambda transition: transition.call.response_ids.size)
    algorithm, result = fitted(tmp_path, air, SCRIPT)
    [done] = algorithm.results
    assert done.error is None
    trajectory = done.attempt_trajectory.trajectories["policy"]
    first, second = trajectory.transitions
    assert [(r.name, r.value, r.source, r.primary) for r in first.rewards] == [
        ("success", 1.0, "air", True), ("failure", -1.0, "air", True),
        ("brief", float(first.call.response_ids.size), "air", False),
    ]  # fmt: skip
    assert [r.name for r in second.rewards] == ["brief"]
    assert (trajectory.final_reward, trajectory.total_reward, done.attempt_trajectory.reward) == (10.0, 10.0, 10.0)

    async def report() -> Any:
        store = await open_store(result.store)
        try:
            return await describe(store, done.rollout.rollout_id)
        finally:
            await store.close()

    explained = asyncio.run(report())
    assert [[(r.name, r.value, r.source) for r in c.rewards] for c in explained.calls] == [
        [(r.name, r.value, r.source) for r in t.rewards] for t in (first, second)
    ]
    text = render(explained)
    for part in (
        "rewards   success 1 (air), failure -1 (air), brief",
        "(air, not primary)",
        "return    10",
        "policy policy v0",
    ):
        assert part in text


def test_an_attempt_is_joined_once_and_each_rule_is_called_once_per_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    air, told = watched()
    judged: list[int] = []
    air.on_call(name="seen")(lambda transition: judged.append(transition.call.index))
    indexed: list[SpanIndex] = []
    make = SpanIndex.__init__
    monkeypatch.setattr(SpanIndex, "__init__", lambda self, *args: (indexed.append(self), make(self, *args))[1])
    algorithm, _ = fitted(tmp_path, air, SCRIPT)
    assert algorithm.results[0].error is None
    assert [event[:2] for event in told] == [("success", "add"), ("failure", "subtract")]
    assert judged == [0, 1]
    assert len(indexed) == 1


def test_air_is_off_unless_asked_for(tmp_path: Path) -> None:
    algorithm, _ = fitted(tmp_path, None, SCRIPT)
    [done] = algorithm.results
    assert [r.source for r, _ in done.attempt_trajectory.credited] == ["return"]


def test_a_rule_that_fails_fails_the_attempt_and_is_never_a_score(tmp_path: Path) -> None:
    air = agl.AIR()
    air.on_tool_success(name="nan")(lambda: float("nan"))
    algorithm, _ = fitted(tmp_path, air, SCRIPT)
    [done] = algorithm.results
    assert (done.rollout.status, done.attempt_trajectory) == ("failed", None)
    assert isinstance(done.error, RewardError)
    assert "AIR rule 'nan' (on_tool_success): the reward 'reward' is nan" in str(done.error)
    assert f"rollout={done.rollout.rollout_id}, attempt=1, agent=solver, tool=add" in str(done.error)


def test_outcomes_are_known_without_their_text(tmp_path: Path) -> None:
    air = agl.AIR()
    air.on_tool_success(name="ok")(lambda tool_name: 1.0 if tool_name == "add" else 5.0)
    air.on_tool_failure(name="bad")(lambda tool_name: -1.0 if tool_name == "subtract" else 5.0)
    algorithm, _ = fitted(tmp_path, air, SCRIPT, capture_content=False)
    first, _ = algorithm.results[0].attempt_trajectory.trajectories["policy"].transitions
    assert [(r.name, r.value) for r in first.rewards] == [("ok", 1.0), ("bad", -1.0)]
    assert NO_NUMBERS not in str(first.call.request)

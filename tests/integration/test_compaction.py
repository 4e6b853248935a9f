"""Histories that a framework compacts in the middle of a rollout, by its own mechanism: trained as the sum of their
stretches, each sampled token once, with one reward."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import blocks

import agl
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import Selection
from agl.mdp.sequence import merge
from agl.mdp.span_index import SpanIndex
from agl.mdp.types import Call
from agl.testing.provider import Reply, serve
from agl.trainer.report.explain import render
from agl.trainer.report.rollout_report import RolloutReport, describe
from agl.trainer.store import open_store

pytestmark = pytest.mark.slow
NOWHERE = "http://provider.invalid/v1"
"""Where nobody answers: a call that is not routed to the policy fails."""
KEY = "sk-provider"
SYSTEM, SUMMARISE = "Calculate what the user wants to know.", "Summarise what the user wanted to know."
"""Long enough that calls which begin with one share a row."""
QUESTIONS = [f"What is {i} + {i}?" for i in range(2, 6)]
Solve = Callable[[str], Any]
"""url -> what asks an agent all questions, in one conversation; sync or async."""


# -- the agents, as a user writes them --------------------------------------------------------------------------------


def _langchain_model(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", base_url=url, api_key=KEY, max_retries=0)  # type: ignore[arg-type]


def langchain(url: str, tools: Any = (), questions: list[str] = QUESTIONS) -> Any:
    from langchain.agents import create_agent
    from langchain.agents.middleware import SummarizationMiddleware
    from langgraph.checkpoint.memory import InMemorySaver

    model = _langchain_model(url)
    short = "Summarise: {messages}"
    middleware = SummarizationMiddleware(model, trigger=("messages", 7), keep=("messages", 3), summary_prompt=short)
    # Without a system prompt: stretches begin differently, and each is a row.
    agent = create_agent(model, list(tools), middleware=[middleware], name="solver", checkpointer=InMemorySaver())

    def solve() -> None:
        thread: Any = {"configurable": {"thread_id": uuid.uuid4().hex}}
        for question in questions:
            asked: Any = {"messages": [("user", question)]}
            agent.invoke(asked, thread)

    return solve


def _strands(url: str, manager: Callable[[], Any], tools: Any = (), **options: Any) -> Any:
    from strands import Agent
    from strands.models.openai import OpenAIModel

    def solve() -> None:
        # Each question has an event loop of its own, and a client belongs to one.
        client = {"base_url": url, "api_key": KEY, "max_retries": 0}
        agent = Agent(
            model=OpenAIModel(client_args=client, model_id="m", **options), tools=list(tools), name="solver",
            system_prompt=SYSTEM, callback_handler=None, conversation_manager=manager(),
        )  # fmt: skip
        for question in QUESTIONS:
            agent(question)

    return solve


def strands_window(url: str, tools: Any = ()) -> Any:
    from strands.agent.conversation_manager import SlidingWindowConversationManager

    return _strands(url, lambda: SlidingWindowConversationManager(window_size=4), tools)


def strands_summary(url: str, limit: int = 80) -> Any:
    from strands.agent.conversation_manager import SummarizingConversationManager

    def manager() -> Any:
        return SummarizingConversationManager(
            summary_ratio=0.5, preserve_recent_messages=2, summarization_system_prompt=SUMMARISE,
            proactive_compression={"compression_threshold": 0.9},
        )  # fmt: skip

    return _strands(url, manager, context_window_limit=limit)


def _agent_framework(url: str, strategy: Callable[[Any], Any]) -> Any:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient

    async def solve() -> None:
        client = OpenAIChatCompletionClient(model="m", base_url=url, api_key=KEY)
        agent = Agent(client, name="solver", instructions=SYSTEM, compaction_strategy=strategy(client))
        session = agent.create_session()
        for question in QUESTIONS:
            await agent.run(question, session=session)

    return solve


def agent_framework_window(url: str) -> Any:
    from agent_framework import SlidingWindowStrategy

    return _agent_framework(url, lambda _: SlidingWindowStrategy(keep_last_groups=3))


def agent_framework_summary(url: str) -> Any:
    from agent_framework import SummarizationStrategy

    return _agent_framework(
        url, lambda client: SummarizationStrategy(client=client, target_count=3, threshold=1, prompt=SUMMARISE)
    )


def openai_agents_session(url: str) -> Any:
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, SessionSettings, SQLiteSession
    from openai import AsyncOpenAI

    async def solve() -> None:
        client = AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
        agent = Agent(name="solver", instructions=SYSTEM, model=OpenAIChatCompletionsModel("m", client))
        session, last_three = SQLiteSession("s"), RunConfig(session_settings=SessionSettings(limit=3))
        for question in QUESTIONS:
            await Runner.run(agent, question, session=session, run_config=last_three)

    return solve


def openai_agents_compaction(url: str) -> Any:
    """`url`: of what compacts; the answers are the policy's."""
    from agents import Agent, OpenAIResponsesModel, Runner, SQLiteSession
    from agents.memory import OpenAIResponsesCompactionSession
    from openai import AsyncOpenAI

    async def solve() -> None:
        client = AsyncOpenAI(base_url=NOWHERE, api_key=KEY, max_retries=0)
        agent = Agent(name="solver", instructions=SYSTEM, model=OpenAIResponsesModel("m", client))
        session = OpenAIResponsesCompactionSession(
            "s", SQLiteSession("s"), client=AsyncOpenAI(base_url=url, api_key=KEY), compaction_mode="input",
            should_trigger_compaction=lambda state: len(state["compaction_candidate_items"]) == 3,
        )  # fmt: skip
        for question in QUESTIONS:
            await Runner.run(agent, question, session=session)

    return solve


@contextmanager
def compacting(item: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """`POST responses/compact`: the user's messages, then this item. The URL, and the requests."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append((self.path, body))
            output = [*(i for i in body["input"] if i.get("role") == "user"), item]
            usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
            usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
            answer = {"id": "c", "object": "response.compaction", "created_at": 0, "output": output, "usage": usage}
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# -- one step of training ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A step, and what is stored of its rollouts."""

    step: dict[str, Any]
    reports: list[RolloutReport]
    rows: list[tuple[list[Call], list[Any]]]


def train(solve: Callable[[], Any], policy: Path, directory: Path, **options: Any) -> Trained:
    """A step of GRPO on two rollouts, of which the one gets 0 and the other 1, whatever they say."""
    rewards = itertools.cycle([0.0, 1.0])

    @agl.rollout
    async def agent(task: str) -> float:
        reward = next(rewards)
        await (solve() if inspect.iscoroutinefunction(solve) else asyncio.to_thread(solve))
        return reward

    algorithm = agl.GRPO(
        model=str(policy), group_size=2, batch_size=1, steps=1, learning_rate=1e-3, max_response_tokens=48,
        max_context=1024, threads=1,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=2, directory=directory, progress=False, max_attempts=1, **options)
    step = trainer.fit(agent, ["sums"]).history[-1]
    return asyncio.run(_trained(step, directory))


async def _trained(step: dict[str, Any], directory: Path) -> Trained:
    store = await open_store(f"sqlite:///{directory / 'run.db'}")
    reports, rows = [], []
    for rollout in await store.query_rollouts():
        reports.append(await describe(store, rollout.rollout_id))
        calls, spans = await store.query_calls(rollout.rollout_id), await store.query_spans(rollout.rollout_id)
        everyone = Selection(tuple((c.agent, c.policy or "") for c in calls))
        built = build_trajectory(rollout.rollout_id, 1, rollout.group, SpanIndex(calls, spans), everyone)
        [trajectory] = built.trajectories.values()
        rows.append((calls, merge(trajectory, {c.id: 1.0 for c in calls})))
    await store.close()
    return Trained(step, reports, rows)


def check_tokens_and_reward(trained: Trained) -> None:
    """Each sampled token is trained once, as it was sampled, and every call of a rollout gets its reward."""
    assert trained.step["train/failed_rollouts"] == trained.step["train/policy_faults"] == 0
    assert trained.step["learner/max_abs_log_ratio"] < 1e-4, "what is trained is what was sampled"
    assert sorted(report.total_reward for report in trained.reports if report.total_reward is not None) == [0, 1]
    for report, (calls, rows) in zip(trained.reports, trained.rows, strict=True):
        assert [call.return_ for call in report.calls] == [report.total_reward] * len(calls)
        [advantage] = {call.trained.advantage for call in report.calls if call.trained}
        assert advantage == pytest.approx(0.7071 if report.total_reward else -0.7071, abs=1e-3)
        assert sum(row.n_actions for row in rows) == sum(c.response_ids.size for c in calls)
        found = {}
        for row in rows:
            for k, call_id in enumerate(row.call_ids):
                assert call_id not in found
                found[call_id] = row.token_ids[row.action_mask & (row.calls == k)]
        assert found.keys() == {c.id for c in calls}
        assert all(np.array_equal(found[c.id], c.response_ids) for c in calls)
        assert [r.calls for r in report.rows] == [[c.index for c in calls if c.id in row.call_ids] for row in rows]
    of_reports = sum((Counter(report.forks) for report in trained.reports), Counter[str]())
    counted = {name.removeprefix("train/forks/"): n for name, n in trained.step.items() if "train/forks/" in name}
    assert counted == of_reports
    assert trained.step["train/forks"] == sum(of_reports.values())
    assert trained.step["train/rows"] == sum(len(report.rows) for report in trained.reports)


@dataclass(frozen=True)
class Case:
    """A framework's way to compact.

    Attributes:
        build: its agent. module: what it imports.
        calls: of each rollout, in order: agent and cause of the fork. rows: the calls of each row.
        detail: of the first fork.
    """

    build: Callable[..., Any]
    module: str
    calls: list[tuple[str, str | None]]
    rows: list[list[int]]
    detail: str


SOLVER, SUMMARY = ("solver", None), ("solver-summary", None)
TRIMMED, SUMMARISED = ("solver", "trimmed"), ("solver", "summarised")

CASES = [
    # At the fourth question the history has seven messages: the first four become one.
    Case(
        langchain, "langchain_openai", [SOLVER, SOLVER, SOLVER, SUMMARY, SUMMARISED], [[0, 1, 2], [3], [4]],
        "4 messages left out from message 0 on; in their place message 0 (user)",
    ),
    # Four messages stay, so that the fourth question comes without the first. What is left begins alike: one tree.
    Case(
        strands_window, "strands", [SOLVER, SOLVER, SOLVER, TRIMMED], [[0, 1, 2, 3]],
        "2 messages left out from message 1 on",
    ),
    # Half of the history is summarised before the third question and before the fourth; its model is told to by
    # another system prompt, and with the messages themselves.
    Case(
        strands_summary, "strands",
        [SOLVER, SOLVER, ("solver-summary", "system_changed"), SUMMARISED,
         ("solver-summary", "system_changed"), SUMMARISED],
        [[0, 1, 3, 5], [2, 4]],
        "message 0 (system) is not the one seen before",
    ),
    # The last question and the group before it stay, with the system prompt: from the third question on.
    Case(
        agent_framework_window, "agent_framework", [SOLVER, SOLVER, TRIMMED, TRIMMED], [[0, 1, 2, 3]],
        "2 messages left out from message 1 on",
    ),
    # More than four messages become three and a summary, before the third question and the fourth.
    Case(
        agent_framework_summary, "agent_framework", [SOLVER, SOLVER, SUMMARY, SUMMARISED, SUMMARY, SUMMARISED],
        [[0, 1, 3, 5], [2, 4]],
        "2 messages left out from message 1 on; in their place message 1 (assistant)",
    ),
    # A question comes with the last three items, so that the third one loses the first question.
    Case(
        openai_agents_session, "agents", [SOLVER, SOLVER, TRIMMED, TRIMMED], [[0, 1, 2, 3]],
        "1 message left out from message 1 on",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.build.__name__)
def test_a_compacted_run_is_trained_as_the_sum_of_its_stretches(case: Case, tiny_policy: Path, tmp_path: Path) -> None:
    pytest.importorskip(case.module)
    trained = train(case.build(NOWHERE), tiny_policy, tmp_path)
    for report in trained.reports:
        assert [(c.call.agent, c.call.fork_cause) for c in report.calls] == case.calls
        assert next(c.fork for c in report.calls if c.fork).endswith(case.detail)
        assert [row.calls for row in report.rows] == case.rows
    check_tokens_and_reward(trained)


# -- who summarises ---------------------------------------------------------------------------------------------------

SUMMARISERS = [
    (langchain, "langchain_openai"),
    (strands_summary, "strands"),
    (agent_framework_summary, "agent_framework"),
]


@pytest.mark.parametrize(("build", "module"), SUMMARISERS, ids=["langchain", "strands", "agent_framework"])
@pytest.mark.parametrize("selected", ["solver", "*-summary"])
def test_the_summariser_is_selected_or_left_out_by_its_name(
    build: Any, module: str, selected: str, tiny_policy: Path, tmp_path: Path
) -> None:
    """What is not selected is answered by its own provider, with its own key."""
    pytest.importorskip(module)
    if module == "strands" and selected != "solver":
        build = functools.partial(build, limit=12)  # the provider says that each of its prompts has seven tokens
    said = "He wants to know sums." if selected == "solver" else "It is six."
    with serve(lambda body: Reply(said)) as provider:
        trained = train(build(provider.url), tiny_policy, tmp_path, agents=[selected])
    names = {"solver"} if selected == "solver" else {"solver-summary"}
    for report in trained.reports:
        assert {c.call.agent for c in report.calls} == names
        assert {call.agent for call in report.provider_calls} == {"solver", "solver-summary"} - names
        own = [c for c in report.calls if c.call.fork_cause == "summarised"]
        if selected == "solver":
            assert own
            assert all(said in json.dumps(c.call.request["messages"]) for c in own)
        else:
            assert not own
    assert all(("Summarise" in seen.raw.decode()) == (selected == "solver") for seen in provider.seen)
    assert all(seen.headers["authorization"] == f"Bearer {KEY}" for seen in provider.seen)
    check_tokens_and_reward(trained)


def test_an_agent_that_summarises_for_another_is_copied_with_it() -> None:
    """Each rollout of a wrapped Strands agent has a manager, and a summariser, of its own; the model is shared."""
    pytest.importorskip("strands")
    from strands import Agent
    from strands.agent.conversation_manager import SummarizingConversationManager
    from strands.models.openai import OpenAIModel

    from agl.adapters.strands.copying import fresh_copy

    model = OpenAIModel(client_args={"base_url": NOWHERE, "api_key": KEY}, model_id="m")
    summariser = Agent(model=model, name="summariser", callback_handler=None)
    manager = SummarizingConversationManager(summarization_agent=summariser)
    copied = fresh_copy(Agent(model=model, name="solver", callback_handler=None, conversation_manager=manager))
    own = copied.conversation_manager.summarization_agent
    assert own is not summariser
    assert own.model is model
    own.messages.append({"role": "user", "content": [{"text": "Hello."}]})
    assert summariser.messages == []


def test_credit_by_rule_reaches_across_stretches(tiny_policy: Path, tmp_path: Path) -> None:
    """Each call's return is the reward, discounted once for each call after it, whatever became of the history."""
    pytest.importorskip("langchain_openai")
    trained = train(langchain(NOWHERE), tiny_policy, tmp_path, credit=agl.credit.Discounted(0.5))
    for report in trained.reports:
        assert report.total_reward is not None
        assert report.forks == {"summarised": 1}
        assert [c.return_ for c in report.calls] == [report.total_reward * 0.5**n for n in (4, 3, 2, 1, 0)]
        assert sum(row.trained for row in report.rows) == sum(len(c.tokens) for c in report.calls)


@pytest.mark.parametrize(("build", "module"), [(langchain, "langchain_openai"), (strands_window, "strands")])
def test_between_tool_calls_too(build: Any, module: str, tiny_policy: Path, tmp_path: Path) -> None:
    """How many calls there are depends on what is sampled; that each is trained does not."""
    pytest.importorskip(module)
    from learning_agents import calculator

    if module == "strands":
        from strands import tool
    else:
        from langchain.tools import tool
    trained = train(build(NOWHERE, tools=[tool(calculator)]), tiny_policy, tmp_path)
    assert sum(len(c.call.tool_call_ids) for report in trained.reports for c in report.calls) > 0
    assert trained.step["train/forks"] > 0
    assert {cause for report in trained.reports for cause in report.forks} == {
        "summarised" if module == "langchain_openai" else "trimmed"
    }
    check_tokens_and_reward(trained)


# -- the compaction of OpenAI's servers -------------------------------------------------------------------------------


def test_a_compaction_session_whose_summary_can_be_read(tiny_policy: Path, tmp_path: Path) -> None:
    """The server that compacts is the session's own; it keeps what the user said, after which the fork begins."""
    pytest.importorskip("agents")
    text = [{"type": "output_text", "text": "So far: sums.", "annotations": []}]
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": text}
    with compacting(item) as (url, requests):
        trained = train(openai_agents_compaction(url), tiny_policy, tmp_path)
    assert [path for path, _ in requests] == ["/v1/responses/compact"] * 2
    for report in trained.reports:
        assert [(c.call.agent, c.call.fork_cause) for c in report.calls] == [SOLVER, SOLVER, SOLVER, SUMMARISED]
        assert [row.calls for row in report.rows] == [[0, 1, 2, 3]]
    check_tokens_and_reward(trained)


def test_a_compaction_that_only_openai_can_read_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    pytest.importorskip("agents")
    item = {"type": "compaction", "id": "cmp", "encrypted_content": "gAAAA"}
    with compacting(item) as (url, _), pytest.raises(agl.errors.RolloutError) as failed:
        train(openai_agents_compaction(url), tiny_policy, tmp_path)
    assert re.search(r"input\.3 is a compaction.*Only OpenAI.*summarise", str(failed.value), re.DOTALL)


# -- what the documents show ------------------------------------------------------------------------------------------


def test_the_page_shows_what_explain_prints(tiny_policy: Path, tmp_path: Path) -> None:
    """docs/concepts.md, but for the numbers: of tokens, and of what is made of rewards."""
    pytest.importorskip("langchain_openai")
    [shown] = [block.text for block in blocks() if block.page == "docs/concepts.md" and "summarised" in block.text]
    trained = train(langchain(NOWHERE, questions=[f"What is {i} + {i}?" for i in range(2, 10)]), tiny_policy, tmp_path)

    def comparable(text: str) -> list[str]:
        text = re.sub(r"ro-\w+", "ID", text)
        lines = [re.sub(r"[-+]?\d+(\.\d+)?", "0", line).split() for line in text.splitlines()]
        return [" ".join(line) for line in lines if line]

    printed = [render(report, width=200).partition("call  agent")[2] for report in trained.reports]
    # A summary that says the same as the one before it is a message that stayed.
    assert comparable(shown) in [comparable(f"call  agent{text}") for text in printed]
    check_tokens_and_reward(trained)

"""`agl.massgen`: agents and orchestrators are recorded whole, and what they say is what they say without it."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT, pythonpath
from small_massgen import Backend, Chunk, Orchestrator, SingleAgent, as_massgen

import agl.massgen
from agl import semconv, tracing
from agl.errors import ConfigError, StoreError
from agl.massgen import (
    AlgorithmConfig,
    ContentSpan,
    CoordinationSpan,
    LightningStore,
    PromptSpan,
    RewardComputer,
    RewardSpan,
    RLAgentMixin,
    RLConfig,
    RLOrchestratorMixin,
    StoreConfig,
    ToolSpan,
    Trace,
    TraceCollector,
    read_traces,
)
from agl.mdp.selection import select
from agl.rewards.trace import Trace as Attempt
from agl.testing.provider import Provider, Reply, last_said, serve
from agl.trainer.cli.export import export_files
from agl.trainer.report.export.rows import RolloutFilter

SEEDS = Path(os.environ.get("AGL_SEEDS") or ROOT.parent / "shared" / "seeds")


class RLAgent(RLAgentMixin, SingleAgent):
    pass


class RLOrchestrator(RLOrchestratorMixin, Orchestrator):
    pass


def script(body: dict[str, Any]) -> Reply:
    """Answers first; votes for agent1 once it sees its answer; presents without tools."""
    text = last_said(body)[1]
    if not body.get("tools"):
        return Reply("# Presented\n\nIt is 4 because 2 + 2 is 4.")
    if '"agent1": null' in text:
        return Reply("Let me think.", tools=(("new_answer", {"content": "4"}),))
    return Reply(tools=(("vote", {"agent_id": "agent1"}),))


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(script) as server:
        yield server


def config(place: Path, **options: Any) -> RLConfig:
    return RLConfig(enable_rl=True, store_config=StoreConfig(path=str(place)), **options)


def team(provider: Provider, rl: RLConfig, names: tuple[str, ...] = ("agent_a", "agent_b")) -> RLOrchestrator:
    agents = {n: RLAgent(Backend("m", provider.url), n, enable_rl=True, rl_config=rl) for n in names}
    return RLOrchestrator(agents, enable_rl=True, rl_config=rl)


def ask(agent: Any, text: str = "What is 2 + 2?") -> list[Any]:
    """All chunks, each taken in a task of its own, as MassGen does."""

    async def main() -> list[Any]:
        chunks, stream = [], agent.chat([{"role": "user", "content": text}])
        while (chunk := await asyncio.create_task(anext(stream, None))) is not None:
            chunks.append(chunk)
        return chunks

    return asyncio.run(main())


def recorded(agent: Any) -> list[Trace]:
    """What its collector has kept, after it is closed."""
    agent.trace_collector.close()
    return agent.trace_collector.store.query_traces()


class Talker:
    """An agent of nobody's SDK: an async generator and an id."""

    def __init__(self, name: str, chunks: list[Any]) -> None:
        self.name, self.chunks = name, chunks

    async def chat(self, messages: Any, **_: Any) -> AsyncIterator[Any]:
        for chunk in self.chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk


class RLTalker(RLAgentMixin, Talker):
    pass


# -- a discussion, whole ----------------------------------------------------------------------------------------------
def test_a_discussion_is_recorded_by_agent_and_read_back(provider: Provider, tmp_path: Path) -> None:
    plain = Orchestrator({n: SingleAgent(Backend("m", provider.url), n) for n in ("agent_a", "agent_b")})
    expected = [c.content for c in ask(plain) if c.type == "content"]
    orchestrator = team(provider, config(tmp_path))
    assert [c.content for c in ask(orchestrator) if c.type == "content"] == expected
    traces = recorded(orchestrator)
    assert {t.agent_id for t in traces} == {"orchestrator", "agent_a", "agent_b"}
    assert {t.task for t in traces} == {"What is 2 + 2?"}

    whole = traces[0]
    assert (whole.agent_id, whole.status) == ("orchestrator", "completed")
    events = [s for s in whole.spans if isinstance(s, CoordinationSpan)]
    # No session_start; the vote is for an agent by its own id, not agent1.
    assert [e.event_type for e in events][:2] == ["answer", "restart"]
    assert {(e.agent_id, e.voted_for) for e in events if e.event_type == "vote"} == {
        ("agent_a", "agent_a"), ("agent_b", "agent_a"),
    }  # fmt: skip
    assert [e.agent_id for e in events if e.event_type == "winner"] == ["agent_a"]
    rewards = {s.reward_type for s in whole.spans if isinstance(s, RewardSpan)}
    assert rewards == {"coordination", "voting"}
    assert {s.agent_id for s in whole.spans if isinstance(s, RewardSpan)} == {None, "agent_a", "agent_b"}
    assert whole.total_reward == pytest.approx(sum(s.reward for s in whole.spans if isinstance(s, RewardSpan)))

    answered = next(t for t in traces if t.agent_id == "agent_a" and any(_called(t, "new_answer")))
    (prompt,) = [s for s in answered.spans if isinstance(s, PromptSpan)]
    assert prompt.model == "m"
    assert "What is 2 + 2?" in json.dumps(prompt.input)
    assert "Let me think." in prompt.output
    assert '"new_answer"' in prompt.output
    assert [s.arguments for s in _called(answered, "new_answer")] == [{"content": "4"}]
    assert [s.content for s in answered.spans if isinstance(s, ContentSpan)] == ["Let me think. "]

    # The files hold the same, and the layout is the document's.
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("traces/*/*/*.json"))
    assert all(re.fullmatch(r"traces/\d{8}/(agent_[ab]|orchestrator)/trace_[\w-]+\.json", f) for f in files)
    index = json.loads((tmp_path / "metadata" / "trace_index.json").read_text())["traces"]
    assert sorted(entry["path"] for entry in index.values()) == files
    by_id = {t.trace_id: t for t in traces}
    assert {t.trace_id: t for t in read_traces(tmp_path)} == by_id
    assert [t.agent_id for t in read_traces(tmp_path, agent_id="agent_b")] == [
        t.agent_id for t in traces if t.agent_id == "agent_b"
    ]
    store = LightningStore(tmp_path)
    assert all(store.get_trace(name) == trace for name, trace in by_id.items())
    assert store.query_traces(status="failed") == []
    with pytest.raises(StoreError, match="no trace"):
        store.get_trace(f"{whole.trace_id}_{'0' * 16}")

    # `agl export` reads the folder, and writes the same files.
    facts = export_files(str(tmp_path), tmp_path / "again", "massgen", RolloutFilter(), tokens=True, quiet=True)
    assert (facts["rollouts"], facts["files"]) == (1, len(files) + 1)
    assert {t.trace_id: t for t in read_traces(tmp_path / "again")} == by_id
    assert json.loads((tmp_path / "again" / "metadata" / "trace_index.json").read_text())["traces"] == index


def _called(trace: Trace, tool: str) -> list[ToolSpan]:
    return [s for s in trace.spans if isinstance(s, ToolSpan) and s.tool_name == tool]


def test_a_restarted_stream_ends_and_its_partial_answer_is_no_answer(provider: Provider, tmp_path: Path) -> None:
    orchestrator = team(provider, config(tmp_path), ("agent_a", "agent_b", "agent_c"))
    ask(orchestrator)
    traces = recorded(orchestrator)
    closed = [t for t in traces if t.status == "cancelled"]
    assert closed
    for trace in closed:
        assert trace.end_time is not None
        assert not any(isinstance(s, RewardSpan) and s.reward_type == "answer_quality" for s in trace.spans)


def test_the_presentation_is_no_move_of_the_winner(provider: Provider, tmp_path: Path) -> None:
    orchestrator = team(provider, config(tmp_path))
    ask(orchestrator)
    (presented,) = [t for t in recorded(orchestrator) if t.metadata.get("stage") == "presentation"]
    assert presented.agent_id == "agent_a"
    assert presented.total_reward == 0.0
    assert "Presented" in next(s.output for s in presented.spans if isinstance(s, PromptSpan))


@pytest.mark.parametrize("agents", [["agent_a"], None], ids=["one", "all"])
def test_in_a_trainers_rollout_agents_keep_their_names_and_only_moves_are_routed(
    provider: Provider, tmp_path: Path, agents: list[str] | None
) -> None:
    """The second step of a stream runs in another task, whose context has nothing that the first one set."""
    from agl.adapters.openai import OpenAITracer

    with serve(script) as gateway, OpenAITracer():
        rollout = tracing.RolloutContext("ro-1", 1, "discussion", select(agents), gateway.root, "key")
        orchestrator = team(provider, config(tmp_path))
        with tracing.running(rollout):
            ask(orchestrator)
        assert orchestrator.trace_collector is not None
        assert not (tmp_path / "run.db").exists(), "the trainer's store keeps the spans"
    named = {seen.path.split("/agents/")[1].split("/")[0] for seen in gateway.seen}
    assert named == ({"agent_a"} if agents else {"agent_a", "agent_b"})
    presented = [s for s in provider.seen if not s.body.get("tools")]
    assert len(presented) == 1, "the presentation goes to the winner's own model"
    assert all(s.body.get("tools") for s in gateway.seen)
    # Collect only: rewards are there, and count for nothing.
    rewards = [s for s in rollout.spans if s.operation == semconv.REWARD]
    assert rewards
    assert not any(s.attributes[semconv.REWARD_PRIMARY] for s in rewards)


def test_rewards_count_in_a_rollout_when_more_than_collecting_is_asked(tmp_path: Path) -> None:
    rollout = tracing.RolloutContext("ro-1", 1, "me", select())
    calls = [{"id": "c1", "function": {"name": "search", "arguments": '{"q": 1}'}}]
    said = [
        {"type": "tool_calls", "tool_calls": calls},
        {"type": "tool_result", "tool_call_id": "c1", "error": "no network"},
        {"type": "content", "content": "It is 4."},
    ]
    agent = RLTalker("me", said, enable_rl=True, rl_config=config(tmp_path, collect_only=False))
    with tracing.running(rollout):
        ask(agent)
    rewards = {s.attributes[semconv.REWARD_NAME]: s for s in rollout.spans if s.operation == semconv.REWARD}
    assert {n: s.attributes[semconv.REWARD_PRIMARY] for n, s in rewards.items()} == {
        "tool": True, "answer_quality": True,
    }  # fmt: skip
    tool = next(s for s in rollout.spans if s.operation == semconv.EXECUTE_TOOL)
    assert rewards["tool"].parent_id == tool.span_id, "credited to the call that asked for the tool"
    assert rewards["tool"].attributes[semconv.REWARD_VALUE] == -1.0


# -- nothing is disturbed ---------------------------------------------------------------------------------------------
def test_context_variables_are_those_of_the_caller() -> None:
    mine: ContextVar[str] = ContextVar("mine", default="unset")
    inner: list[Any] = []

    class Inner:
        agent_id = "a"

        async def chat(self, messages: Any) -> AsyncIterator[str]:
            with tracing.span("operation", "mine"):
                for part in "abc":
                    scope = tracing.current()
                    inner.append(None if scope is None else (scope.kind, scope.agent))
                    yield part

    class Watched(RLAgentMixin, Inner):
        pass

    async def main() -> None:
        stream = Watched(enable_rl=True).chat([])

        async def step() -> Any:
            token = mine.set("in this task")
            before = tracing.innermost()
            chunk = await anext(stream, None)
            assert tracing.innermost() is before
            mine.reset(token)
            return chunk

        while await asyncio.create_task(step()) is not None:
            assert tracing.innermost() is None

    rollout = tracing.RolloutContext("ro-1", 1, "root", select())

    async def within() -> None:
        with tracing.running(rollout):
            root = tracing.innermost()
            stream = Watched(enable_rl=True).chat([])
            while await asyncio.create_task(anext(stream, None)) is not None:
                assert tracing.innermost() is root

    asyncio.run(within())
    assert inner == [("operation", "a")] * 3, "what the generator itself opened is current at each of its steps"


@pytest.mark.parametrize("fault", ["start", "chunk", "end", "store"])
def test_a_failing_collector_is_logged_and_the_answer_is_the_same(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the collector is broken")

    agent = RLTalker("me", [Chunk("content", "4"), Chunk("done")], enable_rl=True, rl_config=config(tmp_path))
    match fault:
        case "start":
            monkeypatch.setattr(TraceCollector, "start_trace", broken)
        case "chunk":
            monkeypatch.setattr(agl.massgen.AgentRun, "emit", broken)
        case "end":
            monkeypatch.setattr(RewardComputer, "answer", broken)
        case "store":
            (tmp_path / "run.db").write_text("no database")
    with caplog.at_level(logging.WARNING, logger="agl.massgen"):
        assert [c.content for c in ask(agent)] == ["4", None]
        agent.trace_collector.close()
    assert len(caplog.records) >= 1
    assert tracing.innermost() is None


def test_a_failing_collector_is_loud_in_a_trainers_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the collector is broken")

    monkeypatch.setattr(RewardComputer, "answer", broken)
    agent = RLTalker("me", [Chunk("content", "4")], enable_rl=True, rl_config=config(tmp_path))
    rollout = tracing.RolloutContext("ro-1", 1, "me", select())
    with tracing.running(rollout), pytest.raises(RuntimeError, match="broken"):
        ask(agent)


def test_what_an_agent_raises_or_says_of_a_failure_is_passed_on(tmp_path: Path) -> None:
    raising = RLTalker("me", [Chunk("content", "4"), ValueError("no")], enable_rl=True, rl_config=config(tmp_path))
    with pytest.raises(ValueError, match="no"):
        ask(raising)
    raising.trace_collector.close()
    telling = RLTalker("me", [Chunk("error", error="rate limit")], enable_rl=True, rl_config=config(tmp_path))
    assert [c.type for c in ask(telling)] == ["error"]
    first, second = recorded(telling)
    assert (first.status, second.status) == ("failed", "failed")
    assert first.metadata["error"] == "ValueError: no"
    assert second.metadata["error"] == "rate limit"
    assert [s.partial for s in first.spans if isinstance(s, ContentSpan)] == [True]


def test_an_agent_closed_early_is_closed_inside_and_recorded_as_cancelled(tmp_path: Path) -> None:
    closed = []

    class Inner(Talker):
        async def chat(self, messages: Any, **_: Any) -> AsyncIterator[Any]:
            try:
                yield Chunk("content", "half an ")
                yield Chunk("content", "answer")
            finally:
                closed.append(True)

    class Watched(RLAgentMixin, Inner):
        pass

    agent = Watched("me", [], enable_rl=True, rl_config=config(tmp_path))

    async def main() -> None:
        stream = agent.chat([{"role": "user", "content": "?"}])
        await asyncio.create_task(anext(stream))
        await stream.aclose()

    asyncio.run(main())
    assert closed == [True]
    (trace,) = recorded(agent)
    assert trace.status == "cancelled"
    assert [(s.content, s.partial) for s in trace.spans if isinstance(s, ContentSpan)] == [("half an ", True)]
    assert not any(isinstance(s, RewardSpan) for s in trace.spans)


def test_without_rl_nothing_is_recorded(provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for agent in (RLAgent(Backend("m", provider.url), "a"), RLTalker("a", [Chunk("content", "4")])):
        assert agent.trace_collector is None
        assert ask(agent)
    assert RLTalker("a", [], enable_rl=True, rl_config=RLConfig()).trace_collector is None
    assert list(tmp_path.iterdir()) == []


# -- other agents and orchestrators -----------------------------------------------------------------------------------
def test_an_agent_of_no_known_sdk(tmp_path: Path) -> None:
    calls = [{"id": "c1", "function": {"name": "search", "arguments": '{"q": "x"}'}}]
    said: list[Any] = [
        {"type": "reasoning", "content": "I "}, {"type": "reasoning", "content": "search."},
        {"type": "tool_calls", "tool_calls": calls},
        {"type": "tool_result", "tool_call_id": "c1", "content": ""},
        {"type": "content", "content": "It is "}, {"type": "content", "content": "4."},
    ]  # fmt: skip
    agent = RLTalker("me", said, enable_rl=True, rl_config=config(tmp_path))
    agent.reference = "It is 4."
    assert ask(agent) == said
    (trace,) = recorded(agent)
    kinds = [(s.span_type, getattr(s, "content", None)) for s in trace.spans if s.span_type in ("reasoning", "content")]
    assert kinds == [("reasoning", "I search."), ("content", "It is 4.")]
    (prompt,) = [s for s in trace.spans if isinstance(s, PromptSpan)]
    assert (prompt.input, prompt.output, prompt.model) == (
        [{"role": "user", "content": "What is 2 + 2?"}], "It is 4.", "unknown",
    )  # fmt: skip
    rewards = {s.reward_type: s.reward for s in trace.spans if isinstance(s, RewardSpan)}
    assert rewards["tool"] == -0.5
    assert 0.3 < rewards["answer_quality"] <= 1.0
    assert trace.total_reward == pytest.approx(sum(rewards.values()))


def test_tools_that_massgen_runs_itself(tmp_path: Path) -> None:
    def status(status: str, content: str, call_id: str) -> dict[str, Any]:
        about = {"source": "mcp_search", "tool_call_id": call_id}
        return {"type": "mcp_status", "status": status, "content": content, **about}

    said = [
        status("mcp_tool_called", "Calling search...", "1"),
        status("function_call", 'Arguments for Calling search: {"q": "x"}', "1"),
        status("function_call_output", "Results for Calling search: found it: here", "1"),
        status("mcp_tool_response", "search completed", "1"),
        status("mcp_tool_called", "Calling search...", "2"),
        status("mcp_tool_error", "Error: no network", "2"),
    ]
    agent = RLTalker("me", said, enable_rl=True, rl_config=config(tmp_path, enable_answer_quality_rewards=False))
    ask(agent)
    (trace,) = recorded(agent)
    first, second = _called(trace, "search")
    assert (first.arguments, first.result, first.error) == ({"q": "x"}, "found it: here", None)
    assert second.error == "Error: no network"
    assert [s.reward for s in trace.spans if isinstance(s, RewardSpan)] == [1.0, -1.0]


def test_a_new_answer_makes_votes_void(tmp_path: Path) -> None:
    class Mine:
        orchestrator_id = "o"

        def __init__(self) -> None:
            self.events: list[Any] = [{"event_type": "vote_cast", "agent_id": "old", "context": {"voted_for": "old"}}]

        async def chat(self, messages: Any) -> AsyncIterator[Any]:
            for kind, agent, context in (
                ("vote_cast", "a", {"voted_for": "b"}),
                ("vote_cast", "b", {"voted_for": "b"}),
                ("restart_triggered", "c", {"affected_agents": ["a"]}),
                ("vote_cast", "c", {"voted_for": "c"}),
                ("final_agent_selected", "b", {}),
            ):
                self.events.append({"event_type": kind, "agent_id": agent, "context": context})
                yield {"type": "status"}
            yield {"type": "content", "content": "4"}

    class Watched(RLOrchestratorMixin, Mine):
        pass

    orchestrator = Watched(enable_rl=True, rl_config=config(tmp_path))
    ask(orchestrator)
    (trace,) = recorded(orchestrator)
    votes = {s.agent_id: s.reward for s in trace.spans if isinstance(s, RewardSpan) and s.reward_type == "voting"}
    assert votes == {"b": 1.0, "c": 0.0}
    assert "consensus 0.00" in next(s.reason for s in trace.spans if isinstance(s, RewardSpan))


# -- rewards ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("result", "error", "value"),
    [("found", None, 1.0), ({"error": "x"}, None, -1.0), ("", None, -0.5), ([], None, -0.5), ("a", "raised", -1.0)],
)
def test_tool_rewards_are_the_documents(result: Any, error: str | None, value: float) -> None:
    assert RewardComputer().tool(ToolSpan("t", {}, result, error)).reward == value


RICH = "# Why\n\nBecause 4 is even, for example.\n\n- one\n\nSo."


def test_answer_and_coordination_rewards_are_the_documents() -> None:
    computer = RewardComputer()
    assert computer.answer("").reward == 0.0
    plain, rich = computer.answer("Yes."), computer.answer(RICH)
    assert plain.reward < 0.2 < rich.reward
    assert computer.answer("Paris", "Paris").reward == pytest.approx(computer.answer("Paris").reward + 0.3)
    nothing = Attempt("ro", 1, "o", ())
    agreed = computer.coordination(nothing, {"a": "b", "b": "b"}, "").reward
    split = computer.coordination(nothing, {"a": "a", "b": "b"}, "").reward
    assert agreed - split == pytest.approx(1.5)  # +1.0 and -0.5
    better = computer.coordination(nothing, {"a": "b", "b": "b"}, RICH).reward
    assert better == pytest.approx(agreed + 2 * rich.reward)


# -- the store --------------------------------------------------------------------------------------------------------
def test_feedback_of_people_is_a_reward_where_it_is_asked_for(tmp_path: Path) -> None:
    agent = RLTalker("me", [Chunk("content", "4")], enable_rl=True, rl_config=config(tmp_path))
    ask(agent)
    (trace,) = recorded(agent)
    with pytest.raises(ConfigError, match="human feedback is off"):
        agent.trace_collector.add_feedback(trace.trace_id, 1.0)
    rated = TraceCollector(config=config(tmp_path, enable_human_feedback=True))
    rated.add_feedback(trace.trace_id, -1.0, "too short")
    after = rated.store.get_trace(trace.trace_id)
    assert after.total_reward == pytest.approx(trace.total_reward - 1.0)
    assert [t.total_reward for t in read_traces(tmp_path)] == [after.total_reward]


# -- configuration and names ------------------------------------------------------------------------------------------
def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for made in (
        lambda: RLConfig(colect_only=True),  # type: ignore[call-arg]
        lambda: StoreConfig(type="s3"),  # type: ignore[arg-type]
        lambda: StoreConfig(type="remote", path="./rl_data"),
        lambda: StoreConfig(path="http://host:4747"),
        lambda: list(read_traces(tmp_path)),
        lambda: Trace.from_json({"trace_id": "x"}),
        lambda: Trace.from_json({"trace_id": "x", "agent_id": "a", "task": "t", "spans": [{"span_type": "dance"}]}),
    ):
        with pytest.raises(ConfigError):
            made()


def test_metrics_stand_in_the_log_once_after_a_resume(tmp_path: Path) -> None:
    from agl_massgen.config import JsonLog

    log = JsonLog(tmp_path / "logs")
    log.start("run-1", {}, None)
    for step in (1, 2, 3):
        log.step(step, {"train/reward": step / 10}, ())
    log.start("run-1", {}, 2)
    log.step(3, {"train/reward": 0.5}, ())
    log.end("succeeded", {})
    lines = [json.loads(line) for line in (tmp_path / "logs" / "run-1.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/reward"]) for line in lines] == [(1, 0.1), (2, 0.2), (3, 0.5)]


@pytest.mark.parametrize("name", agl.massgen.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(agl.massgen, name) is not None
    stub = Path(agl.massgen.__file__ or "").with_suffix(".pyi").read_text()
    assert f"import {name} as {name}\n" in stub or f"def {name}(" in stub, "editors see it"


def test_install_serves_massgen_rl_with_and_without_massgen() -> None:
    code = "import agl.massgen; agl.massgen.install(); agl.massgen.install(); from massgen.rl import RLConfig, Trace; "
    code += "import massgen.rl as rl, sys; assert rl.RLConfig is agl.massgen.RLConfig; "
    code += "print({'torch', 'openai', 'sqlalchemy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": pythonpath()}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "set()", done.stderr


# -- the document's own snippets --------------------------------------------------------------------------------------
def document() -> str:
    for file in sorted(SEEDS.glob("*.txt")):
        text = file.read_text(encoding="utf-8")
        if text.startswith("# MassGen RL Integration"):
            return text
    pytest.skip(f"no MassGen document in {SEEDS}; set AGL_SEEDS to the folder that holds it")


def test_the_documents_snippets_run_verbatim(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", document(), re.DOTALL)
    assert len(blocks) == 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
    names: dict[str, Any] = {}
    with as_massgen():
        agl.massgen.install()
        for block in blocks:
            if "agents=agents" in block:
                names["agents"] = {
                    n: names["RLSingleAgent"](Backend("m"), n, enable_rl=True, rl_config=names["rl_config"])
                    for n in ("agent_a", "agent_b")
                }
            compiled = compile(block, "the document", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            value = eval(compiled, names)
            if asyncio.iscoroutine(value):
                asyncio.run(value)
        assert "Presented" in capsys.readouterr().out
        ask(names["orchestrator"])
    for name in ("agent", "orchestrator"):
        names[name].trace_collector.close()
    assert {t.agent_id for t in read_traces("rl_data")} == {"my_agent", "orchestrator", "agent_a", "agent_b"}
    assert isinstance(names["rl_config"].algorithm_config, AlgorithmConfig)


def test_files_have_the_fields_of_the_documents_example(provider: Provider, tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", document(), re.DOTALL)
    example = json.loads(block.replace("{...}", "{}"))
    assert Trace.from_json(example).to_json().items() >= {k: v for k, v in example.items() if k != "spans"}.items()
    orchestrator = team(provider, config(tmp_path))
    ask(orchestrator)
    recorded(orchestrator)
    needed = {span["span_type"]: span.keys() for span in example["spans"]}
    for file in tmp_path.glob("traces/*/*/*.json"):
        trace = json.loads(file.read_text())
        assert trace.keys() >= example.keys()
        for span in trace["spans"]:
            assert span.keys() >= needed.get(span["span_type"], set())

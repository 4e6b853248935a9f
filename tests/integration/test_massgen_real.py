"""`agl.massgen` on the real package massgen, in an environment of its own (`.ci/nightly`): skipped without it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("massgen") is None:
    pytest.skip("massgen is not installed: 265 packages, in an environment of its own", allow_module_level=True)

import agl.massgen
from agl import tracing
from agl.adapters.openai import OpenAITracer
from agl.massgen import CoordinationSpan, PromptSpan, RewardSpan, Trace, read_traces
from agl.mdp.selection import select
from agl.testing.provider import Provider, Reply, serve


def script(body: dict[str, Any]) -> Reply:
    """Answers, votes for agent1 once there are answers, and presents."""
    named = {tool["function"]["name"] for tool in body.get("tools") or ()}
    text = json.dumps(body["messages"])
    if "vote" in named and re.search(r"<agent1[.\d]*>", text):
        return Reply(tools=(("vote", {"agent_id": "agent1", "reason": "right"}),))
    if "vote" in named or ("new_answer" in named and "2 + 2" in text and "present" not in text.lower()):
        return Reply(tools=(("new_answer", {"content": "It is 4."}),))
    return Reply("# Presented\n\nIt is 4, since 2 + 2 = 4.")


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    monkeypatch.chdir(tmp_path)  # it writes logs and workspaces into the current directory
    with serve(script) as server:
        yield server


def orchestrator(provider: Provider) -> Any:
    agl.massgen.install()
    from massgen import Orchestrator  # pyright: ignore
    from massgen.backend.chat_completions import ChatCompletionsBackend  # pyright: ignore
    from massgen.chat_agent import SingleAgent  # pyright: ignore
    from massgen.rl import RLAgentMixin, RLConfig, RLOrchestratorMixin, StoreConfig  # pyright: ignore

    class RLSingleAgent(RLAgentMixin, SingleAgent):
        pass

    class RLOrchestrator(RLOrchestratorMixin, Orchestrator):
        pass

    config = RLConfig(enable_rl=True, store_config=StoreConfig(path="./rl_data"))
    agents = {
        name: RLSingleAgent(
            backend=ChatCompletionsBackend(api_key="sk-own", base_url=provider.url, model="m"),
            agent_id=name, enable_rl=True, rl_config=config,
        )
        for name in ("agent_a", "agent_b")
    }  # fmt: skip
    return RLOrchestrator(agents=agents, enable_rl=True, rl_config=config)


def ask(agent: Any) -> list[Any]:
    async def main() -> list[Any]:
        return [chunk async for chunk in agent.chat([{"role": "user", "content": "What is 2 + 2?"}])]

    return asyncio.run(main())


def test_a_coordination_is_recorded(provider: Provider) -> None:
    team = orchestrator(provider)
    text = "".join(c.content or "" for c in ask(team) if c.type == "content")
    assert "Presented" in text
    team.trace_collector.close()
    traces = list(read_traces("rl_data"))
    assert {t.agent_id for t in traces} == {"orchestrator", "agent_a", "agent_b"}
    (whole,) = [t for t in traces if t.agent_id == "orchestrator"]
    events = [s for s in whole.spans if isinstance(s, CoordinationSpan)]
    assert {e.event_type for e in events} >= {"answer", "vote", "restart", "winner", "final_answer"}
    assert {e.voted_for for e in events if e.event_type == "vote"} <= {"agent_a", "agent_b"}
    assert {s.reward_type for s in whole.spans if isinstance(s, RewardSpan)} == {"coordination", "voting"}
    asked = [t for t in traces if any(isinstance(s, PromptSpan) for s in t.spans)]
    assert len([s for t in traces for s in t.spans if isinstance(s, PromptSpan)]) == len(provider.seen)
    assert [t.agent_id for t in asked if t.metadata.get("stage") == "presentation"] == [_winner(whole)]


def _winner(trace: Trace) -> str | None:
    return next(
        s.agent_id for s in trace.spans if isinstance(s, CoordinationSpan) and s.event_type == "winner"
    )  # fmt: skip


def test_one_agent_of_a_coordination_is_routed_by_its_name(provider: Provider) -> None:
    team = orchestrator(provider)
    with serve(script) as gateway, OpenAITracer():
        rollout = tracing.RolloutContext("ro-1", 1, "team", select(["agent_b"]), gateway.root, "key")
        with tracing.running(rollout):
            ask(team)
    assert gateway.seen
    assert {seen.path.split("/agents/")[1].split("/")[0] for seen in gateway.seen} == {"agent_b"}
    assert provider.seen

"""What `explain` says is what was trained: recomputed here from the store and compared."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI

import agl
from agl.errors import StoreError
from agl.trainer.explain import describe, render
from agl.trainer.store import open_store


@pytest.fixture(scope="module")
def trained(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> agl.Result:
    @tool
    def lookup(word: str) -> str:
        """Look a word up."""
        return word

    model = ChatOpenAI(model="any", api_key="unused")  # type: ignore[arg-type]
    agent = create_agent(model, [lookup], name="speaker")
    lengths = iter(range(10_000))
    trainer = agl.Trainer(
        agl.GRPO(model=str(untrained_model), group_size=4, batch_size=2, steps=1, max_response_tokens=12),
        directory=tmp_path_factory.mktemp("run"),
        progress=False,
    )
    return trainer.fit(agl.wrap(agent, reward=lambda task, output: next(lengths) % 3), ["one", "two"])


def _reports(result: agl.Result) -> list[Any]:
    async def main() -> list[Any]:
        store = await open_store(result.store)
        try:
            rollouts = await store.query_rollouts(mode="train")
            return [await describe(store, r.rollout_id) for r in rollouts]
        finally:
            await store.close()

    return asyncio.run(main())


def test_rewards_returns_and_advantages(trained: agl.Result) -> None:
    reports = _reports(trained)
    assert len(reports) == 8
    for group in (reports[:4], reports[4:]):
        returns = [r.calls[0].return_ for r in group]
        assert returns == [r.total_reward for r in group]
        mean = sum(returns) / 4
        std = (sum((x - mean) ** 2 for x in returns) / 3) ** 0.5
        for report in group:
            for call in report.calls:
                assert call.advantage == pytest.approx((call.return_ - mean) / (std + 1e-6), abs=1e-5)
                assert (call.step, call.policy, call.policy_version, call.dropped) == (1, "policy", 0, None)


def test_tokens_are_the_sampled_ones(trained: agl.Result) -> None:
    for report in _reports(trained):
        for call in report.calls:
            assert call.agent == "speaker"
            assert all(t.trained for t in call.tokens)
            assert all(t.logprob <= 0 for t in call.tokens)
        assert sum(row.trained for row in report.rows) == sum(len(c.tokens) for c in report.calls)


def test_what_is_printed(trained: agl.Result, capsys: pytest.CaptureFixture[str]) -> None:
    first = _reports(trained)[0]
    text = render(first)
    for word in ("speaker", "policy v0", "log-probs", "advantage", "training rows", "chain"):
        assert word in text
    again = agl.explain(first.rollout_id[:10], trained.directory)
    assert again.rollout_id == first.rollout_id
    assert "speaker" in capsys.readouterr().out


def test_a_trace_is_a_tree(trained: agl.Result, capsys: pytest.CaptureFixture[str]) -> None:
    from agl.trainer.trace import show_trace

    rollout = _reports(trained)[0]
    spans = show_trace(rollout.rollout_id, trained.directory)
    shown = capsys.readouterr().out
    assert "invoke_agent speaker" in shown
    assert "chat any  policy" in shown
    assert "reward reward" in shown
    roots = [s for s in spans if s["parent_id"] is None]
    assert [s["name"] for s in roots] == ["invoke_agent speaker"]
    chats = [s for s in spans if s["name"].startswith("chat")]
    assert {s["parent_id"] for s in chats} == {roots[0]["span_id"]}
    assert {s["span_id"] for s in chats} == {c.span_id for c in _calls(trained, rollout.rollout_id)}


def _calls(result: agl.Result, rollout_id: str) -> list[Any]:
    async def main() -> list[Any]:
        store = await open_store(result.store)
        try:
            return await store.query_calls(rollout_id)
        finally:
            await store.close()

    return asyncio.run(main())


def test_what_is_not_there(trained: agl.Result, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at this path"):
        agl.explain("ro-1", tmp_path / "nothing")
    with pytest.raises(StoreError):
        agl.explain("ro-nobody", trained.directory)
    with pytest.raises(StoreError, match="has attempts 1, not 7"):
        agl.explain(_reports(trained)[0].rollout_id, trained.directory, attempt=7)

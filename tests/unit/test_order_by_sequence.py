"""Runs, attempts and calls are in the order in which they were made, although the clock was set back between them."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from agl.trainer.cli.runs import list_runs
from agl.trainer.store import open_store
from agl.trainer.store.types import NewRollout, TrainingRun
from agl_agentlightning import types as T
from agl_agentlightning.trace_tree import TraceTree
from agl_service.run_record import RunRecord, load_records


@pytest.fixture
def falling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set back by a minute at each look."""
    looks = itertools.count()
    monkeypatch.setattr("time.time", lambda: 2e9 - 60.0 * next(looks))


def test_the_runs_of_a_store(falling: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> list[str]:
        store = await open_store(str(tmp_path / "run.db"))
        for name in ("first", "second", "third"):
            await store.put_run(TrainingRun(name, name=name))
        runs = await store.query_runs()
        assert runs[0].created_at < runs[2].created_at
        await store.close()
        return [run.run_id for run in runs]

    assert asyncio.run(scenario()) == ["third", "second", "first"]
    assert [run["run_id"] for run in list_runs([str(tmp_path)])] == ["third", "second", "first"]
    shown = capsys.readouterr().out
    assert shown.index("third") < shown.index("second") < shown.index("first")


def test_the_open_attempts_of_a_store(falling: None, tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        store = await open_store(str(tmp_path / "run.db"))
        await store.enqueue_rollouts([NewRollout({}, rollout_id=f"ro-{name}") for name in "cab"])
        for _ in range(3):
            await store.dequeue_rollout("worker")
        attempts = await store.query_open_attempts()
        await store.close()
        return [attempt.rollout_id for attempt in attempts]

    assert asyncio.run(scenario()) == ["ro-c", "ro-a", "ro-b"]


def test_the_runs_of_a_server(tmp_path: Path) -> None:
    for number, (name, created_at) in enumerate([("b", 30.0), ("c", 20.0), ("a", 10.0)], start=1):
        (tmp_path / name).mkdir()
        RunRecord(name, tmp_path / name, number=number, created_at=created_at).save()
    assert [record.run_id for record in load_records(tmp_path)] == ["b", "c", "a"]


def span(number: int, name: str, at: float, attributes: dict[str, Any]) -> T.Span:
    return T.Span.from_attributes(
        attributes=attributes,
        rollout_id="ro",
        attempt_id="at",
        sequence_id=number,
        name=name,
        trace_id="t",
        span_id=f"s{number}",
        parent_id="s0" if number else None,
        start_time=at,
        end_time=at + 1.0,
    )


def test_a_reward_goes_to_the_call_before_it() -> None:
    reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1.0}
    spans = [
        span(0, "root", 100.0, {}),
        span(1, "openai.chat.completion", 90.0, {}),
        span(2, "agentlightning.annotation", 50.0, reward),
        span(3, "openai.chat.completion", 10.0, {}),
    ]
    tree = TraceTree.from_spans(spans)
    calls = [node for node in tree.traverse() if node.span.name == "openai.chat.completion"]
    assert tree.match_rewards("first_occurrence", calls) == {"s1": 1.0}

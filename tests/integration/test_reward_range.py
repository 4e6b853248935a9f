"""A reward that nobody meant: refused where a range is set, and warned of where none is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

import agl
from agl.errors import AglError
from agl.trainer.report.explain import list_rollouts
from agl.trainer.store.location import read_store

TASKS = [{"n": n} for n in range(2)]


def trainer(model: Path, directory: Path, **settings: Any) -> agl.Trainer:
    algorithm = agl.GRPO(
        model=str(model), group_size=4, batch_size=2, learning_rate=5e-4, max_response_tokens=8, max_context=64,
        device="cpu", threads=1, steps=1,
    )  # fmt: skip
    return agl.Trainer(algorithm, directory=directory, progress=False, max_attempts=1, n_workers=1, **settings)


def agent(inflated: int) -> Any:
    """In its first rollouts it finds out that a reward can be as large as one likes."""
    calls = iter(range(100))

    @agl.rollout
    async def talk(task: dict[str, int], llm: agl.LLM) -> float:
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
        n = next(calls)
        if n < inflated:
            agl.emit_reward(1e6)
        return 1.0 if n % 2 else 0.5

    return talk


def test_an_attempt_with_a_reward_out_of_range_fails_and_is_not_trained(untrained_model: Path, tmp_path: Path) -> None:
    result = trainer(untrained_model, tmp_path, reward_range=(0.0, 1.0)).fit(agent(inflated=1), TASKS)
    assert result.history[-1]["train/failed_rollouts"] == 1
    assert result.history[-1]["train/reward"] <= 1
    (failed,) = [r for r in list_rollouts(tmp_path) if r["status"] == "failed"]
    (attempt,) = read_store(tmp_path, lambda store: store.query_attempts(failed["rollout_id"]))
    assert "lies outside of reward_range (0, 1): " in (attempt.error or "")
    assert "reward 1e+06 (emit)" in (attempt.error or "")
    trained = read_store(tmp_path, lambda store: store.query_trained_calls(failed["rollout_id"]))
    assert all(call.dropped for call in trained)


def test_where_all_are_out_of_range_the_run_says_so(untrained_model: Path, tmp_path: Path) -> None:
    with pytest.raises(AglError, match=r"all 8 rollouts of step 1 failed.*lies outside of reward_range"):
        trainer(untrained_model, tmp_path, reward_range=(0.0, 1.0)).fit(agent(inflated=8), TASKS)


def test_without_a_range_a_reward_out_of_all_proportion_is_said(
    untrained_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="agl"):
        trainer(untrained_model, tmp_path).fit(agent(inflated=1), TASKS)
    said = [r.getMessage() for r in caplog.records if "reward_range" in r.getMessage()]
    assert len(said) == 1
    assert "all others of its step at most 1" in said[0]

"""A whole training by verl on the CPU: it learns, on the rows that the local trainer would have, and goes on."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import algorithm, quickstart, train
from recomputed import ids_of, local_rows, whole
from recorded import found, metrics_of, record

from agl.errors import ConfigError
from agl.trainer.run.trainer import Result
from agl.trainer.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, SAVE, MORE = 4, 2, 5
CAPTURED = {"trainer.checkpoint_callback_class": "captured.Captured"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "verl"


@pytest.fixture(scope="module")
def trained(cluster: None, tiny_policy: Path, directory: Path) -> Result:
    """Four steps with worker processes, one of which is killed."""
    patch = pytest.MonkeyPatch()
    patch.setenv("KILL_ONCE", str(directory.parent / "killed"))
    try:
        return train(
            f"{Path(__file__).parent / 'deadly.py'}:agent",
            algorithm(tiny_policy, CAPTURED, steps=STEPS, checkpoint_every=SAVE, val_every=STEPS),
            directory, runners="process", n_workers=8,
        )  # fmt: skip
    finally:
        patch.undo()


def test_it_learns(trained: Result, left_clean: None) -> None:
    first, last = trained.history[0], trained.history[-1]
    assert first["step"] == 0
    assert last["step"] == STEPS
    assert last["val/reward"] > first["val/reward"] + 0.3
    assert [h["step"] for h in trained.history] == list(range(STEPS + 1))


def test_a_killed_runner_neither_skips_nor_poisons_a_step(trained: Result, directory: Path) -> None:
    assert (directory.parent / "killed").exists()
    steps = trained.history[1:]
    assert [h["train/rollouts"] for h in steps] == [128] * STEPS
    assert [h["train/failed_rollouts"] for h in steps] == [0] * STEPS
    tried = asyncio.run(_rollouts(trained.store))
    again = [r for r in tried if r.attempts > 1]
    assert again
    assert all(r.status == "succeeded" for r in tried)


def test_every_update_is_served(trained: Result) -> None:
    for entry in trained.history[1:]:
        assert entry["verl/agl/probe/logprob_diff"] < 1e-3
        # What the servers said of sampled tokens is what the trained weights say of them.
        assert entry["verl/training/rollout_probs_diff_max"] < 1e-2
    assert trained.history[2]["verl/agl/probe/moved"] > 1e-2


def test_the_rows_are_those_of_the_local_trainer(trained: Result, directory: Path) -> None:
    """Exactly the ids, masks and log-probs that merging the stored calls gives here, and its advantages to 1e-6."""
    rows = torch.load(directory / "checkpoints" / f"global_step_{SAVE}" / "rows.pt")
    ours = asyncio.run(local_rows(trained.store, SAVE))
    assert sorted(map(ids_of, rows.values())) == sorted(ids for ids, of_ids in ours.items() for _ in of_ids)
    by_ids = defaultdict(list)
    for row in rows.values():
        by_ids[ids_of(row)].append(row)
    multi = 0
    for ids, of_ids in ours.items():
        for mask, logprobs, advantages in of_ids:
            n = len(ids)
            found = [r for r in by_ids[ids] if np.allclose(whole(r, "rollout_log_probs", n), logprobs, rtol=0, atol=0)]
            assert found, "no row of verl's has these log-probs"
            row = found[0]
            assert np.array_equal(whole(row, "response_mask", n).astype(bool), mask)
            assert np.abs(whole(row, "advantages", n) - advantages).max() <= 1e-6
            multi += np.flatnonzero(np.diff(mask.astype(int)) == 1).size > 1
    assert multi, "no row merges several calls, so this shows nothing"


def test_what_was_trained_is_on_record(trained: Result) -> None:
    async def look() -> None:
        store = await open_store(trained.store)
        try:
            [rollout, *_] = await store.query_rollouts(step=0, mode="train")
            calls = await store.query_trained_calls(rollout.rollout_id)
            assert calls
            assert all(c.step == 1 and c.tokens > 0 and c.dropped is None for c in calls)
        finally:
            await store.close()

    asyncio.run(look())
    run, metrics, rollouts = asyncio.run(record(trained.store))
    assert (run.run_id, run.algorithm, run.status) == (trained.run_id, "VERL", "succeeded")
    assert (run.step, run.steps) == (STEPS, STEPS)
    assert found(metrics) == metrics_of(trained.history)
    assert len(rollouts) == 128
    assert sum(s.trained_tokens for s in rollouts) > 0
    assert trained.policy is not None
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trained.policy)
    assert model.config.vocab_size > 0


@pytest.mark.night
def test_it_goes_on(trained: Result, tiny_policy: Path, directory: Path, left_clean: None) -> None:
    """From the last checkpoint, with verl's weights, optimiser and place in the tasks, and our history."""
    (directory / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(SAVE))
    result = train(
        quickstart(), algorithm(tiny_policy, CAPTURED, steps=MORE - 1, checkpoint_every=SAVE, val_every=STEPS),
        directory, resume=True,
    )  # fmt: skip
    assert [h["step"] for h in result.history] == list(range(MORE))
    assert result.history[: SAVE + 1] == trained.history[: SAVE + 1]
    assert result.history[-1]["policy_version"] == MORE - 1
    run, metrics, _ = asyncio.run(record(result.store))
    assert (run.run_id, run.status, run.step) == (trained.run_id, "succeeded", MORE - 1)
    assert found(metrics) == metrics_of(result.history), "the steps after the checkpoint are there once"
    # The weights go on too: right after the resume the reward is what it was, far above the start's.
    assert result.history[SAVE + 1]["train/reward"] > trained.history[1]["train/reward"] + 0.2
    # The rollouts of the first step had ended in these weights and count; the next one has the tasks that it had.
    assert len(asyncio.run(_rollouts(result.store, step=SAVE))) == 128
    first, again = asyncio.run(_tasks_of(result.store, SAVE + 1))
    assert first == again


def test_a_directory_with_a_run_is_not_written_over(trained: Result, tiny_policy: Path, directory: Path) -> None:
    with pytest.raises(ConfigError, match="already has a run"):
        train(quickstart(), algorithm(tiny_policy, steps=1), directory)


# -- what the store says ----------------------------------------------------------------------------------------------


async def _rollouts(url: str, **which: Any) -> list[Any]:
    store = await open_store(url)
    try:
        return await store.query_rollouts(mode="train", **which)
    finally:
        await store.close()


async def _tasks_of(url: str, step: int) -> tuple[set[int], set[int]]:
    """Tasks of a step (from 0): of the run that was stopped, and of the one that went on."""
    rollouts = sorted(await _rollouts(url, step=step), key=lambda r: r.created_at)
    assert len(rollouts) == 256
    half = [r.metadata["task_index"] for r in rollouts]
    return set(half[:128]), set(half[-128:])

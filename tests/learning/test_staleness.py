"""Sampling overlapped with learning: calls are one update older than the weights that they train, and it learns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from miniature import GAIN, gain, train

from agl.trainer.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.night]


def test_it_learns_from_calls_that_are_one_update_old(tiny_policy: Path, tmp_path: Path) -> None:
    result = train(tiny_policy, tmp_path, max_staleness=1)
    assert gain(result) >= GAIN

    async def lags() -> dict[int, set[int]]:
        """Step -> by how many updates its calls are older than the weights that they trained."""
        store = await open_store(f"sqlite:///{tmp_path / 'run.db'}")
        try:
            lags: dict[int, set[int]] = {}
            for step in range(6):
                for rollout in await store.query_rollouts(run_id=result.run_id, step=step, mode="train"):
                    trained = {t.call_id: t for t in await store.query_trained_calls(rollout.rollout_id)}
                    for call in await store.query_calls(rollout.rollout_id):
                        if call.id in trained:
                            lag = trained[call.id].policy_version - 1 - call.policy_version
                            lags.setdefault(step, set()).add(lag)
            return lags
        finally:
            await store.close()

    assert asyncio.run(lags()) == {0: {0}} | {step: {1} for step in range(1, 6)}

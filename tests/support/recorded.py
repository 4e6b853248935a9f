"""What a store recorded of a run, next to the run's own history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agl.trainer.store import open_store
from agl.trainer.store.types import Metric, RolloutSummary, TrainingRun


async def record(url: str) -> tuple[TrainingRun, list[Metric], list[RolloutSummary]]:
    """The only run of a store, its metrics, and the rollouts of its first step."""
    store = await open_store(url)
    try:
        (run,) = await store.query_runs()
        return run, await store.query_metrics([run.run_id]), await store.query_step(run.run_id, 0)
    finally:
        await store.close()


def metrics_of(history: Sequence[dict[str, Any]]) -> set[tuple[int, str, float | None]]:
    """The metrics that a history must leave in the store."""
    return {
        (entry["step"], name, value if math.isfinite(value) else None)
        for entry in history
        for name, value in entry.items()
        if name != "step"
    }


def found(metrics: Sequence[Metric]) -> set[tuple[int, str, float | None]]:
    """The metrics of a run that are in the store, none of them twice."""
    assert len({(m.step, m.name) for m in metrics}) == len(metrics)
    return {(m.step, m.name, m.value) for m in metrics}

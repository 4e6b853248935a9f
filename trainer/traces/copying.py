"""Copies the rollouts that a run imitates into its store, so that what was trained can be looked at there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agl.mdp.types import Call
from agl.trainer.report.export.rows import Record
from agl.trainer.store.base import Store
from agl.trainer.store.types import NewRollout


async def copy_rollout(
    record: Record, store: Store, run_id: str, trained: Mapping[str, Call], metadata: Mapping[str, Any]
) -> None:
    """Copy the attempt of a rollout that is imitated, as a rollout of mode "collect" of this run, with its id. Does
    nothing if the store has it: this is the store that it came from, or the run is resumed.

    Args:
        record: of the rollout.
        store, run_id: where to; no worker asks for rollouts of the run yet.
        trained: call id -> the call with the tokens that are trained, of one attempt.
        metadata: of the copy.
    """
    source = record.rollout
    attempt = next(iter(trained.values())).attempt
    new = NewRollout(
        source.task,
        mode="collect",
        run_id=run_id,
        group=source.group,
        index=source.index,
        seed=source.seed,
        metadata={**source.metadata, **metadata},
        rollout_id=source.rollout_id,
    )
    await store.enqueue_rollouts([new])
    leased = await store.dequeue_rollout("traces", run_id=run_id)
    if leased is None:
        return
    place: dict[str, Any] = {"rollout_id": leased.rollout.rollout_id, "attempt": leased.attempt.attempt}
    calls = [trained.get(call.id, call) for call in record.calls if call.attempt == attempt]
    recorded = {call.id for call in calls}
    calls += [call for call_id, call in trained.items() if call_id not in recorded]
    await store.add_calls([replace(call, **place) for call in calls])
    await store.add_spans([replace(span, **place) for span in record.spans if span.attempt == attempt])
    await store.update_attempt(**place, status="succeeded")

"""Rollouts that a stopped run has left in the store: those that still count are reused; a run that is resumed cancels
the others before it has workers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agl.errors import AglError, RolloutError
from agl.mdp.builder import build_trajectory, require_trainable
from agl.mdp.selection import Selection
from agl.mdp.span_index import SpanIndex
from agl.trainer.runners.attempt_failures import stored_failures
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import Rollouts, Store
from agl.trainer.store.types import NewRollout, Rollout


@dataclass(eq=False)
class ResumableRollouts:
    """Rollouts of the step that a resumed run begins with, which had ended before the run was stopped.

    The resumed weights are those that sampled them, or at most `max_staleness` updates newer (in training; a validation
    is of the resumed weights), so they need not be run again. Rollouts of later steps are run again, unless they were
    to run ahead: there the weights are equal only up to rounding. Without `versions` no policy answers: agents keep
    their own models.
    """

    store: Store
    selection: Selection
    versions: Mapping[str, int]
    max_staleness: int = 0
    rollouts: dict[tuple[str, int | None, int], Rollout] = field(default_factory=dict)

    async def pop(self, new: NewRollout) -> RolloutResult | None:
        """The result that this rollout had before the run was stopped; None if it has to be run."""
        old = self.rollouts.pop((new.mode, new.step, new.index), None)
        same = ("seed", "task", "group", "resources_id")
        if old is None or any(getattr(old, name) != getattr(new, name) for name in same):
            return None
        failures = await stored_failures(self.store, old)
        if old.status == "failed":
            reason = (await self.store.query_attempts(old.rollout_id))[-1].error
            return RolloutResult(old, old.attempts, None, RolloutError(reason or "the rollout failed"), failures)
        calls = await self.store.query_calls(old.rollout_id, old.attempts)
        allowed = self.max_staleness if new.mode == "train" else 0
        for version, call in ((self.versions.get(c.policy, -1), c) for c in calls if c.policy):
            if call.newest_version > version or version - call.policy_version > allowed:
                return None
        spans = await self.store.query_spans(old.rollout_id, old.attempts)
        trajectory = build_trajectory(old.rollout_id, old.attempts, old.group, SpanIndex(calls, spans), self.selection)
        if self.versions:
            try:
                require_trainable(trajectory, self.selection)
            except AglError:
                return None
        return RolloutResult(old, old.attempts, trajectory, None, failures)


async def reconcile(
    store: Store,
    run_id: str,
    step: int,
    selection: Selection,
    versions: Mapping[str, int],
    max_staleness: int = 0,
    first: int | None = None,
) -> ResumableRollouts:
    """Bring the store in line with the weights that a run resumes with: calls that were trained in later steps are
    recorded as not trained.

    Args:
        step: how many steps are done in those weights.
        versions: of those weights, by policy.
        max_staleness: how many updates older the weights of the next step's rollouts may be. Above 1, those of other
            steps may be trained in it.
        first: the earliest step among them; None = `step`.
    """
    resumable = ResumableRollouts(store, selection, versions, max_staleness)
    reason = f"the run was stopped, and resumes from step {step}"
    for later in itertools.count(step if first is None else first):
        rollouts = await store.query_rollouts(run_id=run_id, step=later)
        for rollout in rollouts:
            trained = await store.query_trained_calls(rollout.rollout_id)
            counted = any(t.step <= step for t in trained)
            if (later == step or max_staleness > 1) and not counted and rollout.status == "succeeded":
                resumable.rollouts[rollout.mode, rollout.step, rollout.index] = rollout
            undone = [
                replace(t, tokens=0, sequence=None, dropped=reason)
                for t in trained
                if t.step > step and t.dropped is None
            ]
            await store.add_trained_calls(run_id, undone)
        # The validation after a step has the number of the next one, which may not have begun.
        if not rollouts and later > step:
            return resumable
    return resumable


async def replayable(store: Store, run_id: str, selection: Selection, recorded: int) -> ResumableRollouts:
    """Every rollout of a run without policies that had succeeded, and those that had failed in the first `recorded`
    steps of its history. A run that failures have ended tries those again."""
    resumable = ResumableRollouts(store, selection, {})
    for rollout in await store.query_rollouts(run_id=run_id, status=["succeeded", "failed"]):
        # The entry of a training step counts it as done.
        entry = (rollout.step or 0) + (rollout.mode == "train")
        if rollout.status == "succeeded" or entry <= recorded:
            resumable.rollouts[rollout.mode, rollout.step, rollout.index] = rollout
    return resumable


async def cancel_unfinished(store: Rollouts, run_id: str) -> None:
    """Cancel the rollouts of a run that have not ended, which nobody waits for."""
    unfinished = await store.query_rollouts(run_id=run_id, status=["queuing", "preparing", "running"])
    if unfinished:
        await store.cancel_rollouts([r.rollout_id for r in unfinished])

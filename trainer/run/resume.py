"""What a run that was stopped has left in the store: rollouts that still count are taken up, the others settled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agl.errors import AglError
from agl.mdp.builder import build_trajectory, require_trainable
from agl.mdp.selection import Selection
from agl.mdp.span_index import SpanIndex
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import NewRollout, Rollout, Store


@dataclass(eq=False)
class ResumableRollouts:
    """Rollouts of the step that a resumed run begins with, which ended before it was stopped.

    Its weights are those that sampled them, so they need not be run again; of later steps that holds only up to
    rounding, so those are.
    """

    store: Store
    selection: Selection
    versions: Mapping[str, int]
    rollouts: dict[tuple[str, int | None, int], Rollout] = field(default_factory=dict)

    async def take(self, new: NewRollout) -> RolloutResult | None:
        """What this rollout came to before the run was stopped; None if it has to be run."""
        old = self.rollouts.pop((new.mode, new.step, new.index), None)
        if old is None or (old.seed, old.task, old.group) != (new.seed, new.task, new.group):
            return None
        calls = await self.store.query_calls(old.rollout_id, old.attempts)
        if any(c.policy is not None and self.versions.get(c.policy) != c.policy_version for c in calls):
            return None
        spans = await self.store.query_spans(old.rollout_id, old.attempts)
        built = build_trajectory(old.rollout_id, old.attempts, old.group, SpanIndex(calls, spans), self.selection)
        try:
            require_trainable(built, self.selection)
        except AglError:
            return None
        return RolloutResult(old, old.attempts, built, None)


async def reconcile(
    store: Store, run_id: str, step: int, selection: Selection, versions: Mapping[str, int]
) -> ResumableRollouts:
    """Settle what a stopped run left: what was not finished is cancelled, and what was trained in steps whose weights
    are lost says so.

    Args:
        step: how many steps are done in the weights that the run goes on with. versions: of those weights.
    """
    left = ResumableRollouts(store, selection, versions)
    unfinished = await store.query_rollouts(run_id=run_id, status=["queuing", "preparing", "running"])
    if unfinished:
        await store.cancel_rollouts([r.rollout_id for r in unfinished])
    lost = f"the run was stopped, and goes on from step {step}"
    for later in itertools.count(step):
        rollouts = await store.query_rollouts(run_id=run_id, step=later)
        for rollout in rollouts:
            if later == step and rollout.status == "succeeded":
                left.rollouts[rollout.mode, rollout.step, rollout.index] = rollout
            trained = [
                replace(t, tokens=0, sequence=None, dropped=lost)
                for t in await store.query_trained_calls(rollout.rollout_id)
                if t.step > step and t.dropped is None
            ]
            await store.add_trained_calls(run_id, trained)
        # The validation after a step has the number of the next one, which may not have begun.
        if not rollouts and later > step:
            return left
    return left

"""Results of rollouts, of which verl's rows are made."""

from __future__ import annotations

from agl.mdp.builder import AttemptTrajectory
from agl.mdp.types import Trajectory
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.types import Rollout, RolloutConfig


def result(t: Trajectory, k: int = 0) -> RolloutResult:
    """A rollout that came to this."""
    rewards = tuple((r, x.call.id) for x in t.transitions for r in x.rewards) + tuple((r, None) for r in t.rewards)
    rollout = Rollout(
        rollout_id=t.rollout_id, task={}, mode="train", status="succeeded", run_id="run", step=6, group=t.group,
        index=k, seed=0, resources_id=None, priority=0, config=RolloutConfig(), metadata={}, attempts=1, created_at=0.0,
        ended_at=1.0,
    )  # fmt: skip
    return RolloutResult(rollout, 1, AttemptTrajectory(t, rewards, ("agent",), (), ()), None)

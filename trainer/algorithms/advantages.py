"""From trajectories to advantages: returns by the credit rule, compared within the task's group.

Invariant: a rollout counts once in its group's statistics, however many calls it made, and statistics are computed
before anything is dropped; what is dropped is a whole group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agl.credit import Credit, returns
from agl.mdp import Trajectory

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class ScoredCall:
    """A call's numbers, as `TrainedCall` records them."""

    call_id: str
    rollout_id: str
    reward: float
    return_: float
    advantage: float
    dropped: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A step's trajectories with their advantages.

    Attributes:
        kept: trajectories to train. advantages: call id -> advantage, for all of their calls.
        calls: every call's numbers, dropped ones included.
        dropped_groups: groups with fewer than two rollouts left. zero_variance_groups: with nothing to compare.
    """

    kept: tuple[Trajectory, ...]
    advantages: Mapping[str, float]
    calls: tuple[ScoredCall, ...]
    dropped_groups: int
    zero_variance_groups: int


def score(trajectories: Sequence[Trajectory], credit: Credit, *, normalize_std: bool = True) -> Scored:
    """Advantages of every call: (its return - the group's mean) / the group's standard deviation.

    The group is that of one task and one policy; a rollout enters its statistics once, with the mean of its calls'
    returns. The standard deviation is the sample's (n - 1), as in verl's `compute_grpo_outcome_advantage`.

    Args:
        trajectories: of one step.
        credit: trajectory -> one return per call.
        normalize_std: False leaves out the division.
    """
    groups: dict[tuple[str, str], list[tuple[Trajectory, list[float]]]] = {}
    for trajectory in trajectories:
        values = returns(credit, trajectory)
        groups.setdefault((trajectory.group, trajectory.policy), []).append((trajectory, values))
    kept: list[Trajectory] = []
    advantages: dict[str, float] = {}
    calls: list[ScoredCall] = []
    dropped_groups = zero = 0
    for members in groups.values():
        per_rollout = np.asarray([np.mean(v) for _, v in members], dtype=np.float64)
        mean = float(per_rollout.mean())
        std = float(per_rollout.std(ddof=1)) if len(members) > 1 else 0.0
        why = "its group has no other rollout to compare with" if len(members) < 2 else None
        dropped_groups += why is not None
        zero += why is None and std == 0.0
        for trajectory, values in members:
            for transition, value in zip(trajectory.transitions, values, strict=True):
                advantage = value - mean
                if normalize_std:
                    advantage /= std + EPSILON
                advantage = float(np.float32(0.0 if why else advantage))
                reason = why or (None if transition.trainable else f"its answer was {transition.call.finish_reason}")
                calls.append(
                    ScoredCall(transition.call.id, trajectory.rollout_id, transition.reward, value, advantage, reason)
                )
                advantages[transition.call.id] = advantage
            if why is None:
                kept.append(trajectory)
    return Scored(tuple(kept), advantages, tuple(calls), dropped_groups, zero)

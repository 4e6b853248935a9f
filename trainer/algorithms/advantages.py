"""From trajectories to advantages: returns by the credit rule, compared within the task's group.

Invariant: a rollout counts once in its group's statistics, however many calls it made, and statistics are computed
before anything is dropped; what is dropped is a whole group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agl.credit import Credit, returns
from agl.mdp import Trajectory
from agl.trainer.objectives.advantages import group_statistics, relative


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
    returns. With one call per rollout this is `grpo_advantages`.

    Args:
        trajectories: of one step.
        credit: trajectory -> one return per call.
        normalize_std: False leaves out the division.
    """
    values = [returns(credit, t) for t in trajectories]
    groups = [(t.group, t.policy) for t in trajectories]
    means, deviations = group_statistics([_mean(v) for v in values], groups)
    size = Counter(groups)
    kept: list[Trajectory] = []
    advantages: dict[str, float] = {}
    calls: list[ScoredCall] = []
    for trajectory, group, own, mean, deviation in zip(trajectories, groups, values, means, deviations, strict=True):
        alone = size[group] < 2
        # Rollouts that came to the same still differ call by call under some credit rules: nothing to divide by.
        spread = normalize_std and deviation > 0
        relative_to_group = relative(own, float(mean), float(deviation), normalize_std=spread)
        for transition, value, advantage in zip(trajectory.transitions, own, relative_to_group, strict=True):
            call = transition.call
            reason = None if transition.trainable else f"its answer was {call.finish_reason}"
            if alone:
                reason, advantage = "its group has no other rollout to compare with", 0.0
            advantages[call.id] = float(advantage)
            calls.append(
                ScoredCall(call.id, trajectory.rollout_id, transition.reward, value, advantages[call.id], reason)
            )
        if not alone:
            kept.append(trajectory)
    level = {group for group, deviation in zip(groups, deviations, strict=True) if deviation == 0.0}
    return Scored(tuple(kept), advantages, tuple(calls), sum(n < 2 for n in size.values()), len(level))


def _mean(values: Sequence[float]) -> float:
    """The mean, exactly their value where all are equal: a rollout's number of calls must not show in its rounding."""
    return float(np.clip(np.mean(values), min(values), max(values)))

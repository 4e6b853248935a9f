"""Credit: how a trajectory's rewards become one return per LLM call. Pure functions of a trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agl.errors import RewardError
from agl.mdp import Trajectory

Credit = Callable[[Trajectory], Sequence[float]]
"""Trajectory of C transitions -> C returns, float64."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every call gets the trajectory's whole reward: the rollout's own plus that of all its calls."""

    def __call__(self, trajectory: Trajectory) -> list[float]:
        return [trajectory.total_reward] * len(trajectory.transitions)


def returns(credit: Credit, trajectory: Trajectory) -> list[float]:
    """The returns that a credit rule gives, checked.

    Raises:
        RewardError: not one finite number per transition.
    """
    values = [float(v) for v in credit(trajectory)]
    where = {"rollout": trajectory.rollout_id, "attempt": trajectory.attempt}
    if len(values) != len(trajectory.transitions):
        raise RewardError(
            f"credit rule {credit!r} gave {len(values)} returns for {len(trajectory.transitions)} calls",
            hint="return one number per transition",
            **where,
        )
    for transition, value in zip(trajectory.transitions, values, strict=True):
        if not math.isfinite(value):
            raise RewardError(f"credit rule {credit!r} gave the return {value}", agent=transition.call.agent, **where)
    return values

"""Advantages from returns, which are compared within a task's group or over the whole batch.

Shapes in names: R rollouts, G rollouts of one group, C calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from agl.errors import RewardError
from agl.mdp.types import FloatArray

FloatArray64 = npt.NDArray[np.float64]


def group_statistics(
    returns_R: FloatArray64 | Sequence[float], groups_R: Sequence[Hashable]
) -> tuple[FloatArray64, FloatArray64]:
    """Mean and sample standard deviation (R - 1) of each rollout's group.

    A group of one has nothing to compare with; its mean is taken as 0 and its deviation as 1, as in verl. Where all
    returns of a group are equal, its mean is that return and its deviation 0, free of rounding.

    Args:
        returns_R: float64, one per rollout.
        groups_R: the group of each.

    Returns:
        (mean, deviation), float64 [R] each.

    Raises:
        RewardError: a return is not finite.
        ValueError: not one group per return.
    """
    values_R = np.asarray(returns_R, dtype=np.float64)
    if values_R.ndim != 1 or values_R.size != len(groups_R):
        raise ValueError(f"returns of shape {values_R.shape} but {len(groups_R)} groups")
    if not np.isfinite(values_R).all():
        bad = int(np.flatnonzero(~np.isfinite(values_R))[0])
        raise RewardError(
            f"the return of rollout {bad} of {values_R.size} is {values_R[bad]}",
            hint="rewards must be finite numbers: check the reward function for this group's task",
            group=groups_R[bad],
        )
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups_R):
        members.setdefault(group, []).append(i)
    means_R, deviations_R = np.zeros_like(values_R), np.ones_like(values_R)
    for rollouts in members.values():
        values_G = values_R[rollouts]
        if len(rollouts) > 1:
            equal = (values_G == values_G[0]).all()
            means_R[rollouts] = values_G[0] if equal else values_G.mean()
            deviations_R[rollouts] = 0.0 if equal else values_G.std(ddof=1)
    return means_R, deviations_R


def relative(
    values: FloatArray64 | Sequence[float],
    mean: FloatArray64 | float,
    deviation: FloatArray64 | float,
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> FloatArray:
    """(value - mean) / (deviation + epsilon), float32 of the shape of `values`; without the division where
    `normalize_std` is False (Dr. GRPO, arXiv 2503.20783)."""
    centred = np.asarray(values, dtype=np.float64) - mean
    return np.asarray(centred / (deviation + epsilon) if normalize_std else centred, dtype=np.float32)


def grpo_advantages(
    returns_R: FloatArray64 | Sequence[float],
    groups_R: Sequence[Hashable],
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> FloatArray:
    """Group-relative advantages: (return - mean of its group) / (standard deviation of its group + epsilon).

    A rollout counts once, however many calls it made: pass one return per rollout and give the result to each of its
    calls.

    Args:
        returns_R, groups_R: as in `group_statistics`, which raises the same errors.
        normalize_std: False leaves the division out (Dr. GRPO, arXiv 2503.20783).
        epsilon: keeps the division finite where all returns are equal.

    Returns:
        float32 [R].

    Source: GRPO, arXiv 2402.03300, eq. 4, with the sample standard deviation (R - 1), as verl's
    `compute_grpo_outcome_advantage`.
    """
    means_R, deviations_R = group_statistics(returns_R, groups_R)
    return relative(returns_R, means_R, deviations_R, normalize_std=normalize_std, epsilon=epsilon)


def leave_one_out(
    values: FloatArray64 | Sequence[float], rollout_mean: float, mean: FloatArray64 | float, size: int
) -> FloatArray:
    """value - the mean of the group's other rollouts, float32 of the shape of `values`.

    Args:
        values: returns of one rollout's calls. rollout_mean: their mean, with which the rollout counts in its group.
        mean: of the group. size: rollouts in the group, at least 2.

    Source: RLOO, arXiv 2402.14740, eq. 5; with one call per rollout, verl's `compute_rloo_outcome_advantage`.
    """
    others = (size * np.asarray(mean, dtype=np.float64) - rollout_mean) / (size - 1)
    return np.asarray(np.asarray(values, dtype=np.float64) - others, dtype=np.float32)


def whiten(values_C: FloatArray64 | Sequence[float], tokens_C: Sequence[int] | npt.NDArray[np.int64]) -> FloatArray:
    """(value - mean) / sqrt(variance + 1e-8), float32 [C], over the tokens of a batch.

    Args:
        values_C: one per call, which all of its tokens share. tokens_C: how many tokens the call has.

    Source: REINFORCE++, arXiv 2501.03262, eq. 3; verl's `masked_whiten` (sample variance, N - 1).
    """
    x_C, n_C = np.asarray(values_C, dtype=np.float64), np.asarray(tokens_C, dtype=np.float64)
    total = n_C.sum()
    if total <= 1:
        return np.zeros(x_C.shape, dtype=np.float32)
    mean = (n_C * x_C).sum() / total
    variance = (n_C * (x_C - mean) ** 2).sum() / (total - 1)
    return np.asarray((x_C - mean) / np.sqrt(variance + 1e-8), dtype=np.float32)

"""Advantages from returns: a rollout's are compared within its group, or with those of the whole batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from agl.errors import RewardError
from agl.mdp.types import FloatArray

FloatArray64 = npt.NDArray[np.float64]


def group_statistics(
    returns: FloatArray64 | Sequence[float], groups: Sequence[Hashable]
) -> tuple[FloatArray64, FloatArray64]:
    """Mean and sample standard deviation (N - 1) of each rollout's group.

    A group of one has nothing to compare with; its mean is taken as 0 and its deviation as 1, as in verl. Where all
    returns of a group are equal, its mean is that return and its deviation 0, free of rounding.

    Args:
        returns: float64 [N], one per rollout.
        groups: [N], the group of each.

    Returns:
        (mean, deviation), float64 [N] each.

    Raises:
        RewardError: a return is not finite.
        ValueError: not one group per return.
    """
    values = np.asarray(returns, dtype=np.float64)
    if values.ndim != 1 or values.size != len(groups):
        raise ValueError(f"returns of shape {values.shape} but {len(groups)} groups")
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise RewardError(
            f"the return of rollout {bad} of {values.size} is {values[bad]}",
            hint="rewards must be finite numbers: check the reward function for this group's task",
            group=groups[bad],
        )
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    means, deviations = np.zeros_like(values), np.ones_like(values)
    for rows in members.values():
        of_group = values[rows]
        if len(rows) > 1:
            equal = (of_group == of_group[0]).all()
            means[rows] = of_group[0] if equal else of_group.mean()
            deviations[rows] = 0.0 if equal else of_group.std(ddof=1)
    return means, deviations


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
    returns: FloatArray64 | Sequence[float],
    groups: Sequence[Hashable],
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> FloatArray:
    """Group-relative advantages: (return - mean of its group) / (standard deviation of its group + epsilon).

    A rollout counts once, however many calls it made: pass one return per rollout and give the result to each of its
    calls.

    Args:
        returns, groups: as in `group_statistics`, which raises the same errors.
        normalize_std: False leaves the division out (Dr. GRPO, arXiv 2503.20783).
        epsilon: keeps the division finite where all returns are equal.

    Returns:
        float32 [N].

    Source: GRPO, arXiv 2402.03300, eq. 4, with the sample standard deviation (N - 1), as verl's
    `compute_grpo_outcome_advantage`.
    """
    means, deviations = group_statistics(returns, groups)
    return relative(returns, means, deviations, normalize_std=normalize_std, epsilon=epsilon)


def leave_one_out(
    values: FloatArray64 | Sequence[float], own: float, mean: FloatArray64 | float, size: int
) -> FloatArray:
    """value - the mean of the group's other rollouts, float32 of the shape of `values`.

    Args:
        values: returns of one rollout's calls. own: their mean, with which the rollout counts in its group.
        mean: of the group. size: rollouts in the group, at least 2.

    Source: RLOO, arXiv 2402.14740, eq. 5; with one call per rollout, verl's `compute_rloo_outcome_advantage`.
    """
    others = (size * np.asarray(mean, dtype=np.float64) - own) / (size - 1)
    return np.asarray(np.asarray(values, dtype=np.float64) - others, dtype=np.float32)


def whiten(values: FloatArray64 | Sequence[float], n_tokens: Sequence[int] | npt.NDArray[np.int64]) -> FloatArray:
    """(value - mean) / sqrt(variance + 1e-8), float32 [C], over the tokens of a batch.

    Args:
        values: [C], one per call, which all of its tokens share. n_tokens: [C], how many there are.

    Source: REINFORCE++, arXiv 2501.03262, eq. 3; verl's `masked_whiten` (sample variance, N - 1).
    """
    x, n = np.asarray(values, dtype=np.float64), np.asarray(n_tokens, dtype=np.float64)
    total = n.sum()
    if total <= 1:
        return np.zeros(x.shape, dtype=np.float32)
    mean = (n * x).sum() / total
    variance = (n * (x - mean) ** 2).sum() / (total - 1)
    return np.asarray((x - mean) / np.sqrt(variance + 1e-8), dtype=np.float32)

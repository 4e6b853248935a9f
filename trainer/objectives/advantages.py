"""Advantages from returns: one number per rollout, compared within its group and nowhere else."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from agl.errors import RewardError
from agl.mdp import FloatArray


def grpo_advantages(
    returns: npt.NDArray[np.float64] | Sequence[float],
    groups: Sequence[Hashable],
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> FloatArray:
    """Group-relative advantages: (return - mean of its group) / (standard deviation of its group + epsilon).

    A rollout counts once, however many calls it made: pass one return per rollout and give the result to each of its
    calls. A group of one has nothing to compare with; its mean is taken as 0 and its deviation as 1, as in verl.

    Args:
        returns: float64 [N], one per rollout.
        groups: [N], the group of each.
        normalize_std: False leaves the division out (Dr. GRPO, arXiv 2503.20783).
        epsilon: keeps the division finite where all returns are equal.

    Returns:
        float32 [N].

    Raises:
        RewardError: a return is not finite.
        ValueError: not one group per return.

    Source: GRPO, arXiv 2402.03300, eq. 4, with the sample standard deviation (N - 1), as verl's
    `compute_grpo_outcome_advantage`.
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
    advantages = np.empty_like(values)
    for rows in members.values():
        of_group = values[rows]
        mean, std = (of_group.mean(), of_group.std(ddof=1)) if len(rows) > 1 else (0.0, 1.0)
        centred = of_group - mean
        advantages[rows] = centred / (std + epsilon) if normalize_std else centred
    return advantages.astype(np.float32)

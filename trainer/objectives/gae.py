"""Generalised advantage estimation over the tokens of one answer, and the loss of the value head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agl.mdp.types import FloatArray


def gae(
    values: FloatArray, return_: float, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Advantages of an answer's tokens, and what their values should have been.

    Args:
        values: float32 [n], the value head's estimate before each token.
        return_: what the answer as a whole earned, counted at its last token.
        gamma, lam: discount per token, and the weight of later estimates, both in [0, 1].

    Returns:
        (advantages, targets), float64 [n] each; targets = advantages + values.

    Source: arXiv 1506.02438, eq. 16; verl's `compute_gae_advantage_return` before its whitening.
    """
    v = np.asarray(values, dtype=np.float64)
    advantages = np.empty_like(v)
    ahead, following = 0.0, 0.0
    for t in range(v.size - 1, -1, -1):
        reward = return_ if t == v.size - 1 else 0.0
        ahead = reward + gamma * following - v[t] + gamma * lam * ahead
        advantages[t] = ahead
        following = v[t]
    return advantages, advantages + v


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None = 0.5) -> Tensor:
    """Half the squared error of the value head per token, float32 [n]; the larger of it and that of the values held
    within `clip` of the old ones.

    Args:
        values: float32 [n], carries the gradient. old_values: before the update. targets: what they should be.
        clip: None for none.

    Source: PPO's reference implementation; verl's `compute_value_loss`.
    """
    error = (values - targets).square()
    if clip is not None:
        held = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        error = torch.maximum(error, (held - targets).square())
    return 0.5 * error

"""Generalised advantage estimation over the tokens of one answer, and the loss of the value head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agl.mdp.types import FloatArray


def gae(
    values_T: FloatArray, return_: float, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Advantages of an answer's T tokens, and the targets of their values.

    Args:
        values_T: float32, the value head's estimate before each token.
        return_: what the answer as a whole earned, counted at its last token.
        gamma, lam: discount per token, and the weight of later estimates, both in [0, 1].

    Returns:
        (advantages, targets), float64 [T] each; targets = advantages + values.

    Source: arXiv 1506.02438, eq. 16; verl's `compute_gae_advantage_return` before its whitening.
    """
    estimates_T = np.asarray(values_T, dtype=np.float64)
    advantages_T = np.empty_like(estimates_T)
    advantage = 0.0
    next_estimate = 0.0
    for t in range(estimates_T.size - 1, -1, -1):
        reward = return_ if t == estimates_T.size - 1 else 0.0
        advantage = reward + gamma * next_estimate - estimates_T[t] + gamma * lam * advantage
        advantages_T[t] = advantage
        next_estimate = estimates_T[t]
    return advantages_T, advantages_T + estimates_T


def value_loss(values_N: Tensor, old_values_N: Tensor, targets_N: Tensor, clip: float | None = 0.5) -> Tensor:
    """Half the squared error of the value head per token, float32 [N]; the larger one of the values' error and of that
    of the values clipped to within `clip` of the old ones.

    Args:
        values_N: float32, carries the gradient.
        old_values_N: before the update.
        targets_N: what they should be.
        clip: None for none.

    Source: PPO's reference implementation; verl's `compute_value_loss`.
    """
    error_N = (values_N - targets_N).square()
    if clip is not None:
        clipped_N = torch.minimum(torch.maximum(values_N, old_values_N - clip), old_values_N + clip)
        error_N = torch.maximum(error_N, (clipped_N - targets_N).square())
    return 0.5 * error_N

"""Importance sampling: the weight of each token where another distribution than the learner's sampled it."""

from __future__ import annotations

import numpy as np

from agl.mdp.types import FloatArray, IntArray
from agl.trainer.objectives import MAX_LOG_RATIO, RolloutIS


def importance_weights(
    log_ratios_N: FloatArray, calls_N: IntArray, level: RolloutIS, threshold: float | tuple[float, float]
) -> FloatArray:
    """Learner's probability / behaviour's probability, bounded, float32 [N].

    Args:
        log_ratios_N: float32, learner's minus behaviour's log-prob of each sampled token.
        calls_N: int, the answer that each token belongs to.
        level: "token": of each token alone; "sequence": of its whole answer, the product over its tokens; "geometric":
            the geometric mean over these.
        threshold: the largest weight, above 0, to which larger ones are truncated; or (lowest, largest), outside of
            which a weight is 0, so that those tokens are not trained.

    Source: arXiv 2508.10192 and "Your efficient RL framework secretly brings you off-policy training" (Yao et al.,
    2025); with two bounds, IcePop, arXiv 2510.18855; verl's `compute_rollout_correction_weights` and
    `compute_rollout_rejection_mask`.
    """
    ratios_N = np.asarray(log_ratios_N, dtype=np.float64)
    if level != "token" and ratios_N.size:
        _, answer_N = np.unique(calls_N, return_inverse=True)
        sums_A = np.bincount(answer_N, weights=ratios_N)
        ratios_N = (sums_A / np.bincount(answer_N) if level == "geometric" else sums_A)[answer_N]
    weights_N = np.exp(np.clip(ratios_N, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if isinstance(threshold, (int, float)):
        return np.minimum(weights_N, threshold).astype(np.float32)
    lowest, largest = threshold
    return np.where((weights_N >= lowest) & (weights_N <= largest), weights_N, 0.0).astype(np.float32)

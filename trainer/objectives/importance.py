"""Truncated importance sampling: the weight of each token where another distribution than the learner's sampled it."""

from __future__ import annotations

import numpy as np

from agl.mdp.types import FloatArray, IntArray
from agl.trainer.objectives import MAX_LOG_RATIO, RolloutIS


def truncated_importance(log_ratios_N: FloatArray, calls_N: IntArray, level: RolloutIS, threshold: float) -> FloatArray:
    """min(learner's probability / behaviour's probability, threshold), float32 [N].

    Args:
        log_ratios_N: float32, learner's minus behaviour's log-prob of each sampled token.
        calls_N: int, the answer that each token belongs to.
        level: "token": of each token alone; "sequence": of its whole answer, the product over its tokens.
        threshold: the largest weight, above 0.

    Source: arXiv 2508.10192 and "Your efficient RL framework secretly brings you off-policy training" (Yao et al.,
    2025); verl's `compute_rollout_correction_weights`.
    """
    ratios_N = np.asarray(log_ratios_N, dtype=np.float64)
    if level == "sequence":
        _, answer_N = np.unique(calls_N, return_inverse=True)
        ratios_N = np.bincount(answer_N, weights=ratios_N)[answer_N] if ratios_N.size else ratios_N
    weights_N = np.exp(np.clip(ratios_N, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return np.minimum(weights_N, threshold).astype(np.float32)

"""Truncated importance sampling: what each token counts when another distribution than the learner's sampled it."""

from __future__ import annotations

import numpy as np

from agl.mdp.types import FloatArray, IntArray
from agl.trainer.objectives import RolloutIS

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond this are cut before their exponential, as in verl."""


def truncated_importance(log_ratios: FloatArray, calls: IntArray, level: RolloutIS, threshold: float) -> FloatArray:
    """min(learner's probability / behaviour's probability, threshold), float32 [n].

    Args:
        log_ratios: float32 [n], learner's minus behaviour's log-prob of each sampled token.
        calls: int [n], which answer each token belongs to.
        level: "token": of each token alone; "sequence": of its whole answer, the product over its tokens.
        threshold: the largest weight, above 0.

    Source: arXiv 2508.10192 and "Your efficient RL framework secretly brings you off-policy training" (Yao et al.,
    2025); verl's `compute_rollout_correction_weights`.
    """
    ratios = np.asarray(log_ratios, dtype=np.float64)
    if level == "sequence":
        _, where = np.unique(calls, return_inverse=True)
        ratios = np.bincount(where, weights=ratios)[where] if ratios.size else ratios
    weights = np.exp(np.clip(ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return np.minimum(weights, threshold).astype(np.float32)

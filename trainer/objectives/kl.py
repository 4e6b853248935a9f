"""Estimates of the KL divergence from a reference policy, one per sampled token."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from agl.trainer.objectives import MAX_LOG_RATIO, KLKind

MAX_K3 = 10.0
"""Bound on k3, as in verl: its exponential would let one token outweigh a batch."""


def kl_penalty(logprobs_N: Tensor, ref_logprobs_N: Tensor, kind: KLKind = "k3") -> Tensor:
    """KL(policy || reference), estimated at the sampled token; float32 [N], with the gradient of the formula itself.

    Args:
        logprobs_N, ref_logprobs_N: float32, of the sampled tokens.
        kind: with r = ref_logprobs - logprobs: "k1" is -r (unbiased, can be negative), "k2" is r^2 / 2 (its gradient is
            that of the KL), "k3" is exp(r) - r - 1 (unbiased, never negative, low variance; verl's `low_var_kl`).

    Source: J. Schulman, "Approximating KL divergence" (2020), joschu.net/blog/kl-approx.html; verl's `kl_penalty`.
    """
    r_N = ref_logprobs_N - logprobs_N
    match kind:
        case "k1":
            return -r_N
        case "k2":
            return 0.5 * r_N.square()
        case "k3":
            r_N = r_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return torch.clamp(r_N.exp() - r_N - 1, -MAX_K3, MAX_K3)
        case _:
            assert_never(kind)

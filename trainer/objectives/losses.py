"""Per-token losses on log-probs: no mask, no mean; which tokens count and how much is the reduction's business."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond this are cut, so that their exponential stays finite (as in verl)."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """The clipped policy objective, per token.

    Attributes:
        loss: float32 [n], to be minimised.
        log_ratio: float32 [n], new minus old log-prob, without gradient.
        clipped: bool [n], where the upper or lower clip took the gradient away.
        dual_clipped: bool [n], where the dual clip did.
    """

    loss: Tensor
    log_ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
) -> PolicyLoss:
    """PPO's clipped objective on importance ratios against the policy that sampled.

    Args:
        logprobs: float32 [n], of the sampled tokens under the policy in training; carries the gradient.
        old_logprobs: float32 [n], when they were sampled.
        advantages: float32 [n].
        clip_low, clip_high: the ratio counts between 1 - clip_low and 1 + clip_high.
        clip_c: dual clip: with a negative advantage the loss is at most -clip_c * advantage; > 1, None for none.

    Source: PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729, eq. 5; verl's `compute_policy_loss_vanilla`.
    """
    log_ratio = torch.clamp(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, limited)
    clipped = limited > plain
    dual_clipped = torch.zeros_like(clipped)
    if clip_c is not None:
        bound = -advantages * clip_c
        dual_clipped = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return PolicyLoss(loss, log_ratio.detach(), clipped, dual_clipped)


MAX_SEQUENCE_LOG_RATIO = 10.0
"""Bound on GSPO's log-ratio, as in verl."""


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    calls: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """The clipped objective on the importance ratio of whole answers: the geometric mean of their tokens' ratios.

    Args:
        logprobs, old_logprobs, advantages: as in `policy_loss`.
        calls: int64 [n], from 0: which answer each token belongs to. All of an answer's trained tokens must be here.
        clip_low, clip_high: the ratio counts between 1 - clip_low and 1 + clip_high.

    Source: GSPO, arXiv 2507.18071, section 4.3 (GSPO-token); verl's `compute_policy_loss_gspo`.
    """
    log_ratio = (logprobs - old_logprobs).detach()
    n = int(calls.max()) + 1 if calls.numel() else 0
    total = torch.zeros(n, dtype=log_ratio.dtype, device=log_ratio.device).index_add_(0, calls, log_ratio)
    mean = total / torch.bincount(calls, minlength=n).clamp(min=1)
    # The value is the answer's ratio; the gradient is that of the token's own log-prob.
    ratio = torch.clamp(logprobs - logprobs.detach() + mean[calls], max=MAX_SEQUENCE_LOG_RATIO).exp()
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = limited > plain
    return PolicyLoss(torch.maximum(plain, limited), log_ratio, clipped, torch.zeros_like(clipped))


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of each row of logits [n, V]; float32 [n]."""
    logits = logits.float()
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)

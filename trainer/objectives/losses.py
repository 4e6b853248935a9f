"""Per-token losses on log-probs: no mask, no mean; which tokens count and how much is decided by the reduction.

Shapes in names: N trained tokens, C calls, V ids of the vocabulary, P pairs of rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from agl.trainer.objectives import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """The clipped policy objective, per token.

    Attributes:
        loss: float32 [N], to be minimised.
        log_ratio: float32 [N], new minus old log-prob, without gradient.
        clipped: bool [N], where the upper or lower clip took the gradient away.
        dual_clipped: bool [N], where the dual clip did.
    """

    loss: Tensor
    log_ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
) -> PolicyLoss:
    """PPO's clipped objective on importance ratios against the policy that sampled.

    Args:
        logprobs_N: float32, of the sampled tokens under the policy in training; carries the gradient.
        old_logprobs_N: float32, when they were sampled.
        advantages_N: float32.
        clip_low, clip_high: the ratio counts between 1 - clip_low and 1 + clip_high.
        clip_c: dual clip: with a negative advantage the loss is at most -clip_c * advantage; > 1, None for none.

    Source: PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729, eq. 5; verl's `compute_policy_loss_vanilla`.
    """
    log_ratio_N = torch.clamp(logprobs_N - old_logprobs_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    plain_N = -advantages_N * ratio_N
    limited_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = torch.maximum(plain_N, limited_N)
    clipped_N = limited_N > plain_N
    dual_clipped_N = torch.zeros_like(clipped_N)
    if clip_c is not None:
        bound_N = -advantages_N * clip_c
        dual_clipped_N = (advantages_N < 0) & (loss_N > bound_N)
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, bound_N), loss_N)
    return PolicyLoss(loss_N, log_ratio_N.detach(), clipped_N, dual_clipped_N)


MAX_SEQUENCE_LOG_RATIO = 10.0
"""Bound on GSPO's log-ratio, as in verl."""


def gspo_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    calls_N: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """The clipped objective on the importance ratio of whole answers: the geometric mean of their tokens' ratios.

    Args:
        logprobs_N, old_logprobs_N, advantages_N: as in `policy_loss`.
        calls_N: int64, from 0: the answer that each token belongs to. All of an answer's trained tokens must be here.
        clip_low, clip_high: the ratio counts between 1 - clip_low and 1 + clip_high.

    Source: GSPO, arXiv 2507.18071, section 4.3 (GSPO-token); verl's `compute_policy_loss_gspo`.
    """
    log_ratio_N = (logprobs_N - old_logprobs_N).detach()
    n_calls = int(calls_N.max()) + 1 if calls_N.numel() else 0
    total_C = torch.zeros(n_calls, dtype=log_ratio_N.dtype, device=log_ratio_N.device)
    total_C = total_C.index_add_(0, calls_N, log_ratio_N)
    mean_C = total_C / torch.bincount(calls_N, minlength=n_calls).clamp(min=1)
    # The value is the answer's ratio; the gradient is that of the token's own log-prob.
    ratio_N = torch.clamp(logprobs_N - logprobs_N.detach() + mean_C[calls_N], max=MAX_SEQUENCE_LOG_RATIO).exp()
    plain_N = -advantages_N * ratio_N
    limited_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    clipped_N = limited_N > plain_N
    return PolicyLoss(torch.maximum(plain_N, limited_N), log_ratio_N, clipped_N, torch.zeros_like(clipped_N))


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceLoss:
    """Direct preference optimisation, per pair; all of the shape and dtype of its arguments.

    Attributes:
        loss: to be minimised.
        chosen_rewards, rejected_rewards: beta times the log-ratio to the reference.
        slope: derivative of the loss by the log-prob of the chosen side; that by the rejected side's is its opposite.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    slope: Tensor


def dpo_loss(
    chosen_P: Tensor, rejected_P: Tensor, ref_chosen_P: Tensor, ref_rejected_P: Tensor, *, beta: float = 0.1
) -> PreferenceLoss:
    """-log sigmoid(reward of the chosen side - reward of the rejected side).

    Args:
        chosen_P, rejected_P: log-prob of everything that was sampled on either side, under the policy in training.
        ref_chosen_P, ref_rejected_P: under the reference policy.
        beta: how strongly the policy is held to the reference, above 0.

    Source: DPO, arXiv 2305.18290, eq. 7; TRL's `DPOTrainer` with `loss_type="sigmoid"`.
    """
    chosen_rewards_P, rejected_rewards_P = beta * (chosen_P - ref_chosen_P), beta * (rejected_P - ref_rejected_P)
    margin_P = chosen_rewards_P - rejected_rewards_P
    return PreferenceLoss(
        -functional.logsigmoid(margin_P), chosen_rewards_P, rejected_rewards_P, -beta * torch.sigmoid(-margin_P)
    )


def entropy(logits_NV: Tensor) -> Tensor:
    """Entropy in nats of the distribution in each row of logits; float32 [N]."""
    logits_NV = logits_NV.float()
    return logits_NV.logsumexp(-1) - (logits_NV.softmax(-1) * logits_NV).sum(-1)

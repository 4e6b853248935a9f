"""Per-token losses on log-probs: no mask, no mean; which tokens count and how much is decided by the reduction.

Shapes in names: N trained tokens, C calls, V ids of the vocabulary, P pairs of rollouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from agl.errors import ConfigError, TrainingError
from agl.trainer.objectives import MAX_LOG_RATIO, PolicyLossFunction, PolicyLossKind
from agl.trainer.processes.functions import function_name


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """The objective of a sampled policy, per token.

    Attributes:
        loss: float32 [N], to be minimised.
        log_ratio: float32 [N], new minus old log-prob, without gradient.
        clipped: bool [N], where the upper or lower clip had an effect.
        dual_clipped: where the dual clip had; None for
            none.
    """

    loss: Tensor
    log_ratio: Tensor
    clipped: Tensor | None = None
    dual_clipped: Tensor | None = None


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
    log_ratio_N = _log_ratio(logprobs_N, old_logprobs_N)
    ratio_N = log_ratio_N.exp()
    loss_N, clipped_N = _clipped(ratio_N, advantages_N, clip_low, clip_high)
    dual_clipped_N = None
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
    mean_N = _mean_of_answers(log_ratio_N, calls_N)
    # The value is the answer's ratio; the gradient is that of the token's own log-prob.
    ratio_N = torch.clamp(logprobs_N - logprobs_N.detach() + mean_N, max=MAX_SEQUENCE_LOG_RATIO).exp()
    loss_N, clipped_N = _clipped(ratio_N, advantages_N, clip_low, clip_high)
    return PolicyLoss(loss_N, log_ratio_N, clipped_N)


def geo_mean_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    calls_N: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> PolicyLoss:
    """The ratio of an answer is the geometric mean of its tokens' ratios, each clipped by itself.

    With `loss_agg="seq-mean-token-mean"` this is the published objective.

    Args:
        logprobs_N, old_logprobs_N, advantages_N, calls_N: as in `gspo_loss`; an answer's tokens share their advantage.
        clip_low, clip_high: a token's log-ratio counts between -clip_low and clip_high.

    Source: GMPO, arXiv 2507.20673, eq. 4; verl's `compute_policy_loss_geo_mean`.
    """
    log_ratio_N = _log_ratio(logprobs_N, old_logprobs_N)
    sign_N = advantages_N.sign()
    clamped_N = log_ratio_N.clamp(-clip_low, clip_high)
    counted_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * clamped_N)
    mean_N = _mean_of_answers(counted_N.detach(), calls_N)
    # As with GSPO: the answer's ratio, and the gradient of the token's own.
    loss_N = -advantages_N * (counted_N - counted_N.detach() + mean_N).exp()
    return PolicyLoss(loss_N, log_ratio_N.detach(), (counted_N != log_ratio_N) & (sign_N != 0))


def cispo_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> PolicyLoss:
    """REINFORCE with each token weighed by its clipped ratio, which carries no gradient, so that clipping takes no
    token out of the update.

    Args:
        logprobs_N, old_logprobs_N, advantages_N: as in `policy_loss`.
        clip_low, clip_high: the weight lies between 1 - clip_low and 1 + clip_high; 1 is no lower bound.

    Source: CISPO, arXiv 2506.13585, section 3.1; verl's `compute_policy_loss_cispo`.
    """
    log_ratio_N = _log_ratio(logprobs_N, old_logprobs_N).detach()
    ratio_N = log_ratio_N.exp()
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-weight_N * advantages_N * logprobs_N, log_ratio_N, weight_N != ratio_N)


SAPO_TEMPERATURES = (1.0, 1.05)
"""Of the gate for positive advantages, and for others; those of the paper."""


def sapo_loss(logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor) -> PolicyLoss:
    """A sigmoid gate around a ratio of 1 in place of the clip: a token that has moved away counts less and less.

    Args:
        logprobs_N, old_logprobs_N, advantages_N: as in `policy_loss`.

    Source: SAPO, arXiv 2511.20347, eq. 5; verl's `compute_policy_loss_sapo`.
    """
    log_ratio_N = _log_ratio(logprobs_N, old_logprobs_N)
    positive, other = SAPO_TEMPERATURES
    temperature_N = torch.where(advantages_N > 0, positive, other)
    gate_N = torch.sigmoid(temperature_N * (log_ratio_N.exp() - 1)) * 4 / temperature_N
    return PolicyLoss(-gate_N * advantages_N, log_ratio_N.detach())


VESPO_SHAPES = ((2.0, 3.0), (3.0, 2.0))
"""Exponent and decay of the weight for advantages that are not negative, and for negative ones; those of the paper."""
MIN_VESPO_LOG_RATIO = math.log(1e-8)


def vespo_loss(logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, calls_N: Tensor) -> PolicyLoss:
    """REINFORCE with each answer weighed by w^k e^(c - cw), where w, its ratio, is the product of its tokens': 1 at
    w = 1, and less on either side.

    Args:
        logprobs_N, old_logprobs_N, advantages_N, calls_N: as in `gspo_loss`.

    Source: VESPO, arXiv 2602.10693; TRL's `GRPOTrainer` with `loss_type="vespo"`.
    """
    log_ratio_N = _log_ratio(logprobs_N, old_logprobs_N).detach()
    log_w_N = _sum_of_answers(log_ratio_N, calls_N)[calls_N].clamp(MIN_VESPO_LOG_RATIO, MAX_LOG_RATIO)
    (k, c), (k_negative, c_negative) = VESPO_SHAPES
    k_N = torch.where(advantages_N >= 0, k, k_negative)
    c_N = torch.where(advantages_N >= 0, c, c_negative)
    weight_N = (c_N + k_N * log_w_N - c_N * log_w_N.exp()).exp()
    return PolicyLoss(-weight_N * advantages_N * logprobs_N, log_ratio_N)


def loss_of(
    kind: PolicyLossKind | PolicyLossFunction,
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    calls_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
) -> PolicyLoss:
    """The loss of this name, or of a function of the user's.

    Raises:
        TrainingError: the function raised, or returned something else than the loss of each token, with a gradient.
    """
    tokens = (logprobs_N, old_logprobs_N, advantages_N)
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    match kind:
        case "vanilla":
            return policy_loss(*tokens, **clips, clip_c=clip_c)
        case "cispo":
            return cispo_loss(*tokens, **clips)
        case "sapo":
            return sapo_loss(*tokens)
        case "gspo":
            return gspo_loss(*tokens, calls_N, **clips)
        case "geo_mean":
            return geo_mean_loss(*tokens, calls_N, **clips)
        case "vespo":
            return vespo_loss(*tokens, calls_N)
    name = function_name(kind)
    try:
        loss_N = kind(*tokens, calls_N)
    except Exception as error:
        raise TrainingError(
            f"policy_loss {name} raised {type(error).__name__}: {error}",
            hint="it is called with log-probs, old log-probs, advantages and answers' numbers, a tensor [tokens] each",
        ) from error
    if not isinstance(loss_N, Tensor) or loss_N.shape != logprobs_N.shape or not loss_N.requires_grad:
        found = f"a tensor {list(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
        if isinstance(loss_N, Tensor) and loss_N.shape == logprobs_N.shape:
            found += " without a gradient"
        raise TrainingError(
            f"policy_loss {name} returned {found} for {logprobs_N.numel()} tokens",
            hint="return the loss of each token, computed from the log-probs; agl takes the mean by loss_agg",
        )
    return PolicyLoss(loss_N, _log_ratio(logprobs_N, old_logprobs_N).detach())


def try_loss(function: PolicyLossFunction) -> None:
    """Call a user's loss with five tokens of two answers, so that a mistake in it is found before a model is loaded.

    Raises:
        ConfigError: what `loss_of` would raise in training.
    """
    logprobs_N = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1], requires_grad=True)
    advantages_N = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    calls_N = torch.tensor([0, 0, 0, 1, 1])
    try:
        loss_of(
            function,
            logprobs_N,
            logprobs_N.detach() - 0.1,
            advantages_N,
            calls_N,
            clip_low=0.2,
            clip_high=0.2,
            clip_c=None,
        )
    except TrainingError as error:
        raise ConfigError(error.message, hint=error.hint) from error


def _log_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
    return torch.clamp(logprobs_N - old_logprobs_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic bound, and where the clip took the gradient away."""
    plain_N = -advantages_N * ratio_N
    limited_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain_N, limited_N), limited_N > plain_N


def _sum_of_answers(values_N: Tensor, calls_N: Tensor) -> Tensor:
    """The sum over each answer's tokens; [C]."""
    n_calls = int(calls_N.max()) + 1 if calls_N.numel() else 0
    return torch.zeros(n_calls, dtype=values_N.dtype, device=values_N.device).index_add_(0, calls_N, values_N)


def _mean_of_answers(values_N: Tensor, calls_N: Tensor) -> Tensor:
    """The mean over the answer that each token belongs to; [N]."""
    total_C = _sum_of_answers(values_N, calls_N)
    return (total_C / torch.bincount(calls_N, minlength=total_C.numel()).clamp(min=1))[calls_N]


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
    chosen_rewards_P = beta * (chosen_P - ref_chosen_P)
    rejected_rewards_P = beta * (rejected_P - ref_rejected_P)
    margin_P = chosen_rewards_P - rejected_rewards_P
    return PreferenceLoss(
        -functional.logsigmoid(margin_P), chosen_rewards_P, rejected_rewards_P, -beta * torch.sigmoid(-margin_P)
    )


def entropy(logits_NV: Tensor) -> Tensor:
    """Entropy in nats of the distribution in each row of logits; float32 [N]."""
    logits_NV = logits_NV.float()
    return logits_NV.logsumexp(-1) - (logits_NV.softmax(-1) * logits_NV).sum(-1)

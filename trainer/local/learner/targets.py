"""The targets of an update, computed once before its first step: old log-probs, importance weights, advantages, values.

Invariant: everything here is a function of the weights before the update and of the rows, and is the same however the
calls are merged into rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray
from agl.trainer.local.config import LearnerConfig
from agl.trainer.objectives.advantages import whiten
from agl.trainer.objectives.gae import gae
from agl.trainer.objectives.importance import importance_weights
from agl.trainer.objectives.losses import dpo_loss

Pairs = Seq[tuple[str, str]]
"""Rollout ids: of the chosen and of the rejected rollout."""


@dataclass(frozen=True, slots=True, eq=False)
class LossRow:
    """A training row with the other inputs of its loss; float32 [T] each, read where the token is trained.

    Attributes:
        sequence: the row, with the advantages to use, token by token.
        old_logprobs: the denominator of the importance ratio.
        importance: weight of the token's policy loss; None = 1.
        reference_logprobs: of the reference policy; None without a KL penalty.
        values, value_targets: the value head's estimates before the update, and what they should be; None without one.
    """

    sequence: TrainingRow
    old_logprobs: FloatArray
    importance: FloatArray | None = None
    reference_logprobs: FloatArray | None = None
    values: FloatArray | None = None
    value_targets: FloatArray | None = None


def without_sampler(row: TrainingRow) -> TrainingRow:
    """The row for a loss on the policy's own distribution: temperature 1, no grammar, no log-probs of its sampler."""
    ones = np.ones_like(row.temperatures)
    zeros = np.zeros_like(row.logprobs)
    return replace(row, logprobs=zeros, temperatures=ones, grammars=())


def preferences(
    rows: Seq[LossRow], logprobs: Seq[FloatArray], pairs: Pairs, beta: float
) -> tuple[list[LossRow], Tensor, dict[str, Tensor]]:
    """The preference loss of pairs of rollouts as a loss of their tokens: a sum of log-probs has one derivative for all
    tokens in it, which becomes their advantage, so that the gradient needs no two rollouts in one forward pass.

    Args:
        rows: all rows of the pairs' rollouts, with their reference log-probs.
        logprobs: float32 [T] per row, under the policy in training.
        pairs: rollout ids, (chosen, rejected). A rollout may be in several.

    Returns:
        The rows, with `weights` and `advantages` for -weight * advantage * log-prob; the mean loss, float64; and the
        metrics of each pair, float64 [P].
    """
    rollouts = list(dict.fromkeys(row.sequence.rollout_id for row in rows))
    index = {rollout: r for r, rollout in enumerate(rollouts)}
    sums_R, reference_R = torch.zeros((2, len(rollouts)), dtype=torch.float64)
    for row, logprobs_T in zip(rows, logprobs, strict=True):
        assert row.reference_logprobs is not None
        r = index[row.sequence.rollout_id]
        mask_T = row.sequence.action_mask
        sums_R[r] += logprobs_T[mask_T].sum(dtype=np.float64)
        reference_R[r] += row.reference_logprobs[mask_T].sum(dtype=np.float64)
    chosen_P, rejected_P = (torch.tensor([index[pair[side]] for pair in pairs]) for side in (0, 1))
    loss = dpo_loss(sums_R[chosen_P], sums_R[rejected_P], reference_R[chosen_P], reference_R[rejected_P], beta=beta)
    slopes_R = torch.zeros_like(sums_R).index_add_(0, chosen_P, loss.slope).index_add_(0, rejected_P, -loss.slope)
    weighed = []
    for row in rows:
        mask_T = row.sequence.action_mask.astype(np.float32)
        advantage = -float(slopes_R[index[row.sequence.rollout_id]])
        sequence = replace(row.sequence, advantages=mask_T * np.float32(advantage), weights=mask_T / len(pairs))
        weighed.append(replace(row, sequence=sequence))
    margins_P = loss.chosen_rewards - loss.rejected_rewards
    metrics = {
        "chosen_logprob": sums_R[chosen_P],
        "rejected_logprob": sums_R[rejected_P],
        "chosen_reward": loss.chosen_rewards,
        "rejected_reward": loss.rejected_rewards,
        "reward_margin": margins_P,
        "reward_accuracy": (margins_P > 0).double(),
    }
    return weighed, loss.loss.mean(), metrics


def correct(row: LossRow, proximal_T: FloatArray, config: LearnerConfig) -> LossRow:
    """Take the ratio against the learner's own log-probs, and weigh it by how these differ from the sampler's."""
    assert config.rollout_is is not None
    mask_T = row.sequence.action_mask
    importance_T = np.zeros_like(proximal_T)
    importance_T[mask_T] = importance_weights(
        proximal_T[mask_T] - row.sequence.logprobs[mask_T],
        row.sequence.calls[mask_T],
        config.rollout_is,
        config.rollout_is_threshold,
    )
    return replace(row, old_logprobs=proximal_T, importance=importance_T)


def estimate_advantages(rows: Seq[LossRow], values: Seq[FloatArray], config: LearnerConfig) -> list[LossRow]:
    """Turn each call's return, which every one of its tokens carries, into advantages token by token, then whiten."""
    advantages: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for row, values_T in zip(rows, values, strict=True):
        sequence = row.sequence
        advantages_T = np.zeros(len(sequence))
        targets_T = np.zeros(len(sequence), dtype=np.float32)
        trained_N = np.flatnonzero(sequence.action_mask)
        # A call's tokens follow each other in a row.
        for at in np.split(trained_N, np.flatnonzero(np.diff(sequence.calls[trained_N])) + 1):
            return_ = float(sequence.advantages[at[0]])
            advantages_T[at], targets_T[at] = gae(values_T[at], return_, gamma=config.gamma, lam=config.lam)
        advantages.append(advantages_T)
        targets.append(targets_T)
    # Sorted, so that the sum is the same however calls are merged into rows.
    raw_N = np.concatenate([a[row.sequence.action_mask] for row, a in zip(rows, advantages, strict=True)])
    order_N = np.argsort(raw_N, kind="stable")
    white_N = np.empty(raw_N.size, dtype=np.float32)
    white_N[order_N] = whiten(raw_N[order_N], np.ones(raw_N.size, dtype=np.int64))
    start = 0
    loss_rows = []
    for row, values_T, targets_T in zip(rows, values, targets, strict=True):
        sequence = row.sequence
        white_T = np.zeros(len(sequence), dtype=np.float32)
        white_T[sequence.action_mask] = white_N[start : start + sequence.n_actions]
        start += sequence.n_actions
        sequence = replace(sequence, advantages=white_T)
        loss_rows.append(replace(row, sequence=sequence, values=values_T, value_targets=targets_T))
    return loss_rows

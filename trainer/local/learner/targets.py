"""What an update aims at, computed once before its first step: old log-probs, importance weights, advantages, values.

Invariant: everything here is a function of the weights before the update and of the rows, and is the same however the
calls are merged into rows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray
from agl.trainer.local.config import LearnerConfig
from agl.trainer.objectives.estimators import whiten
from agl.trainer.objectives.gae import gae
from agl.trainer.objectives.importance import truncated_importance

Measure = Callable[[Seq[TrainingRow]], list[FloatArray]]
"""Rows -> a number per token, float32 [T] each."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row with what the loss needs beside it; float32 [T] each, read where the token is trained.

    Attributes:
        sequence: with the advantages to use, token by token.
        old: log-probs that the importance ratio is taken against.
        importance: weight of the token's policy loss; None = 1.
        reference: log-probs of the reference policy; None without a KL penalty.
        values, targets: the value head's estimates before the update, and what they should be; None without one.
    """

    sequence: TrainingRow
    old: FloatArray
    importance: FloatArray | None = None
    reference: FloatArray | None = None
    values: FloatArray | None = None
    targets: FloatArray | None = None


def prepare(
    rows: Seq[TrainingRow],
    config: LearnerConfig,
    *,
    proximal: Measure,
    reference: Measure | None,
    values: Measure | None,
) -> list[Row]:
    """The rows of an update, ready for its steps.

    Args:
        proximal: log-probs by the learner's own weights; asked only for truncated importance sampling.
        reference: log-probs by the reference policy. values: by the value head, of the state before each token.
    """
    ready = [Row(s, s.logprobs) for s in rows]
    if config.rollout_is is not None:
        ready = [_corrected(r, old, config) for r, old in zip(ready, proximal(rows), strict=True)]
    if reference is not None:
        ready = [replace(r, reference=x) for r, x in zip(ready, reference(rows), strict=True)]
    if values is not None:
        ready = _estimated(ready, values(rows), config)
    return ready


def _corrected(row: Row, old: FloatArray, config: LearnerConfig) -> Row:
    """Take the ratio against the learner's own log-probs, and weigh it by how these differ from the sampler's."""
    assert config.rollout_is is not None
    mask = row.sequence.action_mask
    importance = np.zeros_like(old)
    importance[mask] = truncated_importance(
        old[mask] - row.sequence.logprobs[mask],
        row.sequence.calls[mask],
        config.rollout_is,
        config.rollout_is_threshold,
    )
    return replace(row, old=old, importance=importance)


def _estimated(rows: Seq[Row], values: Seq[FloatArray], config: LearnerConfig) -> list[Row]:
    """Turn each call's return, which every one of its tokens carries, into advantages token by token, then whiten."""
    out = []
    for row, estimate in zip(rows, values, strict=True):
        sequence = row.sequence
        advantages, targets = np.zeros(len(sequence)), np.zeros(len(sequence), dtype=np.float32)
        for call in np.unique(sequence.calls[sequence.action_mask]):
            at = np.flatnonzero(sequence.action_mask & (sequence.calls == call))
            return_ = float(sequence.advantages[at[0]])
            advantages[at], targets[at] = gae(estimate[at], return_, gamma=config.gamma, lam=config.lam)
        out.append((row, advantages, targets, estimate))
    # Sorted, so that the sum is the same however calls are merged into rows.
    trained = np.concatenate([a[r.sequence.action_mask] for r, a, _, _ in out])
    order = np.argsort(trained, kind="stable")
    white = np.empty(trained.size, dtype=np.float32)
    white[order] = whiten(trained[order], np.ones(trained.size, dtype=np.int64))
    at, ready = 0, []
    for row, _, targets, estimate in out:
        mask = row.sequence.action_mask
        advantages = np.zeros(len(row.sequence), dtype=np.float32)
        advantages[mask] = white[at : at + int(mask.sum())]
        at += int(mask.sum())
        ready.append(
            replace(row, sequence=replace(row.sequence, advantages=advantages), values=estimate, targets=targets)
        )
    return ready

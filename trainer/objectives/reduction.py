"""How per-token losses become one number: a fixed weight per token, so that loss = sum(weight * loss of the token).

The weights are set before an update, from all of its tokens; merging calls into rows and cutting rows into
micro-batches cannot change them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import assert_never

import numpy as np

from agl.errors import ConfigError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray
from agl.trainer.objectives import LossAgg


def token_weights(
    sequences: Seq[TrainingRow], loss_agg: LossAgg = "token-mean", *, loss_scale_factor: float | None = None
) -> list[FloatArray]:
    """The weight of each token of an optimiser step; 0 where a token is not trained.

    A "seq" is one LLM call (a response, as in verl), not a merged row. With N calls that train n_c tokens each:

    - "token-mean": 1 / sum(n_c); every token counts the same.
    - "seq-mean-token-sum": 1 / N; long answers count more.
    - "seq-mean-token-mean": 1 / (N * n_c); every answer counts the same.
    - "seq-mean-token-sum-norm": 1 / (N * loss_scale_factor); a constant for a length (Dr. GRPO, arXiv 2503.20783).

    Args:
        sequences: all rows of the optimiser step.
        loss_agg: as verl's `loss_agg_mode`.
        loss_scale_factor: for "seq-mean-token-sum-norm" alone, usually the longest answer allowed.

    Returns:
        float32 [T] per row; all zero when nothing is trained.

    Raises:
        ConfigError: `loss_scale_factor` is missing where it is needed, set where it means nothing, or not positive.
    """
    check_scale_factor(loss_agg, loss_scale_factor)
    lengths = [np.bincount(s.calls[s.action_mask], minlength=len(s.call_ids)) for s in sequences]
    n_tokens = sum(int(length_C.sum()) for length_C in lengths)
    n_calls = sum(int((length_C > 0).sum()) for length_C in lengths)
    weights = []
    for sequence, length_C in zip(sequences, lengths, strict=True):
        weights_T = np.zeros(len(sequence), dtype=np.float32)
        mask_T = sequence.action_mask
        match loss_agg:
            case "token-mean":
                weights_T[mask_T] = 1 / max(n_tokens, 1)
            case "seq-mean-token-sum":
                weights_T[mask_T] = 1 / max(n_calls, 1)
            case "seq-mean-token-mean":
                weights_T[mask_T] = 1 / (n_calls * length_C[sequence.calls[mask_T]])
            case "seq-mean-token-sum-norm":
                assert loss_scale_factor is not None
                weights_T[mask_T] = 1 / (max(n_calls, 1) * loss_scale_factor)
            case _:
                assert_never(loss_agg)
        weights.append(weights_T)
    return weights


def weighted(
    sequences: Seq[TrainingRow], loss_agg: LossAgg = "token-mean", *, loss_scale_factor: float | None = None
) -> list[TrainingRow]:
    """The rows with their `weights` set by `token_weights`."""
    weights = token_weights(sequences, loss_agg, loss_scale_factor=loss_scale_factor)
    return [replace(s, weights=w) for s, w in zip(sequences, weights, strict=True)]


def check_scale_factor(loss_agg: LossAgg, loss_scale_factor: float | None) -> None:
    """Raise `ConfigError` unless a positive factor is given exactly where `loss_agg` uses one."""
    used = loss_agg == "seq-mean-token-sum-norm"
    if (loss_scale_factor is not None) != used or (loss_scale_factor is not None and not loss_scale_factor > 0):
        raise ConfigError(
            f"loss_scale_factor={loss_scale_factor} with loss_agg={loss_agg!r}",
            hint="give a loss_scale_factor above 0 with 'seq-mean-token-sum-norm', and none with any other",
        )

"""An estimator for verl that reads the advantages stored with the rows, so that credit reaches the loss.

verl passes an estimator the rewards of padded rows and a label per row. Our label is the row's key, by which the
advantages are read from TransferQueue: exact, per call, and available after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue as tq
from verl.trainer.ppo.core_algos import register_adv_est

from agl_verl.overrides import ESTIMATOR
from agl_verl.rows import ADVANTAGES

_PADDING = "pad"


def pad_advantages(
    keys: Sequence[str], advantages: Sequence[torch.Tensor], response_mask: torch.Tensor
) -> torch.Tensor:
    """Advantages in verl's padded layout.

    Args:
        keys: of the B rows; those of verl's padding rows begin with "pad".
        advantages: float32 [R_b] of each row that is no padding.
        response_mask: [B, R].

    Returns:
        float32 [B, R], 0 where `response_mask` is 0.
    """
    padded = torch.zeros(response_mask.shape, dtype=torch.float32)
    ours = [i for i, key in enumerate(keys) if not key.startswith(_PADDING)]
    for i, row in zip(ours, advantages, strict=True):
        padded[i, : row.numel()] = row
    return padded * response_mask.to(torch.float32)


@register_adv_est(ESTIMATOR)
def call_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    index: Sequence[str] = (),
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, float32 [B, R] each: those of `agl.trainer.objectives.advantages.compute_advantages`.

    Args:
        token_level_rewards, response_mask: [B, R].
        index: key of each row.
    """
    keys = [str(key) for key in index]
    ours = [key for key in keys if not key.startswith(_PADDING)]
    data = tq.kv_batch_get(keys=ours, partition_id="train", select_fields=[ADVANTAGES])
    advantages = pad_advantages(keys, list(data[ADVANTAGES]), response_mask)
    return advantages, advantages

"""A callback of the user's own, which verl calls while the step's rows are still where it trained from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

FIELDS = [
    "prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "advantages", "returns", "rm_scores",
]  # fmt: skip


class Captured(CheckpointCallback):
    """Writes what verl trained on beside each checkpoint: {row key: {field: [T]}}."""

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        tags = tq.kv_list("train")["train"]
        keys = [k for k, tag in tags.items() if not tag.get("is_prompt") and not tag.get("is_padding")]
        data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=FIELDS)
        rows = {k: {f: data[f][i].clone() for f in FIELDS} for i, k in enumerate(keys)}
        torch.save(rows, Path(checkpoint_dir) / "rows.pt")

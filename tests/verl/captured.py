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
        rows = {}
        for key in keys:
            data = tq.kv_batch_get(keys=[key], partition_id="train")
            # What an asynchronous trainer has sampled ahead is there as well, and has not been trained.
            if "advantages" in data:
                rows[key] = {field: data[field][0].clone() for field in FIELDS}
        torch.save(rows, Path(checkpoint_dir) / "rows.pt")


class CapturedOwn(Captured):
    """Those rows alone that the trainer of one of several policies has requested; all share the queue."""

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **options: Any) -> None:
        from agl_verl.manager import requested

        super().on_save(trainer, global_step, checkpoint_dir, **options)
        path = Path(checkpoint_dir) / "rows.pt"
        rows = torch.load(path)
        torch.save({key: row for key, row in rows.items() if key.split("_")[0] in requested()}, path)

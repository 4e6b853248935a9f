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
        keys = [k for k, tag in tags.items() if not tag.get("is_prompt") and not tag.get("is_padding") and self.own(k)]
        rows = {}
        for key in keys:
            data = tq.kv_batch_get(keys=[key], partition_id="train")
            # What an asynchronous trainer has sampled ahead is there as well, and has not been trained.
            if "advantages" in data:
                rows[key] = {field: data[field][0].clone() for field in FIELDS}
        torch.save(rows, Path(checkpoint_dir) / "rows.pt")

    def own(self, key: str) -> bool:
        """Whether a row is the trainer's."""
        return True


class CapturedOwn(Captured):
    """Those rows alone that the trainer of one of several policies has requested; all share the queue, and another
    one's rows can be gone between listing and reading."""

    def own(self, key: str) -> bool:
        from agl_verl.manager import requested

        return key.split("_")[0] in requested()

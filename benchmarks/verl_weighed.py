"""Writes the bytes that a step moves next to its checkpoint: a callback that verl calls in its trainer's process."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback


class Weighed(CheckpointCallback):
    """Writes how many bytes the rows of the last step are as the rollouts wrote them, and how many tokens."""

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        later = {"old_log_probs", "entropy", "advantages", "returns", "log_probs", "rollout_is_weights"}
        tags = tq.kv_list("train")["train"]
        keys = [k for k, tag in tags.items() if not tag.get("is_prompt") and not tag.get("is_padding")]
        data = tq.kv_batch_get(keys=keys, partition_id="train")
        size = 0
        for name in sorted(set(data.keys()) - later):
            for i in range(len(keys)):
                value = data[name][i]
                tensor = isinstance(value, torch.Tensor)
                size += value.nbytes if tensor else len(pickle.dumps(getattr(value, "data", value)))
        tokens = sum(tags[k]["seq_len"] for k in keys)
        (Path(checkpoint_dir) / "weighed.json").write_text(json.dumps({"bytes": size, "tokens": tokens}))

"""The dataset of verl's data loader: positions of tasks. The tasks themselves stay with the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from agl_verl.rows import SOURCE


class TaskPositions(Dataset[dict[str, Any]]):
    """Item i stands for task i; verl's own sampler, order and checkpoints work as for any dataset.

    Args:
        data_files: how many tasks there are and, optionally, how many items an epoch has. verl passes here what its
            config has in place of file names.
    """

    def __init__(self, data_files: Sequence[int], **_: Any) -> None:
        self.n_tasks, self.n_items = int(data_files[0]), int(data_files[-1])

    def __len__(self) -> int:
        return self.n_items

    def __getitem__(self, item: int) -> dict[str, Any]:
        task = int(item) % self.n_tasks
        return {"raw_prompt": [], "index": task, "data_source": SOURCE, "reward_model": {"ground_truth": None}}

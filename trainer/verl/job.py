"""The actor that verl's trainer lives in: everything that verl starts is its child, and ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agl.trainer.verl.events import Message, Over

if TYPE_CHECKING:
    from omegaconf import DictConfig


class TrainerJob:
    """One training.

    Args:
        queue: to the run.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def tell(self, message: Message) -> None:
        """To the run."""
        self._queue.put(message)

    def run(self, config: DictConfig, probe_ids: Sequence[int]) -> None:
        """Train to the end."""
        # verl takes ten seconds to import, and who calls `fit` does not need it.
        from agl.trainer.verl.trainer_hooks import fit

        fit(config, probe_ids, self.tell)
        self.tell(Over())

"""The Ray actor that runs verl's trainer: everything that verl starts is its child, and ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agl_verl.events import Event, TrainingEnd

if TYPE_CHECKING:
    from omegaconf import DictConfig


class TrainerJob:
    """One training.

    Args:
        queue: takes events to the run.
        answers: says after each start and step whether training goes on; None if it always does.
    """

    def __init__(self, queue: Any, answers: Any = None) -> None:
        self._queue, self._answers = queue, answers

    def run(self, config: DictConfig, check_ids: Sequence[int]) -> None:
        """Train to the end.

        Args:
            config: verl's. check_ids: tokens of the weight check.
        """
        # verl takes ten seconds to import, and the process that calls `fit` does not need it.
        from agl_verl.trainer_hooks import fit

        fit(config, check_ids, self.send, self.goes_on)
        self.send(TrainingEnd())

    def goes_on(self) -> bool:
        """Wait for the run's answer whether training goes on."""
        return self._answers is None or self._answers.get()

    def send(self, event: Event) -> None:
        """Send an event to the run."""
        self._queue.put(event)

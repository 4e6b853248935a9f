"""Runs verl's trainer: everything that verl starts is a child of its process, and ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agl_verl.events import Event, TrainingEnd

if TYPE_CHECKING:
    from omegaconf import DictConfig


class TrainerJob:
    """The training of one policy, a Ray actor or a part of `agl_verl.driver`.

    Args:
        policy: its name.
        queue: takes (policy, event) to the run.
        answers: says after each start and step whether training goes on; None if it always does.
        shared: whether the trainers of other policies use the same TransferQueue.
    """

    def __init__(self, policy: str, queue: Any, answers: Any = None, *, shared: bool = False) -> None:
        self._policy = policy
        self._queue = queue
        self._answers = answers
        self._shared = shared

    def run(self, config: DictConfig, check_ids: Sequence[int]) -> None:
        """Train to the end.

        Args:
            config: verl's.
            check_ids: tokens of the weight check.
        """
        # verl takes ten seconds to import, and the process that calls `fit` does not need it.
        from agl_verl.trainer_hooks import fit

        fit(config, check_ids, self.send, self.goes_on, shared=self._shared)
        self.send(TrainingEnd())

    def goes_on(self) -> bool:
        """Wait for the run's answer whether training goes on."""
        return self._answers is None or self._answers.get()

    def send(self, event: Event) -> None:
        """Send an event to the run."""
        self._queue.put((self._policy, event))


class SharedQueue:
    """A Ray actor that owns the TransferQueue of several trainers, which ends with it."""

    def start(self, config: DictConfig) -> None:
        """Start it.

        Args:
            config: verl's section `transfer_queue`.
        """
        import transfer_queue as tq

        tq.init(config)

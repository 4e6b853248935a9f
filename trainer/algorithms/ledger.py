"""The part of a training run that would be lost if it ended now, and the checkpoints that keep it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agl.errors import AglError, CheckpointError, StalePolicyError
from agl.trainer.algorithms import checkpoints
from agl.trainer.algorithms.ahead import Ahead
from agl.trainer.algorithms.trained_calls import recorded_baselines
from agl.trainer.algorithms.training import Training
from agl.trainer.http.aio import finish

SMALL_MODEL = 20_000_000
"""Parameters below which a checkpoint at every step costs next to nothing."""


@dataclass(slots=True, eq=False)
class Ledger:
    """The state of a run between its checkpoints.

    Attributes:
        training: what the run works with.
        identity: the settings that a resumed run must keep.
        done: the completed steps that the run began from.
        groups: what the checkpoint that it began from has recorded of groups in flight.
        unsaved: the completed steps that made these weights; None where a checkpoint has them, and during an update.
        unrecorded: the entry of the last of these steps, where the history does not have it yet.
        spreads: of the tasks, from these steps' rollouts alone; None where tasks are not drawn by them. The batches'
            own already know a step whose update is not made yet, which a resumed run samples again.
    """

    training: Training
    identity: dict[str, Any]
    done: int = 0
    groups: Mapping[str, Any] = field(default_factory=dict)
    unsaved: int | None = None
    unrecorded: dict[str, Any] | None = None
    spreads: dict[int, float] | None = None

    @classmethod
    async def opened(cls, training: Training, identity: dict[str, Any]) -> Ledger:
        """The ledger of a run that begins, or that goes on from its last checkpoint with the rollouts made since.

        Raises:
            CheckpointError: the checkpoint cannot be read, or was made with other settings.
        """
        run = training.run
        source = training.source
        ledger = cls(training, identity)
        if run.resume:
            checkpoint = await checkpoints.restore(run, training.policies, identity, training.algorithm)
            if checkpoint is not None:
                ledger.done = checkpoint.step
                ledger.groups = checkpoint.beyond.get("ahead", {})
                ledger.unrecorded = checkpoint.beyond.get("unrecorded")
                if source.batches.spreads is not None:
                    ledger.spreads = dict(checkpoint.beyond.get("spreads", ()))
                    source.batches.spreads.update(ledger.spreads)
            await training.workplace.resume_from(
                ledger.done,
                training.policies.versions,
                source.max_staleness or 0,
                sampled=source.sampled,
                first=Ahead.first_step(ledger.groups, source.batches.batch_size, ledger.done),
            )
        history = [*run.history, ledger.unrecorded] if ledger.unrecorded else run.history
        training.baselines = recorded_baselines(history)
        return ledger

    def updating(self) -> None:
        """The weights change: until the update is complete, they are those of no step."""
        self.unsaved = None

    def completed(self, step: int, entry: dict[str, Any]) -> None:
        """The update of the `step`-th step is made; `entry` is what the history will have of it."""
        self.unsaved = step
        self.unrecorded = entry
        spreads = self.training.source.batches.spreads
        if spreads is not None:
            self.spreads = dict(spreads)

    async def record(self, entry: dict[str, Any]) -> None:
        """Record the whole entry of the last completed step."""
        self.unrecorded = None
        await self.training.run.record(entry)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is written after `step` steps."""
        source = self.training.source
        small = source.sampled and self.training.policies.parameters < SMALL_MODEL
        every = self.training.algorithm.checkpoint_every or (1 if small else 10)
        return step == source.steps or step % every == 0 or self.training.run.stop_reason is not None

    async def save(self, step: int) -> None:
        """Write the checkpoint of `step` completed steps, even while the run is cancelled.

        Raises:
            CheckpointError: it cannot be written.
        """
        beyond = self.training.beyond(step)
        if self.unrecorded is not None:
            beyond["unrecorded"] = self.unrecorded
        if self.spreads is not None:
            beyond["spreads"] = sorted(self.spreads.items())
        await finish(checkpoints.save(self.training.run, self.training.policies, step, self.identity, beyond))
        self.unsaved = None

    async def save_completed(self) -> bool:
        """Save the last completed step where no checkpoint has it; whether there was one to save."""
        if self.unsaved is None:
            return False
        await self.save(self.unsaved)
        return True

    async def save_despite(self, error: Exception) -> None:
        """Save the last completed step of a run that has failed, if that can be."""
        # Where these weights cannot be served or saved, the last checkpoint is what to go on from.
        if not isinstance(error, StalePolicyError | CheckpointError):
            with contextlib.suppress(AglError):
                await self.save_completed()

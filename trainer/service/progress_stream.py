"""A run's progress for those who watch it from elsewhere: kept in its record, and told as it changes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from agl.trainer.run.progress import Progress
from agl.trainer.service.run_record import RunRecord

if TYPE_CHECKING:
    from agl.trainer.runners.protocol import RolloutResult

TELL_SECONDS = 1.0
"""Rollouts that end are told together, so often."""


class ProgressStream(Progress):
    """Progress of one run. Lives on the run's event loop.

    Args:
        record: what is known of it. enabled: whether this terminal shows it too.
    """

    def __init__(self, record: RunRecord, enabled: bool) -> None:
        super().__init__(enabled)
        self.record = record
        self._changed = asyncio.Event()
        self._told = self._began = time.monotonic()
        self._first = 0

    def start(self, steps: int, first_step: int = 0) -> None:
        super().start(steps, first_step)
        self._began, self._first = time.monotonic(), first_step
        record = self.record
        record.steps, record.step = steps, first_step
        # What came after the last checkpoint is done again.
        record.history = [h for h in record.history if h.get("step", 0) <= first_step]
        self.save()

    def began(self, mode: str, step: int, rollouts: int) -> None:
        super().began(mode, step, rollouts)
        self.record.rollouts = (0, rollouts)
        self.tell()

    def rolled_out(self, result: RolloutResult) -> None:
        super().rolled_out(result)
        done, asked = self.record.rollouts
        self.record.rollouts = (done + 1, asked)
        if time.monotonic() - self._told > TELL_SECONDS:
            self.tell()

    def step(self, entry: dict[str, Any]) -> None:
        super().step(entry)
        record, done = self.record, int(entry["step"])
        record.history.append(entry)
        record.step = done
        took = time.monotonic() - self._began
        record.eta_seconds = took / max(1, done - self._first) * ((record.steps or done) - done)
        self.save()

    def save(self) -> None:
        """Write the record, then tell."""
        self.record.save()
        self.tell()

    def tell(self) -> None:
        """Wake who watches."""
        self._told = time.monotonic()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self, seconds: float) -> None:
        """Wait until something changes, so long at most."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            pass

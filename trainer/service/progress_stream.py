"""A run's progress for remote clients: recorded, and announced to those that wait for changes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from agl.trainer.report.progress import Progress
from agl.trainer.service.run_record import RunRecord

if TYPE_CHECKING:
    from agl.trainer.runners.protocol import RolloutResult

NOTIFY_SECONDS = 1.0
"""Ends of rollouts are announced together, this often at most."""


class ProgressStream(Progress):
    """Progress of one run. Lives on the run's event loop.

    Args:
        record: of the run. enabled: whether to show the progress in this terminal, too.
    """

    def __init__(self, record: RunRecord, enabled: bool) -> None:
        super().__init__(enabled)
        self.record = record
        self._changed = asyncio.Event()
        self._last_notified = self._start_time = time.monotonic()
        self._start_step = 0

    def start(self, steps: int, first_step: int = 0, *, unit: str = "step") -> None:
        super().start(steps, first_step, unit=unit)
        self._start_time, self._start_step = time.monotonic(), first_step
        record = self.record
        record.steps, record.step = steps, first_step
        # Steps after the last checkpoint are repeated.
        record.history = [h for h in record.history if h.get("step", 0) <= first_step]
        self.save()

    def began(self, mode: str, step: int, rollouts: int) -> None:
        super().began(mode, step, rollouts)
        self.record.rollouts = (0, rollouts)
        self.notify()

    def rolled_out(self, result: RolloutResult) -> None:
        super().rolled_out(result)
        done, total = self.record.rollouts
        self.record.rollouts = (done + 1, total)
        if time.monotonic() - self._last_notified > NOTIFY_SECONDS:
            self.notify()

    def step(self, entry: dict[str, Any]) -> None:
        super().step(entry)
        record, step = self.record, int(entry["step"])
        record.history.append(entry)
        record.step = step
        seconds = time.monotonic() - self._start_time
        record.eta_seconds = seconds / max(1, step - self._start_step) * ((record.steps or step) - step)
        self.save()

    def save(self) -> None:
        """Write the record, then wake the waiting clients."""
        self.record.save()
        self.notify()

    def notify(self) -> None:
        """Wake the callers of `changed`."""
        self._last_notified = time.monotonic()
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def changed(self, seconds: float) -> None:
        """Wait until something changes, for this long at most."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            pass

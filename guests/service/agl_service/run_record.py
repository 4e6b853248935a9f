"""A server's runs: one directory each, with the state in `service.json`, and their progress for remote clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from agl.errors import AglError, CheckpointError
from agl.trainer.report.progress import Progress
from agl.trainer.run.checkpoints import write_atomically

RunStatus = Literal["running", "succeeded", "failed", "stopped"]
_FILE = "service.json"
LAST = {"reward": "train/reward", "rollouts_per_second": "rollouts_per_second"}
"""Facts of a run that are those of its last step -> their names there."""


@dataclass(eq=False)
class RunRecord:
    """A run. Every change is on disk before clients can see it.

    Attributes:
        run_id, directory: identify the run.
        settings: the options of its request.
        status: "stopped" and "failed" runs can be resumed; a "running" one is resumed when the server starts.
        air: which side applies AIR's rules, "server" or "client"; None for neither.
        nworkers: rollouts at once of each
            client.
        steps, step: updates in all, and completed ones.
        history: one dict per step.
        rollouts: (completed, all) of the present batch.
        error, hint: why it failed.
        policies: name -> directory on the server.
        tasks: how many for (training, validation).
        number: of this run among the server's, from 1.
        created_at, ended_at: seconds since the epoch.
    """

    run_id: str
    directory: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    status: RunStatus = "running"
    air: Literal["server", "client"] | None = None
    nworkers: int | None = None
    steps: int | None = None
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    rollouts: tuple[int, int] = (0, 0)
    eta_seconds: float | None = None
    error: str | None = None
    hint: str | None = None
    policies: dict[str, str] = field(default_factory=dict)
    tasks: tuple[int, int] = (0, 0)
    number: int = 0
    created_at: float = field(default_factory=time.time)
    ended_at: float | None = None

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.status != "running"

    def facts(self, *, history: bool = False) -> dict[str, Any]:
        """The state for clients, as JSON values."""
        last = self.history[-1] if self.history else {}
        facts = {name: value for name, value in vars(self).items() if history or name != "history"}
        facts |= {name: last.get(key) for name, key in LAST.items()}
        return to_jsonable_python(facts, inf_nan_mode="null")

    def fail(self, error: BaseException) -> None:
        """Record that the run ended with this error."""
        self.status, self.ended_at = "failed", time.time()
        self.error = error.message if isinstance(error, AglError) else f"{type(error).__name__}: {error}"
        where = ", ".join(f"{k}={v}" for k, v in error.where.items()) if isinstance(error, AglError) else ""
        self.error += f" ({where})" if where else ""
        self.hint = error.hint if isinstance(error, AglError) else None

    def save(self) -> None:
        """Write the record atomically."""
        write_atomically(self.directory / _FILE, json.dumps({k: v for k, v in vars(self).items() if k != "directory"}))


def load_records(root: Path) -> list[RunRecord]:
    """The runs below a directory, oldest first, whatever the clock said.

    Raises:
        CheckpointError: a record cannot be read.
    """
    records = []
    for file in root.glob(f"*/{_FILE}"):
        try:
            values = json.loads(file.read_text())
            pairs = {name: tuple(values[name]) for name in ("rollouts", "tasks")}
            records.append(RunRecord(directory=file.parent, **{**values, **pairs}))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"the record of a run cannot be read: {error}", hint="move its directory away", path=file
            ) from error
    return sorted(records, key=lambda r: r.number)


NOTIFY_SECONDS = 1.0
"""Ends of rollouts are announced together, this often at most."""


class ProgressStream(Progress):
    """Progress of one run. Lives on the run's event loop.

    Args:
        record: of the run.
        enabled: whether to show the progress in this terminal, too.
    """

    def __init__(self, record: RunRecord, enabled: bool) -> None:
        super().__init__(enabled)
        self.record = record
        self._changed = asyncio.Event()
        self._last_notified = self._start_time = time.monotonic()
        self._start_step = 0

    def start(self, steps: int, first_step: int = 0, *, unit: str = "step") -> None:
        super().start(steps, first_step, unit=unit)
        self._start_time = time.monotonic()
        self._start_step = first_step
        record = self.record
        record.steps = steps
        record.step = first_step
        # Steps after the last checkpoint are repeated.
        record.history = [h for h in record.history if h.get("step", 0) <= first_step]
        self.save()

    def began(self, mode: str, step: int, rollouts: int) -> None:
        super().began(mode, step, rollouts)
        self.record.rollouts = (0, rollouts)
        self.notify()

    def count(self, *, failed: bool = False) -> None:
        super().count(failed=failed)
        done, total = self.record.rollouts
        self.record.rollouts = (done + 1, total)
        if time.monotonic() - self._last_notified > NOTIFY_SECONDS:
            self.notify()

    def step(self, entry: dict[str, Any]) -> None:
        super().step(entry)
        record = self.record
        step = int(entry["step"])
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
        event = self._changed
        self._changed = asyncio.Event()
        event.set()

    async def changed(self, seconds: float) -> None:
        """Wait until something changes, for this long at most."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            pass

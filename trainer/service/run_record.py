"""A server's runs on disk: one directory each, with the run's state in `service.json`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from agl.errors import AglError, CheckpointError

RunStatus = Literal["running", "succeeded", "failed", "stopped"]
_FILE = "service.json"


@dataclass(eq=False)
class RunRecord:
    """A run. Every change is on disk before clients can see it.

    Attributes:
        run_id, directory: identify the run. settings: the options of its request.
        status: "stopped" and "failed" runs can be resumed; a "running" one is resumed when the server starts.
        air: which side applies AIR's rules, "server" or "client"; None for neither. nworkers: rollouts at once of each
            client.
        steps, step: updates in all, and completed ones. history: one dict per step.
        rollouts: (completed, all) of the present batch. error, hint: why it failed.
        policies: name -> directory on the server. tasks: how many for (training, validation).
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
    created_at: float = field(default_factory=time.time)
    ended_at: float | None = None

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.status != "running"

    def facts(self, *, history: bool = False) -> dict[str, Any]:
        """The state for clients, as JSON values."""
        last = self.history[-1] if self.history else {}
        facts = {
            "run_id": self.run_id,
            "status": self.status,
            "step": self.step,
            "steps": self.steps,
            "reward": last.get("train/reward"),
            "rollouts_per_second": last.get("rollouts_per_second"),
            "eta_seconds": self.eta_seconds,
            "rollouts": list(self.rollouts),
            "air": self.air,
            "nworkers": self.nworkers,
            "settings": dict(self.settings),
            "tasks": list(self.tasks),
            "error": self.error,
            "hint": self.hint,
            "policies": dict(self.policies),
            "directory": str(self.directory),
            "created_at": self.created_at,
            "ended_at": self.ended_at,
        }
        return _finite({**facts, "history": self.history} if history else facts)

    def fail(self, error: BaseException) -> None:
        """Record that the run ended with this error."""
        self.status, self.ended_at = "failed", time.time()
        self.error = error.message if isinstance(error, AglError) else f"{type(error).__name__}: {error}"
        where = ", ".join(f"{k}={v}" for k, v in error.where.items()) if isinstance(error, AglError) else ""
        self.error += f" ({where})" if where else ""
        self.hint = error.hint if isinstance(error, AglError) else None

    def save(self) -> None:
        """Write the record atomically."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "directory"}
        part = self.directory / f".{_FILE}.part"
        with part.open("w") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.directory / _FILE)


def load_records(root: Path) -> list[RunRecord]:
    """The runs below a directory, oldest first.

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
    return sorted(records, key=lambda r: r.created_at)


def _finite(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value

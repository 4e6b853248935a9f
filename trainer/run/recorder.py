"""A run's history, written by one method: in memory, in the store, to the loggers, on the screen."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agl.errors import StoreError
from agl.trainer.loggers.base import Sample
from agl.trainer.loggers.threads import Loggers
from agl.trainer.run.progress import Progress
from agl.trainer.run.samples import step_samples
from agl.trainer.store.base import RunStatus, Store, TrainingRun


@dataclass(eq=False)
class Recorder:
    """The history of one run.

    Attributes:
        store: keeps the run and its metrics. progress: shows them. run: what is recorded of the run so far.
        history: one dict per step.
        loggers: get the same numbers. resumed: whether the run goes on with what a stopped one has logged.
    """

    store: Store
    progress: Progress
    run: TrainingRun
    history: list[dict[str, Any]] = field(default_factory=list)
    loggers: Loggers = field(default_factory=Loggers)
    resumed: bool = False

    async def begin(self, run_id: str, steps: int | None, step: int = 0) -> None:
        """Training begins, or goes on after `step` of `steps` steps; what was recorded of later ones is deleted."""
        if steps is not None:
            self.progress.start(steps, step)
        self.run = replace(self.run, run_id=run_id, status="running", step=step, steps=steps)
        await self.store.put_run(self.run)
        await self.store.delete_metrics(run_id, step)
        if self.history:  # a run that is cancelled while it writes a step's metrics has the step in its checkpoint
            await self.store.add_metrics(run_id, self.history[-1]["step"], numbers(self.history[-1]))
        self.loggers.start(run_id, self.run.config, step if self.resumed else None)

    async def add(self, entry: dict[str, Any]) -> None:
        """Add a step's entry, or the validation's before the first step.

        Args:
            entry: "step", how many are done, and numbers by name.
        """
        step = int(entry["step"])
        self.history.append(entry)
        values = numbers(entry)
        self.run = replace(self.run, step=step)
        # First, so that no step is missing where the run is cancelled here.
        self.loggers.step(step, _finite(values), await self._samples(entry))
        await self.store.put_run(self.run)
        await self.store.add_metrics(self.run.run_id, step, values)
        if "rollouts_per_second" in entry:
            self.progress.step(entry)
        self._note_loggers()

    async def end(self, status: RunStatus, error: BaseException | None = None) -> None:
        """The run is over. A store that cannot be written is noted only: `error` says more."""
        reason = None if error is None else f"{type(error).__name__}: {error}"
        self.run = replace(self.run, status=status, error=reason, ended_at=time.time())
        try:
            await self.store.put_run(self.run)
        except StoreError as failed:
            if error is None:
                raise
            self.progress.note(f"the end of the run was not recorded: {failed}")
        finally:
            last: dict[str, float] = {}
            for entry in self.history:
                last |= _finite(numbers(entry))
            await asyncio.to_thread(self.loggers.end, status, last)
            self._note_loggers()

    async def _samples(self, entry: Mapping[str, Any]) -> list[Sample]:
        if not self.loggers.samples:
            return []
        try:
            return await step_samples(self.store, self.run.run_id, entry, self.loggers.samples)
        except StoreError as error:
            self.progress.note(f"step {entry['step']}: no samples for the loggers: {error}")
            return []

    def _note_loggers(self) -> None:
        for text in self.loggers.notes():
            self.progress.note(text)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an entry of the history by name, without its step."""
    return {name: float(value) for name, value in entry.items() if name != "step" and _is_number(value)}


_SECRET = re.compile(r"(^|[^a-z])(api)?(key|token|secret|password|passwd|credentials?|authorization)$", re.IGNORECASE)
"""Names of settings that may hold a key."""


def json_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON values; what is none, or could hold a key, is replaced by the name of its type."""
    return {name: _json_value(value) for name, value in settings.items() if not _SECRET.search(name)}


def _json_value(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return json_settings({str(name): inner for name, inner in value.items()})
        case list() | tuple():
            return [_json_value(inner) for inner in value]
    return type(value).__name__


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

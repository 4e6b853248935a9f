"""A run's history, written by one method: in memory, in the store, to the loggers, on the screen."""

from __future__ import annotations

import asyncio
import math
import numbers
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isfunction
from typing import Any

from agl.errors import StoreError, described
from agl.trainer.loggers.base import Sample
from agl.trainer.loggers.threads import Loggers
from agl.trainer.processes.functions import function_name
from agl.trainer.report.progress import Progress
from agl.trainer.run.samples import step_samples
from agl.trainer.store.base import Runs, Store
from agl.trainer.store.types import RunStatus, TrainingRun


@dataclass(eq=False)
class Recorder:
    """The history of one run.

    Attributes:
        store: keeps the run and its metrics.
        progress: shows them.
        run: what is recorded of the run so far.
        history: one dict per step.
        loggers: get the same numbers.
        resumed: whether the run continues the logs of a stopped one.
    """

    store: Store
    progress: Progress
    run: TrainingRun
    history: list[dict[str, Any]] = field(default_factory=list)
    loggers: Loggers = field(default_factory=Loggers)
    resumed: bool = False
    _began: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        self.run = replace(self.run, created_at=self.run.created_at or time.time())

    async def start(self) -> None:
        """The run begins: it is seen from now on. One that is resumed is as far as it was until training begins."""
        for earlier in await self.store.query_runs(run_ids=[self.run.run_id]):
            self.run = replace(self.run, step=earlier.step, steps=earlier.steps)
        await self.store.put_run(self.run)

    async def begin(self, run_id: str, steps: int | None, step: int = 0) -> None:
        """Training begins, or continues after `step` of `steps` steps; records of later steps are deleted. With
        `steps` 0 nothing is trained."""
        if steps:
            self.progress.start(steps, step)
        self.run = replace(self.run, run_id=run_id, step=step, steps=steps)
        await self.store.put_run(self.run)
        await self.store.delete_metrics(run_id, step)
        # A checkpoint from before stores had metrics, one whose run had another store, or was cancelled in `add`.
        await add_history(self.store, run_id, self.history)
        self.loggers.start(run_id, self.run.config, step if self.resumed else None)

    async def add(self, entry: dict[str, Any]) -> None:
        """Add a step's entry, or the validation's before the first step.

        Args:
            entry: "step", how many are done, and numbers by name.
        """
        self.history.append(entry)
        step = int(entry["step"])
        self.run = replace(self.run, step=step)
        # First the loggers, which miss no step where the run is cancelled here.
        self.loggers.step(step, _finite(entry), await self._samples(entry))
        # Then the run: metrics belong to a run that the store knows.
        await self.store.put_run(self.run)
        await add_entry(self.store, self.run.run_id, entry)
        if "seconds" in entry:
            self.progress.step(entry)
        self._note_loggers()

    async def extend(self, found: Mapping[str, float]) -> None:
        """Add numbers to the last entry."""
        entry = self.history[-1]
        entry |= found
        self.loggers.step(int(entry["step"]), _finite(found), [])
        await self.store.add_metrics(self.run.run_id, int(entry["step"]), metrics(found))

    async def end(self, status: RunStatus, error: BaseException | None = None, *, content: bool = True) -> None:
        """The run is over. Where it did not succeed, a store that cannot be written is noted only. Without `content`,
        the type of the error alone is recorded."""
        reason = None if error is None else described(error, content=content)
        # By the monotonic clock: the wall clock may have been set since.
        ended_at = self.run.created_at + time.monotonic() - self._began
        self.run = replace(self.run, status=status, error=reason, ended_at=ended_at)
        try:
            await self.store.put_run(self.run)
        except StoreError as failed:
            if status == "succeeded":
                raise
            self.progress.note(f"the end of the run was not recorded: {failed}")
        finally:
            last: dict[str, float] = {}
            for entry in self.history:
                last |= _finite(entry)
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


def metrics(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an entry of the history by name, without its step."""
    return {
        name: float(value)
        for name, value in entry.items()
        if name != "step" and isinstance(value, numbers.Real) and not isinstance(value, bool)
    }


def _finite(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics(entry).items() if math.isfinite(value)}


_SECRET = re.compile(
    r"(^|[^a-z])(api)?(keys?|token|secrets?|passwords?|passwd|credentials?|authorization)$", re.IGNORECASE
)
"""Names of settings that may hold a key."""


async def add_entry(store: Runs, run_id: str, entry: Mapping[str, Any]) -> None:
    """Store the numbers of a history's entry as metrics of its step."""
    await store.add_metrics(run_id, int(entry["step"]), metrics(entry))


async def add_history(store: Runs, run_id: str, history: Sequence[Mapping[str, Any]]) -> None:
    """Store a history's entries, unless the store has metrics of the last one, which is stored last."""
    if not history or await store.query_metrics([run_id], after_step=int(history[-1]["step"]) - 1, limit=1):
        return
    *others, last = history
    await asyncio.gather(*(add_entry(store, run_id, entry) for entry in others))
    await add_entry(store, run_id, last)


def json_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON values, without those whose names say that they are secret.

    A function is its name. What else is no JSON value, and could hold a key, is replaced by the name of its type.
    """
    return {name: _json_value(value) for name, value in settings.items() if not _SECRET.search(name)}


def _json_value(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return json_settings({str(name): inner for name, inner in value.items()})
        case list() | tuple():
            return [_json_value(inner) for inner in value]
    return function_name(value) if isfunction(value) else type(value).__name__

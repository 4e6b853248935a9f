"""Callbacks: user code that sees a run's steps and may end it.

Invariant: a callback that raises or stops a run ends it after the step, with a checkpoint, as if it had been the last.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from agl.errors import AglError, CallbackError, ConfigError, nearest
from agl.tracing.threads import in_thread
from agl.trainer.report.alerts import Alert
from agl.trainer.run.recorder import Recorder
from agl.trainer.store.types import RunStatus

log = logging.getLogger("agl")

Found = Mapping[str, float] | None
"""What a callback has measured: numbers by name, recorded with the step."""
Entry = Mapping[str, Any]
"""A step's entry of the history: "step", how many are done, and numbers by name."""


class RunState(Protocol):
    """The part of a run that callbacks are shown."""

    run_id: str
    directory: Path
    val: Sequence[Any]
    recorder: Recorder


class RunView:
    """A read-only view of a run, which can stop it."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._reason: str | None = None

    @property
    def run_id(self) -> str:
        """The run's id, which stays the same when it is resumed."""
        return self._run.run_id

    @property
    def directory(self) -> Path:
        """Where its checkpoints are."""
        return self._run.directory

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self._run.recorder.run.step

    @property
    def steps(self) -> int | None:
        """How many steps are planned; None if unknown."""
        return self._run.recorder.run.steps

    @property
    def history(self) -> tuple[Entry, ...]:
        """The entries so far, those from before a resume included."""
        return tuple(MappingProxyType(entry) for entry in self._run.recorder.history)

    @property
    def val_tasks(self) -> int:
        """How many validation tasks the run has."""
        return len(self._run.val)

    @property
    def stop_reason(self) -> str | None:
        """Why the run will end after this step; None while it continues."""
        return self._reason

    def stop(self, reason: str) -> None:
        """End training after the current step: its checkpoint and the policies are saved, and `fit` returns."""
        self._reason = self._reason or reason


class Callback:
    """Base class: override what you need.

    Methods are plain functions, called one after another in a worker thread. The run waits for each of them, while
    rollouts in progress go on. One that raises ends the run after the step with its error; the checkpoint of the step
    is saved before. What `on_step`, `on_validation` and `on_checkpoint` return, numbers by name, is recorded with the
    step: in the history, the store and every tracker; those of `on_checkpoint` are not in the history of a run that is
    resumed from that checkpoint. Names under "goal/" are what the run is about: the dashboard shows them first.
    """

    def on_start(self, run: RunView) -> None:
        """Training begins, or a stopped run is resumed; `run.history` has the entries from before."""

    def on_step(self, run: RunView, entry: Entry) -> Found:
        """A step is done and recorded."""

    def on_validation(self, run: RunView, entry: Entry) -> Found:
        """An entry with a validation was recorded; after `on_step`, and once before the first step."""

    def on_checkpoint(self, run: RunView, path: Path, step: int) -> Found:
        """A checkpoint was written, after `step` steps."""

    def on_alert(self, run: RunView, alert: Alert) -> None:
        """Something began to look wrong with this step: an entropy that collapses, groups without a spread of rewards,
        failures, ... (`agl.trainer.report.alerts`)."""

    def on_end(self, run: RunView, status: RunStatus) -> None:
        """The run is over: "succeeded" (stopped early, too), "failed", or "stopped" (cancelled)."""


class Webhook(Callback):
    """Posts alerts and the run's end to a URL, as JSON: {"run_id", "step", "event": "alert" or "end", "kind" (of the
    alert, or the status), "text"}. A receiver that does not answer is logged, and never stops the run.

    Args:
        url: http:// or https://.
        timeout: seconds for one request.

    Raises:
        ConfigError: not a URL.
    """

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"Webhook({url!r})", hint="give a URL that begins with https://")
        self.url = url
        self.timeout = timeout

    def on_alert(self, run: RunView, alert: Alert) -> None:
        self._post(run, event="alert", kind=alert.kind, text=alert.text)

    def on_end(self, run: RunView, status: RunStatus) -> None:
        self._post(run, event="end", kind=status, text=run.stop_reason or f"the run has {status}")

    def _post(self, run: RunView, **facts: str) -> None:
        import httpx

        try:
            answer = httpx.post(self.url, json={"run_id": run.run_id, "step": run.step, **facts}, timeout=self.timeout)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            log.warning("the webhook did not take %s of step %d: %s", facts["kind"], run.step, error)


class EarlyStopping(Callback):
    """Ends a run when a metric no longer improves. It reads only the history, so resuming changes nothing.

    Args:
        metric: its name in `Result.history`.
        patience: how many values in a row without improvement end the run.
        min_delta: by how much a value has to beat the best one to be an improvement.
        mode: "max" if larger is better, else "min".
        min_steps: the run is not ended before so many steps.

    Raises:
        ConfigError: a value out of range; in the run, a metric that it does not have.
    """

    def __init__(
        self,
        metric: str = "val/reward",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["max", "min"] = "max",
        min_steps: int = 0,
    ) -> None:
        if mode not in ("max", "min"):
            raise ConfigError(f"EarlyStopping(mode={mode!r})", hint=nearest(str(mode), ("max", "min")))
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"EarlyStopping(patience={patience!r})", hint="give a whole number above 0")
        if not (min_delta >= 0 and min_steps >= 0):
            raise ConfigError(
                f"EarlyStopping(min_delta={min_delta!r}, min_steps={min_steps!r})", hint="give numbers from 0"
            )
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.min_steps = min_steps

    def on_start(self, run: RunView) -> None:
        if self.metric.startswith("val/") and not run.val_tasks:
            raise ConfigError(
                f"EarlyStopping watches {self.metric!r}, and the run has no validation",
                hint="give fit() a val_dataset, or watch another metric, such as 'train/reward'",
            )
        self._decide(run)

    def on_step(self, run: RunView, entry: Entry) -> None:
        if not self.metric.startswith("val/"):
            self._look(run, entry)

    def on_validation(self, run: RunView, entry: Entry) -> None:
        if self.metric.startswith("val/"):
            self._look(run, entry)

    def _look(self, run: RunView, entry: Entry) -> None:
        # A step without an update has no metrics of the learner.
        without_update = "learner/" in self.metric and not any("learner/" in name for name in entry)
        if self.metric not in entry and not without_update:
            raise ConfigError(
                f"EarlyStopping watches {self.metric!r}, which the run does not have",
                hint=nearest(self.metric, [name for name in entry if name != "step"]),
            )
        self._decide(run)

    def _decide(self, run: RunView) -> None:
        sign = 1 if self.mode == "max" else -1
        best = -math.inf
        best_step = 0
        since = 0
        step = 0
        for entry in run.history:
            if self.metric not in entry:
                continue
            step = entry["step"]
            value = sign * entry[self.metric]
            if (best == -math.inf and not math.isnan(value)) or value > best + self.min_delta:
                best = value
                best_step = step
                since = 0
                continue
            since += 1
            if since >= self.patience and step >= self.min_steps:
                best_text = f"{sign * best:.4g} after step {best_step}" if best > -math.inf else "not a number"
                run.stop(
                    f"{self.metric} has not improved in {since} values; the best, {best_text}, "
                    f"is not beaten by {entry[self.metric]:.4g} after step {step}"
                )
                return


_MEASURING = ("on_step", "on_validation", "on_checkpoint")


class Callbacks:
    """The callbacks of one run, and whether one of them has ended it.

    Args:
        callbacks: in the order in which they are called.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)
        self.view: RunView | None = None
        self._recorder: Recorder | None = None
        self.error: AglError | None = None

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    @property
    def stop_reason(self) -> str | None:
        """Why the run must end after this step; None if it continues."""
        if self.error is not None:
            return f"a callback failed: {self.error.message}"
        return None if self.view is None else self.view.stop_reason

    async def start(self, run: RunState) -> None:
        """Training begins. Only this call raises, since nothing can be lost yet."""
        if self._callbacks:
            self.view = RunView(run)
            self._recorder = run.recorder
            await self.call("on_start")
            self.raise_error()

    async def record(self, entry: dict[str, Any]) -> None:
        """An entry was added to the history."""
        names = ("train/", "on_step"), ("val/", "on_validation")
        for prefix, method in names:
            if any(name.startswith(prefix) for name in entry):
                await self.call(method, MappingProxyType(entry))

    async def call(self, method: str, *args: Any) -> None:
        """Call a method of each callback, and record the numbers that it returns; of those that raise, the first one's
        error is kept."""
        if self.view is None:
            return
        for callback in self._callbacks:
            try:
                found = await in_thread(functools.partial(getattr(callback, method), self.view, *args))
                if method in _MEASURING and found is not None:
                    await self._add(found)
            except Exception as error:
                self.error = self.error or _callback_error(error, callback, method, self.view)

    async def _add(self, found: Mapping[str, float]) -> None:
        """Record numbers with the last entry.

        Raises:
            ConfigError: a name that the entry has, or a value that is no number.
        """
        assert self._recorder is not None
        if not isinstance(found, Mapping):
            raise ConfigError(f"it returned {found!r}", hint="return numbers by name, or nothing")
        for name, value in found.items():
            if name in self._recorder.history[-1]:
                raise ConfigError(f"{name!r} is recorded already", hint=f"name it otherwise, such as 'goal/{name}'")
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise ConfigError(f"it returned {value!r} as {name!r}", hint="return numbers by name")
        await self._recorder.extend(found)

    def raise_error(self) -> None:
        """Raise the error of the callback that failed, if one did."""
        if self.error is not None:
            raise self.error


def as_callbacks(callbacks: Callback | Iterable[Callback] | None) -> Sequence[Callback]:
    """Callbacks as a list.

    Raises:
        ConfigError: something that is no callback, or has async methods.
    """
    several = isinstance(callbacks, Iterable)
    listed: list[Any] = list(callbacks) if several else [] if callbacks is None else [callbacks]
    for callback in listed:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks= has {callback!r}, which is not an agl.Callback",
                hint="give objects of subclasses, for example agl.EarlyStopping()",
            )
        for name in vars(Callback):
            if name.startswith("on_") and inspect.iscoroutinefunction(getattr(callback, name)):
                raise ConfigError(
                    f"{type(callback).__name__}.{name} is async", hint="make it a plain function; it has its own thread"
                )
    return listed


def _callback_error(error: Exception, callback: Callback, method: str, view: RunView) -> AglError:
    place = {"callback": f"{type(callback).__name__}.{method}", "step": view.step}
    if isinstance(error, AglError):
        own = type(error)(error.message, hint=error.hint, **{**error.where, **place})
    else:
        own = CallbackError(
            f"a callback failed: {type(error).__name__}: {error}",
            hint="repair it, or leave it out of callbacks=, and resume the run with resume=True: the step is saved",
            **place,
        )
    own.__cause__ = error
    return own

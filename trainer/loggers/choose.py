"""Which loggers a run has: objects, and trackers by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agl.errors import ConfigError, nearest
from agl.trainer.loggers.base import MAX_SAMPLES, Logger, Tracker
from agl.trainer.loggers.trackers import MLflow, TensorBoard, Trackio, WandB

TRACKERS: Mapping[str, type[Tracker]] = {
    tracker.name_in_log: tracker for tracker in (WandB, MLflow, TensorBoard, Trackio)
}
"""The trackers by their names in `log=`."""


def as_loggers(log: str | Logger | Iterable[str | Logger] | None, more: Iterable[Tracker] = ()) -> tuple[Logger, ...]:
    """Loggers of names and objects.

    Args:
        more: further trackers; one that `log` has already is left out.

    Raises:
        ConfigError: an unknown name, something that is no logger, a tracker twice or without its package.
    """
    if log is None:
        log = ()
    elif isinstance(log, str) or not isinstance(log, Iterable):
        log = (log,)
    loggers = [_as_logger(entry) for entry in log]
    names = [name_of(logger) for logger in loggers if isinstance(logger, Tracker)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"log= has the tracker {twice!r} twice", hint="name it once")
    return (*loggers, *(tracker for tracker in more if tracker.name_in_log not in names))


def name_of(logger: Logger) -> str:
    """The name of a logger in messages."""
    return logger.name_in_log if isinstance(logger, Tracker) else type(logger).__name__


def samples_of(logger: Logger) -> int:
    """How many rollouts of a step a logger asks for."""
    return getattr(logger, "samples", 0)


def _as_logger(entry: Any) -> Logger:
    if isinstance(entry, str):
        if entry not in TRACKERS:
            raise ConfigError(f"log= names {entry!r}, which is not a tracker", hint=nearest(entry, TRACKERS))
        return TRACKERS[entry]()
    if isinstance(entry, type) or not isinstance(entry, Logger):
        raise ConfigError(
            f"log= has {entry!r}, which is not a logger",
            hint=f"give {', '.join(map(repr, TRACKERS))}, or an object with the methods start, step and end",
        )
    samples = samples_of(entry)
    if not isinstance(samples, int) or not 0 <= samples <= MAX_SAMPLES:
        raise ConfigError(
            f"the logger {name_of(entry)} has samples={samples!r}", hint=f"give a number from 0 to {MAX_SAMPLES}"
        )
    return entry

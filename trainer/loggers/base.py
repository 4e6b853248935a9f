"""What a logger is, and what it gets: numbers of each step, and whole rollouts only where it asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from agl.errors import ConfigError
from agl.extras import install_line

MAX_SAMPLES = 32
"""Most rollouts of a step that a logger may ask for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout of a step, texts and all.

    Attributes:
        rollout_id: its id in the store.
        mode: "train" or "val".
        task: as JSON text.
        conversation: the calls' messages and answers in order, as text. Long ones are cut.
        rewards: by name, of its last attempt.
        reward: the sum of those that count; None without any.
        advantage: the mean over its trained tokens; None where none was trained.
    """

    rollout_id: str
    mode: str
    task: str
    conversation: str
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None


@runtime_checkable
class Logger(Protocol):
    """Takes what a run records. Its methods are called one after another in a thread that no other logger uses.

    A logger that raises is noted once and not called again; one that is slower than the run loses its oldest steps.
    An attribute `samples`, a number, asks for so many rollouts with their texts per step; without it none is sent.
    """

    def start(self, run_id: str, config: Mapping[str, Any], resumed_from: int | None) -> None:
        """A run begins.

        Args:
            run_id: its id, which stays the same when it is resumed.
            config: its settings as JSON values, without keys.
            resumed_from: how many steps are done when a stopped run is resumed; later ones may have been logged
                before it was stopped, and are logged again. None for a new run.
        """
        ...

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """`step` steps are done. `metrics` holds finite numbers by the names that `Result.history` has."""
        ...

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        """The run is over: "succeeded", "failed" or "stopped".

        Args:
            summary: the last number of each metric.
        """
        ...


@dataclass(kw_only=True)
class Tracker(Logger):
    """A logger for a known tracker: its settings, of which those that are None are filled in by the run.

    Attributes:
        samples: rollouts whose texts are sent per step; 0 sends none.
    """

    name_in_log: ClassVar[str]
    module: ClassVar[str]
    package: ClassVar[str]

    samples: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.samples <= MAX_SAMPLES:
            raise ConfigError(f"samples={self.samples}", hint=f"give a number from 0 to {MAX_SAMPLES}")
        # Now, and not in its thread: an import takes seconds, in which the first steps would wait for the interpreter.
        try:
            import_module(self.module)
        except ImportError as error:
            raise ConfigError(
                f"the logger {self.name_in_log!r} needs the package {self.package}, which cannot be imported: {error}",
                hint=f"pip install {self.package}; or for all trackers, {install_line('track')}",
            ) from error

    def for_run(self, project: str | None, name: str | None, directory: Path) -> Self:
        """A copy for one run.

        Args:
            project, name, directory: take the place of settings of these names that are None.
        """
        values = {"project": project, "name": name, "directory": directory}
        own = [f.name for f in fields(self) if f.name in values and getattr(self, f.name) is None]
        return replace(self, **{key: values[key] for key in own})

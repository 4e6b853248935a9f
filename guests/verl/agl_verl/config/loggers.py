"""Trackers that a verl config names: agl logs to those that it knows, and verl to the others.

Invariant: nothing is logged twice, and what a config says of logging has an effect or is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agl.errors import ConfigError, nearest
from agl.trainer.loggers.base import MAX_SAMPLES, Tracker
from agl.trainer.loggers.choose import TRACKERS

KEY = "trainer.logger"
RENAMED = {"tracking": "wandb"}
"""verl's older names of trackers."""
OTHERS = ("console", "file", "swanlab", "vemlp_wandb", "clearml", "rl_insight")
"""What verl alone logs to."""


@dataclass(frozen=True, slots=True)
class Tracking:
    """What a verl config says of trackers.

    Attributes:
        names: of those that agl logs to.
        samples: rollouts whose texts they get per step.
        project, name: what the trackers call the run; None if the config does not say.
    """

    names: tuple[str, ...] = ()
    samples: int = 0
    project: str | None = None
    name: str | None = None

    def trackers(self) -> list[Tracker]:
        """The loggers.

        Raises:
            ConfigError: the package of one is not installed.
        """
        return [TRACKERS[name](samples=self.samples) for name in self.names]


def split(settings: Mapping[str, Any]) -> tuple[Tracking, dict[str, Any]]:
    """What agl logs to, and the settings that are left for verl.

    Args:
        settings: dotted key -> value.

    Raises:
        ConfigError: a tracker that neither knows.
    """
    value = settings.get(KEY)
    listed = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    names = [RENAMED.get(name, name) for name in listed if isinstance(name, str)]  # verl's schema refuses the others
    for name in names:
        if name not in TRACKERS and name not in OTHERS:
            raise ConfigError(f"{KEY} names {name!r}", hint=nearest(name, (*TRACKERS, *OTHERS)))
    ours = tuple(dict.fromkeys(name for name in names if name in TRACKERS))
    left = dict(settings)
    samples = 0
    if ours:
        left[KEY] = [name for name in names if name not in TRACKERS]
        generations = settings.get("trainer.log_val_generations")
        if isinstance(generations, int) and generations > 0:
            samples = min(generations, MAX_SAMPLES)
    project = settings.get("trainer.project_name")
    name = settings.get("trainer.experiment_name")
    return Tracking(ours, samples, project, name), left

"""What `Trainer(runners=...)` takes: where rollouts are executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agl.errors import ConfigError
from agl.options import checked_options


@checked_options
@dataclass(frozen=True, slots=True)
class RayRunners:
    """Rollouts on a Ray cluster: `Trainer(runners=agl.RayRunners(...))`; "ray" has these defaults.

    Attributes:
        num_cpus: CPUs that Ray reserves for each worker; most agents wait for their model, so less than one. 0 reserves
            nothing.
        per_actor: worker processes in one actor, which imports the agent once for all of them.

    Raises:
        ConfigError: a value is out of range.
    """

    num_cpus: float = 0.25
    per_actor: int = 8

    def __post_init__(self) -> None:
        if self.num_cpus < 0 or self.per_actor < 1:
            raise ConfigError(f"{self}", hint="num_cpus is 0 or more, per_actor 1 or more")


Runners = Literal["local", "process", "ray", "remote"]

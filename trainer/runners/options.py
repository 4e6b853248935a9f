"""What `Trainer(runners=...)` takes: where rollouts are executed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

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


@checked_options
@dataclass(frozen=True, slots=True)
class ProcessRunners:
    """Each attempt in a container on this machine: `Trainer(runners=agl.ProcessRunners(container=image))`. Linux only.

    Attributes:
        container: the image. It has agl of this release, a Python of this program's version, and what the agent needs.
        engine: "podman" or "docker".
        network: the engine's name of the containers' network. With "none" an agent reaches its policy alone.
        env: names of environment variables that the agents get.
        memory_mb: memory of a container in MiB, /tmp included.

    Raises:
        ConfigError: a value is out of range.
    """

    container: str
    engine: Literal["podman", "docker"] = "podman"
    network: str = "none"
    env: tuple[str, ...] = ()
    memory_mb: int = 4096

    def __post_init__(self) -> None:
        if self.memory_mb < 64 or self.engine not in ("podman", "docker"):
            raise ConfigError(f"{self}", hint='engine is "podman" or "docker", memory_mb 64 or more')

    def require(self, payload: bytes) -> None:
        """Import the agent in a container.

        Raises:
            ConfigError: there is no such image, or the agent cannot be imported in it.
        """
        import_module("agl_service.containers").require_container(self, payload)

    def pool(self, *args: Any, **kwargs: Any) -> Any:
        """As `WorkerPool`, with a new container for each attempt."""
        return import_module("agl_service.containers").ContainerPool(self, *args, **kwargs)


Runners = Literal["local", "process", "ray", "remote"]

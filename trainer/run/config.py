"""The settings of a run: who is trained, how rewards are credited, where and how rollouts are executed.

Invariant: a value that could not be used is refused here, before anything is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, get_args

from agl.agents.hooks import Hook
from agl.credit import Credit, Uniform
from agl.errors import ConfigError, nearest
from agl.extras import require
from agl.mdp.selection import Selection
from agl.rewards.air import AIR
from agl.rewards.function import GroupReward
from agl.trainer.local.config import Policy
from agl.trainer.run.group_reward import require_group_reward
from agl.trainer.runners.options import RayRunners, Runners
from agl.trainer.runners.remote.coordinator import SILENT_SECONDS
from agl.trainer.runners.remote.runner import PATIENCE_SECONDS

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What `Trainer` was configured with, unchanged from a run's start to its end.

    Attributes:
        selection: which agents are trained, and by which policy.
        credit: how rewards become returns.
        policies: name -> where a policy differs from the algorithm's settings.
        group_reward: compares the rollouts of each task, once they have ended.
        air: the rules that reward tool outcomes, calls and handoffs, if any.
        n_workers: rollouts that run at once. max_attempts: tries per rollout. timeout: seconds per attempt.
        runners: where rollouts are executed: "local" (this process), "process", Ray, or "remote" (wherever `agl runner`
            is started).
        runner_key: the key that remote runners must show; with None, one is made that runners of this user on this
            machine find. Worker processes that the run starts get a key that is made for them.
        silent_seconds: how long a remote runner may be silent before its rollouts are run again.
        runner_patience: how long the run waits for any remote runner before it ends.
        host, port: the gateway's address, where it has its own server.
        gateways: processes that answer the agents' requests; 1 is this process, None lets the algorithm choose.
        capture_content: whether texts are recorded in addition to the tokens.
        initial_resources: what rollouts receive in addition to the LLM. hooks: called around every attempt.
    """

    selection: Selection
    credit: Credit = field(default_factory=Uniform)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    group_reward: GroupReward | None = None
    air: AIR | None = None
    n_workers: int = 8
    max_attempts: int = 2
    timeout: float | None = None
    runners: Runners | RayRunners = "local"
    runner_key: str | None = None
    silent_seconds: float = SILENT_SECONDS
    runner_patience: float = PATIENCE_SECONDS
    host: str = LOOPBACK
    port: int = 0
    gateways: int | None = None
    capture_content: bool = True
    initial_resources: Mapping[str, Any] = field(default_factory=dict)
    hooks: Sequence[Hook] = ()

    def __post_init__(self) -> None:
        require_positive(
            n_workers=self.n_workers,
            max_attempts=self.max_attempts,
            timeout=self.timeout,
            silent_seconds=self.silent_seconds,
            gateways=self.gateways,
        )
        require_group_reward(self.group_reward, capture_content=self.capture_content)
        if not isinstance(self.runners, RayRunners) and self.runners not in get_args(Runners):
            raise ConfigError(f"runners={self.runners!r}", hint=nearest(str(self.runners), get_args(Runners)))
        if isinstance(self.runners, RayRunners):
            require("runners='ray'", "ray")
        elif self.runners == "process":
            require("runners='process'", "local", ("cloudpickle",))
        has_key = isinstance(self.runners, RayRunners) or (self.runners == "remote" and self.runner_key is not None)
        if self.host not in (LOOPBACK, "::1", "localhost") and not has_key:
            raise ConfigError(
                f"host={self.host!r} is not a loopback address",
                hint='leave it out; or serve runners elsewhere with runners="remote" and a key (runner_key=, '
                "AGL_RUNNER_KEY)",
            )
        names = self.selection.policies
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ConfigError(
                    f"{name!r} cannot be a policy's name", hint="use letters, digits, dots, dashes and underscores"
                )
        for name, policy in self.policies.items():
            if name not in names:
                raise ConfigError(
                    f"policies= has {name!r}, but no agent is trained by it", hint=nearest(name, list(names))
                )
            if not isinstance(policy, Policy):
                raise ConfigError(f"policies= maps {name!r} to {policy!r}", hint="map it to agl.Policy(...)")


def require_positive(**values: float | None) -> None:
    """Raise `ConfigError` for the first value that is neither None nor above 0."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, Real) and value > 0):
            raise ConfigError(f"{name} is {value!r}", hint="use a number above 0")


def require_descriptors(n_workers: int) -> None:
    """Raise `ConfigError` where the system does not let this process open as many files as a run may need."""
    # A rollout holds a connection at both ends, and may hold one to its tools; the rest is stores, pipes and libraries.
    needed = 64 + 4 * n_workers
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"this process may open {hard} files, and {n_workers} workers need up to {needed}",
            hint="raise the limit (ulimit -n), or lower n_workers",
        )

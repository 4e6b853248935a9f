"""The settings of a run: which agents are trained, how rewards are credited, where and how rollouts run.

Invariant: a value that could not be used is refused here, before anything is started.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, cast, get_args

from agl import credit as credits
from agl.agents.agent import Tracer
from agl.agents.hooks import Hook
from agl.credit import Credit, Uniform
from agl.errors import ConfigError, nearest
from agl.extras import require
from agl.mdp.selection import AgentFilter, Selection, select
from agl.rewards.air import AIR, rule_set
from agl.rewards.function import GroupReward
from agl.trainer.local.config import Policy
from agl.trainer.loggers.base import Logger
from agl.trainer.run.callbacks import Callback
from agl.trainer.run.group_reward import require_group_reward
from agl.trainer.runners.options import ProcessRunners, RayRunners, Runners
from agl.trainer.runners.remote.coordinator import SILENT_SECONDS
from agl.trainer.runners.remote.runner import PATIENCE_SECONDS
from agl.trainer.store import require_known_store
from agl.trainer.store.base import Store

_CREDITS = ("Uniform", "Discounted", "PerCall", "PerAgent", "Cooperative", "Competitive", "TurnGroups")
LOOPBACK = "127.0.0.1"
_UNRECORDED = {"recorded": False}
"""Settings that the store does not keep with the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a run, unchanged from its start to its end. `agl.Trainer` takes each by keyword; what can be
    written as text is an option of `agl train` and `agl serve`.

    Attributes:
        tracer: an adapter's tracer, or several; a wrapped agent brings its own.
        agents: train only these agents, by name or glob; None = every agent. In Python also a re.Pattern, a callable,
            or {pattern: policy}.
        policies: {policy: agl.Policy(...)}, where a policy of `agents` differs from the algorithm's settings.
        credit: how rewards become returns: "uniform", "discounted(0.9)", or another rule of `agl.credit`. In Python the
            rule itself, or a function.
        air: reward tool outcomes, calls and handoffs by the rules of `agl.air`. In Python also your own `agl.AIR()`.
        reward_range: lowest and highest total reward of an attempt, such as "0,1"; one whose reward lies outside fails,
            and is not trained. None = any, with a warning where one is 100 times as large as all others of its step.
        group_reward: scores the rollouts of each task against each other: `agl.rewards.RankJudge(model)`. The agent's
            own rewards, if any, are added.
        n_workers: rollouts that run at once.
        store: where rollouts are recorded: a path, sqlite:///, postgresql:// or http:// of `agl store`; None = a file
            in the run's directory. In Python also an open store, which stays open.
        directory: directory of the run, for checkpoints, policies and the store. None = agl-runs/RUN_ID.
        seed: seed of the order of tasks, of every request's sampling and of the learner.
        max_attempts: attempts per rollout, the first included; what fails the same way each time is not tried again.
        timeout: time limit of an attempt, in seconds.
        runners: where rollouts run: "local" (threads and tasks of this process), "process" (worker processes, where a
            stuck agent is killed), `agl.ProcessRunners(container=...)` (a container for each attempt), "ray" or
            `agl.RayRunners(...)` (worker processes on a Ray cluster), "remote" (wherever `agl runner --store URL` is
            started; `fit`'s agent is then not run here and may be None).
        runner_key: the key that remote runners must show. None = AGL_RUNNER_KEY; without that, a key is made that
            runners of this user on this machine find.
        silent_seconds: heartbeat timeout of remote runners, in seconds. After it, their rollouts are run again.
        runner_patience: how long the run waits for any remote runner before it fails, in seconds.
        host: address that the gateway listens on. Other than loopback only for Ray, and for remote runners with a key.
        port: port that the gateway listens on; 0 picks a free port.
        gateways: processes that answer the agents' requests, for hundreds of rollouts at once. Each listens on its own
            port (`port` + 1, + 2, ... if a port is set). None = 1, this process; with verl, one for every 300 of
            `n_workers`.
        capture_content: record texts in addition to tokens.
        initial_resources: what rollouts receive in addition to `llm`.
        prompts: directory of prompts (`agl.save_prompts`, `agl.GEPA`, `agl.APO`) that the agents get. Its system
            prompts replace the agents' own, its templates those of `initial_resources`. None = the algorithm's
            `prompts`.
        hooks: an `agl.Hook`, or several, called around every attempt.
        progress: show progress.
        callbacks: an `agl.Callback`, or several, which see each step and may end training, as `agl.EarlyStopping` does.
        log: trackers that get the metrics: "wandb", "mlflow", "tensorboard" or "trackio". In Python also objects of
            `agl.loggers`, or your own. They get texts only where they ask for `samples`. A verl config's
            `trainer.logger` is added.
        project: project in the trackers.
        name: name of the run, in the trackers and in the store.
    """

    tracer: Tracer | Iterable[Tracer] | None = field(default=None, metadata=_UNRECORDED)
    agents: AgentFilter = field(default=None, metadata=_UNRECORDED)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    credit: Credit = field(default_factory=Uniform)
    air: bool | AIR | None = None
    reward_range: tuple[float, float] | None = None
    group_reward: GroupReward | None = None
    n_workers: int = 8
    store: str | Store | None = field(default=None, metadata=_UNRECORDED)
    directory: str | Path | None = field(default=None, metadata=_UNRECORDED)
    seed: int = 0
    max_attempts: int = 2
    timeout: float | None = 600.0
    runners: Runners | ProcessRunners | RayRunners = "local"
    runner_key: str | None = None
    silent_seconds: float = SILENT_SECONDS
    runner_patience: float = PATIENCE_SECONDS
    host: str = LOOPBACK
    port: int = 0
    gateways: int | None = None
    capture_content: bool = True
    initial_resources: Mapping[str, Any] = field(default_factory=dict)
    prompts: str | Path | None = field(default=None, metadata=_UNRECORDED)
    hooks: Hook | Iterable[Hook] | None = None
    progress: bool = field(default=True, metadata=_UNRECORDED)
    callbacks: Callback | Iterable[Callback] | None = field(default=None, metadata=_UNRECORDED)
    log: str | Logger | Iterable[str | Logger] | None = field(default=None, metadata=_UNRECORDED)
    project: str | None = field(default=None, metadata=_UNRECORDED)
    name: str | None = field(default=None, metadata=_UNRECORDED)
    selection: Selection = field(init=False)

    def __post_init__(self) -> None:
        resolved = {
            "selection": select(self.agents),
            "policies": dict(self.policies or {}),
            "credit": _credit(self.credit),
            "air": rule_set(self.air),
            "runners": RayRunners() if self.runners == "ray" else self.runners,
            "runner_key": self.runner_key or os.environ.get("AGL_RUNNER_KEY"),
            "initial_resources": dict(self.initial_resources or {}),
            "hooks": as_tuple(self.hooks),
        }
        low, high = self.reward_range or (0, 1)
        if not low < high:
            raise ConfigError(f"reward_range={self.reward_range!r}", hint="give the lowest and the highest: (0, 1)")
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        require_positive(
            n_workers=self.n_workers,
            max_attempts=self.max_attempts,
            timeout=self.timeout,
            silent_seconds=self.silent_seconds,
            gateways=self.gateways,
        )
        if isinstance(self.store, str):
            require_known_store(self.store)
        require_group_reward(self.group_reward, capture_content=self.capture_content)
        if not isinstance(self.runners, ProcessRunners | RayRunners) and self.runners not in get_args(Runners):
            raise ConfigError(f"runners={self.runners!r}", hint=nearest(str(self.runners), get_args(Runners)))
        if isinstance(self.runners, ProcessRunners):
            require("agl.ProcessRunners", "service")
        if isinstance(self.runners, RayRunners):
            require("runners='ray'", "ray")
        elif self.runners != "local" and self.runners != "remote":
            require("runners='process'", "local", ("cloudpickle",))
        if isinstance(self.runners, ProcessRunners) and (self.gateways or 1) > 1:
            raise ConfigError(f"gateways={self.gateways}", hint="leave it out: containers reach one gateway")
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


def _credit(credit: Any) -> Credit:
    if isinstance(credit, str):
        return credit_of_text(credit, "credit=")
    if isinstance(credit, type) or not (credit is None or callable(credit)):
        name = credit.__name__ if isinstance(credit, type) else "Discounted"
        raise ConfigError(f"credit= is {credit!r}", hint=f"give a rule: agl.credit.{name}(...)")
    return cast(Credit, credit or Uniform())


def credit_of_text(text: str, origin: str) -> Credit:
    """A rule of `agl.credit` by its name, with or without its options: "discounted(0.9)".

    Raises:
        ConfigError: there is no such rule, or it has no such options; the message begins with `origin`.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(\(.*\))?\s*", text)
    by_word = {bare_word(name): name for name in _CREDITS}
    if match is None or bare_word(match[1]) not in by_word:
        raise ConfigError(f"{origin}: there is no credit {text!r}", hint=nearest(text, by_word))
    try:
        call = ast.parse(f"f{match[2] or '()'}", mode="eval").body
        assert isinstance(call, ast.Call)
        values = [ast.literal_eval(value) for value in call.args]
        options = {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
        return getattr(credits, by_word[bare_word(match[1])])(*values, **options)
    except (SyntaxError, ValueError, TypeError) as error:
        raise ConfigError(f"{origin}: credit {text!r}: {error}", hint="for example discounted(0.9)") from None


def bare_word(name: str) -> str:
    """A name in lower case, without dashes, underscores and spaces."""
    return re.sub(r"[-_ ]", "", name.lower())


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Nothing, one thing or several as a tuple."""
    return () if value is None else tuple(value) if isinstance(value, Iterable) else (value,)


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

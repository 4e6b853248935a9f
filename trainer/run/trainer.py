"""The trainer: one object that takes an agent, tasks and an algorithm, and gives back a better policy."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from agl.agents.agent import Agent, Tracer, as_agent
from agl.agents.hooks import Hook
from agl.agents.registry import switched_on
from agl.agents.resources import Dataset, as_tasks
from agl.credit import Credit, Uniform
from agl.errors import CheckpointError, ConfigError, checked_options, nearest
from agl.mdp.selection import AgentFilter, select
from agl.rewards.air import AIR, rule_set
from agl.trainer.http.aio import run_in_thread
from agl.trainer.local.config import Policy
from agl.trainer.run.algorithm import Algorithm
from agl.trainer.run.checkpoints import latest_checkpoint
from agl.trainer.run.progress import Progress
from agl.trainer.run.run import Run, Serve, require_positive, require_tasks
from agl.trainer.runners.loading import load_agent
from agl.trainer.runners.options import RayRunners, Runners
from agl.trainer.runners.remote.coordinator import SILENT_SECONDS
from agl.trainer.store import open_store
from agl.trainer.store.base import Store


@dataclass(frozen=True, slots=True)
class Result:
    """What training came to.

    Attributes:
        run_id, directory: of the run. store: the URL of its store.
        history: one dict per step: "step", "train/reward", "val/reward" where there was a validation, each also
            by the reward's or agent's name ("train/reward/<name>"), ...
        policies: the trained policies by name, a Hugging Face directory each. policy: the only one; None if there is
            none or more than one.
        checkpoint: the last checkpoint, for `resume=True`; None if none was written.
    """

    run_id: str
    directory: Path
    store: str
    history: list[dict[str, Any]]
    policies: dict[str, Path]
    checkpoint: Path | None

    @property
    def policy(self) -> Path | None:
        """The trained policy's directory, where there is just one."""
        return next(iter(self.policies.values())) if len(self.policies) == 1 else None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A run that can start.

    Attributes:
        payload: what worker processes are given instead of the agent. tracers: what is switched on here.
        dev_tasks: how many tasks a dry run takes.
    """

    run_id: str
    directory: Path
    agent: Agent
    payload: bytes | None
    tracers: tuple[Tracer, ...]
    progress: Progress
    resume: bool
    dev_tasks: int | None


@checked_options
class Trainer:
    """Trains an agent.

    Args:
        algorithm: `agl.GRPO(...)` and its kin on this machine, `agl.VERL(...)` on a cluster, or `agl.Baseline()`.
        tracer: an adapter's tracer, or several; a wrapped agent brings its own.
        agents: which agents are trained: name, glob, re.Pattern, callable, several of them, or {pattern: policy};
            None = every agent.
        policies: {policy: agl.Policy(...)}, where a policy of `agents` differs from what the algorithm says.
        credit: how rewards become returns; `agl.credit.Uniform()` if None.
        air: rules that reward tool outcomes, calls and handoffs: True = `agl.air`, or an `agl.AIR()` of your own.
        n_workers: rollouts that run at once.
        store: "sqlite:///run.db", a path, or an open store, which stays open; None keeps it in the run's directory.
        directory: where checkpoints and the store go; `agl-runs/<run id>` if None.
        seed: fixes the order of tasks, every request's sampling and the learner's randomness.
        max_attempts: tries per rollout. timeout: seconds per attempt.
        runners: where rollouts are executed: "local" (threads and tasks of this process), "process" (worker processes,
            where a stuck agent is killed), "ray" or `agl.RayRunners(...)` (such processes on a Ray cluster), "remote"
            (wherever `agl runner --store URL` is started; `fit`'s agent is then not run here and may be None).
        runner_key: what remote runners must show (AGL_RUNNER_KEY if None).
        silent_seconds: how long a remote runner may be silent before its rollouts are run again.
        host, port: where the gateway listens; other than loopback only for Ray and for remote runners with a key.
        capture_content: whether texts are recorded beside the tokens.
        initial_resources: what rollouts are given beside `llm`.
        hooks: an `agl.Hook`, or several, called around every attempt.
        progress: show progress.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        tracer: Tracer | Iterable[Tracer] | None = None,
        agents: AgentFilter = None,
        policies: Mapping[str, Policy] | None = None,
        credit: Credit | None = None,
        air: bool | AIR | None = None,
        n_workers: int = 8,
        store: str | Store | None = None,
        directory: str | Path | None = None,
        seed: int = 0,
        max_attempts: int = 2,
        timeout: float | None = 600.0,
        runners: Runners | RayRunners = "local",
        runner_key: str | None = None,
        silent_seconds: float = SILENT_SECONDS,
        host: str = "127.0.0.1",
        port: int = 0,
        capture_content: bool = True,
        initial_resources: Mapping[str, Any] | None = None,
        hooks: Hook | Iterable[Hook] | None = None,
        progress: bool = True,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise ConfigError(f"algorithm= is {algorithm!r}", hint="for example agl.GRPO(model=..., steps=200)")
        require_positive(n_workers=n_workers, max_attempts=max_attempts, timeout=timeout, silent_seconds=silent_seconds)
        if runners == "ray":
            runners = RayRunners()
        if not isinstance(runners, RayRunners) and runners not in get_args(Runners):
            raise ConfigError(f"runners={runners!r}", hint=nearest(str(runners), get_args(Runners)))
        self.runners: Runners | RayRunners = runners
        self.runner_key = runner_key or os.environ.get("AGL_RUNNER_KEY")
        keyed = isinstance(runners, RayRunners) or (runners == "remote" and self.runner_key is not None)
        if host not in ("127.0.0.1", "::1", "localhost") and not keyed:
            raise ConfigError(
                f"host={host!r} is not a loopback address",
                hint='leave it out; or serve runners elsewhere with runners="remote" and a key (runner_key=, '
                "AGL_RUNNER_KEY)",
            )
        self.algorithm = algorithm
        self.tracers: tuple[Tracer, ...] = (
            () if tracer is None else tuple(tracer) if isinstance(tracer, Iterable) else (tracer,)
        )
        self.selection = select(agents)
        self.policies = dict(policies or {})
        self._check_policies()
        self.credit = credit or Uniform()
        self.air = rule_set(air)
        self.n_workers = n_workers
        self.store = store
        self.directory = None if directory is None else Path(directory)
        self.seed = seed
        self.max_attempts = max_attempts
        self.timeout = timeout
        self.silent_seconds = silent_seconds
        self.host, self.port = host, port
        self.capture_content = capture_content
        self.initial_resources = dict(initial_resources or {})
        self.hooks: tuple[Hook, ...] = (
            () if hooks is None else tuple(hooks) if isinstance(hooks, Iterable) else (hooks,)
        )
        self.progress = progress

    def fit(
        self,
        agent: Any,
        train_dataset: Dataset[Any] | Iterable[Any],
        val_dataset: Dataset[Any] | Iterable[Any] | None = None,
        *,
        resume: bool = False,
    ) -> Result:
        """Train, and return when done.

        Args:
            agent: what `agl.wrap` or `@agl.rollout` made, a `LitAgent`, a function, or where to import one of these
                from: "package.module:name" or "file.py:name".
            train_dataset, val_dataset: tasks; any JSON values, usually dicts.
            resume: go on from the last completed step in `directory`.

        Raises:
            AglError: what went wrong, where, and what to do.
            KeyboardInterrupt: Ctrl-C, after everything was ended and the last completed step saved.
        """
        train, val = as_tasks(train_dataset), as_tasks(val_dataset)
        if getattr(self.algorithm, "needs_tasks", True):
            require_tasks(train, "the training dataset")
        return self._drive(agent, train, val, resume=resume, dev_tasks=None)

    def dev(self, agent: Any, dataset: Dataset[Any] | Iterable[Any], n_tasks: int = 3) -> Result:
        """A dry run: a few tasks, no update; prints what the trainer would have seen. Arguments as `fit`."""
        tasks = as_tasks(dataset)
        require_tasks(tasks, "the dataset")
        return self._drive(agent, tasks, [], resume=False, dev_tasks=n_tasks)

    async def fit_async(
        self,
        agent: Any,
        train_dataset: Dataset[Any] | Iterable[Any],
        val_dataset: Dataset[Any] | Iterable[Any] | None = None,
        *,
        resume: bool = False,
        run_id: str | None = None,
        serve: Serve | None = None,
        progress: Progress | None = None,
    ) -> Result:
        """As `fit`, on the caller's event loop; cancelling it ends the run cleanly.

        Args:
            run_id: of the run; None = a new one. serve: how the gateway is reached; None: by a server of its own.
            progress: where progress goes; None: as `Trainer(progress=)` says.
        """
        train, val = as_tasks(train_dataset), as_tasks(val_dataset)
        if getattr(self.algorithm, "needs_tasks", True):
            require_tasks(train, "the training dataset")
        prepared = self._prepare(agent, resume=resume, dev_tasks=None, run_id=run_id, progress=progress)
        with switched_on(prepared.tracers):
            return await self._train(prepared, train, val, serve)

    def _drive(self, agent: Any, train: Any, val: Any, *, resume: bool, dev_tasks: int | None) -> Result:
        prepared = self._prepare(agent, resume=resume, dev_tasks=dev_tasks)
        with switched_on(prepared.tracers):
            try:
                return run_in_thread(self._train(prepared, train, val))
            except KeyboardInterrupt:
                prepared.progress.stop()
                saved = latest_checkpoint(prepared.directory)
                if saved is not None and dev_tasks is None:
                    prepared.progress.note(
                        f"stopped; {saved.name} is saved in {prepared.directory}. Go on with resume=True / --resume"
                    )
                raise

    def _prepare(
        self,
        agent: Any,
        *,
        resume: bool,
        dev_tasks: int | None,
        run_id: str | None = None,
        progress: Progress | None = None,
    ) -> _Prepared:
        """Check what is given, and make the run's directory."""
        runnable, payload = self._runnable(agent)
        if self.air is not None:
            self.air.require(capture_content=self.capture_content)
        run_id = run_id or f"run-{uuid.uuid4().hex[:8]}"
        directory = self.directory or Path("agl-runs") / run_id
        if dev_tasks is None:
            self._check_directory(directory, resume)
        directory.mkdir(parents=True, exist_ok=True)
        if dev_tasks is None:
            run_id = _kept_id(directory, run_id, resume)
        # Worker processes switch their own on.
        tracers = () if payload is not None else (*self.tracers, *runnable.tracers)
        told = progress or Progress(self.progress)
        return _Prepared(run_id, directory, runnable, payload, tracers, told, resume, dev_tasks)

    async def _train(self, prepared: _Prepared, train: Any, val: Any, serve: Serve | None = None) -> Result:
        directory, given = prepared.directory, None if isinstance(self.store, str) else self.store
        url = repr(given) if given is not None else str(self.store or f"sqlite:///{directory / 'run.db'}")
        store = given or await open_store(url)
        try:
            run = Run(
                run_id=prepared.run_id,
                seed=self.seed,
                directory=directory,
                agent=prepared.agent,
                selection=self.selection,
                credit=self.credit,
                train=train,
                val=val,
                store=store,
                progress=prepared.progress,
                n_workers=self.n_workers,
                max_attempts=self.max_attempts,
                timeout=self.timeout,
                resume=prepared.resume,
                capture_content=self.capture_content,
                runners=self.runners,
                payload=prepared.payload,
                runner_key=self.runner_key,
                silent_seconds=self.silent_seconds,
                serve=serve,
                host=self.host,
                port=self.port,
                initial_resources=self.initial_resources,
                policies=self.policies,
                air=self.air,
                hooks=self.hooks,
            )
            if prepared.dev_tasks is None:
                await self.algorithm.run(run)
            else:
                await self.algorithm.dev(run, prepared.dev_tasks)
            return Result(run.run_id, directory, url, run.history, run.policy_paths, run.checkpoint)
        finally:
            if given is None:
                await store.close()

    def _runnable(self, agent: Any) -> tuple[Agent, bytes | None]:
        """What is run here, and what is sent to worker processes instead."""
        if self.runners == "remote":
            return (_ELSEWHERE if agent is None or isinstance(agent, str) else as_agent(agent)), None
        if self.runners == "local":
            return (load_agent(agent, None) if isinstance(agent, str) else as_agent(agent)), None
        sent = agent if isinstance(agent, str) else as_agent(agent)
        from agl.trainer.runners.process.payload import Payload, pack

        packed = pack(Payload(sent, self.tracers, self.hooks, self.selection, self.initial_resources))
        return _ELSEWHERE if isinstance(sent, str) else sent, packed

    def _check_policies(self) -> None:
        named = self.selection.policies
        for name in named:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ConfigError(
                    f"{name!r} cannot be a policy's name", hint="use letters, digits, dots, dashes and underscores"
                )
        for name, policy in self.policies.items():
            if name not in named:
                raise ConfigError(
                    f"policies= has {name!r}, but no agent is trained by it", hint=nearest(name, list(named))
                )
            if not isinstance(policy, Policy):
                raise ConfigError(f"policies= maps {name!r} to {policy!r}", hint="map it to agl.Policy(...)")

    def _check_directory(self, directory: Path, resume: bool) -> None:
        """A run goes on in its own directory, and a new one needs a directory without another's checkpoints."""
        if resume and self.directory is None:
            raise ConfigError("resume=True needs directory=", hint="name the directory of the run to go on with")
        if resume and not directory.is_dir():
            raise CheckpointError("there is no run to go on with", hint="name its directory", path=directory)
        if not resume and (last := latest_checkpoint(directory)) is not None:
            raise ConfigError(
                f"{directory} holds a run already ({last})",
                hint="go on with it (resume=True or --resume), or choose another directory",
            )


def _kept_id(directory: Path, new: str, resume: bool) -> str:
    """The run's id, which its directory keeps from the start: a run is the same before its first checkpoint, too."""
    path = directory / "run-id"
    if resume and path.is_file():
        return path.read_text().strip()
    part = path.with_suffix(".part")
    part.write_text(f"{new}\n")
    part.rename(path)
    return new


def _not_here(*_: Any) -> Any:
    raise ConfigError("the agent of this run is executed by its runners", hint="start one: agl runner --store URL")


_ELSEWHERE = Agent("agent", _not_here, False)

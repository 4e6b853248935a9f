"""The trainer: one object that takes an agent, tasks and an algorithm, and gives back a better policy."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, cast

from agl._version import __version__
from agl.agents.agent import Agent, Tracer, as_agent
from agl.agents.frameworks import switched_on
from agl.agents.prompts import load_prompts, replacements
from agl.agents.resources import Dataset, as_tasks
from agl.errors import CheckpointError, ConfigError
from agl.mdp.selection import DEFAULT_POLICY
from agl.options import reject_unknown, require_types
from agl.rewards.air import rule_set
from agl.rewards.trace import Trace
from agl.stop_signals import stop_signals_to
from agl.texts import printable
from agl.trainer.http.aio import run_in_thread
from agl.trainer.local.prepared import require_local_model
from agl.trainer.loggers.base import Tracker
from agl.trainer.loggers.choose import as_loggers
from agl.trainer.loggers.threads import Loggers
from agl.trainer.report.progress import Progress
from agl.trainer.run.callbacks import Callbacks, as_callbacks
from agl.trainer.run.checkpoints import latest_checkpoint, write_atomically
from agl.trainer.run.config import RunConfig, as_tuple, require_descriptors
from agl.trainer.run.hub import save_command
from agl.trainer.run.lock import lock_directory
from agl.trainer.run.recorder import Recorder, json_settings
from agl.trainer.run.results import mean_rewards, require_some, require_tasks
from agl.trainer.run.run import Algorithm, Run, Serve
from agl.trainer.runners.loading import load_agent
from agl.trainer.runners.options import ProcessRunners
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store import open_store
from agl.trainer.store.sql.codec import dumps
from agl.trainer.store.types import TrainingRun

SHOWN_STEPS = 8
"""How many of the last steps a notebook shows of a result."""
CHECKED_TASKS = 1000
"""How many tasks are checked before anything is loaded, whether they can be stored."""


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The result of training.

    Attributes:
        run_id, directory: identify the run.
        store: the URL of its store.
        history: one dict per step: "step", "train/reward", "val/reward" where there was a validation, each also
            by the reward's or agent's name ("train/reward/<name>"), ...
        policies: the trained policies by name, a Hugging Face directory each.
        policy: the only one; None if there is
            none or more than one.
        checkpoint: the last checkpoint, for `resume=True`; None if none was written.
        stop_reason: why a callback ended training before its last step; None if none did.
        prompts: the texts that `agl.GEPA` or `agl.APO` ended with, by name; `directory / "prompts"` holds them, too.
    """

    run_id: str
    directory: Path
    store: str
    history: list[dict[str, Any]]
    policies: dict[str, Path]
    checkpoint: Path | None
    stop_reason: str | None = None
    prompts: dict[str, str] = field(default_factory=dict)

    @property
    def policy(self) -> Path | None:
        """The trained policy's directory, where there is just one."""
        return next(iter(self.policies.values())) if len(self.policies) == 1 else None

    def push_to_hub(
        self,
        repo: str,
        *,
        policy: str | None = None,
        adapter: bool = False,
        private: bool | None = None,
        token: str | None = None,
        message: str | None = None,
    ) -> str:
        """Upload the trained policy to the Hugging Face hub, with a model card of this run; returns its URL.

        Arguments and errors are those of `agl.trainer.run.hub.push`.
        """
        from agl.trainer.run.hub import push

        return push(self.directory, repo, policy=policy, adapter=adapter, private=private, token=token, message=message)

    def __repr__(self) -> str:
        val = [entry["val/reward"] for entry in self.history if "val/reward" in entry]
        steps = self.history[-1]["step"] if self.history else 0
        ends = " -> ".join(f"{value:.3f}" for value in (*val[:1], *val[1:][-1:]))
        reward = f", held-out reward {ends}" if ends else ""
        return f"<Result of {self.run_id}: {steps} steps{reward}, in {self.directory}>"

    def _repr_html_(self) -> str:
        """The curve, the last steps and the policies, for a notebook."""
        from agl.trainer.report.curve import svg_curve
        from agl.trainer.report.markup import styled, table, text

        names = ("step", "train/reward", "val/reward", "train/dropped_groups", "train/failed_rollouts")
        columns = [name for name in names if any(name in entry for entry in self.history)]
        values = [[entry.get(name, "") for name in columns] for entry in self.history[-SHOWN_STEPS:]]
        rows = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row] for row in values]
        paths = [["run", str(self.directory)], *([name, str(path)] for name, path in self.policies.items())]
        parts = [svg_curve(self.history), table(columns, rows), table(["", ""], paths)]
        return styled(f"<p><b>{text(self.run_id)}</b></p>{''.join(parts)}")


@dataclass(frozen=True, slots=True)
class _Launch:
    """What one call of `fit` or `dev` adds to the trainer's settings.

    Attributes:
        payload: what worker processes receive instead of the agent.
        tracers: those to switch on in this process.
        lock: of the directory; None for a dry run.
    """

    run_id: str
    directory: Path
    agent: Agent
    payload: bytes | None
    tracers: tuple[Tracer, ...]
    progress: Progress
    resume: bool
    lock: IO[str] | None


P = ParamSpec("P")
log = logging.getLogger("agl")


def _takes(
    arguments: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give `__init__` the signature of this dataclass; another keyword argument is a `ConfigError`."""

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        known = list(signature(arguments).parameters.values())
        kinds = cast(type, arguments)

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            algorithm = args[0] if args else kwargs.get("algorithm")
            of_class = is_dataclass(algorithm) and not isinstance(algorithm, type)
            theirs = signature(type(algorithm)).parameters if of_class else ()
            owners = {name: f"agl.{type(algorithm).__name__}" for name in theirs}
            reject_unknown(kwargs, (p.name for p in known), type(self).__name__, owners=owners)
            require_types(kwargs, kinds)
            init(self, *args, **kwargs)

        checked.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_ONLY), *known])  # type: ignore
        return checked

    return decorate


@dataclass(frozen=True, slots=True)
class _Arguments(RunConfig):
    """The arguments of `Trainer`: an algorithm, and the settings of a run."""

    algorithm: Algorithm


class Trainer:
    """Trains an agent.

    Args:
        algorithm: `agl.GRPO(...)` and its kin on this machine, `agl.VERL(...)` on a cluster, or `agl.Baseline()`.
        **settings: those of `RunConfig`, which `config` holds.
    """

    @_takes(_Arguments)
    def __init__(self, algorithm: Algorithm, **settings: Any) -> None:
        if isinstance(algorithm, type) or not isinstance(algorithm, Algorithm):
            raise ConfigError(f"algorithm= is {algorithm!r}", hint="for example agl.GRPO(model=..., steps=200)")
        self.algorithm = algorithm
        prompts = settings.get("prompts") or algorithm.prompts_directory()
        resources = {**(settings.get("initial_resources") or {}), **({} if prompts is None else load_prompts(prompts))}
        replacements(resources)  # checks them
        self.config = config = RunConfig(**{**settings, "initial_resources": resources})
        self.tracers: tuple[Tracer, ...] = as_tuple(config.tracer)
        self.store = config.store
        self.directory = None if config.directory is None else Path(config.directory)
        self.progress = config.progress
        self.callbacks = as_callbacks(config.callbacks)
        # A verl config names trackers, a project and a run, too.
        tracking = algorithm.tracking()
        self.loggers = as_loggers(config.log, tracking.trackers() if tracking else ())
        self.project = config.project or (tracking.project if tracking else None)
        self.name = config.name or (tracking.name if tracking else None)

    def fit(
        self,
        agent: Any,
        train_dataset: Dataset[Any] | Iterable[Any] = (),
        val_dataset: Dataset[Any] | Iterable[Any] | None = None,
        *,
        resume: bool = False,
    ) -> Result:
        """Train, and return when done.

        Args:
            agent: what `agl.wrap` or `@agl.rollout` made, a `LitAgent`, a function, or where to import one of these
                from: "package.module:name" or "file.py:name"; None where nothing is sampled.
            train_dataset, val_dataset: tasks; any JSON values, usually dicts. What learns from recorded data
                (`agl.SFT`, `agl.DPO`) needs none to train.
            resume: continue from the last completed step in `directory`.

        Raises:
            AglError: what went wrong, where, and what to do.
            KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after everything was ended and the last completed step saved.
        """
        train, val = _as_tasks(train_dataset, val_dataset)
        return self._drive(self._prepare(agent, train, val, resume=resume), train, val)

    def dev(self, agent: Any, dataset: Dataset[Any] | Iterable[Any], n_tasks: int = 3) -> Result:
        """A dry run: a few tasks, no update; prints what the trainer would have seen. Arguments as `fit`."""
        tasks = as_tasks(dataset)
        require_tasks(tasks, "the dataset")
        return self._drive(self._prepare(agent, tasks, [], resume=False, dry=True), tasks, [], dev_tasks=n_tasks)

    async def fit_async(
        self,
        agent: Any,
        train_dataset: Dataset[Any] | Iterable[Any] = (),
        val_dataset: Dataset[Any] | Iterable[Any] | None = None,
        *,
        resume: bool = False,
        run_id: str | None = None,
        serve: Serve | None = None,
        progress: Progress | None = None,
    ) -> Result:
        """As `fit`, on the caller's event loop; cancelling it ends the run cleanly, and so do SIGTERM and SIGHUP.

        Args:
            run_id: of the run; None = a new one.
            serve: makes the gateway reachable; None: a server for this run.
            progress: receives the run's progress; None: as `Trainer(progress=)` says.
        """
        train, val = _as_tasks(train_dataset, val_dataset)
        launch = self._prepare(agent, train, val, resume=resume, run_id=run_id, progress=progress)
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        received: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            received.append(number)
            if len(received) == 1:
                loop.call_soon_threadsafe(task.cancel)

        # Ctrl-C is the event loop's own.
        with stop_signals_to(stop), switched_on(launch.tracers), launch.lock or nullcontext():
            try:
                return await self._run(launch, train, val, serve=serve)
            except asyncio.CancelledError:
                if received:
                    raise KeyboardInterrupt(received[0].name) from None
                raise

    def _drive(self, launch: _Launch, train: Any, val: Any, *, dev_tasks: int | None = None) -> Result:
        with switched_on(launch.tracers), launch.lock or nullcontext():
            try:
                return run_in_thread(self._run(launch, train, val, dev_tasks=dev_tasks))
            except (KeyboardInterrupt, SystemExit) as stopped:
                launch.progress.stop()
                if stopped.__cause__ is not None:
                    launch.progress.note(f"while it was stopped: {stopped.__cause__}")
                saved = latest_checkpoint(launch.directory)
                if saved is not None and dev_tasks is None:
                    launch.progress.note(
                        f"stopped; {saved.name} is saved in {launch.directory}. Resume it with resume=True / --resume"
                    )
                raise

    async def _run(
        self,
        launch: _Launch,
        train: Sequence[Any],
        val: Sequence[Any],
        *,
        dev_tasks: int | None = None,
        serve: Serve | None = None,
    ) -> Result:
        directory = launch.directory
        user_store = None if isinstance(self.store, str) else self.store
        url = repr(user_store) if user_store is not None else str(self.store or f"sqlite:///{directory / 'run.db'}")
        store = user_store or await open_store(url)
        loggers = [
            logger.for_run(self.project, self.name, directory) if isinstance(logger, Tracker) else logger
            for logger in (self.loggers if dev_tasks is None else ())
        ]
        try:
            run = Run(
                self.config,
                launch.run_id,
                self.config.seed,
                directory,
                launch.agent,
                train,
                val,
                store,
                launch.progress,
                resume=launch.resume,
                own_store=self.store is None,
                payload=launch.payload,
                serve=serve,
                recorder=Recorder(
                    store,
                    launch.progress,
                    self._recorded(launch, len(train), len(val), dev_tasks),
                    loggers=Loggers(loggers),
                    resumed=launch.resume,
                ),
                callbacks=Callbacks(self.callbacks if dev_tasks is None else ()),
            )
            try:
                await run.recorder.start()
                if dev_tasks is None:
                    await self.algorithm.run(run)
                    run.callbacks.raise_error()
                elif (results := await self.algorithm.dev(run, dev_tasks)) is not None:
                    await _report(run, results)
            except asyncio.CancelledError:
                await run.end("stopped")
                raise
            except BaseException as error:
                await run.end("failed", error)
                raise
            await run.end("succeeded")
            run.callbacks.raise_error()
            paths = run.policy_paths
            reason = run.stop_reason
            return Result(run.run_id, directory, url, run.history, paths, run.checkpoint, reason, run.prompts)
        finally:
            launch.progress.stop()
            if user_store is None:
                await store.close()

    def _recorded(self, launch: _Launch, train: int, val: int, dev_tasks: int | None) -> TrainingRun:
        """What the store knows of the run when it begins."""
        recorded = (f.name for f in fields(RunConfig) if f.metadata.get("recorded", True))
        settings = {name: getattr(self.config, name) for name in recorded}
        settings |= {f"algorithm.{name}": value for name, value in self.algorithm.recorded_settings().items()}
        # Resources are prompts: their names say what there was.
        settings["initial_resources"] = sorted(self.config.initial_resources)
        settings |= {"train_tasks": train, "val_tasks": val, "agl": __version__}
        settings |= {} if dev_tasks is None else {"dry_run": True}
        return TrainingRun(
            launch.run_id,
            name=self.name or "",
            algorithm=type(self.algorithm).__name__,
            config=json_settings(settings),
            directory=str(launch.directory.absolute()),
            created_at=time.time(),
        )

    # -- before the run -----------------------------------------------------------------------------------------------

    def _prepare(
        self,
        agent: Any,
        train: Sequence[Any],
        val: Sequence[Any],
        *,
        resume: bool,
        dry: bool = False,
        run_id: str | None = None,
        progress: Progress | None = None,
    ) -> _Launch:
        """Check the tasks, the agent and the directory, and make the directory."""
        if self.algorithm.needs_tasks:
            require_tasks(train, "the training dataset")
        config = self.config
        payload = None
        agent = _REMOTE if agent is None and not (len(train) or len(val)) else agent
        by_name = isinstance(agent, str)
        if config.runners == "remote":
            runnable = _REMOTE if agent is None or by_name else as_agent(agent)
        elif config.runners == "local":
            runnable = load_agent(agent, None) if by_name else as_agent(agent)
        else:
            from agl.trainer.runners.process.payload import Payload, pack

            runnable = _REMOTE if by_name else as_agent(agent)
            sent = agent if by_name else runnable
            if runnable.memory is not None:
                # Workers ask the run, which has the memory and its `embed=`.
                sent = replace(runnable, memory=replace(runnable.memory, memory=None))
            payload = pack(
                Payload(sent, self.tracers, as_tuple(config.hooks), config.selection, config.initial_resources),
                here=not isinstance(config.runners, ProcessRunners),
            )
            if isinstance(config.runners, ProcessRunners):
                config.runners.require(payload)
        for tasks, name in ((train, "a training task"), (val, "a validation task")):
            for index, task in enumerate(itertools.islice(tasks, CHECKED_TASKS)):
                dumps(task, name, index=index)
        model = self.algorithm.local_model()
        if model is not None and not resume:
            require_local_model(model)
        if (air := rule_set(config.air)) is not None:
            air.require(capture_content=config.capture_content)
        require_descriptors(config.n_workers)
        run_id = run_id or f"run-{uuid.uuid4().hex[:8]}"
        directory = self.directory or Path("agl-runs") / run_id
        if resume and self.directory is None:
            raise ConfigError("resume=True needs directory=", hint="name the directory of the run to resume")
        if resume and not directory.is_dir():
            raise CheckpointError("there is no run to resume", hint="name its directory", path=directory)
        if not resume and not dry and (last := latest_checkpoint(directory)) is not None:
            raise ConfigError(
                f"{directory} already has a run ({last})",
                hint="resume it (resume=True or --resume), or choose another directory",
            )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = None if dry else lock_directory(directory)
            # The directory holds the run's id from the start, so it stays the same before the first checkpoint, too.
            id_file = directory / "run-id"
            if resume and id_file.is_file():
                run_id = id_file.read_text().strip()
            elif not dry:
                write_atomically(id_file, f"{run_id}\n")
            if not dry and not resume:
                save_command(directory)
        except OSError as error:
            raise ConfigError(
                f"the run's directory cannot be written: {error}",
                hint="check its permissions and the space on its disk, or choose another directory",
                path=directory,
            ) from error
        # Worker processes switch their own on.
        tracers = () if payload is not None else (*self.tracers, *runnable.tracers)
        return _Launch(run_id, directory, runnable, payload, tracers, progress or Progress(self.progress), resume, lock)


def _as_tasks(train: Any, val: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    tasks = as_tasks(train)
    measured = as_tasks(val)
    if val is not None and not len(measured):
        log.warning("val_dataset= is empty, so nothing is measured")
    return tasks, measured


async def _report(run: Run, results: Sequence[RolloutResult]) -> None:
    """Print each rollout of a dry run and the agents that were seen, and add what they earned to the history.

    Raises:
        AglError: all of them failed.
    """
    from agl.trainer.report import terminal
    from agl.trainer.report.explain import describe, renderable

    for result in results:
        report = await describe(run.store, result.rollout.rollout_id, credit=run.config.credit)
        terminal.console().print(renderable(report))
    seen = (name for r in results if r.attempt_trajectory is not None for name in r.attempt_trajectory.agents)
    agents = tuple(dict.fromkeys(seen))
    selection = run.config.selection.knowing(agents)
    for name in agents:
        policy = selection.policy_for(name)
        what = "not trained" if policy is None else "trained" if policy == DEFAULT_POLICY else f"trained as {policy}"
        terminal.console().print(f"agent     {name}: {what}; agents={name!r} selects it alone")
    for name, prompts in (await _namesakes(run, results)).items():
        shown = " and ".join(repr(printable(text)[:60]) for text in prompts[:2])
        terminal.console().print(
            f"agent     {name}: {len(prompts)} system prompts in one rollout, such as {shown}. Two agents of one name "
            "are selected and trained as one: give each its own name"
        )
    if agents and (unmatched := selection.unmatched(agents)):
        terminal.console().print(f"agents=   {', '.join(unmatched)}: no agent that made a call")
    succeeded = require_some(results, "the dry run")
    await run.record({"step": 0, **mean_rewards(succeeded, "train"), "train/rollouts": len(results)})


async def _namesakes(run: Run, results: Sequence[RolloutResult]) -> dict[str, tuple[str, ...]]:
    """Agents of the rollouts that may be several of one name, with their system prompts."""
    from agl.trainer.report.namesakes import namesakes

    found: dict[str, tuple[str, ...]] = {}
    for rollout_id, attempt in ((r.rollout.rollout_id, r.attempt) for r in results):
        spans = await run.store.query_spans(rollout_id, attempt)
        calls = await run.store.query_calls(rollout_id, attempt)
        found |= namesakes(Trace.of_attempt(rollout_id, attempt, spans, calls))
    return found


def _not_here(*_: Any) -> Any:
    raise ConfigError("the agent of this run is executed by its runners", hint="start one: agl runner --store URL")


_REMOTE = Agent("agent", _not_here, False)
"""Stands for an agent that only the runners load."""

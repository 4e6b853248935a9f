"""A training run: what an algorithm is given, and where it says how far it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from starlette.routing import Route

from agl.agents.agent import Agent
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.loggers.base import Tracker
from agl.trainer.report.alerts import Watch
from agl.trainer.report.progress import Progress
from agl.trainer.run.about import clear_stop_request, stop_requested
from agl.trainer.run.callbacks import Callbacks
from agl.trainer.run.config import RunConfig
from agl.trainer.run.memory import RunMemory
from agl.trainer.run.recorder import Recorder
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import Store
from agl.trainer.store.types import RunStatus, TrainingRun


class Endpoint(Protocol):
    """What makes a gateway reachable: a server for this run, or a place in one that outlives it."""

    async def start(self) -> str:
        """Let requests in; returns the base URL and sets the gateway's."""
        ...

    async def stop(self) -> None:
        """Let no more in, and end those that run. Idempotent."""
        ...


Serve = Callable[[Gateway, Sequence[Route]], Endpoint]
"""Makes the endpoint of a gateway and of the routes next to it; it also checks the keys of those routes."""


@dataclass(eq=False)
class Run:
    """What an algorithm is given. Its rollouts are executed by `agl.trainer.run.workplace.Workplace`.

    Attributes:
        config: the settings.
        run_id, seed, directory: of this run.
        agent: what is executed for each task.
        train, val: the tasks.
        store: where facts are recorded; stays open.
        progress: what is shown while it runs.
        resume: whether to continue from the last checkpoint in `directory`.
        own_store: whether the store is the file of this run, in `directory`.
        payload: the packed agent for worker processes, where `config.runners` starts them.
        serve: makes the gateway reachable; None: a server at `config.host` and `config.port`.
        checkpoint: the last one.
        policy_paths: the trained policies' directories by name.
        prompts: the texts that a prompt search ended with, by name.
        history: one dict per step; `record` adds to it.
        recorder: keeps the run's history; made from the others if None.
        callbacks: see it, and may end the run.
        memory: what the agent remembers, made where its rollouts are executed; None for nothing.
        watch: what looks wrong in the history.
        stop_request: why it ends after this step, where a person outside of
            this program wants it to.
    """

    config: RunConfig
    run_id: str
    seed: int
    directory: Path
    agent: Agent
    train: Sequence[Any]
    val: Sequence[Any]
    store: Store
    progress: Progress
    resume: bool = False
    own_store: bool = False
    payload: bytes | None = None
    serve: Serve | None = None
    checkpoint: Path | None = None
    policy_paths: dict[str, Path] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    recorder: Recorder = field(default=None)  # type: ignore[assignment]
    callbacks: Callbacks = field(default_factory=Callbacks)
    memory: RunMemory | None = None
    history: list[dict[str, Any]] = field(init=False)
    watch: Watch = field(default_factory=Watch, init=False)
    stop_request: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.recorder is None:
            self.recorder = Recorder(self.store, self.progress, TrainingRun(self.run_id, directory=str(self.directory)))
        self.history = self.recorder.history

    async def begin(self, steps: int | None, step: int = 0) -> None:
        """Record that training begins, or continues after `step` of `steps` steps."""
        await self.recorder.begin(self.run_id, steps, step)
        await clear_stop_request(self.store, self.run_id)
        self.watch = Watch()
        for entry in self.history:
            self.watch.add(entry)
        await self.callbacks.start(self)

    async def record(self, entry: dict[str, Any]) -> None:
        """Add an entry to the history: "step", how many are done, and numbers by name. Callbacks, and who looks at the
        run from outside, may set `stop_reason`."""
        await self.recorder.add(entry)
        await self.callbacks.record(entry)
        if await stop_requested(self.store, self.run_id):
            self.stop_request = "by agl stop, or from its page"
        for alert in self.watch.add(entry):
            whose = f"policy {alert.policy}: " if alert.policy else ""
            self.progress.note(f"step {alert.since}: {whose}{alert.text}")
            await self.callbacks.call("on_alert", alert)

    async def end(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Record that the run is over. What was saved stays saved, whatever callbacks and loggers do."""
        if self.stop_reason is not None and status == "succeeded":
            self.progress.note(f"stopped after step {self.recorder.run.step}: {self.stop_reason}")
        if self.memory is not None and status != "failed":
            await self.memory.end()
        await self.callbacks.call("on_end", status)
        await self.recorder.end(status, error, content=self.config.capture_content)

    async def record_checkpoint(self, path: Path, step: int) -> None:
        """Record that a checkpoint was written after `step` steps."""
        self.checkpoint = path
        await self.callbacks.call("on_checkpoint", path, step)

    @property
    def stop_reason(self) -> str | None:
        """Why training must end after this step, with a checkpoint; None if it continues."""
        return self.callbacks.stop_reason or self.stop_request


class Tracking(Protocol):
    """The trackers that an algorithm's own configuration names."""

    @property
    def project(self) -> str | None:
        """The project that they show the run in; None if the configuration does not say."""
        ...

    @property
    def name(self) -> str | None:
        """Their name of the run; None if the configuration does not say."""
        ...

    def trackers(self) -> Sequence[Tracker]:
        """The loggers.

        Raises:
            ConfigError: the package of one is not installed.
        """
        ...


class Algorithm(ABC):
    """Runs a training run to its end, or until its task is cancelled; cleans up after itself either way.

    Attributes:
        needs_tasks: whether its rollouts are of tasks of a training dataset, which must then have some.
    """

    needs_tasks: ClassVar[bool] = True

    @abstractmethod
    async def run(self, run: Run) -> None:
        """Fill `run.history`, `run.checkpoint` and `run.policy_paths`.

        Raises:
            AglError: what went wrong, where, and what to do.
        """

    @abstractmethod
    async def dev(self, run: Run, n_tasks: int) -> Sequence[RolloutResult] | None:
        """A dry run: `n_tasks` rollouts, no update.

        Returns:
            The rollouts, failed ones included, which the trainer reports and counts in `run.history`; None if the
            algorithm has filled `run.history` itself.
        """

    def recorded_settings(self) -> Mapping[str, Any]:
        """The settings that the store and the trackers show; the default is the fields of a dataclass."""
        if not is_dataclass(self):
            return {}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("recorded", True)}

    def prompts_directory(self) -> str | Path | None:
        """The directory of the prompts that the agents start with, where `Trainer(prompts=)` names none."""
        return None

    def tracking(self) -> Tracking | None:
        """The trackers that its own configuration names; None if it names none."""
        return None

    def local_model(self) -> str | None:
        """The model that is loaded on this machine, a directory or hub id; None if there is none."""
        return None

"""A training run: what an algorithm works with, and the one place where rollouts are requested."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.routing import Route

from agl.agents.agent import Agent
from agl.credit import Credit
from agl.errors import AglError, ConfigError, DatasetError, StoreError
from agl.mdp.selection import Selection
from agl.mdp.types import Reward
from agl.rewards.air import rule_set
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.processes.group import GatewayProcesses
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.http.auth import Keys, key_hash
from agl.trainer.local.config import Policy
from agl.trainer.report.progress import Progress
from agl.trainer.report.statistics import mean_interval
from agl.trainer.run.callbacks import Callbacks
from agl.trainer.run.config import LOOPBACK, RunConfig, as_tuple
from agl.trainer.run.faults import fault_counts, score_faults
from agl.trainer.run.group_reward import score_group
from agl.trainer.run.memory import RunMemory, require_content
from agl.trainer.run.recorder import Recorder
from agl.trainer.run.resume import ResumableRollouts, reconcile, replayable
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.lease_guard import LeaseGuard
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.options import RayRunners, Runners
from agl.trainer.runners.protocol import RolloutResult, Runner
from agl.trainer.runners.remote.coordinator import coordinator_routes, key_check
from agl.trainer.runners.remote.runner import RemoteRunner
from agl.trainer.runners.remote.serialization import selection_to_json
from agl.trainer.store.base import Mode, NewRollout, RolloutConfig, RunStatus, Store, TrainingRun, new_rollout_id


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


def seed_of(*parts: object) -> int:
    """A 62-bit seed from any parts, the same in every process."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


@dataclass(eq=False)
class Run:
    """Everything an algorithm needs. Lives on one event loop.

    Attributes:
        config: the settings. run_id, seed, directory: of this run.
        agent: what is executed for each task. train, val: the tasks.
        store: where facts are recorded; stays open. progress: what is shown while it runs.
        resume: whether to continue from the last checkpoint in `directory`.
        own_store: whether the store is the file of this run, in `directory`.
        payload: the packed agent for worker processes, where `config.runners` starts them.
        serve: makes the gateway reachable; None: a server at `config.host` and `config.port`.
        gateway: made by `start`, unless the algorithm has set one.
        checkpoint: the last one. policy_paths: the trained policies' directories by name.
        prompts: the texts that a prompt search ended with, by name.
        recorder: keeps the run's history; made from the others if None. callbacks: see it, and may end the run.
        memory: what the agent remembers, made from the others; None for nothing.
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
    gateway: Gateway | None = None
    checkpoint: Path | None = None
    policy_paths: dict[str, Path] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    recorder: Recorder = field(default=None)  # type: ignore[assignment]
    callbacks: Callbacks = field(default_factory=Callbacks)
    memory: RunMemory | None = None
    _endpoint: Endpoint | None = None
    _processes: GatewayProcesses | None = None
    _gc_threshold: tuple[int, int, int] | None = None
    _resumable: ResumableRollouts | None = None
    _coordinator: RunCoordinator | None = None
    _runner: Runner | None = None
    _cluster: Any = None
    _pending: dict[str, asyncio.Future[RolloutResult]] = field(default_factory=dict)
    _abandoned: list[str] = field(default_factory=list)
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        if self.recorder is None:
            self.recorder = Recorder(self.store, self.progress, TrainingRun(self.run_id, directory=str(self.directory)))

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict per step; `record` adds to it."""
        return self.recorder.history

    def _remembered(self) -> RunMemory | None:
        """The memory of the agent; its run's id is known once a checkpoint was read."""
        if self.memory is None and self.agent.memory is not None:
            require_content(self.agent.memory, self.capture_content)
            self.memory = RunMemory(self.store, self.run_id, self.agent.memory)
        return self.memory

    async def begin(self, steps: int | None, step: int = 0) -> None:
        """Record that training begins, or goes on after `step` of `steps` steps."""
        await self.recorder.begin(self.run_id, steps, step)
        await self.callbacks.start(self)

    async def record(self, entry: dict[str, Any]) -> None:
        """Add an entry to the history: "step", how many are done, and numbers by name. Callbacks may set
        `stop_reason`."""
        await self.recorder.add(entry)
        await self.callbacks.record(entry)

    async def end(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Record that the run is over. What was saved stays saved, whatever callbacks and loggers do."""
        if self.stop_reason is not None and status == "succeeded":
            self.progress.note(f"stopped after step {self.recorder.run.step}: {self.stop_reason}")
        if self.memory is not None and status != "failed":
            await self.memory.end()
        await self.callbacks.call("on_end", status)
        await self.recorder.end(status, error)

    async def record_checkpoint(self, path: Path, step: int) -> None:
        """Record that a checkpoint was written after `step` steps."""
        self.checkpoint = path
        await self.callbacks.call("on_checkpoint", path, step)

    @property
    def stop_reason(self) -> str | None:
        """Why training has to end after this step, with a checkpoint; None if it goes on."""
        return self.callbacks.stop_reason

    @property
    def selection(self) -> Selection:
        """Which agents are trained, and by which policy."""
        return self.config.selection

    @property
    def credit(self) -> Credit:
        """How rewards become returns."""
        return self.config.credit

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Name -> where a policy differs from the algorithm's settings."""
        return self.config.policies

    @property
    def n_workers(self) -> int:
        """Rollouts that run at once."""
        return self.config.n_workers

    @property
    def runners(self) -> Runners | RayRunners:
        """Where rollouts are executed."""
        return self.config.runners

    @property
    def capture_content(self) -> bool:
        """Whether texts are recorded in addition to the tokens."""
        return self.config.capture_content

    async def start(
        self,
        rules: Callable[[str], SamplingRules],
        model: str,
        *,
        register: Callable[[Gateway], None] | None = None,
        routed: bool = True,
        rewarded: bool = True,
        gateways: int = 1,
    ) -> None:
        """Start the gateway and the workers.

        Args:
            rules: mode -> the trainer's sampling rules. model: the policy's name for agents.
            register: puts the policies that answer on the run's gateway.
            routed: whether selected agents' requests go to the gateway.
            rewarded: whether a rollout without a reward has failed.
            gateways: how many processes answer requests, if the configuration does not say.
        """
        try:
            await self._start(rules, model, register, routed, rewarded, self.config.gateways or gateways)
        except BaseException:
            await self.stop()
            raise
        # A full collection visits every object of the frameworks and torch, a fifth of a second each time; they live
        # as long as the run anyway.
        gc.collect()
        gc.freeze()
        # What a step makes lives until its end: looking for garbage after every 700 new objects visits it in vain.
        self._gc_threshold = gc.get_threshold()
        gc.set_threshold(10_000, *self._gc_threshold[1:])

    async def _start(
        self,
        rules: Callable[[str], SamplingRules],
        model: str,
        register: Callable[[Gateway], None] | None,
        routed: bool,
        rewarded: bool,
        gateways: int,
    ) -> None:
        config = self.config
        memory = self._remembered()
        if memory is not None:
            await memory.begin()
        gateway = self.gateway or self._make_gateway(gateways if routed else 1)
        if routed:
            self.gateway = gateway
            if register is not None:
                register(gateway)
        coordinator = self._coordinator = RunCoordinator(
            self.store,
            gateway if routed else None,
            selection=config.selection,
            rules=rules,
            resources=config.initial_resources,
            model=model,
            run_id=self.run_id,
            on_result=self._on_result,
            air=rule_set(config.air),
            rewarded=rewarded and config.group_reward is None,
            capture_content=config.capture_content,
            # The death of a process on this machine is noticed; that of a remote one shows only by its silence.
            silent_seconds=None if config.runners in ("local", "process") else config.silent_seconds,
            guard=LeaseGuard() if config.runners == "remote" else None,
            memory=None if memory is None else memory.answer,
        )
        url = worker_key = ""
        if routed or config.runners != "local":
            routes: list[Route] = []
            minted = None
            if config.runners == "remote":
                selection_to_json(config.selection)  # refuses a selection that cannot be sent to the runners
                key = config.runner_key or (minted := secrets.token_urlsafe(32))
                routes = self._runner_routes(key)
            elif config.runners != "local":
                worker_key = secrets.token_urlsafe(32)
                routes = self._runner_routes(worker_key)
            if self.serve is None:
                host = await self._reachable_host()
                self._endpoint = GatewayServer(
                    gateway, host=host, port=config.port, extra_routes=routes, minted_key=minted
                )
            else:
                self._endpoint = self.serve(gateway, routes)
            url = await self._endpoint.start()
            if isinstance(gateway, GatewayProcesses):
                self._processes = gateway
                where = urlsplit(url)
                port = (where.port or 0) + 1 if config.port else 0
                await gateway.start(host=where.hostname or config.host, port=port)
        self._runner = self._make_runner(coordinator, url, worker_key)
        await self._runner.start()

    def _make_gateway(self, n: int) -> Gateway:
        config = self.config
        if n > 1:
            try:
                selection_to_json(config.selection)
            except ConfigError:
                # Its functions cannot be sent to another process. One is enough where the algorithm chose the number.
                if config.gateways is not None:
                    raise
                n = 1
        if n == 1:
            return Gateway(self.store, capture_content=config.capture_content)
        return GatewayProcesses(self.store, n, capture_content=config.capture_content, on_failure=self.fail)

    def _runner_routes(self, key: str) -> list[Route]:
        # An endpoint that was passed in checks keys itself.
        keys = Keys() if self.serve is not None else Keys(key_hash(key))
        own_workers = self.config.runners != "remote"
        return coordinator_routes(lambda: self._coordinator, key_check(keys), own_workers=own_workers)

    async def _reachable_host(self) -> str:
        config = self.config
        if not isinstance(config.runners, RayRunners):
            return config.host
        from agl.trainer.runners.ray import Cluster

        self._cluster = await Cluster.join(config.runners, config.n_workers)
        return self._cluster.host if config.host == LOOPBACK else config.host

    def _make_runner(self, coordinator: RunCoordinator, url: str, worker_key: str) -> Runner:
        config, n_workers = self.config, self.config.n_workers
        if config.runners == "remote":
            return RemoteRunner(
                coordinator,
                url,
                waiting=lambda: sum(not future.done() for future in self._pending.values()),
                note=self.progress.note,
                on_failure=self.fail,
                patience=config.runner_patience,
            )
        if config.runners == "local":
            return LocalRunner(
                self.agent, coordinator, n_workers=n_workers, on_failure=self.fail, hooks=as_tuple(config.hooks)
            )
        assert self.payload is not None
        workers = (coordinator, self.payload, url, worker_key)
        if not isinstance(config.runners, RayRunners):
            from agl.trainer.runners.process.runner import ProcessRunner

            return ProcessRunner(*workers, n_workers=n_workers, on_failure=self.fail)
        from agl.trainer.runners.ray import RayRunner

        return RayRunner(self._cluster, *workers, options=config.runners, n_workers=n_workers, on_failure=self.fail)

    async def resume_from(
        self, step: int, versions: Mapping[str, int], max_staleness: int = 0, *, sampled: bool = True
    ) -> None:
        """Continue a stopped run: `step` steps are done, in the weights of these versions.

        Rollouts of the next step that had ended are not run again, if their weights are at most `max_staleness` updates
        older; unfinished ones are cancelled.

        Args:
            sampled: whether each step has rollouts.

        Raises:
            StoreError: the run's own store does not hold the last of these steps.
        """
        must_have = sampled and step and self.own_store
        if must_have and not await self.store.query_rollouts(run_id=self.run_id, step=step - 1, limit=1):
            raise StoreError(
                f"the run's store holds no rollout of step {step}, and the checkpoint was made after it: the file was "
                "emptied or replaced, or its journal (run.db-wal) was deleted",
                hint=f"put it back from a copy, journal too, or start a new run from the weights in {self.checkpoint}",
                run=self.run_id,
                store=self.directory / "run.db",
            )
        if (memory := self._remembered()) is not None:
            await memory.revert(step)
        self._resumable = await reconcile(self.store, self.run_id, step, self.selection, versions, max_staleness)
        if n := len(self._resumable.rollouts):
            self.progress.note(f"{n} rollouts of step {step + 1} had ended before the run was stopped; they count")

    async def replay(self, recorded: int) -> None:
        """Continue a stopped run that trains nothing by doing everything again: a rollout that had ended is not run
        again, nor is one that had failed in the first `recorded` steps of the history."""
        if (memory := self._remembered()) is not None:
            await memory.revert(0)
        self._resumable = await replayable(self.store, self.run_id, self.selection, recorded)

    async def stop(self) -> None:
        """End the workers and the gateway; open rollouts are cancelled in the store."""
        if self._runner is not None:
            await self._runner.stop()
        if self._coordinator is not None:
            await self._coordinator.stop()
        open_rollouts = [*self._abandoned, *(r for r, f in self._pending.items() if not f.done())]
        if open_rollouts:
            try:
                await self.store.cancel_rollouts(open_rollouts)
            except StoreError as error:
                self.progress.note(f"could not cancel open rollouts: {error}")
        if self._processes is not None:
            await self._processes.stop()
        if self._endpoint is not None:
            await self._endpoint.stop()
        if self._cluster is not None:
            await self._cluster.leave()
        self._runner = self._coordinator = self._endpoint = self._processes = self._cluster = None
        gc.unfreeze()
        if self._gc_threshold is not None:
            gc.set_threshold(*self._gc_threshold)
            self._gc_threshold = None

    async def rollouts(
        self,
        tasks: Sequence[tuple[int, Any]],
        *,
        mode: Mode,
        step: int,
        group_size: int = 1,
        metadata: Mapping[str, Any] | None = None,
        first: int = 0,
        announce: bool = True,
        resources_id: str | None = None,
    ) -> list[RolloutResult]:
        """Run every task `group_size` times and wait for all of them.

        Args:
            tasks: (index in the dataset, task). Seeds depend on the run's seed, the mode, the step (training alone),
                the place and the repetition, so a validation draws the same each time.
            first: place of the first task, when the step has had others.
            announce: whether progress restarts its count.
            resources_id: of a version of the resources in the store, which these rollouts get in addition to the run's
                initial ones, or in their place.

        Returns:
            One result per rollout, tasks in order, repetitions next to each other.
        """
        assert self._coordinator is not None
        if self._failure is not None:
            raise self._failure
        config = RolloutConfig(max_attempts=self.config.max_attempts, timeout_seconds=self.config.timeout)
        seed_step = step if mode == "train" else 0
        remembered = {} if self.memory is None else self.memory.metadata(step)
        new = [
            NewRollout(
                task=task,
                mode=mode,
                run_id=self.run_id,
                step=step,
                group=f"{mode}-{step}-{place}",
                index=place * group_size + k,
                seed=seed_of(self.seed, mode, seed_step, place, index, k),
                resources_id=resources_id,
                config=config,
                metadata={"task_index": index, **(metadata or {}), **remembered},
                rollout_id=new_rollout_id(),
            )
            for place, (index, task) in enumerate(tasks, start=first)
            for k in range(group_size)
        ]
        loop = asyncio.get_running_loop()
        futures = [self._pending.setdefault(str(r.rollout_id), loop.create_future()) for r in new]
        if announce:
            self.progress.began(mode, step, len(new))
        try:
            to_run = []
            for r, future in zip(new, futures, strict=True):
                result = None if self._resumable is None else await self._resumable.pop(r)
                if result is None:
                    to_run.append(r)
                else:
                    self.progress.rolled_out(result)
                    future.set_result(result)
            await self.store.enqueue_rollouts(to_run)
            groups = [
                asyncio.ensure_future(self._group(futures[i : i + group_size]))
                for i in range(0, len(futures), group_size)
            ]
            try:
                results = [result for group in await asyncio.gather(*groups) for result in group]
                results = await score_faults(self.store, self.credit, results, mode)
                if self.memory is not None and mode == "train":
                    await self.memory.merge(results, step)
                return results
            finally:
                for group in groups:
                    group.cancel()
        finally:
            for r in new:
                if (future := self._pending.get(str(r.rollout_id))) is not None and future.done():
                    self._pending.pop(str(r.rollout_id))

    async def _group(self, rollouts: Sequence[asyncio.Future[RolloutResult]]) -> list[RolloutResult]:
        """The results of one task's rollouts, compared with each other as soon as all have ended."""
        results = list(await asyncio.gather(*rollouts))
        if self.config.group_reward is None:
            return results
        try:
            scored = await score_group(self.store, self.config.group_reward, results)
        except Exception as error:
            self.fail(error)
            raise
        error = next((r.error for r, old in zip(scored, results, strict=True) if r.error is not old.error), None)
        if error is not None:
            self.progress.note(f"a group is dropped: {error}")
        return scored

    def _on_result(self, result: RolloutResult) -> None:
        self.progress.rolled_out(result)
        future = self._pending.get(result.rollout.rollout_id)
        if future is not None and not future.done():
            future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End the wait for rollouts, now and from now on, with this error: none can succeed any more."""
        self._failure = error
        for rollout_id, future in self._pending.items():
            if not future.done():
                self._abandoned.append(rollout_id)
                future.set_exception(error)


def require_some(results: Sequence[RolloutResult], what: str) -> list[RolloutResult]:
    """The rollouts that succeeded.

    Raises:
        AglError: none did; the error is that of the first one, since they rarely differ.
    """
    succeeded = [r for r in results if r.error is None]
    if succeeded or not results:
        return succeeded
    first = results[0].error
    assert first is not None
    if isinstance(first, AglError):
        raise type(first)(
            f"all {len(results)} rollouts of {what} failed; the first: {first.message}", hint=first.hint, **first.where
        ) from first
    raise first


def mean_rewards(results: Sequence[RolloutResult], mode: str) -> dict[str, float]:
    """The mean rewards of rollouts, for `run.history`.

    Returns:
        "<mode>/reward", the sum of all that counts, and "<mode>/reward/<name>" for each (0 where a rollout did not
        earn it), an agent's own under the agent's name.
    """
    rewarded = [
        r.attempt_trajectory
        for r in results
        if r.attempt_trajectory is not None and r.attempt_trajectory.reward is not None
    ]
    if not rewarded:
        return {f"{mode}/reward": math.nan}
    total = math.fsum(trajectory.reward or 0.0 for trajectory in rewarded)
    by_name: dict[str, list[float]] = defaultdict(list)
    for reward in (reward for trajectory in rewarded for reward, _ in trajectory.credited):
        by_name[reward_label(reward)].append(reward.value)
    means = {f"{mode}/reward/{name}": math.fsum(v) / len(rewarded) for name, v in sorted(by_name.items())}
    return {f"{mode}/reward": total / len(rewarded), **means}


def measurement(results: Sequence[RolloutResult], mode: str, what: str) -> dict[str, float]:
    """What a validation, or another measurement, adds to the history.

    Returns:
        `mean_rewards`; "<mode>/reward_low" and "<mode>/reward_high", the 95 % interval of the mean over tasks
        (`statistics.mean_interval`), of two tasks or more; "<mode>/failed_rollouts"; `fault_counts`.

    Raises:
        AglError: all of them failed; the error is that of the first one.
    """
    succeeded = require_some(results, what)
    by_task: dict[str, list[float]] = defaultdict(list)
    for result in succeeded:
        if result.attempt_trajectory is not None and result.attempt_trajectory.reward is not None:
            by_task[result.rollout.group].append(result.attempt_trajectory.reward)
    facts = mean_rewards(succeeded, mode)
    if len(by_task) > 1:
        low, high = mean_interval([math.fsum(rewards) / len(rewards) for rewards in by_task.values()])
        facts |= {f"{mode}/reward_low": float(low), f"{mode}/reward_high": float(high)}
    return facts | {f"{mode}/failed_rollouts": len(results) - len(succeeded), **fault_counts(succeeded, mode)}


def reward_label(reward: Reward) -> str:
    """The name under which a reward is reported: an agent's own has the agent's."""
    if reward.agent is None:
        return reward.name
    return reward.agent if reward.name in ("reward", reward.agent) else f"{reward.agent}/{reward.name}"


def require_tasks(tasks: Sequence[Any], name: str) -> None:
    """Raise `DatasetError` for an empty dataset."""
    if len(tasks) == 0:
        raise DatasetError(f"{name} is empty", hint="give at least one task: any JSON value, usually a dict")

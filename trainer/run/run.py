"""A training run: what an algorithm is given to work with, and the one place where rollouts are asked for."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from starlette.routing import Route

from agl.agents.agent import Agent
from agl.agents.hooks import Hook
from agl.credit import Credit
from agl.errors import AglError, ConfigError, DatasetError, StoreError
from agl.mdp.selection import Selection
from agl.mdp.types import Reward
from agl.rewards.air import AIR
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.http.auth import Keys, key_hash
from agl.trainer.local.config import Policy
from agl.trainer.run.progress import Progress
from agl.trainer.run.resume import ResumableRollouts, reconcile
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.options import RayRunners, Runners
from agl.trainer.runners.protocol import RolloutResult, Runner
from agl.trainer.runners.remote.coordinator import SILENT_SECONDS, coordinator_routes, key_check
from agl.trainer.runners.remote.runner import PATIENCE_SECONDS, RemoteRunner
from agl.trainer.runners.remote.serialization import selection_to_json
from agl.trainer.store.base import Mode, NewRollout, RolloutConfig, Store, new_rollout_id

LOOPBACK = "127.0.0.1"


class Listening(Protocol):
    """What makes a gateway reachable: a server of the run's own, or a place in one that outlives it."""

    async def start(self) -> str:
        """Let requests in; returns the base URL and sets the gateway's."""
        ...

    async def stop(self) -> None:
        """Let no more in, and end those that run. Idempotent."""
        ...


Serve = Callable[[Gateway, Sequence[Route]], Listening]
"""Makes it, for a gateway and the routes beside it; keys of the latter are then its own business."""


def seed_of(*parts: object) -> int:
    """A 62-bit seed from any parts, the same in every process."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


@dataclass(frozen=True, slots=True)
class Batches:
    """The order in which tasks are trained: a new permutation each epoch, fixed by the seed; position is the step.

    Attributes:
        tasks: the dataset. batch_size: tasks per step. seed: of the permutations.
    """

    tasks: Sequence[Any]
    batch_size: int
    seed: int

    def indices(self, step: int) -> list[int]:
        """Indices of the tasks of one step (from 0); a small dataset is gone through several times."""
        n = len(self.tasks)
        found = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, place = divmod(position, n)
            found.append(int(np.random.default_rng([self.seed, epoch]).permutation(n)[place]))
        return found

    def further(self, step: int) -> Iterator[int]:
        """Tasks to sample in place of some of a step's, endlessly: those that are not in it first, in an order fixed by
        the seed and the step."""
        taken = set(self.indices(step))
        rng = np.random.default_rng([self.seed, step, 1])
        while True:
            order = rng.permutation(len(self.tasks)).tolist()
            yield from (i for i in order if i not in taken)
            taken = set()

    def steps_per_epoch(self) -> int:
        """Steps in which every task is seen once, rounded up."""
        return -(-len(self.tasks) // self.batch_size)


@dataclass(eq=False)
class Run:
    """Everything an algorithm needs. Lives on one event loop.

    Attributes:
        run_id, seed, directory: of this run. resume: whether to go on from its last checkpoint.
        agent, selection, credit: what is run, who is trained, how rewards become returns.
        policies: name -> where a policy differs from what the algorithm says.
        train, val: the tasks. store, gateway, progress: where facts go.
        n_workers, max_attempts, timeout: how rollouts run.
        runners: where rollouts are executed: "local" (this process), "process", Ray, or "remote" (wherever `agl runner`
            is started). payload: what worker processes are given, packed.
        runner_key: what runners elsewhere must show; None lets any on this machine in. Worker processes of this
            run's get a key made for them.
        silent_seconds: how long a remote runner may be silent before its rollouts are run again.
        runner_patience: how long the run waits for any of them before it ends.
        serve: how the gateway is reached; None: by a server of the run's own at `host` and `port`.
        initial_resources: what rollouts are given beside the LLM. hooks: called around every attempt.
        air: the rules that reward tool outcomes, calls and handoffs, if any.
    """

    run_id: str
    seed: int
    directory: Path
    agent: Agent
    selection: Selection
    credit: Credit
    train: Sequence[Any]
    val: Sequence[Any]
    store: Store
    progress: Progress
    n_workers: int = 8
    max_attempts: int = 2
    timeout: float | None = None
    resume: bool = False
    capture_content: bool = True
    host: str = LOOPBACK
    port: int = 0
    runners: Runners | RayRunners = "local"
    payload: bytes | None = None
    runner_key: str | None = None
    silent_seconds: float = SILENT_SECONDS
    runner_patience: float = PATIENCE_SECONDS
    serve: Serve | None = None
    initial_resources: Mapping[str, Any] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    air: AIR | None = None
    hooks: Sequence[Hook] = ()
    gateway: Gateway | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: Path | None = None
    policy_paths: dict[str, Path] = field(default_factory=dict)
    _server: Listening | None = None
    _left_over: ResumableRollouts | None = None
    _desk: RunCoordinator | None = None
    _runner: Runner | None = None
    _cluster: Any = None
    _waiting: dict[str, asyncio.Future[RolloutResult]] = field(default_factory=dict)
    _given_up: list[str] = field(default_factory=list)

    async def start(
        self, rules: Callable[[str], SamplingRules], model: str, *, routed: bool = True, rewarded: bool = True
    ) -> None:
        """Start the gateway and the workers.

        Args:
            rules: mode -> the trainer's sampling rules. model: the policy's name for agents.
            routed: whether selected agents are sent to the gateway.
            rewarded: whether a rollout without a reward has failed.
        """
        try:
            await self._start(rules, model, routed, rewarded)
        except BaseException:
            await self.stop()
            raise
        # A full collection goes over every object that the frameworks and torch have made, a fifth of a second each
        # time; they live as long as the run anyway.
        gc.collect()
        gc.freeze()

    async def _start(self, rules: Callable[[str], SamplingRules], model: str, routed: bool, rewarded: bool) -> None:
        if routed:
            self.gateway = self.gateway or Gateway(self.store, capture_content=self.capture_content)
        self._desk = RunCoordinator(
            self.store,
            self.gateway if routed else None,
            selection=self.selection,
            rules=rules,
            resources=self.initial_resources,
            model=model,
            run_id=self.run_id,
            on_result=self._done,
            air=self.air,
            rewarded=rewarded,
            capture_content=self.capture_content,
            # That a process of this machine has died is seen; of the others only silence tells.
            silent_seconds=None if self.runners in ("local", "process") else self.silent_seconds,
        )
        url = ""
        if routed or self.runners != "local":
            gateway = self.gateway or Gateway(self.store, capture_content=self.capture_content)
            routes = self._runner_routes()
            self._server = (
                GatewayServer(gateway, host=await self._reachable_host(), port=self.port, extra_routes=routes)
                if self.serve is None
                else self.serve(gateway, routes)
            )
            url = await self._server.start()
        self._runner = self._make_runner(self._desk, url)
        await self._runner.start()

    async def _reachable_host(self) -> str:
        if not isinstance(self.runners, RayRunners):
            return self.host
        from agl.trainer.runners.ray import Cluster

        self._cluster = await Cluster.join(self.runners, self.n_workers)
        return self._cluster.host if self.host == LOOPBACK else self.host

    def _make_runner(self, desk: RunCoordinator, url: str) -> Runner:
        if self.runners == "remote":
            return RemoteRunner(
                desk, url, waiting=self._n_waiting, note=self.progress.note, on_failure=self._broken,
                patience=self.runner_patience,
            )  # fmt: skip
        if self.runners == "local":
            return LocalRunner(self.agent, desk, n_workers=self.n_workers, on_failure=self._broken, hooks=self.hooks)
        assert self.payload is not None
        assert self.runner_key is not None
        what = (desk, self.payload, url, self.runner_key)
        if not isinstance(self.runners, RayRunners):
            from agl.trainer.runners.process.runner import ProcessRunner

            return ProcessRunner(*what, n_workers=self.n_workers, on_failure=self._broken)
        from agl.trainer.runners.ray import RayRunner

        return RayRunner(self._cluster, *what, options=self.runners, n_workers=self.n_workers, on_failure=self._broken)

    def _n_waiting(self) -> int:
        return sum(not future.done() for future in self._waiting.values())

    def _runner_routes(self) -> list[Route]:
        if self.runners == "local":
            return []
        own = self.runners != "remote"
        if own:
            self.runner_key = secrets.token_urlsafe(32)
        else:
            selection_to_json(self.selection)
        # Where the gateway is reached by other means, keys are that one's business.
        keys = Keys() if self.runner_key is None or self.serve is not None else Keys(key_hash(self.runner_key))
        return coordinator_routes(lambda: self._desk, key_check(keys), own_workers=own)

    async def take_up(self, step: int, versions: Mapping[str, int]) -> None:
        """Go on with a run that was stopped, from `step` done steps in the weights of these versions.

        Its rollouts of that step which had ended are not run again, and what it left unfinished is cancelled.
        """
        self._left_over = await reconcile(self.store, self.run_id, step, self.selection, versions)
        if n := len(self._left_over.rollouts):
            self.progress.note(f"{n} rollouts of step {step + 1} had ended before the run was stopped; they count")

    async def stop(self) -> None:
        """End the workers and the gateway; open rollouts are cancelled in the store."""
        if self._runner is not None:
            await self._runner.stop()
        if self._desk is not None:
            await self._desk.stop()
        open_rollouts = [*self._given_up, *(r for r, f in self._waiting.items() if not f.done())]
        if open_rollouts:
            try:
                await self.store.cancel_rollouts(open_rollouts)
            except StoreError as error:
                self.progress.note(f"could not cancel open rollouts: {error}")
        if self._server is not None:
            await self._server.stop()
        if self._cluster is not None:
            await self._cluster.leave()
        self._runner = self._desk = self._server = self._cluster = None
        gc.unfreeze()

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
    ) -> list[RolloutResult]:
        """Run every task `group_size` times and wait for all of them.

        Args:
            tasks: (index in the dataset, task). Seeds depend on the run's seed, the mode, the step (training alone),
                the place and the repetition, so a validation draws the same each time.
            first: place of the first task, when the step has had others.
            announce: whether progress begins to count anew.

        Returns:
            One result per rollout, tasks in order, repetitions next to each other.
        """
        assert self._desk is not None
        config = RolloutConfig(max_attempts=self.max_attempts, timeout_seconds=self.timeout)
        when = step if mode == "train" else 0
        new = [
            NewRollout(
                task=task,
                mode=mode,
                run_id=self.run_id,
                step=step,
                group=f"{mode}-{step}-{place}",
                index=place * group_size + k,
                seed=seed_of(self.seed, mode, when, place, index, k),
                config=config,
                metadata={"task_index": index, **(metadata or {})},
                rollout_id=new_rollout_id(),
            )
            for place, (index, task) in enumerate(tasks, start=first)
            for k in range(group_size)
        ]
        loop = asyncio.get_running_loop()
        futures = [self._waiting.setdefault(str(r.rollout_id), loop.create_future()) for r in new]
        if announce:
            self.progress.began(mode, step, len(new))
        try:
            to_run = []
            for r, future in zip(new, futures, strict=True):
                ended = None if self._left_over is None else await self._left_over.take(r)
                if ended is None:
                    to_run.append(r)
                else:
                    self.progress.rolled_out(ended)
                    future.set_result(ended)
            await self.store.enqueue_rollouts(to_run)
            return list(await asyncio.gather(*futures))
        finally:
            for r in new:
                if (future := self._waiting.get(str(r.rollout_id))) is not None and future.done():
                    self._waiting.pop(str(r.rollout_id))

    def _done(self, result: RolloutResult) -> None:
        self.progress.rolled_out(result)
        future = self._waiting.get(result.rollout.rollout_id)
        if future is not None and not future.done():
            future.set_result(result)

    def _broken(self, error: BaseException) -> None:
        for rollout_id, future in self._waiting.items():
            if not future.done():
                self._given_up.append(rollout_id)
                future.set_exception(error)


def require_some(results: Sequence[RolloutResult], what: str) -> list[RolloutResult]:
    """Those that succeeded.

    Raises:
        AglError: none did; the error is that of the first one, since they rarely differ.
    """
    good = [r for r in results if r.error is None]
    if good or not results:
        return good
    first = results[0].error
    assert first is not None
    if isinstance(first, AglError):
        raise type(first)(
            f"all {len(results)} rollouts of {what} failed; the first: {first.message}", hint=first.hint, **first.where
        ) from first
    raise first


def mean_rewards(results: Sequence[RolloutResult], mode: str) -> dict[str, float]:
    """What rollouts earned on average, for `run.history`.

    Returns:
        "<mode>/reward", the sum of all that counts, and "<mode>/reward/<name>" for each (0 where a rollout did not
        earn it), an agent's own under the agent's name.
    """
    built = [r.built for r in results if r.built is not None and r.built.reward is not None]
    if not built:
        return {f"{mode}/reward": math.nan}
    total = math.fsum(b.reward or 0.0 for b in built)
    by_name: dict[str, list[float]] = defaultdict(list)
    for reward in (reward for b in built for reward, _ in b.credited):
        by_name[_label(reward)].append(reward.value)
    means = {f"{mode}/reward/{name}": math.fsum(v) / len(built) for name, v in sorted(by_name.items())}
    return {f"{mode}/reward": total / len(built), **means}


def _label(reward: Reward) -> str:
    if reward.agent is None:
        return reward.name
    return reward.agent if reward.name in ("reward", reward.agent) else f"{reward.agent}/{reward.name}"


def require_tasks(tasks: Sequence[Any], name: str) -> None:
    """Raise `DatasetError` for an empty dataset."""
    if len(tasks) == 0:
        raise DatasetError(f"{name} is empty", hint="give at least one task: any JSON value, usually a dict")


def require_positive(**values: float | None) -> None:
    """Raise `ConfigError` for the first value that is given and not above 0."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}", hint="give a number above 0")

"""Where a run's rollouts are executed: its gateway, its runners, and the one place where rollouts are requested."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any
from urllib.parse import urlsplit

from starlette.routing import Route

from agl.errors import ConfigError, MainThreadError, StoreError, StoreGoneError
from agl.rewards.air import rule_set
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.processes.group import GatewayProcesses
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.http.auth import Keys, key_hash
from agl.trainer.run.config import LOOPBACK, as_tuple
from agl.trainer.run.faults import score_faults
from agl.trainer.run.group_reward import score_group
from agl.trainer.run.memory import RunMemory, require_content
from agl.trainer.run.results import require_some
from agl.trainer.run.resume import ResumableRollouts, cancel_unfinished, reconcile, replayable
from agl.trainer.run.run import Endpoint, Run
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.lease_guard import LeaseGuard
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.options import ProcessRunners, RayRunners
from agl.trainer.runners.protocol import RolloutResult, Runner
from agl.trainer.runners.remote.coordinator import coordinator_routes, key_check
from agl.trainer.runners.remote.runner import RemoteRunner
from agl.trainer.runners.remote.serialization import selection_to_json
from agl.trainer.store.types import Mode, NewRollout, RolloutConfig, new_rollout_id

log = logging.getLogger("agl")


def seed_of(*parts: object) -> int:
    """A 62-bit seed from any parts, the same in every process."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


STORE_CHECK_SECONDS = 2.0
"""How often a run looks whether its store is still there, whoever writes to it."""
TRIES = 3
"""Rollouts that fail alike before a run has begun, which end it."""


class Workplace:
    """Started by `start`, ended by `stop`. Lives on one event loop.

    Args:
        run: whose rollouts are executed.

    Attributes:
        gateway: of the policies, made by `start`; None where nothing is routed.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.gateway: Gateway | None = None
        self._endpoint: Endpoint | None = None
        self._processes: GatewayProcesses | None = None
        self._gc_threshold: tuple[int, int, int] | None = None
        self._froze = False
        self._resumable: ResumableRollouts | None = None
        self._coordinator: RunCoordinator | None = None
        self._runner: Runner | None = None
        self._cluster: Any = None
        self._store_check: asyncio.Task[None] | None = None
        self._pending: dict[str, asyncio.Future[RolloutResult]] = {}
        self._abandoned: list[str] = []
        self._failure: BaseException | None = None
        self._proven = True
        self._agents: dict[str, None] = {}
        """Those that asked a model, in order of appearance."""

    async def start(
        self,
        rules: Callable[[str], SamplingRules],
        model: str,
        *,
        register: Callable[[Gateway], None] | None = None,
        routed: bool = True,
        rewarded: bool = True,
        gateways: int = 1,
        try_first: bool = False,
    ) -> None:
        """Start the gateway and the workers. Of a run that is resumed, what was left unfinished is cancelled first.

        Args:
            rules: mode -> the trainer's sampling rules.
            model: the policy's name for agents.
            register: puts the policies that answer on the run's gateway.
            routed: whether selected agents' requests go to the gateway.
            rewarded: whether a rollout without a reward has failed.
            gateways: how many processes answer requests, if the configuration does not say.
            try_first: whether the run's very first rollout runs alone, so that what is wrong with the agent, its reward
                or `agents=` is found before a provider is asked for all of them.
        """
        run = self.run
        config = self.run.config
        self._proven = not try_first
        try:
            if run.resume:
                # Workers would lease what a stopped run has left in the queue.
                await cancel_unfinished(run.store, run.run_id)
            memory = self._remembered()
            if memory is not None:
                await memory.begin()
            gateway = self._make_gateway(
                # Containers reach one port.
                (config.gateways or gateways) if routed and not isinstance(config.runners, ProcessRunners) else 1
            )
            if routed:
                self.gateway = gateway
                if register is not None:
                    register(gateway)
            coordinator = self._coordinator = RunCoordinator(
                run.store,
                gateway if routed else None,
                selection=config.selection,
                rules=rules,
                resources=config.initial_resources,
                model=model,
                run_id=run.run_id,
                on_result=self._on_result,
                air=rule_set(config.air),
                rewarded=rewarded and config.group_reward is None,
                reward_range=config.reward_range,
                capture_content=config.capture_content,
                # The death of a process on this machine is noticed; that of a remote one shows only by its silence.
                silent_seconds=config.silent_seconds
                if config.runners == "remote" or isinstance(config.runners, RayRunners)
                else None,
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
                if run.serve is None:
                    host = config.host
                    if isinstance(config.runners, RayRunners):
                        from agl.trainer.runners.ray import Cluster

                        self._cluster = await Cluster.join(config.runners, config.n_workers)
                        host = self._cluster.host if host == LOOPBACK else host
                    self._endpoint = GatewayServer(
                        gateway, host=host, port=config.port, extra_routes=routes, minted_key=minted
                    )
                else:
                    self._endpoint = run.serve(gateway, routes)
                url = await self._endpoint.start()
                if isinstance(gateway, GatewayProcesses):
                    self._processes = gateway
                    where = urlsplit(url)
                    port = (where.port or 0) + 1 if config.port else 0
                    await gateway.start(host=where.hostname or config.host, port=port)
            self._runner = self._make_runner(coordinator, url, worker_key)
            await self._runner.start()
            self._store_check = asyncio.ensure_future(self._check_store())
        except BaseException:
            await self.stop()
            raise
        # A full collection visits every object of the frameworks and torch, a fifth of a second each time; they live
        # as long as the run anyway. Who has frozen them already is left alone.
        self._froze = not gc.get_freeze_count()
        if self._froze:
            gc.collect()
            gc.freeze()
        # What a step makes lives until its end: looking for garbage after every 700 new objects visits it in vain.
        self._gc_threshold = gc.get_threshold()
        gc.set_threshold(10_000, *self._gc_threshold[1:])

    def _make_gateway(self, n: int) -> Gateway:
        config = self.run.config
        if n > 1:
            try:
                selection_to_json(config.selection)
            except ConfigError:
                # Its functions cannot be sent to another process. One is enough where the algorithm chose the number.
                if config.gateways is not None:
                    raise
                n = 1
        if n == 1:
            return Gateway(self.run.store, capture_content=config.capture_content)
        return GatewayProcesses(self.run.store, n, capture_content=config.capture_content, on_failure=self.fail)

    def _runner_routes(self, key: str) -> list[Route]:
        # An endpoint that was passed in checks keys itself.
        keys = Keys() if self.run.serve is not None else Keys(key_hash(key))
        own_workers = self.run.config.runners != "remote"
        return coordinator_routes(lambda: self._coordinator, key_check(keys), own_workers=own_workers)

    def _make_runner(self, coordinator: RunCoordinator, url: str, worker_key: str) -> Runner:
        config = self.run.config
        n_workers = self.run.config.n_workers
        if config.runners == "remote":
            return RemoteRunner(
                coordinator,
                url,
                waiting=lambda: sum(not future.done() for future in self._pending.values()),
                note=self.run.progress.note,
                on_failure=self.fail,
                patience=config.runner_patience,
            )
        if config.runners == "local":
            return LocalRunner(
                self.run.agent, coordinator, n_workers=n_workers, on_failure=self.fail, hooks=as_tuple(config.hooks)
            )
        assert self.run.payload is not None
        workers = (coordinator, self.run.payload, url, worker_key)
        if not isinstance(config.runners, RayRunners):
            from agl.trainer.runners.process.runner import ProcessRunner

            pool = {"pool": config.runners.pool} if isinstance(config.runners, ProcessRunners) else {}
            return ProcessRunner(*workers, n_workers=n_workers, on_failure=self.fail, **pool)
        from agl.trainer.runners.ray import RayRunner

        return RayRunner(self._cluster, *workers, options=config.runners, n_workers=n_workers, on_failure=self.fail)

    async def resume_from(
        self,
        step: int,
        versions: Mapping[str, int],
        max_staleness: int = 0,
        *,
        sampled: bool = True,
        first: int | None = None,
    ) -> None:
        """Continue a stopped run: `step` steps are done, in the weights of these versions.

        Rollouts of the next step that had ended are not run again, if their weights are at most `max_staleness` updates
        older. Before or after `start`, which cancels unfinished ones.

        Args:
            sampled: whether each step has rollouts.
            first: as for `reconcile`.

        Raises:
            StoreError: the run's own store does not hold the last of these steps.
        """
        run = self.run
        must_have = sampled and step and run.own_store
        if must_have and not await run.store.query_rollouts(run_id=run.run_id, step=step - 1, limit=1):
            raise StoreError(
                f"the run's store holds no rollout of step {step}, and the checkpoint was made after it: the file was "
                "emptied or replaced, or its journal (run.db-wal) was deleted",
                hint=f"put it back from a copy, journal too, or start a new run from the weights in {run.checkpoint}",
                run=run.run_id,
                store=run.directory / "run.db",
            )
        self._proven |= step > 0
        if (memory := self._remembered()) is not None:
            await memory.revert(step)
        self._resumable = await reconcile(
            run.store, run.run_id, step, run.config.selection, versions, max_staleness, first
        )
        if n := len(self._resumable.rollouts):
            run.progress.note(f"{n} rollouts of steps to come had ended before the run was stopped; they count")

    async def replay(self, recorded: int) -> None:
        """Continue a stopped run that trains nothing by doing everything again: a rollout that had ended is not run
        again, nor is one that had failed in the first `recorded` steps of the history. As `resume_from`, before or
        after `start`."""
        if (memory := self._remembered()) is not None:
            await memory.revert(0)
        self._resumable = await replayable(self.run.store, self.run.run_id, self.run.config.selection, recorded)

    def hold(self) -> AbstractAsyncContextManager[None]:
        """Hold the requests of agents while the block runs; see `Gateway.hold`."""
        return nullcontext() if self.gateway is None else self.gateway.hold()

    async def stop(self) -> None:
        """End the workers and the gateway; open rollouts are cancelled in the store."""
        if self._store_check is not None:
            self._store_check.cancel()
            await asyncio.gather(self._store_check, return_exceptions=True)
            self._store_check = None
        if self._runner is not None:
            await self._runner.stop()
        if self._coordinator is not None:
            await self._coordinator.stop()
        open_rollouts = [*self._abandoned, *(r for r, f in self._pending.items() if not f.done())]
        if open_rollouts:
            try:
                await self.run.store.cancel_rollouts(open_rollouts)
            except StoreError as error:
                self.run.progress.note(f"could not cancel open rollouts: {error}")
        if self._processes is not None:
            await self._processes.stop()
        if self._endpoint is not None:
            await self._endpoint.stop()
        if self._cluster is not None:
            await self._cluster.leave()
        self._runner = self._coordinator = self._endpoint = self._processes = self._cluster = None
        if self._froze:
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

        Raises:
            AglError: the first rollouts of `TRIES` tasks failed alike; or none can succeed any more.
        """
        assert self._coordinator is not None
        if self._failure is not None:
            raise self._failure
        config = RolloutConfig(max_attempts=self.run.config.max_attempts, timeout_seconds=self.run.config.timeout)
        seed_step = step if mode == "train" else 0
        remembered = {} if self.run.memory is None else self.run.memory.metadata(step)
        new = [
            NewRollout(
                task=task,
                mode=mode,
                run_id=self.run.run_id,
                step=step,
                group=f"{mode}-{step}-{place}",
                index=place * group_size + k,
                seed=seed_of(self.run.seed, mode, seed_step, place, index, k),
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
            self.run.progress.began(mode, step, len(new))
        try:
            to_run = []
            for r, future in zip(new, futures, strict=True):
                result = None if self._resumable is None else await self._resumable.pop(r)
                if result is None:
                    to_run.append(r)
                else:
                    self.run.progress.count(failed=result.error is not None)
                    future.set_result(result)
            if not self._proven and mode != "dev":
                to_run = await self._try_first(to_run)
            await self.run.store.enqueue_rollouts(to_run)
            groups = [
                asyncio.ensure_future(self._group(futures[i : i + group_size]))
                for i in range(0, len(futures), group_size)
            ]
            try:
                results = [result for group in await asyncio.gather(*groups) for result in group]
                self._see_agents(results)
                results = await score_faults(self.run.store, self.run.config.credit, results, mode)
                if self.run.memory is not None and mode == "train":
                    await self.run.memory.merge(results, step)
                return results
            finally:
                for group in groups:
                    group.cancel()
        finally:
            for r in new:
                rollout_id = str(r.rollout_id)
                future = self._pending.get(rollout_id)
                if future is None or not future.done():
                    continue
                del self._pending[rollout_id]
                # Nobody awaits its result any more, but it may still be in the store's queue.
                if future.cancelled():
                    self._abandoned.append(rollout_id)

    def require_agents(self) -> None:
        """Check, at the end of a run, that each of the agents that `agents=` names has made a call.

        Raises:
            NoAgentMatchedError: one has not.
        """
        if self._agents:
            self.run.config.selection.require_matched(self._agents, "in this run")

    def _see_agents(self, results: Sequence[RolloutResult]) -> None:
        """Note the agents that made calls; after the first rollouts, for people also which rules select none of them.

        An agent may be called seldom, so that only the end of the run shows that a name is nobody's.
        """
        first = not self._agents
        for trajectory in (r.attempt_trajectory for r in results if r.attempt_trajectory is not None):
            self._agents |= dict.fromkeys(trajectory.agents)
        if first and self._agents and (unmatched := self.run.config.selection.unmatched(self._agents)):
            self.run.progress.note(
                f"agents= has {', '.join(unmatched)}, but no agent that it selects made a call in the first "
                f"{len(results)} rollouts; those that did: {', '.join(map(repr, self._agents))}"
            )

    async def _try_first(self, rollouts: Sequence[NewRollout]) -> list[NewRollout]:
        """Run the first rollout alone, and while none succeeds those of up to `TRIES` tasks. Returns the others.

        Raises:
            AglError: all of them failed, with the same error.
        """
        of_tasks = list({r.group: r for r in reversed(rollouts)}.values())[::-1]
        tried: list[RolloutResult] = []
        for first in (of_tasks if len(of_tasks) > 1 else rollouts)[:TRIES]:
            await self.run.store.enqueue_rollouts([first])
            tried.append(await self._pending[str(first.rollout_id)])
            if tried[-1].error is None:
                break
        else:
            if len(tried) > 1 and len({(type(r.error), getattr(r.error, "message", str(r.error))) for r in tried}) == 1:
                require_some(tried, "the first try")
        self._proven = True
        ended = {r.rollout.rollout_id for r in tried}
        return [r for r in rollouts if r.rollout_id not in ended]

    async def _group(self, rollouts: Sequence[asyncio.Future[RolloutResult]]) -> list[RolloutResult]:
        """The results of one task's rollouts, compared with each other as soon as all have ended."""
        results = list(await asyncio.gather(*rollouts))
        if self.run.config.group_reward is None:
            return results
        try:
            scored = await score_group(self.run.store, self.run.config.group_reward, results)
        except Exception as error:
            self.fail(error)
            raise
        error = next((r.error for r, old in zip(scored, results, strict=True) if r.error is not old.error), None)
        if error is not None:
            self.run.progress.note(f"a group is dropped: {error}")
        return scored

    def _on_result(self, result: RolloutResult) -> None:
        self.run.progress.count(failed=result.error is not None)
        if isinstance(result.error, MainThreadError):
            # Each rollout that comes to the same code would be refused, too, or would be wrong.
            self.fail(result.error)
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

    async def _check_store(self) -> None:
        """End the run when its store is gone: workers that report would try again, and nobody would be told."""
        while True:
            await asyncio.sleep(STORE_CHECK_SECONDS)
            try:
                await self.run.store.query_runs(run_ids=[self.run.run_id], limit=1)
            except StoreGoneError as error:
                self.fail(error)
                return
            except StoreError as error:
                log.debug("the store: %s", error)

    def _remembered(self) -> RunMemory | None:
        """The memory of the agent; its run's id is known once a checkpoint was read."""
        if self.run.memory is None and self.run.agent.memory is not None:
            require_content(self.run.agent.memory, self.run.config.capture_content)
            self.run.memory = RunMemory(self.run.store, self.run.run_id, self.run.agent.memory)
        return self.run.memory

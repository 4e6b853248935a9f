"""Rollouts on a Ray cluster: actors keep worker processes on its nodes, which reach the run's coordinator by HTTP.

Invariant: a Ray that others started is left unchanged; one that was started here is shut down.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import ray.exceptions
import ray.util
import ray.util.client

from agl.errors import ConfigError, RolloutError
from agl.mdp.spans import Span
from agl.trainer.processes.environment import without_agls_variables
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.options import RayRunners
from agl.trainer.runners.process.fork_server import STOP_SECONDS
from agl.trainer.runners.process.runner import MAX_CRASHES, reap, spans_of
from agl.trainer.runners.process.worker_pool import CrashLoopGuard, WorkerExit, WorkerPool
from agl.trainer.runners.protocol import Lease, Report

log = logging.getLogger("agl.runner")

PLACEMENT_SECONDS = 20.0
"""After how long a warning is logged that Ray has not yet placed an actor."""
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
_RESTART_SECONDS = 1.0


class Cluster:
    """The Ray that runners use: made by `join`, left by `leave`.

    Attributes:
        host: address of this machine that every node reaches.
        n_nodes: nodes that were alive when it was joined.
    """

    def __init__(self, host: str, n_nodes: int, started: bool) -> None:
        self.host = host
        self.n_nodes = n_nodes
        self._started = started

    @classmethod
    async def join(cls, options: RayRunners, n_workers: int) -> Cluster:
        """As `join`; a Ray that is started has CPUs for all workers."""
        cpus = max(os.cpu_count() or 1, math.ceil(n_workers * options.num_cpus))
        own = {"num_cpus": cpus, "num_gpus": 0, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        started = await join(own, log_to_driver=True)
        n_nodes = sum(node["Alive"] for node in ray.nodes())
        host = "127.0.0.1" if n_nodes == 1 else ray.util.get_node_ip_address()
        return cls(host, n_nodes, started)

    async def leave(self) -> None:
        """Shut down what `join` started. Idempotent."""
        if self._started:
            self._started = False
            await asyncio.to_thread(ray.shutdown)


async def join(own: Mapping[str, Any], *, log_to_driver: bool) -> bool:
    """Use the Ray of this process, else that of RAY_ADDRESS, else start one on this machine.

    Args:
        own: `ray.init`'s arguments for a Ray that is started here.

    Returns:
        Whether this process was connected here, so that the caller ends that with `ray.shutdown()`.

    Raises:
        ConfigError: the cluster cannot be reached, or only as a Ray client.
    """
    connects = not ray.is_initialized()
    if connects:
        address = os.environ.get("RAY_ADDRESS")
        options = {"address": address} if address else {"address": "local", **own}
        # Only errors: Ray warns that it sets no signal handler in this thread, which is intended.
        init = functools.partial(ray.init, **options, logging_level=logging.ERROR, log_to_driver=log_to_driver)
        try:
            # All processes of a Ray that is started here inherit this environment, and agents could read it in /proc.
            with without_agls_variables():
                await asyncio.to_thread(init)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"Ray cannot be joined: {error}", hint="see RAY_ADDRESS, or call ray.init(...) before fit"
            ) from error
    if ray.util.client.ray.is_connected():
        if connects:
            await asyncio.to_thread(ray.shutdown)
        raise ConfigError(
            "this process is a Ray client (ray://), which the cluster cannot reach",
            hint="run the script on a node of the cluster: ray job submit, or a shell on the head node",
        )
    return connects


class _WorkerActor:
    """An actor: keeps worker processes on its node."""

    def __init__(self, payload: bytes, url: str, key: str, n_workers: int, name: str) -> None:
        self._exits: asyncio.Queue[WorkerExit | BaseException] = asyncio.Queue()
        self._pool = WorkerPool(
            payload,
            url,
            key,
            n_workers=n_workers,
            name=name,
            on_exit=self._exits.put,
            on_failure=self._exits.put_nowait,
        )

    async def start(self) -> str:
        await self._pool.start()
        return ray.get_runtime_context().get_node_id()

    async def next(self) -> WorkerExit:
        """The next end of a worker."""
        worker_exit = await self._exits.get()
        if isinstance(worker_exit, BaseException):
            raise worker_exit
        return worker_exit

    async def kill(self, worker: str) -> WorkerExit | None:
        return await self._pool.kill(worker)

    async def stop(self) -> None:
        await self._pool.stop()


class RayRunner:
    """N workers in actors of a Ray cluster, spread over its nodes; an actor that dies is replaced.

    Args:
        cluster: joined; left by `stop`.
        coordinator: the run's; this runner sets its `end_worker`.
        payload: the packed agent.
        url: of the coordinator's routes, as the nodes reach it.
        key: for them.
        options: of `Trainer(runners=)`.
        n_workers: how many rollouts run at once.
        on_failure: called when workers die that had no rollout.

    Attributes:
        nodes: name of an actor -> id of its node.
    """

    def __init__(
        self,
        cluster: Cluster,
        coordinator: RunCoordinator,
        payload: bytes,
        url: str,
        key: str,
        *,
        options: RayRunners,
        n_workers: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.cluster = cluster
        self.coordinator = coordinator
        self.url = url
        self.key = key
        self.options = options
        self.n_workers = n_workers
        self.on_failure = on_failure
        self.nodes: dict[str, str] = {}
        self._payload = payload
        self._actors: dict[str, Any] = {}
        self._actor_tasks: list[asyncio.Task[None]] = []
        self._up = asyncio.Event()
        self._numbers = itertools.count()
        self._crashes = CrashLoopGuard(MAX_CRASHES)

    async def start(self) -> None:
        """Start the actors, and wait until the first of them has imported the agent.

        Raises:
            ConfigError: it cannot be imported on a node.
        """
        self.coordinator.end_worker = self._end_worker
        self.coordinator.watch()
        payload = ray.put(self._payload)
        sizes = _actor_sizes(self.n_workers, self.options.per_actor, self.cluster.n_nodes)
        self._actor_tasks = [asyncio.ensure_future(self._keep_actor(payload, size)) for size in sizes]
        up = asyncio.ensure_future(self._up.wait())
        await asyncio.wait((up, *self._actor_tasks), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        for task in self._actor_tasks:
            if task.done():
                task.result()
            task.add_done_callback(self._on_actor_task_end)

    async def stop(self) -> None:
        for task in self._actor_tasks:
            task.cancel()
        await asyncio.gather(*self._actor_tasks, return_exceptions=True)
        actors = list(self._actors.values())
        self._actors.clear()
        if actors:
            stopping = [asyncio.ensure_future(_result(actor.stop.remote())) for actor in actors]
            await asyncio.wait(stopping, timeout=STOP_SECONDS + 4.0)
            for task in stopping:
                task.cancel()
            await asyncio.gather(*stopping, return_exceptions=True)
        for actor in actors:
            ray.kill(actor)
        await self.cluster.leave()

    def _on_actor_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_failure(error)

    async def _keep_actor(self, payload: Any, n_workers: int) -> None:
        """Keep one actor alive."""
        while True:
            name = f"ray-{next(self._numbers)}"
            remote: Any = ray.remote(_WorkerActor)
            actor_class = remote.options(
                num_cpus=self.options.num_cpus * n_workers,
                num_gpus=0,
                scheduling_strategy="SPREAD",
                max_restarts=0,
                max_concurrency=100,
            )
            actor = self._actors[name] = actor_class.remote(payload, self.url, self.key, n_workers, name)
            try:
                self.nodes[name] = await self._start_actor(actor, n_workers)
                self._up.set()
                while True:
                    worker_exit = await _result(actor.next.remote())
                    self._crashes.check(worker_exit, had_work=await reap(self.coordinator, worker_exit))
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, Exception) else error from None
            except ray.exceptions.RayError as error:
                log.warning("the Ray actor %s is gone, another one takes its place: %s", name, _first_line(error))
                self._actors.pop(name, None)
                await self._fail_leases(name, error)
                await asyncio.sleep(_RESTART_SECONDS)

    async def _start_actor(self, actor: Any, n_workers: int) -> str:
        starting = asyncio.ensure_future(_result(actor.start.remote()))
        try:
            done, _ = await asyncio.wait((starting,), timeout=PLACEMENT_SECONDS)
            if not done:
                log.warning(
                    "Ray has not started an actor for %d workers for %g s; it needs %g CPUs, and %g are free",
                    n_workers,
                    PLACEMENT_SECONDS,
                    self.options.num_cpus * n_workers,
                    ray.available_resources().get("CPU", 0),
                )
            return await starting
        finally:
            starting.cancel()

    async def _fail_leases(self, name: str, error: Exception) -> None:
        for lease in self.coordinator.dismiss(name):
            failure = RolloutError(
                f"the Ray actor whose worker ran the agent is gone: {_first_line(error)}",
                hint="its node died or it was killed; another worker runs the rollout again if it has attempts left",
                rollout=lease.rollout.rollout_id,
                attempt=lease.attempt,
            )
            await self.coordinator.finish(lease, Report((), failure))

    async def _end_worker(self, lease: Lease, worker: str) -> Sequence[Span]:
        actor = self._actors.get(worker.partition("/")[0])
        if actor is None:
            return ()
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            worker_exit = await asyncio.wait_for(_result(actor.kill.remote(worker)), 15.0)
            return () if worker_exit is None else spans_of(worker_exit, lease)
        return ()


async def _result(reference: Any) -> Any:
    return await reference


def _actor_sizes(n_workers: int, per_actor: int, n_nodes: int) -> list[int]:
    """How many workers each actor has: at least one actor per node, sizes as even as possible."""
    n = min(n_workers, max(math.ceil(n_workers / per_actor), n_nodes))
    return [n_workers // n + (i < n_workers % n) for i in range(n)]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"

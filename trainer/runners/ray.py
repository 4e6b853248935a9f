"""Rollouts on a Ray cluster: an actor on each of some nodes keeps worker processes, which speak to the run's desk.

Invariant: of a Ray that others started nothing is left changed; one that was started here is shut down.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import ray
import ray.exceptions
import ray.util
import ray.util.client

from agl.errors import ConfigError, RolloutError
from agl.mdp.spans import Span
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.options import RayRunners
from agl.trainer.runners.process.fork_server import STOP_SECONDS
from agl.trainer.runners.process.runner import STRIKES, reap, spans_of
from agl.trainer.runners.process.worker_pool import CrashLoopGuard, WorkerExit, WorkerPool
from agl.trainer.runners.protocol import Lease, Report

log = logging.getLogger("agl.runner")

PLACE_SECONDS = 20.0
"""After how long it is said that Ray has not yet placed an actor."""
_STORE_BYTES = 80 * 1024 * 1024
_PAUSE_SECONDS = 1.0


class Cluster:
    """The Ray that runners use: made by `join`, left by `leave`.

    Attributes:
        host: address of this machine that every node reaches. n_nodes: alive at the time.
    """

    def __init__(self, host: str, n_nodes: int, started: bool) -> None:
        self.host, self.n_nodes, self._started = host, n_nodes, started

    @classmethod
    async def join(cls, options: RayRunners, n_workers: int) -> Cluster:
        """Use the Ray of this process, else that of RAY_ADDRESS, else start one on this machine.

        Raises:
            ConfigError: the cluster cannot be reached, or only as a Ray client.
        """
        started = False
        if not ray.is_initialized():
            started = not os.environ.get("RAY_ADDRESS")
            # Ray warns that it sets no signal handler in this thread, which is as it should be.
            wanted: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.ERROR}
            if started:
                cpus = max(os.cpu_count() or 1, math.ceil(n_workers * options.num_cpus))
                wanted |= {
                    "address": "local", "num_cpus": cpus, "num_gpus": 0, "include_dashboard": False,
                    "object_store_memory": _STORE_BYTES,
                }  # fmt: skip
            try:
                await asyncio.to_thread(ray.init, **wanted)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"Ray cannot be joined: {error}", hint="see RAY_ADDRESS, or call ray.init(...) before fit"
                ) from error
        if ray.util.client.ray.is_connected():
            raise ConfigError(
                "this process is a Ray client (ray://), which the workers cannot reach",
                hint="run the trainer on a node of the cluster: ray job submit, or a shell on the head node",
            )
        n_nodes = sum(node["Alive"] for node in ray.nodes())
        host = "127.0.0.1" if n_nodes == 1 else ray.util.get_node_ip_address()
        return cls(host, n_nodes, started)

    async def leave(self) -> None:
        """Shut down what `join` started. Idempotent."""
        if self._started:
            self._started = False
            await asyncio.to_thread(ray.shutdown)


class _Host:
    """An actor: worker processes on its node."""

    def __init__(self, payload: bytes, url: str, key: str, n_workers: int, name: str) -> None:
        self._ended: asyncio.Queue[WorkerExit | BaseException] = asyncio.Queue()
        self._pool = WorkerPool(
            payload, url, key, n_workers=n_workers, name=name, ended=self._ended.put, broken=self._ended.put_nowait
        )

    async def start(self) -> str:
        await self._pool.start()
        return ray.get_runtime_context().get_node_id()

    async def next(self) -> WorkerExit:
        """The next worker that is over."""
        ended = await self._ended.get()
        if isinstance(ended, BaseException):
            raise ended
        return ended

    async def kill(self, worker: str) -> WorkerExit | None:
        return await self._pool.kill(worker)

    async def stop(self) -> None:
        await self._pool.stop()


class RayRunner:
    """N workers in actors of a Ray cluster, spread over its nodes; an actor that dies is made anew.

    Args:
        cluster: joined; left by `stop`. desk: the run's; this runner makes itself its `given_up`.
        payload: packed agent. url: of the desk's routes, as the nodes reach it. key: that they ask for.
        options: of `Trainer(runners=)`. n_workers: how many rollouts run at once.
        broken: called when workers die that no rollout can be blamed for.

    Attributes:
        nodes: name of an actor -> id of the node that it is on.
    """

    def __init__(
        self,
        cluster: Cluster,
        desk: RunCoordinator,
        payload: bytes,
        url: str,
        key: str,
        *,
        options: RayRunners,
        n_workers: int,
        broken: Callable[[BaseException], None],
    ) -> None:
        self.cluster, self.desk, self.url, self.key = cluster, desk, url, key
        self.options, self.n_workers, self.broken = options, n_workers, broken
        self.nodes: dict[str, str] = {}
        self._payload = payload
        self._hosts: dict[str, Any] = {}
        self._tending: list[asyncio.Task[None]] = []
        self._up = asyncio.Event()
        self._numbers = itertools.count()
        self._strikes = CrashLoopGuard(STRIKES)

    async def start(self) -> None:
        """Start the actors, and wait for the first of them to have imported the agent.

        Raises:
            ConfigError: it cannot be imported on a node.
        """
        self.desk.given_up = self._given_up
        self.desk.watch()
        payload = ray.put(self._payload)
        sizes = _shares(self.n_workers, self.options.per_actor, self.cluster.n_nodes)
        self._tending = [asyncio.ensure_future(self._tend(payload, size)) for size in sizes]
        up = asyncio.ensure_future(self._up.wait())
        await asyncio.wait((up, *self._tending), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        for task in self._tending:
            if task.done():
                task.result()
            task.add_done_callback(self._tended)

    async def stop(self) -> None:
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        hosts = list(self._hosts.values())
        self._hosts.clear()
        if hosts:
            stopping = [asyncio.ensure_future(_answer(host.stop.remote())) for host in hosts]
            await asyncio.wait(stopping, timeout=STOP_SECONDS + 4.0)
            for task in stopping:
                task.cancel()
            await asyncio.gather(*stopping, return_exceptions=True)
        for host in hosts:
            ray.kill(host)
        await self.cluster.leave()

    def _tended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken(error)

    async def _tend(self, payload: Any, n_workers: int) -> None:
        """Keep one actor alive."""
        while True:
            name = f"ray-{next(self._numbers)}"
            remote: Any = ray.remote(_Host)
            actor = remote.options(
                num_cpus=self.options.num_cpus * n_workers, num_gpus=0, scheduling_strategy="SPREAD", max_restarts=0,
                max_concurrency=100,
            )  # fmt: skip
            host = self._hosts[name] = actor.remote(payload, self.url, self.key, n_workers, name)
            try:
                self.nodes[name] = await self._placed(host, n_workers)
                self._up.set()
                while True:
                    ended = await _answer(host.next.remote())
                    self._strikes.check(ended, had_work=await reap(self.desk, ended))
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, Exception) else error from None
            except ray.exceptions.RayError as error:
                log.warning("the Ray actor %s is gone, another one takes its place: %s", name, _first_line(error))
                self._hosts.pop(name, None)
                await self._lost(name, error)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _placed(self, host: Any, n_workers: int) -> str:
        starting = asyncio.ensure_future(_answer(host.start.remote()))
        try:
            done, _ = await asyncio.wait((starting,), timeout=PLACE_SECONDS)
            if not done:
                asked, free = self.options.num_cpus * n_workers, ray.available_resources().get("CPU", 0)
                log.warning(
                    "Ray has not started an actor for %d workers for %g s; it asks for %g CPUs, and free are %g",
                    n_workers, PLACE_SECONDS, asked, free,
                )  # fmt: skip
            return await starting
        finally:
            starting.cancel()

    async def _lost(self, name: str, error: Exception) -> None:
        for lease in self.desk.dismiss(name):
            lost = RolloutError(
                f"the Ray actor whose worker ran the agent is gone: {_first_line(error)}",
                hint="its node died or it was killed; the rollout is run again elsewhere if it has attempts left",
                rollout=lease.rollout.rollout_id,
                attempt=lease.attempt,
            )
            await self.desk.finish(lease, Report((), lost))

    async def _given_up(self, lease: Lease, worker: str) -> Sequence[Span]:
        host = self._hosts.get(worker.partition("/")[0])
        if host is None:
            return ()
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            ended = await asyncio.wait_for(_answer(host.kill.remote(worker)), 15.0)
            return () if ended is None else spans_of(ended, lease)
        return ()


async def _answer(reference: Any) -> Any:
    return await reference


def _shares(n_workers: int, per_actor: int, n_nodes: int) -> list[int]:
    """How many workers each actor has: on every node one at least, as even as can be."""
    n = min(n_workers, max(math.ceil(n_workers / per_actor), n_nodes))
    return [n_workers // n + (i < n_workers % n) for i in range(n)]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"

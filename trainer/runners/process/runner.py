"""Rollouts in processes of this machine: a stuck agent is killed at its limit, a dead one fails its attempt at once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence

from agl.errors import RolloutError
from agl.mdp.spans import Span
from agl.tracing import otlp
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.process.worker_pool import CrashLoopGuard, WorkerExit, WorkerPool
from agl.trainer.runners.protocol import Lease, Report

MAX_CRASHES = 3


class ProcessRunner:
    """N worker processes that reach the run's coordinator by HTTP on loopback.

    Args:
        coordinator: the run's; this runner sets its `end_worker`.
        payload: the packed agent.
        url: of the coordinator's routes.
        key: for them.
        n_workers: how many rollouts run at once.
        on_failure: called when workers die that had no rollout.
        pool: makes the workers.
    """

    def __init__(
        self,
        coordinator: RunCoordinator,
        payload: bytes,
        url: str,
        key: str,
        *,
        n_workers: int,
        on_failure: Callable[[BaseException], None],
        pool: Callable[..., WorkerPool] = WorkerPool,
    ) -> None:
        self.coordinator = coordinator
        self.pool = pool(
            payload, url, key, n_workers=n_workers, name="process", on_exit=self._on_exit, on_failure=on_failure
        )
        self._crashes = CrashLoopGuard(MAX_CRASHES)

    async def start(self) -> None:
        """Import the agent in the process that the workers are forked from, and start them.

        Raises:
            ConfigError: it cannot be imported there.
        """
        self.coordinator.end_worker = self._end_worker
        self.coordinator.watch()
        await self.pool.start()

    async def stop(self) -> None:
        await self.pool.stop()

    async def _end_worker(self, lease: Lease, worker: str) -> Sequence[Span]:
        worker_exit = await self.pool.kill(worker)
        return () if worker_exit is None else spans_of(worker_exit, lease)

    async def _on_exit(self, worker_exit: WorkerExit) -> None:
        self._crashes.check(worker_exit, had_work=await reap(self.coordinator, worker_exit))


async def reap(coordinator: RunCoordinator, worker_exit: WorkerExit) -> bool:
    """Fail the attempts that a worker left unfinished when it ended; whether there were any."""
    leases = coordinator.dismiss(worker_exit.worker)
    for lease in leases:
        error = RolloutError(
            f"the worker process that ran the agent {worker_exit.how}",
            hint=_advice(worker_exit.status),
            rollout=lease.rollout.rollout_id,
            attempt=lease.attempt,
            worker=worker_exit.worker,
        )
        await coordinator.finish(lease, Report(spans_of(worker_exit, lease), error))
    return bool(leases)


def spans_of(worker_exit: WorkerExit, lease: Lease) -> list[Span]:
    """The spans of a lease's attempt that had ended when its worker did."""
    rollout_id, attempt = lease.id
    return [
        span
        for request in worker_exit.spans
        for span in otlp.decode(json.loads(request), rollout_id=rollout_id, attempt=attempt)
    ]


def _advice(status: int) -> str:
    if status == -signal.SIGKILL:
        return "perhaps memory ran out and the kernel chose it (dmesg says so); run fewer workers"
    if status < 0:
        return "native code that the agent uses crashed or was asked to end; its stack is on stderr"
    return "something in the agent ended the process (os._exit, a native library); nothing should"

"""Rollouts in processes of this machine: what is stuck is killed at its limit, what dies fails at once."""

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

STRIKES = 3


class ProcessRunner:
    """N worker processes over the run's own desk, by HTTP on loopback.

    Args:
        desk: the run's; this runner makes itself its `given_up`.
        payload: packed agent. url: of the desk's routes. key: that they ask for.
        n_workers: how many rollouts run at once. broken: called when workers die that no rollout can be blamed for.
    """

    def __init__(
        self,
        desk: RunCoordinator,
        payload: bytes,
        url: str,
        key: str,
        *,
        n_workers: int,
        broken: Callable[[BaseException], None],
    ) -> None:
        self.desk, self.broken = desk, broken
        self.pool = WorkerPool(
            payload, url, key, n_workers=n_workers, name="process", ended=self._ended, broken=broken
        )  # fmt: skip
        self._strikes = CrashLoopGuard(STRIKES)

    async def start(self) -> None:
        """Import the agent in the process that the workers are forked from, and start them.

        Raises:
            ConfigError: it cannot be imported there.
        """
        self.desk.given_up = self._given_up
        self.desk.watch()
        await self.pool.start()

    async def stop(self) -> None:
        await self.pool.stop()

    async def _given_up(self, lease: Lease, worker: str) -> Sequence[Span]:
        ended = await self.pool.kill(worker)
        return () if ended is None else spans_of(ended, lease)

    async def _ended(self, ended: WorkerExit) -> None:
        self._strikes.check(ended, had_work=await reap(self.desk, ended))


async def reap(desk: RunCoordinator, ended: WorkerExit) -> bool:
    """Fail what a worker that is over held; whether it held anything."""
    held = desk.dismiss(ended.worker)
    for lease in held:
        error = RolloutError(
            f"the worker process that ran the agent {ended.how}",
            hint=_advice(ended.status),
            rollout=lease.rollout.rollout_id,
            attempt=lease.attempt,
            worker=ended.worker,
        )
        await desk.finish(lease, Report(spans_of(ended, lease), error))
    return bool(held)


def spans_of(ended: WorkerExit, lease: Lease) -> list[Span]:
    """Those of a lease's attempt that had ended when its worker did."""
    rollout_id, attempt = lease.id
    return [
        span
        for request in ended.spans
        for span in otlp.decode(json.loads(request), rollout_id=rollout_id, attempt=attempt)
    ]


def _advice(status: int) -> str:
    if status == -signal.SIGKILL:
        return "perhaps memory ran out and the kernel chose it (dmesg says so); run fewer workers"
    if status < 0:
        return "native code that the agent uses crashed or was told to end; its stack is on stderr"
    return "something in the agent ended the process (os._exit, a native library); nothing should"

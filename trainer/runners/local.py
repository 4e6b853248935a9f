"""N workers in this process, which lease rollouts from a desk and execute them one after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from agl.agents.agent import Agent
from agl.agents.hooks import Hook
from agl.errors import AglError
from agl.mdp.spans import Span
from agl.trainer.runners.executor import Executor
from agl.trainer.runners.protocol import HEARTBEAT_SECONDS, Coordinator, Lease, Report

log = logging.getLogger("agl.runner")

GIVE_BACK_SECONDS = 5.0
"""How long a stopped runner tries to tell its desk which rollouts it leaves."""


class LocalRunner:
    """Workers as tasks of the caller's event loop, which executes their agents beside it.

    Args:
        agent: what to run. desk: where rollouts come from.
        n_workers: how many rollouts run at once.
        broken: called when a worker itself fails (the store is gone, say), which no rollout can be blamed for.
        hooks: called around every attempt. name: of this runner; its workers are counted after it.
        span_ended: called with every span of an attempt as it ends, in the thread that ended it.
    """

    def __init__(
        self,
        agent: Agent,
        desk: Coordinator,
        *,
        n_workers: int,
        broken: Callable[[BaseException], None],
        hooks: Sequence[Hook] = (),
        name: str = "local",
        span_ended: Callable[[Span], None] | None = None,
    ) -> None:
        self.desk, self.n_workers, self.broken, self.name = desk, n_workers, broken, name
        self._executor = Executor(agent, desk, hooks=hooks, runner=self, span_ended=span_ended)
        self._workers: list[asyncio.Task[None]] = []
        self._running: dict[tuple[str, int], tuple[Lease, asyncio.Task[Report]]] = {}

    async def start(self) -> None:
        """Start the workers."""
        self._executor.start()
        for i in range(self.n_workers):
            self._workers.append(asyncio.ensure_future(self._work(f"{self.name}-{i}")))
        self._workers.append(asyncio.ensure_future(self._beat()))
        for worker in self._workers:
            worker.add_done_callback(self._ended)

    def _ended(self, worker: asyncio.Task[None]) -> None:
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self.broken(error)

    async def stop(self) -> None:
        """Cancel what runs, give its rollouts back, and end the workers; bounded."""
        leases = [lease for lease, _ in self._running.values()]
        for task in self._workers:
            task.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers.clear()
        given_back = [asyncio.ensure_future(self.desk.abandon(lease, "its runner was stopped")) for lease in leases]
        if given_back:
            _, left = await asyncio.wait(given_back, timeout=GIVE_BACK_SECONDS)
            for task in left:
                task.cancel()
            await asyncio.gather(*given_back, return_exceptions=True)
        await self._executor.stop()

    async def _work(self, worker_id: str) -> None:
        while True:
            lease = await self.desk.lease(worker_id)
            if lease is not None:
                await self.attempt(lease)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for lease, attempt in list(self._running.values()):
                try:
                    if not await self.desk.heartbeat(lease):
                        attempt.cancel()
                except AglError as error:
                    log.debug("heartbeat: %s", error)

    async def attempt(self, lease: Lease) -> Report | None:
        """Run one lease, whose result goes to the desk; None where it was cancelled, as not wanted any more."""
        attempt = asyncio.ensure_future(self._executor.attempt(lease))
        self._running[lease.id] = lease, attempt
        try:
            await asyncio.wait((attempt,))
        except asyncio.CancelledError:
            attempt.cancel()
            await asyncio.wait((attempt,))
            raise
        finally:
            self._running.pop(lease.id, None)
        return None if attempt.cancelled() else attempt.result()

"""N workers in this process that lease rollouts from a coordinator and execute them one after another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from agl.agents.agent import Agent
from agl.agents.hooks import Hook
from agl.errors import AglError
from agl.mdp.spans import Span
from agl.trainer.runners.executor import Executor
from agl.trainer.runners.protocol import HEARTBEAT_SECONDS, Coordinator, Lease, Report

log = logging.getLogger("agl.runner")

ABANDON_SECONDS = 5.0
"""How long a stopped runner tries to give its leases back to the coordinator."""


class LocalRunner:
    """Workers as tasks of the caller's event loop; their agents run on another loop and in threads.

    Args:
        agent: what to run.
        coordinator: where rollouts come from.
        n_workers: how many rollouts run at once.
        on_failure: called when a worker itself fails (the store is gone, for example), which is no rollout's fault.
        hooks: called around every attempt.
        name: of this runner; workers are named after it and numbered.
        on_span_end: called with every span of an attempt as it ends, in the thread that ended it.
    """

    def __init__(
        self,
        agent: Agent,
        coordinator: Coordinator,
        *,
        n_workers: int,
        on_failure: Callable[[BaseException], None],
        hooks: Sequence[Hook] = (),
        name: str = "local",
        on_span_end: Callable[[Span], None] | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.n_workers = n_workers
        self.on_failure = on_failure
        self.name = name
        self._executor = Executor(agent, coordinator, hooks=hooks, runner=self, on_span_end=on_span_end)
        self._workers: list[asyncio.Task[None]] = []
        self._running: dict[tuple[str, int], tuple[Lease, asyncio.Task[Report]]] = {}

    async def start(self) -> None:
        """Start the workers."""
        self._executor.start()
        for i in range(self.n_workers):
            self._workers.append(asyncio.ensure_future(self._work(f"{self.name}-{i}")))
        self._workers.append(asyncio.ensure_future(self._heartbeat()))
        for worker in self._workers:
            worker.add_done_callback(self._on_worker_end)

    async def run(self, over: asyncio.Future[None], until: asyncio.Event) -> None:
        """Work until `over` is done or `until` is set, then stop.

        Raises:
            Exception: that of `over`.
        """
        await self.start()
        stopped = asyncio.ensure_future(until.wait())
        try:
            await asyncio.wait((over, stopped), return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                over.result()
        finally:
            stopped.cancel()
            over.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.stop()

    async def stop(self) -> None:
        """Cancel running attempts, give their leases back, and end the workers; bounded."""
        leases = [lease for lease, _ in self._running.values()]
        for task in self._workers:
            task.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers.clear()
        abandons = [
            asyncio.ensure_future(self.coordinator.abandon(lease, "its runner was stopped")) for lease in leases
        ]
        if abandons:
            _, pending = await asyncio.wait(abandons, timeout=ABANDON_SECONDS)
            for task in pending:
                task.cancel()
            await asyncio.gather(*abandons, return_exceptions=True)
        await self._executor.stop()

    async def attempt(self, lease: Lease) -> Report | None:
        """Run one lease and report its result to the coordinator; None if it was cancelled as no longer wanted."""
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

    async def _work(self, worker_id: str) -> None:
        while True:
            lease = await self.coordinator.lease(worker_id)
            if lease is not None:
                await self.attempt(lease)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for lease, attempt in list(self._running.values()):
                try:
                    if not await self.coordinator.heartbeat(lease):
                        attempt.cancel()
                except AglError as error:
                    log.debug("heartbeat: %s", error)

    def _on_worker_end(self, worker: asyncio.Task[None]) -> None:
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self.on_failure(error)

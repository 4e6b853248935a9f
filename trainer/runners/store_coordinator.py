"""A coordinator without a run: hands out whatever is enqueued in a store, for as long as its server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from starlette.routing import Route

from agl.errors import AglError, StoreGoneError
from agl.mdp.selection import select
from agl.trainer.http.auth import Keys
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.lease_guard import LeaseGuard
from agl.trainer.runners.remote.coordinator import SILENT_SECONDS, coordinator_routes, key_check
from agl.trainer.store.base import Store
from agl.trainer.store.sql.clock import Observer
from agl.trainer.store.types import NO_RUN

LOST_CHECK_SECONDS = 2.0
EXPIRE_SECONDS = 1.0

log = logging.getLogger("agl.runner")


class StoreCoordinator:
    """A coordinator and its background tasks. Made on the event loop that it lives on; ended by `stop`.

    Args:
        coordinator: one that belongs to no run.
        silent_seconds: how long a runner may be silent before its rollouts
            are run again.
    """

    def __init__(self, coordinator: RunCoordinator, silent_seconds: float) -> None:
        self.coordinator = coordinator
        self.silent_seconds = silent_seconds
        coordinator.watch()
        self._tasks = [asyncio.ensure_future(work) for work in (self._give_up_lost(), self._expire())]

    async def gone(self) -> None:
        """Wait until the store is gone.

        Raises:
            StoreGoneError: it is.
        """
        await asyncio.shield(self._tasks[-1])

    @classmethod
    def of_store(cls, store: Store, silent_seconds: float = SILENT_SECONDS) -> StoreCoordinator:
        """A coordinator without a gateway: its rollouts call the models that the store's resources name."""
        coordinator = RunCoordinator(
            store,
            None,
            selection=select(None),
            run_id=NO_RUN,
            rewarded=False,
            silent_seconds=silent_seconds,
            guard=LeaseGuard(),
        )
        return cls(coordinator, silent_seconds)

    def routes(self, keys: Keys) -> list[Route]:
        """Its HTTP routes, which need one of these keys."""
        return coordinator_routes(lambda: self.coordinator, key_check(keys))

    async def stop(self) -> None:
        """Lease nothing more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.coordinator.stop()

    async def _give_up_lost(self) -> None:
        """Give up attempts that were leased by an earlier server, which was killed, and whose runners are silent.

        Silence counts from this server's start: a server that was down has received no heartbeats. Setting a clock
        has no effect.
        """
        store = self.coordinator.store
        observer = Observer(time.monotonic)
        earlier: set[tuple[str, int]] | None = None
        while True:
            with contextlib.suppress(AglError):
                rollouts = await store.query_rollouts(status=["preparing", "running"])
                attempts = [(await store.query_attempts(r.rollout_id))[-1] for r in rollouts if r.run_id is None]
                if earlier is None:
                    earlier = {(a.rollout_id, a.attempt) for a in attempts}
                lost = [a for a in attempts if (a.rollout_id, a.attempt) in earlier]
                if not lost:
                    return
                ages = observer.look((a.rollout_id, a.attempt, a.last_heartbeat_at) for a in lost)
                for key, (_, silence) in ages.items():
                    if silence > self.silent_seconds:
                        why = "its runner was not heard of since the server was restarted"
                        await store.update_attempt(*key, "unresponsive", error=why)
            await asyncio.sleep(LOST_CHECK_SECONDS)

    async def _expire(self) -> None:
        """Give up attempts past the limits that their rollouts set, whoever leased them."""
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            try:
                for attempt in await self.coordinator.store.expire_attempts():
                    log.warning(
                        "rollout %s attempt %d %s: %s",
                        attempt.rollout_id,
                        attempt.attempt,
                        attempt.status,
                        attempt.error,
                    )
            except StoreGoneError:
                raise
            except AglError as error:
                log.warning("cannot look for attempts past their limits: %s", error)

"""A desk that stands by itself, without a run: hands out whatever is enqueued in a store, for as long as its server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from starlette.routing import Route

from agl.errors import AglError
from agl.mdp.selection import select
from agl.trainer.http.auth import Keys
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.remote.coordinator import SILENT_SECONDS, coordinator_routes, key_check
from agl.trainer.store.base import NO_RUN, Store

LOOK_SECONDS, EXPIRE_SECONDS = 2.0, 1.0

log = logging.getLogger("agl.runner")


class StoreCoordinator:
    """A desk with its upkeep. Made on the event loop that it lives on; ended by `stop`.

    Args:
        desk: not of one run. silent_seconds: how long a runner may be silent before its rollouts are run again.
    """

    def __init__(self, desk: RunCoordinator, silent_seconds: float) -> None:
        self.desk, self.silent_seconds = desk, silent_seconds
        desk.watch()
        self._upkeep = [asyncio.ensure_future(work) for work in (self._give_up_lost(), self._expire())]

    @classmethod
    def of_store(cls, store: Store, silent_seconds: float = SILENT_SECONDS) -> StoreCoordinator:
        """One whose rollouts call the models that the store's resources name."""
        desk = RunCoordinator(
            store, None, selection=select(None), run_id=NO_RUN, rewarded=False, silent_seconds=silent_seconds
        )
        return cls(desk, silent_seconds)

    def routes(self, keys: Keys) -> list[Route]:
        """Its routes, for whom these keys know."""
        return coordinator_routes(lambda: self.desk, key_check(keys))

    async def stop(self) -> None:
        """Lease nothing more."""
        for work in self._upkeep:
            work.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        await self.desk.stop()

    async def _give_up_lost(self) -> None:
        """Attempts that were out when a server before this one was killed, and whose runners are gone: again."""
        began, store = time.time(), self.desk.store
        while True:
            with contextlib.suppress(AglError):
                out = await store.query_rollouts(status=["preparing", "running"])
                before = [r for r in out if r.run_id is None and r.created_at < began]
                attempts = [(await store.query_attempts(r.rollout_id))[-1] for r in before]
                lost = [a for a in attempts if a.started_at < began]
                if not lost:
                    return
                for attempt in lost:
                    if time.time() - attempt.last_heartbeat_at > self.silent_seconds:
                        why = "its runner was not heard of since the server was restarted"
                        await store.update_attempt(attempt.rollout_id, attempt.attempt, "unresponsive", error=why)
            await asyncio.sleep(LOOK_SECONDS)

    async def _expire(self) -> None:
        """Attempts past the limits that their rollouts set, whoever leased them."""
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            try:
                for attempt in await self.desk.store.expire_attempts():
                    where = attempt.rollout_id, attempt.attempt, attempt.status, attempt.error
                    log.warning("rollout %s attempt %d %s: %s", *where)
            except AglError as error:
                log.warning("attempts past their limits cannot be looked for: %s", error)

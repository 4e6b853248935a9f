"""A desk that stands by itself, without a run: hands out whatever is enqueued in a store, for as long as its server."""

from __future__ import annotations

import asyncio
import contextlib
import time

from starlette.routing import Route

from agl.errors import AglError
from agl.selection import select
from agl.trainer.gateway.app import build_app
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.runners.desk import RunDesk
from agl.trainer.runners.remote import desk_routes, key_check
from agl.trainer.server.keys import Keys
from agl.trainer.server.limits import Limits
from agl.trainer.store.base import Store

SILENT_SECONDS = 60.0
LOOK_SECONDS = 2.0


class StandingDesk:
    """A desk with its upkeep. Made on the event loop that it lives on; ended by `stop`.

    Args:
        desk: not of one run. silent_seconds: how long a runner may be silent before its rollouts are run again.
    """

    def __init__(self, desk: RunDesk, silent_seconds: float) -> None:
        self.desk, self.silent_seconds = desk, silent_seconds
        desk.watch()
        self._looking = asyncio.ensure_future(self._give_up_lost())

    @classmethod
    def of_store(cls, store: Store, silent_seconds: float = SILENT_SECONDS) -> StandingDesk:
        """One whose rollouts call the models that the store's resources name."""
        desk = RunDesk(store, None, selection=select(None), rewarded=False, silent_seconds=silent_seconds)
        return cls(desk, silent_seconds)

    def route(self, store: Store, keys: Keys, limits: Limits) -> Route:
        """Its routes as one, for a server that answers errors in another shape."""
        app = build_app(Gateway(store), desk_routes(lambda: self.desk, key_check(keys)), limits)
        return Route("/runner/{what}", app, methods=["POST"])

    async def stop(self) -> None:
        """Lease nothing more."""
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
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
                        self.desk.wake()
            await asyncio.sleep(LOOK_SECONDS)

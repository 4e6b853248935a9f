"""A policy that is served and not trained: for evaluation, and for algorithms that drive the store themselves."""

from __future__ import annotations

import asyncio
import contextlib
import time

from agl.errors import AglError
from agl.selection import DEFAULT_POLICY, select
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.rendering import Rendering
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.runners.desk import RunDesk
from agl.trainer.runners.remote import desk_routes, key_check
from agl.trainer.server.keys import Keys
from agl.trainer.service.front import Front, Place
from agl.trainer.service.settings import Settings
from agl.trainer.store.base import Store

LOOK_SECONDS = 2.0


class ServedPolicy:
    """A policy behind a front, with a desk for whatever is enqueued in the store. Made by `start`, ended by `stop`."""

    def __init__(self, policy: LocalPolicy, desk: RunDesk, place: Place, silent_seconds: float) -> None:
        self.policy, self.desk, self.place = policy, desk, place
        self._silent = silent_seconds
        self._looking = asyncio.ensure_future(self._give_up_lost())

    @classmethod
    async def start(cls, settings: Settings, store: Store, front: Front) -> ServedPolicy:
        """Load it and let requests in.

        Raises:
            ModelLoadError, EngineError: nothing is left running then.
        """
        model = settings.model()
        spec = PolicySpec(
            model=model, name=DEFAULT_POLICY, device=settings.device, dtype=settings.get("dtype"),
            max_context=settings.get("max_context"), threads=settings.get("threads"),
        )  # fmt: skip
        policy = await LocalPolicy.start(spec)
        try:
            rendering = await asyncio.to_thread(_rendering, model, settings.get("renderer"))
        except BaseException:
            await policy.close()
            raise
        content, silent = settings.get("capture_content"), settings.get("silent_seconds")
        gateway = Gateway(store, capture_content=content)
        gateway.serve(DEFAULT_POLICY, policy, rendering, policy.info.stop_token_ids)
        desk = RunDesk(
            store, gateway, selection=select(settings.get("agents")), model=DEFAULT_POLICY, rewarded=False,
            capture_content=content, silent_seconds=silent,
        )  # fmt: skip
        place = front.place(gateway, desk_routes(lambda: desk, key_check(Keys())))
        await place.start()
        desk.watch()
        return cls(policy, desk, place, silent)

    async def stop(self) -> None:
        """Let nothing more in and unload it."""
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        await self.desk.stop()
        await self.place.stop()
        await self.policy.close()

    async def _give_up_lost(self) -> None:
        """Attempts that were out when a server before this one was killed are nobody's: queue their rollouts again."""
        began = time.time()
        store = self.desk.store
        while True:
            with contextlib.suppress(AglError):
                out = await store.query_rollouts(status=["preparing", "running"])
                lost = [r for r in out if r.run_id is None and r.created_at < began]
                if not lost:
                    return
                for rollout in lost:
                    last = (await store.query_attempts(rollout.rollout_id))[-1]
                    if last.started_at < began and time.time() - last.last_heartbeat_at > self._silent:
                        await store.update_attempt(
                            rollout.rollout_id, last.attempt, "unresponsive", error="its server was restarted"
                        )
                        self.desk.wake()
            await asyncio.sleep(LOOK_SECONDS)


def _rendering(model: str, renderer: str | None) -> Rendering:
    from agl.trainer.local.model import load_tokenizer

    return Rendering(load_tokenizer(model), renderer=renderer)

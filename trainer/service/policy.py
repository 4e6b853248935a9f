"""A policy that is served and not trained: for evaluation, and for algorithms that drive the store themselves."""

from __future__ import annotations

import asyncio

from agl.selection import DEFAULT_POLICY, select
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.rendering import Rendering
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.runners.desk import RunDesk
from agl.trainer.runners.remote import desk_routes, key_check
from agl.trainer.runners.standing import StandingDesk
from agl.trainer.server.keys import Keys
from agl.trainer.service.front import Front, Place
from agl.trainer.service.settings import Settings
from agl.trainer.store.base import NO_RUN, Store


class ServedPolicy:
    """A policy behind a front, with a desk for whatever is enqueued in the store. Made by `start`, ended by `stop`."""

    def __init__(self, policy: LocalPolicy, desk: StandingDesk, place: Place) -> None:
        self.policy, self.desk, self.place = policy, desk, place

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
            store, gateway, selection=select(settings.get("agents")), model=DEFAULT_POLICY, run_id=NO_RUN,
            rewarded=False, capture_content=content, silent_seconds=silent,
        )  # fmt: skip
        place = front.place(gateway, desk_routes(lambda: desk, key_check(Keys())))
        await place.start()
        return cls(policy, StandingDesk(desk, silent), place)

    async def stop(self) -> None:
        """Let nothing more in and unload it."""
        await self.desk.stop()
        await self.place.stop()
        await self.policy.close()


def _rendering(model: str, renderer: str | None) -> Rendering:
    from agl.trainer.local.model import load_tokenizer

    return Rendering(load_tokenizer(model), renderer=renderer)

"""A policy that is served and not trained: for evaluation, and for algorithms that drive the store themselves."""

from __future__ import annotations

from agl.mdp.selection import DEFAULT_POLICY, select
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.http.auth import Keys
from agl.trainer.local.policy import PolicySpec
from agl.trainer.run.frozen_policy import FrozenPolicy
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.remote.coordinator import coordinator_routes, key_check
from agl.trainer.runners.store_coordinator import StoreCoordinator
from agl.trainer.service.front import GatewayMount, MountPoint
from agl.trainer.service.settings import Settings
from agl.trainer.store.base import NO_RUN, Store


class ServedPolicy:
    """A policy behind a front, with a desk for whatever is enqueued in the store. Made by `start`, ended by `stop`."""

    def __init__(self, policy: FrozenPolicy, desk: StoreCoordinator, place: MountPoint) -> None:
        self.policy, self.desk, self.place = policy, desk, place

    @classmethod
    async def start(cls, settings: Settings, store: Store, front: GatewayMount) -> ServedPolicy:
        """Load it, or ask the server that holds it, and let requests in.

        Raises:
            ConfigError, ModelLoadError, EngineError: nothing is left running then.
        """
        policy = await _opened(settings)
        content, silent = settings.get("capture_content"), settings.get("silent_seconds")
        gateway = Gateway(store, capture_content=content)
        policy.serve(gateway, DEFAULT_POLICY)
        desk = RunCoordinator(
            store, gateway, selection=select(settings.get("agents")), model=DEFAULT_POLICY, run_id=NO_RUN,
            rewarded=False, capture_content=content, silent_seconds=silent,
        )  # fmt: skip
        place = front.place(gateway, coordinator_routes(lambda: desk, key_check(Keys())))
        await place.start()
        return cls(policy, StoreCoordinator(desk, silent), place)

    async def stop(self) -> None:
        """Let nothing more in and unload it."""
        await self.desk.stop()
        await self.place.stop()
        await self.policy.close()


async def _opened(settings: Settings) -> FrozenPolicy:
    engine, renderer = settings.get("engine"), settings.get("renderer")
    if engine is not None:
        from agl.trainer.engines.vllm import VLLMEngine

        return await FrozenPolicy.connect(VLLMEngine(engine), settings.get("model") or None, renderer)
    spec = PolicySpec(
        model=settings.model(), name=DEFAULT_POLICY, device=settings.device, dtype=settings.get("dtype"),
        max_context=settings.get("max_context"), threads=settings.get("threads"),
    )  # fmt: skip
    return await FrozenPolicy.load(spec, renderer)

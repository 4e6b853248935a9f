"""A policy that is served and not trained: for evaluation, and for algorithms that enqueue rollouts themselves."""

from __future__ import annotations

from urllib.parse import urlsplit

from agl.mdp.selection import DEFAULT_POLICY, select
from agl.trainer.algorithms.options import Settings
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.processes.group import GatewayProcesses
from agl.trainer.http.auth import Keys
from agl.trainer.local.policy import PolicySpec
from agl.trainer.policies.frozen import FrozenPolicy
from agl.trainer.report.progress import Progress
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.lease_guard import LeaseGuard
from agl.trainer.runners.remote.coordinator import coordinator_routes, key_check
from agl.trainer.runners.store_coordinator import StoreCoordinator
from agl.trainer.service.gateway_mount import GatewayMount, MountPoint
from agl.trainer.store.base import Store
from agl.trainer.store.types import NO_RUN


class ServedPolicy:
    """A mounted policy, and a coordinator for whatever is enqueued in the store. Made by `start`, ended by `stop`."""

    def __init__(
        self, policy: FrozenPolicy, coordinator: StoreCoordinator, mount_point: MountPoint, gateway: Gateway
    ) -> None:
        self.policy, self.coordinator, self.mount_point, self.gateway = policy, coordinator, mount_point, gateway

    @classmethod
    async def start(cls, settings: Settings, store: Store, mount: GatewayMount, *, progress: bool) -> ServedPolicy:
        """Load the policy, or connect to the server that holds it, and admit requests.

        Args:
            progress: whether to show how far loading is.

        Raises:
            ConfigError, ModelLoadError, EngineError: nothing is left running then.
        """
        policy = await _open_policy(settings, progress)
        capture_content, silent_seconds = settings.get("capture_content"), settings.get("silent_seconds")
        n = settings.get("gateways") or 1
        if n == 1:
            gateway = Gateway(store, capture_content=capture_content)
        else:
            gateway = GatewayProcesses(store, n, capture_content=capture_content)
        policy.serve(gateway, DEFAULT_POLICY)
        coordinator = RunCoordinator(
            store,
            gateway,
            selection=select(settings.get("agents")),
            model=DEFAULT_POLICY,
            run_id=NO_RUN,
            rewarded=False,
            capture_content=capture_content,
            silent_seconds=silent_seconds,
            guard=LeaseGuard(),
        )
        mount_point = mount.point(gateway, coordinator_routes(lambda: coordinator, key_check(Keys())))
        where = urlsplit(await mount_point.start())
        if isinstance(gateway, GatewayProcesses):
            try:
                port = (where.port or 0) + 1 if settings.get("port") else 0
                await gateway.start(host=where.hostname or settings.get("host"), port=port)
            except BaseException:
                await mount_point.stop()
                await policy.close()
                raise
        return cls(policy, StoreCoordinator(coordinator, silent_seconds), mount_point, gateway)

    async def stop(self) -> None:
        """Admit no more requests and unload the policy."""
        await self.coordinator.stop()
        if isinstance(self.gateway, GatewayProcesses):
            await self.gateway.stop()
        await self.mount_point.stop()
        await self.policy.close()


async def _open_policy(settings: Settings, progress: bool) -> FrozenPolicy:
    engine, renderer = settings.get("engine"), settings.get("renderer")
    if engine is not None:
        from agl.trainer.engines.vllm import VLLMEngine

        return await FrozenPolicy.connect(VLLMEngine(engine), settings.get("model") or None, renderer)
    spec = PolicySpec(
        model=settings.model(),
        name=DEFAULT_POLICY,
        device=settings.get("device"),
        dtype=settings.get("dtype"),
        max_context=settings.get("max_context"),
        threads=settings.get("threads"),
    )
    return await FrozenPolicy.load(spec, renderer, progress=Progress(progress))

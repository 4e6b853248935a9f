"""A policy that is served and not trained: for evaluation, and for algorithms that enqueue rollouts themselves."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
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
from agl.trainer.store.base import Store
from agl.trainer.store.types import NO_RUN
from agl_service.gateway_mount import GatewayMount


@contextlib.asynccontextmanager
async def served_policy(
    settings: Settings, store: Store, mount: GatewayMount, *, progress: bool
) -> AsyncIterator[None]:
    """Load the policy, or connect to the server that holds it, and serve the store's rollouts within the block.

    Args:
        progress: whether to show how far loading is.

    Raises:
        ConfigError, ModelLoadError, EngineError: nothing is left running then.
    """
    async with contextlib.AsyncExitStack() as stack:
        texts = {name: settings.get(name) for name in ("renderer", "chat_template")}
        if (engine := settings.get("engine")) is not None:
            from agl.trainer.engines.vllm import VLLMEngine

            model = settings.get("model") or None
            policy = await FrozenPolicy.connect(VLLMEngine(engine), model, **texts)
        else:
            values = {name: settings.get(name) for name in ("device", "dtype", "max_context", "threads")}
            spec = PolicySpec(settings.model(), DEFAULT_POLICY, **values)
            policy = await FrozenPolicy.load(spec, **texts, progress=Progress(progress))
        stack.push_async_callback(policy.close)
        capture_content = settings.get("capture_content")
        silent_seconds = settings.get("silent_seconds")
        if (n := settings.get("gateways") or 1) == 1:
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
        stack.push_async_callback(mount_point.stop)
        where = urlsplit(await mount_point.start())
        if isinstance(gateway, GatewayProcesses):
            port = (where.port or 0) + 1 if settings.get("port") else 0
            await gateway.start(host=where.hostname or settings.get("host"), port=port)
            stack.push_async_callback(gateway.stop)
        stack.push_async_callback(StoreCoordinator(coordinator, silent_seconds).stop)
        yield

"""`agl serve`: gateway, store, coordinator and trainer behind one address, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from agl.errors import GatewayError
from agl.trainer.algorithms.options import Settings
from agl.trainer.dashboard.app import ui_routes
from agl.trainer.gateway.app import build_app as gateway_app
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.http.auth import Keys
from agl.trainer.http.limits import Limits
from agl.trainer.http.server import HttpServer
from agl.trainer.run.data import read_tasks
from agl.trainer.runners.loading import load_rules
from agl.trainer.runners.remote.coordinator import coordinator_routes, key_check
from agl.trainer.store import open_store
from agl.trainer.store.http.openapi import schema as store_schema
from agl.trainer.store.http.server import StoreRoutes
from agl_service.gateway_mount import GatewayMount
from agl_service.policy import served_policy
from agl_service.routes import build_app, operations
from agl_service.service import Service, Split


@contextlib.asynccontextmanager
async def serving(
    settings: Settings, keys: Keys, *, data: dict[Split, Path] | None = None, progress: bool = True
) -> AsyncIterator[Service]:
    """A server that listens at `service.mount.url` within the block.

    Args:
        settings: checked.
        keys: of the operator and the runners.
        data: task files by split, which replace the uploaded
            ones. progress: whether this terminal shows runs.

    Raises:
        ConfigError, DatasetError, ModelLoadError, StoreError, GatewayError: it cannot serve.
    """
    settings.check()
    host = settings.get("host")
    keys.check_host(host)
    if settings.get("air_rules"):
        load_rules(settings.get("air_rules"))
    out = Path(settings.get("directory"))
    limits = Limits.of_environment()
    async with contextlib.AsyncExitStack() as stack:
        out.mkdir(parents=True, exist_ok=True)
        store = await open_store(settings.get("store") or f"sqlite:///{out / 'store.db'}")
        stack.push_async_callback(store.close)
        idle = gateway_app(Gateway(store), coordinator_routes(lambda: None, key_check(Keys())), limits)
        mount = GatewayMount(idle, keys, limits)
        service = Service(settings, store, mount, out, progress=progress)
        service.open()
        stack.push_async_callback(service.close)
        for split, file in (data or {}).items():
            await asyncio.to_thread(read_tasks, file)
            await asyncio.to_thread(service.upload, split, file.read_text(encoding="utf-8"), str(file))
        store_routes = StoreRoutes(store, keys, limits)
        facts = {
            "model": settings.get("model") or settings.get("engine"),
            "algorithm": settings.get("algorithm"),
            "nworkers": settings.get("n_workers"),
            "process": os.getpid(),
        }
        listed = operations(service, facts, store_schema(keys.operator is not None))
        known = {operation.path for operation in listed}
        others = [r for r in store_routes.routes() if r.path not in known]
        mount.app = build_app(service, listed, [*others, *ui_routes(store, str(out), keys)])
        server = HttpServer(
            mount, error=GatewayError, host=host, port=settings.get("port"), limits=limits, minted_key=keys.minted
        )
        mount.url = await server.start()
        stack.push_async_callback(server.stop)
        store_routes.start()
        stack.callback(store_routes.stop)
        # A run ends before the server does, so that its workers notice.
        stack.push_async_callback(service.close)
        if settings.get("algorithm") is None:
            await stack.enter_async_context(served_policy(settings, store, mount, progress=progress))
        service.resume()
        yield service


async def serve(
    settings: Settings,
    keys: Keys,
    on_start: Callable[[Service], None],
    *,
    data: dict[Split, Path] | None = None,
    start: bool = False,
    progress: bool = True,
) -> None:
    """Serve until cancelled.

    Args:
        on_start: called with the service once it listens.
        start: whether to start a run without a request.
    """
    async with serving(settings, keys, data=data, progress=progress) as service:
        on_start(service)
        if start and service.current is None:
            service.train({})
        await asyncio.Event().wait()

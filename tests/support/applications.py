"""A server for applications that listens, around a scripted engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from scripted import ScriptedEngine, quick_tokenizer, rendering_of
from starlette.routing import Route

from agl.trainer.gateway.application import ApplicationGateway, ApplicationPaths
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.http.application_keys import ApplicationKeys
from agl.trainer.http.auth import key_hash

SHOP, DESK = "shop-key-0123456789", "desk-key-0123456789"
KEYS = ApplicationKeys({"shop": key_hash(SHOP), "desk": key_hash(DESK)})


@dataclass
class Served:
    """A listening server and its only engine."""

    gateway: ApplicationGateway
    server: GatewayServer
    url: str
    engine: Any

    def openai(self, key: str = SHOP, **options: Any) -> Any:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        http = DefaultAsyncHttpxClient(trust_env=False)
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, http_client=http, **{"max_retries": 0} | options)

    async def post(self, path: str, body: Any, key: str | None = SHOP) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=30) as client:
            return await client.post(f"{self.url}{path}", json=body)

    async def get(self, path: str, key: str | None = SHOP) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=30) as client:
            return await client.get(f"{self.url}{path}")


@contextlib.asynccontextmanager
async def served(
    engine: Any,
    keys: ApplicationKeys = KEYS,
    *,
    names: tuple[str, ...] = ("policy",),
    routes: Callable[[ApplicationGateway], list[Route]] = lambda gateway: [],
    **options: Any,
) -> AsyncIterator[Served]:
    if not hasattr(engine, "generate"):
        engine = ScriptedEngine(quick_tokenizer(), engine)
    gateway = ApplicationGateway(keys, **options)
    for name in names:
        gateway.serve(name, engine, rendering_of(quick_tokenizer()))
    server = GatewayServer(gateway, extra_routes=routes(gateway), middleware=ApplicationPaths)
    url = await server.start()
    try:
        yield Served(gateway, server, url, engine)
    finally:
        await server.stop()

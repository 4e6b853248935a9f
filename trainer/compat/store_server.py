"""0.3's `LightningStoreServer`: a `LightningStore` over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from agl.errors import ConfigError

if TYPE_CHECKING:
    from agl.trainer.compat.store import LightningStore
    from agl.trainer.store.http.server import StoreServer

__all__ = ["LightningStoreServer"]


class LightningStoreServer:
    """Serves a store over HTTP, to `LightningStoreClient`, runners and OTLP exporters.

    Args:
        store: what to serve. host, port: where; None = this machine alone, a free port. Other hosts need a key in
            AGL_OPERATOR_KEY.
    """

    def __init__(self, store: LightningStore, host: str | None = None, port: int | None = None) -> None:
        self.store, self._address = store, (host or "127.0.0.1", port or 0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: StoreServer | None = None

    @property
    def endpoint(self) -> str:
        """Where it listens; ConfigError before `start`."""
        if self._server is None:
            raise ConfigError("the store's server has not been started", hint="await server.start()")
        return self._server.url

    async def start(self) -> None:
        """Listen; StoreError if the port is taken."""
        from agl.trainer.http.auth import Keys
        from agl.trainer.store.http.server import StoreServer

        host, port = self._address
        server = StoreServer(self.store.agl_store, host=host, port=port, keys=Keys.find())
        # On a separate loop: a client in this process may block the caller's while it connects.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agl-store-server", daemon=True).start()
        try:
            await self._on_loop(server.start())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        self._server = server

    async def stop(self) -> None:
        """Stop listening; the store stays open. Idempotent."""
        server, self._server = self._server, None
        if server is not None and self._loop is not None:
            await self._on_loop(server.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

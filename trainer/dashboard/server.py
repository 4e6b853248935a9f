"""The dashboard as a separate server, for the command line and next to a training run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Sequence

from agl.errors import AglError, StoreError
from agl.trainer.dashboard.app import dashboard_app
from agl.trainer.dashboard.sources import Source
from agl.trainer.http.auth import Keys
from agl.trainer.http.server import HttpServer

PORT = 8001


def link(url: str, key: str | None) -> str:
    """The page's address with a key in its fragment, which a browser sends to no server."""
    return f"{url}/#key={urllib.parse.quote(key, safe='')}" if key else f"{url}/"


@contextlib.asynccontextmanager
async def serving(
    sources: Sequence[Source], keys: Keys, *, host: str = "127.0.0.1", port: int = PORT
) -> AsyncIterator[str]:
    """A dashboard that listens within the block, and its URL. The sources are closed at the end.

    Raises:
        ConfigError: `host` is not loopback, and there is no operator key.
        StoreError: the port is taken, or the address cannot be bound.
    """
    keys.check_host(host)
    server = HttpServer(dashboard_app(sources, keys), error=StoreError, host=host, port=port, minted_key=keys.minted)
    try:
        yield await server.start()
    finally:
        await server.stop()
        for source in sources:
            await source.close()


@contextlib.contextmanager
def serving_beside(sources: Sequence[Source], keys: Keys, *, port: int = 0) -> Iterator[str]:
    """The same on a separate thread, next to a training run that keeps its thread busy.

    The training reads and writes through another connection, and nothing that happens here reaches it.

    Raises:
        StoreError: the port is taken.
    """
    started: dict[str, str | AglError] = {}
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        try:
            async with serving(sources, keys, port=port) as url:
                started["url"] = url
                ready.set()
                await stop.wait()
        except AglError as error:
            started["error"] = error
        finally:
            ready.set()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(main())

    thread = threading.Thread(target=run, name="agl-dashboard", daemon=True)
    thread.start()
    ready.wait()
    error = started.get("error")
    if isinstance(error, AglError):
        raise error
    try:
        yield str(started["url"])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()

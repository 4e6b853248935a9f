"""0.3's `LightningStoreServer`: a `LightningStore` over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agl.errors import ConfigError, StoreError
from agl.trainer.http.aio import LoopThread
from agl_agentlightning.lightning_store import _SERVER, LightningStore, LightningStoreClient, _Delegate

if TYPE_CHECKING:
    from agl.trainer.store.http.server import StoreServer

__all__ = [
    "LaunchMode",
    "LightningStoreClient",
    "LightningStoreServer",
    "PythonServerLauncher",
    "PythonServerLauncherArgs",
]

log = logging.getLogger("agl.store")
LaunchMode = Literal["asyncio", "thread", "mp"]
PORT = 4747


class ServerStartError(StoreError, RuntimeError):
    """The server cannot listen. 0.3's programs catch RuntimeError."""


@dataclass
class PythonServerLauncherArgs:
    """Where and how a server listens.

    Attributes:
        port: None takes a free one.
        host: None is this machine alone.
        access_host: what clients are told instead.
        launch_mode: "asyncio" and "thread" are the same here: a separate thread. "mp" is refused.
        healthcheck_url: the path that answers when the server listens.
    """

    port: int | None = None
    host: str | None = None
    access_host: str | None = None
    launch_mode: LaunchMode = "asyncio"
    n_workers: int = 1
    healthcheck_url: str | None = None
    startup_timeout: float = 60.0


class PythonServerLauncher:
    """The addresses of a server that is launched with `args`."""

    def __init__(self, app: Any, args: PythonServerLauncherArgs) -> None:
        self.app = app
        self.args = args

    @property
    def endpoint(self) -> str:
        """The base URL, as clients are told."""
        return f"http://{self.args.access_host or self.args.host or '127.0.0.1'}:{self.args.port}"

    @property
    def health_url(self) -> str | None:
        """What answers when the server listens; None without `healthcheck_url`."""
        path = self.args.healthcheck_url
        return None if path is None else f"{self.endpoint}/{path.lstrip('/')}"


class LightningStoreServer(_Delegate):
    """Serves a store over HTTP, to `LightningStoreClient`, runners and OTLP exporters; it is that store itself, too.

    In a child process its methods reach the server of the parent. Clients reach the database of the store: methods that
    a class of one's own overrides are run in the server's process alone.

    Args:
        store: what to serve.
        host, port: where; None = this machine alone, a free port. Other hosts need a key in
            AGL_OPERATOR_KEY.
        launch_mode, n_workers, launcher_args: as of `PythonServerLauncherArgs`.
        cors_allow_origins, tracker: without
            effect.

    Raises:
        ValueError: `launch_mode="mp"`: this store's server is one process.
    """

    def __init__(
        self,
        store: LightningStore,
        host: str | None = None,
        port: int | None = None,
        cors_allow_origins: Any = None,
        launch_mode: LaunchMode = "thread",
        launcher_args: PythonServerLauncherArgs | None = None,
        n_workers: int = 1,
        tracker: Any = None,
    ) -> None:
        super().__init__(store)
        given = host is not None or port is not None or launch_mode != "thread"
        if launcher_args is not None and given:
            raise ValueError("host, port and launch_mode stand in launcher_args")
        self.launcher_args = launcher_args or PythonServerLauncherArgs(
            port, host, launch_mode=launch_mode, n_workers=n_workers, healthcheck_url="/health"
        )
        if self.launcher_args.launch_mode == "mp":
            raise ValueError("The store does not support zero-copy. `agl store` serves one from a process of its own.")
        self.server_launcher = PythonServerLauncher(None, self.launcher_args)
        self._loop: LoopThread | None = None
        self._server: StoreServer | None = None
        self._url_of_server: str | None = None
        self._process = os.getpid()
        self._client: LightningStoreClient | None = None

    def __reduce__(self) -> Any:
        return LightningStoreClient, (self.endpoint,)

    def _target(self) -> LightningStore:
        if self._process == os.getpid():
            return self.store
        if self._client is None:
            self._client = LightningStoreClient(self.endpoint)
        return self._client

    @property
    def endpoint(self) -> str:
        """Where it listens; ConfigError before `start`."""
        if self._url_of_server is None:
            raise ConfigError("the store's server has not been started", hint="await server.start()")
        return self._url_of_server

    def otlp_traces_endpoint(self) -> str:
        """Where exporters of spans send them."""
        return f"{self.endpoint}/v1/traces"

    async def start(self) -> None:
        """Listen; a StoreError that is a RuntimeError, too, if the port is taken."""
        from agl.trainer.http.auth import Keys
        from agl.trainer.store.http.server import StoreServer

        args = self.launcher_args
        server = StoreServer(self.store.agl_store, host=args.host or "127.0.0.1", port=args.port or 0, keys=Keys.find())
        await self.store.agl_store.put_note(
            _SERVER, {"name": type(self.store).__name__, "opened_at": self.store._opened_at}
        )
        # On a separate loop: a client in this process may block the caller's while it connects.
        self._loop = LoopThread("agl-store-server")
        try:
            await self._on_loop(server.start())
        except BaseException as error:
            self._loop.stop()
            if not isinstance(error, StoreError):
                raise
            reason = error.message[:1].lower() + error.message[1:].replace("Address already", "address already")
            log.error("the store's server does not start: %s", reason)
            raise ServerStartError(
                f"the store's server did not start up within its time: {reason}", hint=error.hint
            ) from error
        self._server = server
        self._url_of_server = server.url
        args.port = int(server.url.rpartition(":")[2])

    async def run_forever(self) -> None:
        """Listen until cancelled."""
        await self.start()
        try:
            await asyncio.Event().wait()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop listening; the store stays open. Idempotent."""
        server = self._server
        self._server = None
        self._url_of_server = None
        if server is not None and self._loop is not None:
            await self._on_loop(server.stop())
            await asyncio.to_thread(self._loop.stop)

    async def _on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return await asyncio.wrap_future(self._loop.submit(work))

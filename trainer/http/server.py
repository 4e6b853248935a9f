"""Runs an ASGI application as an HTTP server on the caller's event loop; it listens on loopback by default."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from agl.errors import AglError
from agl.trainer.http import local_key
from agl.trainer.http.browsers import BrowserCheck, is_loopback
from agl.trainer.http.connections import Connections
from agl.trainer.http.limits import Bounded, Limits

STOP_SECONDS = 2.0
"""How long open requests usually have to end, and then again to be cancelled."""
_BACKLOG = 2048
_SPARE_FILES = 256
"""File descriptors that are reserved for everything but connections."""


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: the owner of the process decides what Ctrl-C does."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[override]
        yield


class HttpServer:
    """An application that listens, within limits.

    Args:
        app: the application.
        error: the type of error that is raised when it cannot listen.
        host: address to bind.
        port: 0 for any free one.
        limits: bounds on requests.
        minted_key: the server's key if it was made for it: this user's programs find it while the server listens.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        error: type[AglError],
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
        minted_key: str | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.error = error
        self.limits = limits or Limits.of_environment()
        self.app = Bounded(BrowserCheck(app, loopback=is_loopback(host)), self.limits)
        self.url = ""
        self._minted_key = minted_key
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind, serve, and return the base URL.

        Raises:
            AglError: of type `error`: the port is in use, or the address cannot be bound.
        """
        sock = self._bind()
        self.port = sock.getsockname()[1]
        if self._minted_key is not None:
            local_key.publish(self.host, self.port, self._minted_key)
        files = _allow_files(self.limits.connections + _SPARE_FILES)
        # Else accept() fails once there are none left, and everything that opens a file with it.
        most = min(self.limits.connections, max(files // 2, files - _SPARE_FILES))
        connections = Connections(replace(self.limits, connections=most))
        config = uvicorn.Config(
            self.app,
            log_config=None,
            # Its warnings are one line for each malformed request, as many as anybody cares to send.
            log_level="error",
            # asyncio accepts so many at a time, several times over before the first of them is counted.
            backlog=max(1, min(_SPARE_FILES, files - most) // 8),
            access_log=False,
            lifespan="off",
            http=connections.protocol(),  # type: ignore[arg-type]
            timeout_keep_alive=int(self.limits.idle_seconds),
            ws="none",
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        self._server = _Uvicorn(config)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[sock]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise self.error("the server ended before it listened")
            await asyncio.sleep(0.005)
        sock.listen(_BACKLOG)
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"http://{host}:{self.port}"
        return self.url

    async def stop(self, cancel: Callable[[], None] | None = None, *, seconds: float = STOP_SECONDS) -> None:
        """Stop listening. Open requests have `seconds` to end, and two more after `cancel` is called. Idempotent."""
        if self._server is None or self._task is None:
            return
        server = self._server
        task = self._task
        self._server = None
        self._task = None
        self.url = ""
        if self._minted_key is not None:
            local_key.withdraw(self.host, self.port, self._minted_key)
        server.should_exit = True
        if not await _wait(task, seconds):
            if cancel is not None:
                cancel()
            if not await _wait(task, STOP_SECONDS):
                server.force_exit = True
        await task

    def _bind(self) -> socket.socket:
        # asyncio disables Nagle's algorithm only on sockets with an explicit protocol; with it, answers wait 40 ms.
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The kernel detects peers that have vanished, or that read nothing.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 60),
            ("TCP_KEEPINTVL", 15),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", int(2000 * self.limits.write_seconds)),
        ):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        try:
            sock.bind((self.host, self.port))
        except OSError as error:
            sock.close()
            raise self.error(
                f"cannot listen on {self.host}:{self.port}: {error.strerror or error}",
                hint="another program has the port; choose another one, or 0 for any free one",
            ) from error
        sock.listen(_BACKLOG)
        return sock


def _allow_files(count: int) -> int:
    """Raise this process's limit of open files, as far as the system permits; returns how many it may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return count if allowed == resource.RLIM_INFINITY else allowed


async def _wait(task: asyncio.Task[None], seconds: float) -> bool:
    done, _ = await asyncio.wait((task,), timeout=seconds)
    return bool(done)

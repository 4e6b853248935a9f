"""Runs the gateway's HTTP server on the caller's event loop; loopback unless told otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

import uvicorn
from starlette.routing import Route

from agl.errors import GatewayError
from agl.trainer.gateway.app import build_app
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway

STOP_SECONDS = 2.0
"""How long open requests get to end by themselves, and again to be cancelled."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: who owns the process decides what Ctrl-C does."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[override]
        yield


class GatewayServer:
    """A listening gateway.

    Args:
        gateway: what to serve. beside: other routes to serve.
        host: address to bind. port: 0 takes a free one.
    """

    def __init__(
        self, gateway: Gateway, *, host: str = "127.0.0.1", port: int = 0, beside: Sequence[Route] = ()
    ) -> None:
        self.gateway, self.host, self.port, self.beside = gateway, host, port, beside
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind, serve, and return the base URL.

        Raises:
            GatewayError: the port is taken or the address cannot be bound.
        """
        # asyncio switches Nagle's algorithm off only on sockets that name their protocol; with it, answers wait 40 ms.
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((self.host, self.port))
        except OSError as error:
            sock.close()
            raise GatewayError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror or error}",
                hint="another program has the port; choose another one, or 0 for any free one",
            ) from error
        sock.listen(2048)
        self.port = sock.getsockname()[1]
        app = build_app(self.gateway, self.beside)
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, lifespan="off",
            timeout_keep_alive=75, ws="none", server_header=False, date_header=False,
        )  # fmt: skip
        self._server = _Server(config)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[sock]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise GatewayError("the gateway's server ended before it listened")
            await asyncio.sleep(0.005)
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.gateway.base_url = f"http://{host}:{self.port}"
        return self.gateway.base_url

    async def stop(self) -> None:
        """Stop listening; open requests get two seconds and are then cancelled. Idempotent."""
        if self._server is None or self._task is None:
            return
        server, task, self._server, self._task = self._server, self._task, None, None
        self.gateway.base_url = ""
        server.should_exit = True
        if not await _ended(task, STOP_SECONDS):
            self.gateway.cancel_requests(RequestError(503, "the gateway is stopping", code="gateway_stopping"))
            if not await _ended(task, STOP_SECONDS):
                server.force_exit = True
        await task


async def _ended(task: asyncio.Task[None], seconds: float) -> bool:
    done, _ = await asyncio.wait((task,), timeout=seconds)
    return bool(done)

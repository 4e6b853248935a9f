"""Runs the gateway's HTTP server on the caller's event loop; loopback by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.routing import Route
from starlette.types import ASGIApp

from agl.errors import GatewayError
from agl.trainer.gateway.app import build_app
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.http.limits import Limits
from agl.trainer.http.server import STOP_SECONDS, HttpServer


class GatewayServer:
    """A listening gateway.

    Args:
        gateway: what to serve.
        extra_routes: other routes at the same address.
        host: address to bind.
        port: 0 takes a free one.
        limits: what clients may do.
        minted_key: as of `HttpServer`.
        middleware: wraps the application.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        extra_routes: Sequence[Route] = (),
        limits: Limits | None = None,
        minted_key: str | None = None,
        middleware: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        self.gateway = gateway
        limits = limits or Limits.of_environment()
        app = middleware(build_app(gateway, extra_routes, limits))
        self._server = HttpServer(app, error=GatewayError, host=host, port=port, limits=limits, minted_key=minted_key)

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        return self._server.port

    async def start(self) -> str:
        """Bind, serve, and return the base URL.

        Raises:
            GatewayError: the port is taken or the address cannot be bound.
        """
        self.gateway.base_url = await self._server.start()
        return self.gateway.base_url

    async def stop(self, *, seconds: float = STOP_SECONDS) -> None:
        """Stop listening; open requests get so many seconds and are then cancelled. Idempotent."""
        self.gateway.base_url = ""
        stopping = RequestError(503, "the gateway is stopping", code="gateway_stopping")
        await self._server.stop(lambda: self.gateway.cancel_requests(stopping), seconds=seconds)

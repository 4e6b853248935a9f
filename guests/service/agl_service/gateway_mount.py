"""The one address of a server: its own routes, and in front of them the gateway and coordinator of the current run."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agl.errors import StoreError
from agl.trainer.gateway.app import build_app
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.http.auth import Keys, Role
from agl.trainer.http.errors import error_json
from agl.trainer.http.limits import Limits, Refused
from agl.trainer.http.responses import answer

_ATTEMPTS = "/rollouts/"
_RUNNERS = "/runner/"


class GatewayMount:
    """An ASGI application that passes requests on to others.

    Args:
        idle: serves attempts and runners while no gateway is mounted.
        keys: runners need a runner's or the operator's key; attempts have separate keys.
        limits: what clients may do.

    Attributes:
        app: serves everything else.
        url: the address that it listens on.
        mounted: serves attempts and runners; None = `idle` does.
    """

    app: ASGIApp

    def __init__(self, idle: ASGIApp, keys: Keys, limits: Limits) -> None:
        self.app = idle
        self.idle = idle
        self.keys = keys
        self.limits = limits
        self.url = ""
        self.mounted: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith((_ATTEMPTS, _RUNNERS)):
            app = self.mounted or self.idle
            if path.startswith(_RUNNERS):
                try:
                    self.check(Request(scope), "operator", "runner")
                except Refused as refused:
                    app = answer(error_json(StoreError(refused.message)), refused.status)
            await app(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def check(self, request: Request, *roles: Role) -> None:
        """Admit requests with a key of one of these roles.

        Raises:
            Refused: 401, there is no valid key; 403, the key has another role.
        """
        role = self.keys.role(request.headers)
        if role is None:
            raise Refused(401, "this server takes requests with one of its keys only", "invalid_api_key")
        if role not in roles:
            raise Refused(403, f"a {role}'s key is not good for this", "forbidden")

    def point(self, gateway: Gateway, runner_routes: Sequence[Route]) -> MountPoint:
        """A mount point for a gateway, which replaces the mounted one when it starts."""
        return MountPoint(self, gateway, runner_routes)


class MountPoint:
    """Makes a gateway reachable at a server's address; what `agl.trainer.run.Serve` returns."""

    def __init__(self, mount: GatewayMount, gateway: Gateway, runner_routes: Sequence[Route]) -> None:
        self._mount = mount
        self._gateway = gateway
        self._app = build_app(gateway, runner_routes, mount.limits)

    async def start(self) -> str:
        """Admit requests; returns the base URL."""
        self._gateway.base_url = self._mount.url
        self._mount.mounted = self._app
        return self._mount.url

    async def stop(self) -> None:
        """Admit no more requests, and cancel those that run. Idempotent."""
        if self._mount.mounted is self._app:
            self._mount.mounted = None
        self._gateway.base_url = ""
        self._gateway.cancel_requests(RequestError(503, "the run has ended", code="gateway_stopping"))

"""The one address of a server: its own routes, and whichever gateway and desk are there at the time behind them."""

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
from agl.trainer.http.limits import Limits, Refused
from agl.trainer.http.responses import answer
from agl.trainer.store.http.protocol import error_json

_ATTEMPTS, _RUNNERS = "/rollouts/", "/runner/"


class GatewayMount:
    """An ASGI application over others.

    Args:
        idle: serves attempts and runners while there is no gateway; its place is taken and left.
        keys: runners show a runner's or the operator's; attempts have keys of their own.
        limits: what clients may do.

    Attributes:
        own: serves everything else. url: where it listens.
    """

    def __init__(self, idle: ASGIApp, keys: Keys, limits: Limits) -> None:
        self.own, self.idle, self.keys, self.limits = idle, idle, keys, limits
        self.url = ""
        self._present: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith((_ATTEMPTS, _RUNNERS)):
            app = self._present or self.idle
            if path.startswith(_RUNNERS):
                app = self._guarded(scope, app)
            await app(scope, receive, send)
        else:
            await self.own(scope, receive, send)

    def check(self, request: Request, *roles: Role) -> None:
        """Let in who has one of these roles.

        Raises:
            Refused: 401, a stranger; 403, another role.
        """
        role = self.keys.role(request.headers)
        if role is None:
            raise Refused(401, "this server takes requests with one of its keys only", "invalid_api_key")
        if role not in roles:
            raise Refused(403, f"a {role}'s key is not good for this", "forbidden")

    def _guarded(self, scope: Scope, app: ASGIApp) -> ASGIApp:
        try:
            self.check(Request(scope), "operator", "runner")
        except Refused as refused:
            return answer(error_json(StoreError(refused.message)), refused.status)
        return app

    def place(self, gateway: Gateway, beside: Sequence[Route]) -> MountPoint:
        """A place for a gateway, which takes that of the one before it when it starts."""
        return MountPoint(self, gateway, beside)

    def take(self, app: ASGIApp) -> None:
        """Serve attempts and runners by this application."""
        self._present = app

    def leave(self, app: ASGIApp) -> None:
        """Do so no more."""
        if self._present is app:
            self._present = None


class MountPoint:
    """Where a gateway is reached behind a front; what `agl.trainer.run.Serve` makes."""

    def __init__(self, mount: GatewayMount, gateway: Gateway, beside: Sequence[Route]) -> None:
        self._front, self._gateway = mount, gateway
        self._app = build_app(gateway, beside, mount.limits)

    async def start(self) -> str:
        """Let requests in; returns the base URL."""
        self._gateway.base_url = self._front.url
        self._front.take(self._app)
        return self._front.url

    async def stop(self) -> None:
        """Let no more in, and end those that run. Idempotent."""
        self._front.leave(self._app)
        self._gateway.base_url = ""
        self._gateway.cancel_requests(RequestError(503, "the run has ended", code="gateway_stopping"))

"""The one address of a server: its own routes, and whichever gateway and desk are there at the time behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agl.trainer.gateway.app import build_app
from agl.trainer.gateway.chat import error_body
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.http import answer
from agl.trainer.server.keys import Keys
from agl.trainer.server.limits import Limits

_ATTEMPTS, _RUNNERS = "/rollouts/", "/runner/"


class Front:
    """An ASGI application over others.

    Args:
        own: serves everything but attempts and runners. idle: serves runners while there is no gateway.
        keys: runners show a runner's or the operator's; attempts have keys of their own.
        limits: what clients may do.
    """

    def __init__(self, own: ASGIApp, idle: ASGIApp, keys: Keys, limits: Limits) -> None:
        self.own, self.idle, self.keys, self.limits = own, idle, keys, limits
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

    def _guarded(self, scope: Scope, app: ASGIApp) -> ASGIApp:
        try:
            allow(self.keys, "operator", "runner")(Request(scope))
        except RequestError as refused:
            return answer(error_body(refused), refused.status)
        return app

    def place(self, gateway: Gateway, beside: Sequence[Route]) -> Place:
        """A place for a gateway, which takes that of the one before it when it starts."""
        return Place(self, gateway, beside)

    def take(self, app: ASGIApp) -> None:
        """Serve attempts and runners by this application."""
        self._present = app

    def leave(self, app: ASGIApp) -> None:
        """Do so no more."""
        if self._present is app:
            self._present = None


class Place:
    """Where a gateway is reached behind a front; what `agl.trainer.run.Serve` makes."""

    def __init__(self, front: Front, gateway: Gateway, beside: Sequence[Route]) -> None:
        self._front, self._gateway = front, gateway
        self._app = build_app(gateway, beside, front.limits)

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


def allow(keys: Keys, *roles: str) -> Callable[[Request], None]:
    """A check of a request: it must come from one of these roles."""

    def check(request: Request) -> None:
        role = keys.role(request.headers)
        if role is None:
            raise RequestError(
                401, "this server asks for a key: Authorization: Bearer KEY", code="invalid_api_key"
            )
        if role not in roles:
            raise RequestError(403, f"a {role}'s key may not do this", code="forbidden")

    return check

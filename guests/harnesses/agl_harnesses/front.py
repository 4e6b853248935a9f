"""The one address that a coding agent calls: each call goes on to the attempt's address of the agent that made it."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping

import orjson
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from agl.trainer.gateway.errors import RequestError
from agl.trainer.http.limits import Refused
from agl_harnesses.harness import Harness, Providers


class Front:
    """An ASGI application behind `/harness/{secret}/{api}/{rest}`.

    Attributes:
        prefixes: API -> the path that precedes a call's own.
        addresses: (agent's name) -> API -> the attempt's address for its calls. agent: the main agent's name.
        calls: how many requests with a body came.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness, self.agent, self.calls = harness, harness.name, 0
        self.prefixes: Mapping[str, str] = {}

    def addresses(self, agent: str) -> Providers:
        raise RequestError(404, "the command has not been started", code="not_found")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            RequestError: 404, the path is not below its API's prefix; or its body is too large.
        """
        request = Request(scope, receive)
        if request.headers.get("upgrade", "").lower() == "websocket":
            # Codex then sends the same over HTTP; after any other answer it tries for seconds.
            raise RequestError(426, "calls are taken over HTTP", code="upgrade_required")
        try:
            content = await request.body()
        except Refused as refused:
            raise RequestError(refused.status, refused.message, code=refused.code) from None
        api, raw = request.path_params["api"], scope["raw_path"].decode("ascii")
        prefix = self.prefixes.get(api)
        if prefix is None or not raw.startswith(prefix):
            raise RequestError(404, f"{request.method} {request.url.path} is not served", code="not_found")
        self.calls += bool(content)
        path = urllib.parse.urlsplit(self.addresses(self._name(request, content))[api]).path + raw[len(prefix) :]
        # What this route has found is not to be found again.
        scope = {name: value for name, value in scope.items() if name not in ("path_params", "endpoint", "router")}
        scope |= {"path": urllib.parse.unquote(path), "raw_path": path.encode()}
        sent = False

        async def again() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        await request.app(scope, again, send)

    def _name(self, request: Request, content: bytes) -> str:
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            return self.agent
        sub_agent = self.harness.sub_agent(request.headers, body) if isinstance(body, dict) else None
        return self.agent if sub_agent is None else f"{self.agent}-{sub_agent}"

"""The one address that a coding agent calls: each call goes on to the attempt's address of the agent that made it."""

from __future__ import annotations

import socket
import time
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from agl.trainer.gateway.errors import RequestError
from agl.trainer.http.bodies import body_in_turn, media_type
from agl.trainer.http.errors import error_handlers
from agl.trainer.http.limits import Limits, Refused, check_json
from agl.trainer.http.server import HttpServer
from agl.trainer.http.turns import Turns
from agl.trainer.http.unix_sockets import listening_at
from agl.trainer.runners.model_requests import (
    STORED,
    NotPermitted,
    check_request,
    permitted_headers,
    permitted_query,
)
from agl.trainer.runners.provider_calls import RefusedCalls, is_permitted, leads_out, provider_error
from agl.trainer.runners.recording_proxy import KEY_HEADERS, SILENT_SECONDS, forwarded_headers
from agl.trainer.wire.methods import dumps, loads
from agl_harnesses.harness import Harness, Providers


class Front:
    """An ASGI application behind `/harness/{secret}/{api}/{rest}`.

    Attributes:
        prefixes: API -> the path that precedes a call's own.
        addresses: (agent's name) -> API -> the attempt's address for its calls.
        agent: the main agent's name.
        calls: how many requests with a body came.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.agent = harness.name
        self.calls = 0
        self.prefixes: Mapping[str, str] = {}
        self.addresses: Callable[[str], Providers] = _not_started
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            RequestError: 404, the path is not below its API's prefix, or not one that is forwarded; 413 or 400, the
                body is too large or too deep.
        """
        request = Request(scope, receive)
        if request.headers.get("upgrade", "").lower() == "websocket":
            # Codex then sends the same over HTTP; after any other answer it tries for seconds.
            raise RequestError(426, "calls are taken over HTTP", code="upgrade_required")
        api = request.path_params["api"]
        raw = scope["raw_path"].decode("ascii")
        prefix = self.prefixes.get(api)
        if prefix is None or not raw.startswith(prefix):
            raise RequestError(404, f"{request.method} {request.url.path} is not served", code="not_found")
        path = raw[len(prefix) :]
        self.check(request, api, path)
        try:
            async with body_in_turn(request, self._turns) as body:
                content, name = await body.read(self.read, request, api, path, body.limits)
        except Refused as refused:
            raise RequestError(refused.status, refused.message, code=refused.code) from None
        self.calls += bool(content)
        await self.forward(request, name, self.addresses(name)[api] + path, content, send)

    def check(self, request: Request, api: str, path: str) -> None:
        """Refuse a request that is not to be forwarded, before its body is read.

        Args:
            path: what follows the base URL of its API.

        Raises:
            RequestError: it is one.
        """
        if leads_out(path):
            raise RequestError(404, f"{request.method} {request.url.path} is not served", code="not_found")

    def read(self, content: bytes, request: Request, api: str, path: str, limits: Limits) -> tuple[bytes, str]:
        """(the body to forward, the name of the agent whose request this is).

        Raises:
            Refused: 413, the body has too many values; 400, it is nested too deep.
        """
        return content, self.name_of(request, self.json_of(content, request, limits))

    async def forward(self, request: Request, name: str, url: str, content: bytes, send: Send) -> None:
        """Answer a request of an agent with what a URL answers, which is this server's."""
        path = urllib.parse.urlsplit(url).path
        receive = request.receive
        # What this route has found is not to be found again.
        scope = {
            name: value for name, value in request.scope.items() if name not in ("path_params", "endpoint", "router")
        }
        scope |= {"path": urllib.parse.unquote(path), "raw_path": path.encode()}
        sent = False

        async def again() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        await request.app(scope, again, send)

    def json_of(self, content: bytes, request: Request, limits: Limits) -> Any:
        """The value of a body; None if it is no JSON that can be read.

        Raises:
            Refused: 413, the body has too many values; 400, it is nested too deep.
        """
        if media_type(request) != "application/json" or "content-encoding" in request.headers:
            return None
        check_json(content, limits.json_depth, limits.json_values)
        try:
            return loads(content, limits.json_depth)
        except ValueError:
            return None

    def name_of(self, request: Request, value: Any) -> str:
        """The name of the agent whose request this is, by the value of its body."""
        sub_agent = self.harness.sub_agent(request.headers, value) if isinstance(value, dict) else None
        return self.agent if sub_agent is None else f"{self.agent}-{sub_agent}"


def _not_started(_: str) -> Providers:
    raise RequestError(404, "the command has not been started", code="not_found")


class Onward(Front):
    """The same where the addresses are other servers'. It adds the keys, which the coding agent does not have, and so
    passes on no call but those of models, and in them nothing but what `model_requests` permits.

    Args:
        keys: API -> headers, with their values for the address of that API.
        allow: what is permitted in addition, by
            the names with which it is refused.

    Attributes:
        is_policy: (agent's name) -> whether its addresses are those of a gateway, which has keys of its own, and does
            nothing but answer.
        status: of the last answer to a request with a body; None before it.
        refused: what was not passed on.
    """

    def __init__(
        self, harness: Harness, keys: Mapping[str, Sequence[tuple[str, str]]], allow: Collection[str] = ()
    ) -> None:
        super().__init__(harness)
        self.is_policy: Callable[[str], bool] = lambda _: False
        self.status: int | None = None
        self.refused = RefusedCalls()
        self._allow = frozenset(allow)
        self._keys = {
            api: [(name.encode(), value.encode()) for name, value in headers] for api, headers in keys.items()
        }
        self._client = httpx.AsyncClient(timeout=SILENT_SECONDS, limits=httpx.Limits(max_connections=None))
        self._client.headers.clear()
        self._open, self._since, self._seconds = 0, time.monotonic(), 0.0

    @property
    def own_seconds(self) -> float:
        """For how long no answer was awaited."""
        return self._seconds + (0.0 if self._open else time.monotonic() - self._since)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except NotPermitted as refused:
            self.refused.note(refused.names)
            raise

    def check(self, request: Request, api: str, path: str) -> None:
        if not is_permitted(api, request.method, path):
            raise self.refused.refuse(request.method, path)

    def read(self, content: bytes, request: Request, api: str, path: str, limits: Limits) -> tuple[bytes, str]:
        value = self.json_of(content, request, limits)
        name = self.name_of(request, value)
        if self.is_policy(name):
            return content, name
        if request.method != "POST":
            if path.startswith("/responses/") and STORED not in self._allow:
                raise NotPermitted([STORED])
            return b"", name
        if not isinstance(value, dict):
            raise RequestError(400, "a call of a model is an object of JSON, without a content-encoding")
        check_request(api, path, value, self._allow)
        # What was looked at is what is sent: a key that an object has twice is another's to choose.
        return dumps(value), name

    async def forward(self, request: Request, name: str, url: str, content: bytes, send: Send) -> None:
        self._seconds = self.own_seconds
        self._open = self._open + 1
        try:
            headers = forwarded_headers(request)
            query = request.url.query
            if self.is_policy(name):
                headers = [header for header in headers if header[0].decode("latin-1").lower() not in KEY_HEADERS]
            else:
                api = request.path_params["api"]
                query = permitted_query(api, query, self._allow)
                # Another's key, too, would carry what the agent has seen to the account of somebody else.
                headers, left_out = permitted_headers(headers, self._allow)
                self.refused.note(name for name in left_out if name.removeprefix("header ") not in KEY_HEADERS)
                headers += self._keys.get(api, ())
            url += f"?{query}" if query else ""
            sent = self._client.build_request(request.method, url, headers=headers, content=content)
            answer = await self._client.send(sent, stream=True)
            self.status = answer.status_code if content else self.status
            response = StreamingResponse(answer.aiter_raw(), answer.status_code)
            skipped = (b"transfer-encoding", b"connection", b"keep-alive")
            response.raw_headers = [pair for pair in answer.headers.raw if pair[0].lower() not in skipped]
            await response(request.scope, request.receive, send)
            await answer.aclose()
        except httpx.HTTPError as error:
            self.status = 502
            raise RequestError(502, f"the model cannot be reached: {error}", code="provider_unreachable") from None
        finally:
            self._open, self._since = self._open - 1, time.monotonic()

    async def close(self) -> None:
        """End its connections."""
        await self._client.aclose()


def front_app(front: Front) -> Starlette:
    """The application of one sandbox's address, whose paths are `/{api}/{rest}`."""

    def describe(request: Request, error: Exception) -> tuple[Any, int]:
        return provider_error(request.path_params.get("api", ""), error)

    return Starlette(
        routes=[Route("/{api}/{rest:path}", front, methods=None)],
        exception_handlers=error_handlers(describe, RequestError, HTTPException),
    )


class UnixServer(HttpServer):
    """A server behind a socket in the file system, which every user may open who sees it."""

    path = ""

    def _bind(self) -> socket.socket:
        return listening_at(Path(self.path))

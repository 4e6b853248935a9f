"""The gateway's routes: every URL belongs to an attempt, every dialect's errors are in the dialect's form."""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agl.tracing.http_hooks import GOOGLE as GOOGLE_METHODS
from agl.trainer.gateway import http
from agl.trainer.gateway.dialects.chat import CHAT
from agl.trainer.gateway.dialects.detection import dialect_of
from agl.trainer.gateway.dialects.google import GOOGLE, GOOGLE_ARRAY
from agl.trainer.gateway.dialects.google.body import read as read_google
from agl.trainer.gateway.dialects.messages import MESSAGES
from agl.trainer.gateway.dialects.messages.body import read as read_messages
from agl.trainer.gateway.dialects.responses import RESPONSES
from agl.trainer.gateway.dialects.responses.body import read as read_responses
from agl.trainer.gateway.dialects.responses.items import NO_COMPACTION
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.http.errors import error_handlers
from agl.trainer.http.limits import Limits, Refused

_BASE = http.PREFIX.removesuffix("/v1")
"""What comes before a version in the paths of an attempt's agent: a client's base URL."""


def build_app(gateway: Gateway, extra_routes: Sequence[Route] = (), limits: Limits | None = None) -> ASGIApp:
    """The ASGI application that serves a gateway.

    Args:
        gateway: what to serve.
        extra_routes: other routes at the same address.
        limits: what clients may do.
    """

    async def models(request: Request) -> Response:
        http.attempt_of(gateway, request)
        forms = dialect_of(request).models
        served = [forms.one(name, gateway.served(name).engine.max_context) for name in gateway.models]
        return http.answer(forms.page(served, request.query_params))

    async def model(request: Request) -> Response:
        http.attempt_of(gateway, request)
        name = request.path_params["model"]
        return http.answer(dialect_of(request).models.one(name, gateway.served(name).engine.max_context))

    async def health(_: Request) -> Response:
        return http.answer({"status": "ok", "models": gateway.models})

    routes = [
        # In the order of their use: routes are tried one after another.
        Route(f"{http.PREFIX}/chat/completions", http.generation_endpoint(gateway, CHAT), methods=["POST"]),
        Route(f"{http.PREFIX}/responses", http.generation_endpoint(gateway, RESPONSES), methods=["POST"]),
        Route(f"{http.PREFIX}/responses/compact", _unserved, methods=["POST"]),
        *_responses_routes(gateway),
        *_messages_routes(gateway),
        *_google_routes(gateway),
        *extra_routes,
        Route("/health", health),
        # Of any version: a client's base URL can end in /v1, to which it adds its own.
        Route(f"{_BASE}/{{version}}/models", models),
        Route(f"{_BASE}/{{version}}/models/{{model:path}}", model),
    ]
    app = Starlette(routes=routes, exception_handlers=error_handlers(_describe, RequestError, HTTPException))
    app.router.redirect_slashes = False
    app.add_middleware(http.KeyInPath)
    app.state.limits = limits or Limits.of_environment()
    return WithRequestIds(app)


class WithRequestIds:
    """Gives every request an id (`request.state.request_id`), and its answer the header in which its API's clients look
    for it.

    The id of a request to a policy becomes that of its call in the store.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["request_id"] = f"req_{uuid.uuid4().hex}"
        header = dialect_of(HTTPConnection(scope)).request_id_header.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (header, state["request_id"].encode())]
            await send(message)

        await self.app(scope, receive, send_with_id)


def _responses_routes(gateway: Gateway) -> list[Route]:
    """The routes of the Responses API beside the one that answers: what is stored, and how long a prompt is."""

    async def count_tokens(request: Request) -> Response:
        count = await http.count_tokens(gateway, request, functools.partial(read_responses, counting=True))
        return http.answer({"object": "response.input_tokens", "input_tokens": count})

    endpoints = {
        "input_tokens": (count_tokens, ["POST"]),
        "{response}": (functools.partial(http.stored_response, gateway), ["GET", "DELETE"]),
        "{response}/input_items": (functools.partial(http.input_items, gateway), ["GET"]),
    }
    return [
        Route(f"{http.PREFIX}/responses/{path}", endpoint, methods=methods)
        for path, (endpoint, methods) in endpoints.items()
    ]


def _messages_routes(gateway: Gateway) -> list[Route]:
    """The routes of Anthropic Messages, which also counts tokens."""

    reader = functools.partial(read_messages, counting=True)

    async def count_tokens(request: Request) -> Response:
        return http.answer({"input_tokens": await http.count_tokens(gateway, request, reader)})

    endpoints = {"messages": http.generation_endpoint(gateway, MESSAGES), "messages/count_tokens": count_tokens}
    # A client whose base URL ends in /v1 adds another /v1.
    return [
        Route(f"{prefix}/{path}", endpoint, methods=["POST"])
        for prefix in (f"{http.PREFIX}/v1", http.PREFIX)
        for path, endpoint in endpoints.items()
    ]


def _google_routes(gateway: Gateway) -> list[Route]:
    """The routes of Google's API, whose paths end in the model and the method."""

    async def count_tokens(request: Request) -> Response:
        reader = functools.partial(read_google, counting=True)
        return http.answer({"totalTokens": await http.count_tokens(gateway, request, reader)})

    async def call(request: Request) -> Response:
        dialect = GOOGLE if request.query_params.get("alt") == "sse" else GOOGLE_ARRAY
        stream = request.url.path.endswith(GOOGLE_METHODS[1])
        read = functools.partial(read_google, model=request.path_params["model"], stream=stream)
        return await http.generation_endpoint(gateway, replace(dialect, read=read))(request)

    # A client's base URL can end in /v1, to which it adds the version.
    prefixes = (http.PREFIX, _BASE)
    paths = [f"{prefix}/{{version}}/models/{{model:path}}" for prefix in prefixes]
    endpoints = dict.fromkeys(GOOGLE_METHODS, call) | {":countTokens": count_tokens, ":{method}": _unserved}
    return [Route(path + method, endpoints[method], methods=["POST"]) for path in paths for method in endpoints]


async def _unserved(_: Request) -> Response:
    """The endpoint of what an API has at a path below others that are served."""
    raise HTTPException(404)


def served_routes(routes: Sequence[BaseRoute]) -> str:
    """What is served, in words: each method with its paths as clients know them, a path's parameters in capitals."""
    paths: dict[str, dict[str, None]] = {}
    for route in routes:
        if not isinstance(route, Route) or route.endpoint is _unserved:
            continue
        path = re.sub(r"\{(\w+)(:\w+)?\}", lambda found: found[1].upper(), route.path.removeprefix(_BASE))
        if path.startswith(("/v1/v1/", "/v1/VERSION/")):
            path = path.removeprefix("/v1")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(method, {})[path] = None
    return "; ".join(f"{method} {', '.join(of)}" for method, of in paths.items())


def _instead(request: Request) -> str:
    """What a client can do that asked for what is not served."""
    if "upgrade" in request.headers:
        return "A policy in training answers over HTTP, not over a WebSocket: choose that transport in the client"
    if request.url.path.endswith("/responses/compact"):
        return NO_COMPACTION
    if re.search(r"/responses/[^/]+/cancel$", request.url.path):
        return "Background is not supported, so there is nothing to cancel: close the connection of the request instead"
    if re.search(r"/chat/completions/[^/]", request.url.path):
        return "Completions are not stored: ask for a response, which is stored and has the same answer"
    return f"Served are: {served_routes(request.app.routes)}"


def _describe(request: Request, error: Exception) -> tuple[Any, int]:
    """The body of an error in the form of the API that the request is of, and its status."""
    match error:
        case Refused():
            refused = RequestError(error.status, error.message, code=error.code)
        case HTTPException():
            message = f"{request.method} {http.shown_path(request)} is not served. {_instead(request)}"
            code = "method_not_supported" if error.status_code == 405 else "not_found"
            refused = RequestError(error.status_code, message, code=code)
        case RequestError():
            refused = error
        case _:
            refused = RequestError(500, f"{type(error).__name__}: {error}")
    return dialect_of(request).error_body(refused, request.state.request_id), refused.status

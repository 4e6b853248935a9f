"""The gateway's routes: every URL belongs to an attempt, every dialect's errors are in the dialect's form."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl.tracing.http_hooks import GOOGLE as GOOGLE_METHODS
from agl.trainer.gateway import http
from agl.trainer.gateway.dialects.chat import CHAT
from agl.trainer.gateway.dialects.error_forms import openai_error
from agl.trainer.gateway.dialects.google import GOOGLE, GOOGLE_ARRAY
from agl.trainer.gateway.dialects.google.body import read as read_google
from agl.trainer.gateway.dialects.messages import MESSAGES
from agl.trainer.gateway.dialects.messages.body import read as read_messages
from agl.trainer.gateway.dialects.responses import RESPONSES
from agl.trainer.gateway.dialects.responses.items import NO_COMPACTION
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.http.errors import error_handlers
from agl.trainer.http.limits import Limits, Refused, refusal_body


def build_app(gateway: Gateway, extra_routes: Sequence[Route] = (), limits: Limits | None = None) -> Starlette:
    """The ASGI application that serves a gateway.

    Args:
        gateway: what to serve. extra_routes: other routes at the same address. limits: what clients may do.
    """

    async def models(request: Request) -> Response:
        http.attempt_of(gateway, request)
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "agl"} for name in gateway.models]
        return http.answer({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        http.attempt_of(gateway, request)
        name = request.path_params["model"]
        if name not in gateway.models:
            raise RequestError(404, f"no policy {name!r} is served here", code="model_not_found", param="model")
        return http.answer({"id": name, "object": "model", "created": 0, "owned_by": "agl"})

    async def health(_: Request) -> Response:
        return http.answer({"status": "ok", "models": gateway.models})

    async def not_found(request: Request) -> Response:
        known = (
            "This gateway has POST chat/completions, responses, messages and v1beta/models/MODEL:generateContent, and "
            "GET models"
        )
        why = NO_COMPACTION if request.url.path.endswith("/responses/compact") else known
        path = http.shown_path(request)
        raise RequestError(404, f"{request.method} {path} is not served. {why}", code="not_found")

    routes = [
        # In the order of their use: routes are tried one after another.
        Route(f"{http.PREFIX}/chat/completions", http.generation_endpoint(gateway, CHAT), methods=["POST"]),
        Route(f"{http.PREFIX}/responses", http.generation_endpoint(gateway, RESPONSES), methods=["POST"]),
        *_messages_routes(gateway),
        *_google_routes(gateway),
        *extra_routes,
        Route("/health", health),
        Route(f"{http.PREFIX}/models", models),
        Route(f"{http.PREFIX}/models/{{model:path}}", model),
        Route("/{path:path}", not_found, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
    ]
    app = Starlette(routes=routes, exception_handlers=error_handlers(_describe, RequestError))
    app.add_middleware(http.KeyInPath)
    app.state.limits = limits or Limits.of_environment()
    return app


def _messages_routes(gateway: Gateway) -> list[Route]:
    """The routes of Anthropic Messages, which also counts tokens and has its own form of errors."""

    reader = functools.partial(read_messages, counting=True)

    async def count_tokens(request: Request) -> Response:
        return http.answer({"input_tokens": await http.count_tokens(gateway, request, reader)})

    async def not_found(request: Request) -> Response:
        raise RequestError(404, f"{request.method} {http.shown_path(request)} is not served; this gateway has messages")

    endpoints = {
        "messages": (http.generation_endpoint(gateway, MESSAGES), ["POST"]),
        "messages/count_tokens": (http.with_errors_of(MESSAGES, count_tokens), ["POST"]),
        "messages/{rest:path}": (http.with_errors_of(MESSAGES, not_found), ["GET", "POST", "DELETE"]),
    }
    # A client whose base URL ends in /v1 adds another /v1.
    return [
        Route(f"{prefix}/{path}", endpoint, methods=methods)
        for prefix in (f"{http.PREFIX}/v1", http.PREFIX)
        for path, (endpoint, methods) in endpoints.items()
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
    prefixes = (http.PREFIX, http.PREFIX.removesuffix("/v1"))
    paths = [f"{prefix}/{{version}}/models/{{model:path}}" for prefix in prefixes]
    endpoints = dict.fromkeys(GOOGLE_METHODS, call) | {":countTokens": http.with_errors_of(GOOGLE, count_tokens)}
    return [Route(path + method, endpoints[method], methods=["POST"]) for path in paths for method in endpoints]


def _describe(_: Request, error: Exception) -> tuple[Any, int]:
    if isinstance(error, Refused):
        return refusal_body(error), error.status
    refused = error if isinstance(error, RequestError) else RequestError(500, f"{type(error).__name__}: {error}")
    return openai_error(refused), refused.status

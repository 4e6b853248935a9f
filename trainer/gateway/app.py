"""The gateway's HTTP face: attempt-scoped URLs, one route per dialect, errors in the dialect's own shape."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl.trainer.gateway import http
from agl.trainer.gateway.calls import ChatRequest, Choice, Reply, ServedPolicy
from agl.trainer.gateway.dialects import chat, messages, responses
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.http.errors import error_handlers
from agl.trainer.http.limits import Limits, Refused, refusal_body


def build_app(gateway: Gateway, beside: Sequence[Route] = (), limits: Limits | None = None) -> Starlette:
    """The ASGI application that serves a gateway, and what else is to be served beside it."""

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

    async def chat_completions(request: Request) -> Response:
        wire = http.begin_request(gateway, request, chat.new_id())
        try:
            asked, body = chat.read(await http.body_of(request))
        except Exception as error:
            gateway.refuse(wire, error)
            raise
        if body.stream:
            begin = functools.partial(_ChatEvents, wire.response_id, body, asked)
            return await http.stream(gateway, request, wire, asked, begin)
        replies = await http.unless_gone(request, gateway.complete(wire, asked))
        served = gateway.served(wire.policy)
        return http.answer(chat.response(wire.response_id, served.name, replies, body, served.rendering))

    async def health(_: Request) -> Response:
        return http.answer({"status": "ok", "models": gateway.models})

    async def not_here(request: Request) -> Response:
        raise RequestError(
            404,
            f"{request.method} {request.url.path} is not served; this gateway has POST chat/completions, responses "
            "and messages, and GET models",
            code="not_found",
        )

    routes = [
        *beside,
        Route("/health", health),
        Route(f"{http.PREFIX}/models", models),
        Route(f"{http.PREFIX}/models/{{model:path}}", model),
        Route(f"{http.PREFIX}/chat/completions", chat_completions, methods=["POST"]),
        *responses.responses_routes(gateway),
        *messages.messages_routes(gateway),
        Route("/{path:path}", not_here, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
    ]
    app = Starlette(routes=routes, exception_handlers=error_handlers(_describe, RequestError))
    app.state.limits = limits or Limits()
    return app


class _ChatEvents:
    """A chat stream as it is sent."""

    def __init__(self, response_id: str, body: chat.ChatBody, asked: ChatRequest, served: ServedPolicy) -> None:
        self._streamer = chat.Streamer(response_id, served.name, body, asked, served.rendering)

    def push(self, choice: Choice) -> Iterator[bytes]:
        return map(http.sse, self._streamer.push(choice))

    def finish(self, replies: Sequence[Reply]) -> Iterator[bytes]:
        yield from map(http.sse, self._streamer.finish(replies))
        yield b"data: [DONE]\n\n"

    def fail(self, error: RequestError) -> Iterator[bytes]:
        yield http.sse(chat.error_body(error))


def _describe(_: Request, error: Exception) -> tuple[Any, int]:
    if isinstance(error, Refused):
        return refusal_body(error), error.status
    refused = error if isinstance(error, RequestError) else RequestError(500, f"{type(error).__name__}: {error}")
    return chat.error_body(refused), refused.status

"""Anthropic Messages, as a dialect over the token-level call: its routes."""

from __future__ import annotations

import asyncio
import functools
import json
import uuid
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl.trainer.gateway.dialects.messages_answer import MessageEvents, error_body, response
from agl.trainer.gateway.dialects.messages_body import read
from agl.trainer.gateway.errors import RequestError, refusal
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.http import PREFIX, answer, attempt_of, begin_request, body_of, stream, unless_gone

Handler = Callable[[Request], Awaitable[Response]]


def messages_routes(gateway: Gateway) -> list[Route]:
    """The routes of Anthropic's Messages API below an attempt's URL; errors are in Anthropic's shape."""

    async def create(request: Request) -> Response:
        wire = begin_request(gateway, request, f"msg_{uuid.uuid4().hex}")
        try:
            asked, body = read(await body_of(request))
        except Exception as error:
            gateway.refuse(wire, error)
            raise
        if body.stream:
            return await stream(
                gateway, request, wire, asked, lambda served: MessageEvents(wire.response_id, served, asked, body)
            )
        (reply,) = await unless_gone(request, gateway.complete(wire, asked))
        message = response(wire.response_id, gateway.served(wire.policy), asked, body, reply)
        # Not orjson: a model writes integers of any length.
        return Response(json.dumps(message), media_type="application/json")

    async def count_tokens(request: Request) -> Response:
        access = attempt_of(gateway, request)
        asked, _ = read(await body_of(request), counting=True)
        served = gateway.served(access.selection.policy_for(request.path_params["agent"]))
        try:
            prompt = await asyncio.to_thread(
                served.rendering.prompt, asked.messages, asked.tools, force_tool=asked.force_tool
            )
        except Exception as error:
            raise refusal(error) from error
        return answer({"input_tokens": int(prompt.ids.size)})

    async def not_here(request: Request) -> Response:
        raise RequestError(404, f"{request.method} {request.url.path} is not served; this gateway has messages")

    # A client that is given a base URL ending in /v1 adds another: Anthropic's own do without.
    return [
        route
        for prefix in (f"{PREFIX}/v1", PREFIX)
        for route in (
            Route(f"{prefix}/messages", _told(create), methods=["POST"]),
            Route(f"{prefix}/messages/count_tokens", _told(count_tokens), methods=["POST"]),
            Route(f"{prefix}/messages/{{rest:path}}", _told(not_here), methods=["GET", "POST", "DELETE"]),
        )
    ]


def _told(handler: Handler) -> Handler:
    """`handler`, with its errors in Anthropic's shape."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            return answer(error_body(error), error.status)

    return handle

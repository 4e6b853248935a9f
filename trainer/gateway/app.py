"""The gateway's HTTP face: attempt-scoped URLs, one route per dialect, errors in the dialect's own shape."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agl.trainer.gateway import chat
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import ChatRequest, Gateway, Reply

MAX_BODY_BYTES = 64 * 1024 * 1024
PREFIX = "/rollouts/{rollout}/attempts/{attempt:int}/agents/{agent}/v1"
_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-[0-9a-f]{32}-([0-9a-f]{16})-[0-9a-f]{2}$")


def build_app(gateway: Gateway) -> Starlette:
    """The ASGI application that serves a gateway."""

    async def models(request: Request) -> Response:
        _attempt(gateway, request)
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "agl"} for name in gateway.models]
        return _json({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        _attempt(gateway, request)
        name = request.path_params["model"]
        if name not in gateway.models:
            raise RequestError(404, f"no policy {name!r} is served here", code="model_not_found", param="model")
        return _json({"id": name, "object": "model", "created": 0, "owned_by": "agl"})

    async def chat_completions(request: Request) -> Response:
        access = _attempt(gateway, request)
        asked, body = chat.read(await _body(request))
        asked = replace(asked, span_id=_span_id(request))
        agent = request.path_params["agent"]
        if body.stream:
            return await _stream(gateway, access, agent, asked, body)
        response_id = chat.new_id()
        replies = await _unless_gone(request, gateway.complete(access, agent, asked, response_id=response_id))
        served = gateway.served(access.selection.policy_for(agent))
        return _json(chat.response(response_id, served.name, replies, body, served.rendering))

    async def health(_: Request) -> Response:
        return _json({"status": "ok", "models": gateway.models})

    async def not_here(request: Request) -> Response:
        raise RequestError(
            404,
            f"{request.method} {request.url.path} is not served; this gateway has chat/completions and models",
            code="not_found",
        )

    routes = [
        Route("/health", health),
        Route(f"{PREFIX}/models", models),
        Route(f"{PREFIX}/models/{{model:path}}", model),
        Route(f"{PREFIX}/chat/completions", chat_completions, methods=["POST"]),
        Route("/{path:path}", not_here, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
    ]
    return Starlette(routes=routes, exception_handlers={RequestError: _refused, Exception: _failed})  # type: ignore[dict-item]


def _attempt(gateway: Gateway, request: Request) -> Access:
    return gateway.find_attempt(request.path_params["rollout"], request.path_params["attempt"], request.headers)


async def _body(request: Request) -> Any:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise RequestError(413, f"the body has {length} bytes; the limit is {MAX_BODY_BYTES}")
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > MAX_BODY_BYTES:
            raise RequestError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        return orjson.loads(received)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None


def _span_id(request: Request) -> str | None:
    match = _TRACEPARENT.match(request.headers.get("traceparent", ""))
    return match.group(1) if match else None


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Await `work`, but cancel it when the client hangs up."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        return await task
    except asyncio.CancelledError:
        raise RequestError(499, "the request was cancelled", code="cancelled") from None
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()


async def _stream(
    gateway: Gateway, access: Access, agent: str, asked: ChatRequest, body: chat.ChatBody
) -> StreamingResponse:
    served = gateway.served(access.selection.policy_for(agent))
    queue: asyncio.Queue[tuple[int, list[int]] | None] = asyncio.Queue()
    response_id = chat.new_id()

    def on_tokens(choice: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        queue.put_nowait((choice, list(ids)))

    work: asyncio.Task[list[Reply]] = asyncio.ensure_future(
        gateway.complete(access, agent, asked, on_tokens, response_id=response_id)
    )
    work.add_done_callback(lambda _: queue.put_nowait(None))
    # The first tokens decide between a stream and an error with a status of its own.
    first = await queue.get()
    if first is None and work.done():
        try:
            await work
        except asyncio.CancelledError:
            raise RequestError(499, "the request was cancelled", code="cancelled") from None

    async def events() -> AsyncIterator[bytes]:
        streamer = chat.Streamer(response_id, served.name, body, asked, served.rendering)
        try:
            item = first
            while item is not None:
                for chunk in streamer.push(*item):
                    yield _event(chunk)
                item = await queue.get()
            for chunk in streamer.finish(await work):
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            yield _event(chat.error_body(error))
        except asyncio.CancelledError:
            yield _event(chat.error_body(RequestError(499, "the request was cancelled", code="cancelled")))
            raise
        finally:
            work.cancel()

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _json(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(chat.error_body(error), error.status)


async def _failed(_: Request, error: Exception) -> Response:
    return _json(chat.error_body(RequestError(500, f"{type(error).__name__}: {error}")), 500)

"""The gateway's HTTP face: attempt-scoped URLs, one route per dialect, errors in the dialect's own shape."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agl.trainer.gateway import chat
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.calls import ChatRequest, Choice, Reply, WireCall
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway

MAX_BODY_BYTES = 64 * 1024 * 1024
PREFIX = "/rollouts/{rollout}/attempts/{attempt:int}/agents/{agent:path}/v1"
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
        wire = gateway.arrive(access, request.path_params["agent"], chat.new_id(), _span_id(request))
        try:
            asked, body = chat.read(await _body(request))
        except Exception as error:
            gateway.refuse(wire, error)
            raise
        if body.stream:
            return await _stream(gateway, request, wire, asked, body)
        replies = await _unless_gone(request, gateway.complete(wire, asked))
        served = gateway.served(wire.policy)
        return _json(chat.response(wire.response_id, served.name, replies, body, served.rendering))

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
    handlers = {RequestError: _refused, ClientDisconnect: _hung_up, Exception: _failed}
    return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]


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
        data = orjson.loads(received)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    try:
        # What is nested too deep to be written again, within the record of the call, cannot be recorded.
        orjson.dumps([[[[data]]]])
    except orjson.JSONEncodeError as error:
        raise RequestError(400, f"the body is nested too deep: {error}") from None
    return data


def _span_id(request: Request) -> str | None:
    # Instrumentation of an HTTP client can put a span of its own into `traceparent`.
    headers = request.headers
    match = _TRACEPARENT.match(headers.get("x-agl-traceparent") or headers.get("traceparent", ""))
    return match.group(1) if match else None


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Await `work`, but cancel it when the client hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait((task,))
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Events(StreamingResponse):
    """Server-sent events that cancel what makes them when they are no longer read."""

    def __init__(self, events: AsyncIterator[bytes], work: asyncio.Task[Any]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.cancel()


async def _stream(
    gateway: Gateway, request: Request, wire: WireCall, asked: ChatRequest, body: chat.ChatBody
) -> Response:
    queue: asyncio.Queue[Choice | None] = asyncio.Queue()

    def on_tokens(choice: Choice, _: Sequence[int]) -> None:
        queue.put_nowait(choice)

    work: asyncio.Task[list[Reply]] = asyncio.ensure_future(gateway.complete(wire, asked, on_tokens))
    work.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        # The first tokens decide between a stream and an error with a status of its own.
        first = await _unless_gone(request, queue.get())
        if first is None:
            await work
    except BaseException:
        work.cancel()
        raise
    served = gateway.served(wire.policy)
    streamer = chat.Streamer(wire.response_id, served.name, body, asked, served.rendering)

    async def events() -> AsyncIterator[bytes]:
        item = first
        try:
            while item is not None:
                for chunk in streamer.push(item):
                    yield _event(chunk)
                item = await queue.get()
            for chunk in streamer.finish(await work):
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            yield _event(chat.error_body(error))

    return _Events(events(), work)


def _event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _json(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(chat.error_body(error), error.status)


async def _hung_up(_: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(_: Request, error: Exception) -> Response:
    return _json(chat.error_body(RequestError(500, f"{type(error).__name__}: {error}")), 500)

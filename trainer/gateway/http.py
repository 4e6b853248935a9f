"""What the gateway's routes need of HTTP: the attempt of a request, its body, and the endpoint of any dialect."""

from __future__ import annotations

import asyncio
import functools
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agl.trainer.gateway.access import Access, PendingRequest
from agl.trainer.gateway.calls import Choice, Reply
from agl.trainer.gateway.dialects.base import Dialect, DialectRequest
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.http.limits import Limits, Refused, parse_json
from agl.trainer.http.responses import answer as answer
from agl.trainer.http.responses import unless_gone

PREFIX = "/rollouts/{rollout}/attempts/{attempt:int}/agents/{agent:path}/v1"
"""Precedes the path of each route: it identifies the attempt and the agent."""

_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-[0-9a-f]{32}-([0-9a-f]{16})-[0-9a-f]{2}$")

Endpoint = Callable[[Request], Awaitable[Response]]


def generation_endpoint(gateway: Gateway, dialect: Dialect[Any]) -> Endpoint:
    """The endpoint that answers a dialect's requests, whole or as a stream."""

    async def generate(request: Request) -> Response:
        pending = _begin_request(gateway, request, dialect.id_prefix + uuid.uuid4().hex)
        try:
            dialect_request = dialect.read(await body_of(request), pending.access)
        except Exception as error:
            gateway.refuse(pending, error)
            raise
        if dialect_request.stream:
            return await _stream(gateway, request, dialect, pending, dialect_request)
        replies = await unless_gone(request, gateway.complete(pending, dialect_request.chat))
        body = dialect.answer(pending, gateway.served(pending.policy), dialect_request, replies)
        return Response(body, media_type="application/json")

    return with_errors_of(dialect, generate)


def with_errors_of(dialect: Dialect[Any], endpoint: Endpoint) -> Endpoint:
    """`endpoint`, with its errors in the dialect's form."""

    @functools.wraps(endpoint)
    async def handle(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as error:
            return answer(dialect.error_body(error), error.status)

    return handle


def attempt_of(gateway: Gateway, request: Request) -> Access:
    """The attempt that a request belongs to.

    Raises:
        RequestError: 401, the key is not that of an open attempt.
    """
    return gateway.find_attempt(request.path_params["rollout"], request.path_params["attempt"], request.headers)


async def body_of(request: Request) -> Any:
    """A request's body, parsed as JSON.

    Raises:
        RequestError: the body is too long, too deep, or not JSON.
        ClientDisconnect: the client hung up.
    """
    try:
        data = await request.body()
    except Refused as refused:
        raise RequestError(refused.status, refused.message, code=refused.code) from None
    try:
        return parse_json(data, _limits(request).json_depth)
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON that can be read: {error}") from None


def _begin_request(gateway: Gateway, request: Request, response_id: str) -> PendingRequest:
    """Register the arrival of a request; `Gateway.complete` or `refuse` must follow.

    Raises:
        RequestError: 401, the key is not that of an open attempt; 429, the attempt has too many requests running.
    """
    access = attempt_of(gateway, request)
    most = _limits(request).requests_per_attempt
    if len(access.pending) >= most:
        raise RequestError(429, f"the attempt has {most} requests running; try again", code="too_many_requests")
    # Instrumentation of an HTTP client can put its own span into `traceparent`.
    headers = request.headers
    span = _TRACEPARENT.match(headers.get("x-agl-traceparent") or headers.get("traceparent", ""))
    return gateway.begin_request(access, request.path_params["agent"], response_id, span.group(1) if span else None)


async def _stream(
    gateway: Gateway,
    request: Request,
    dialect: Dialect[Any],
    pending: PendingRequest,
    dialect_request: DialectRequest[Any],
) -> Response:
    """Answer while the tokens are sampled.

    Raises:
        RequestError: the request cannot be served, and nothing was sampled yet; later errors are sent in the stream.
        ClientDisconnect: the client hung up before the first token.
    """
    queue: asyncio.Queue[Choice | None] = asyncio.Queue()

    def on_tokens(choice: Choice, _: Sequence[int]) -> None:
        queue.put_nowait(choice)

    work: asyncio.Task[list[Reply]] = asyncio.ensure_future(gateway.complete(pending, dialect_request.chat, on_tokens))
    work.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        # The first tokens decide between a stream and an error with a status code.
        first = await unless_gone(request, queue.get())
        if first is None:
            await work
    except BaseException:
        work.cancel()
        raise
    stream = dialect.stream(pending, gateway.served(pending.policy), dialect_request)

    async def events() -> AsyncIterator[bytes]:
        choice = first
        try:
            while choice is not None:
                for event in stream.push(choice):
                    yield event
                choice = await queue.get()
            for event in stream.finish(await work):
                yield event
        except RequestError as error:
            for event in stream.fail(error):
                yield event

    return _EventResponse(events(), work)


class _EventResponse(StreamingResponse):
    """Server-sent events; when they are no longer read, the task that makes them is cancelled."""

    def __init__(self, events: AsyncIterator[bytes], work: asyncio.Task[Any]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.cancel()


def _limits(request: Request) -> Limits:
    return request.app.state.limits

"""What every dialect's routes need of HTTP: whose request it is, its body, clients that hang up, server-sent events."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agl.trainer.gateway.access import Access
from agl.trainer.gateway.calls import ChatRequest, Choice, PendingRequest, Reply, ServedPolicy
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.http.limits import Limits, Refused, parse_json
from agl.trainer.http.responses import answer as answer
from agl.trainer.http.responses import unless_gone as unless_gone

PREFIX = "/rollouts/{rollout}/attempts/{attempt:int}/agents/{agent:path}/v1"
"""Before the path of each route: it says whose request it is."""

_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-[0-9a-f]{32}-([0-9a-f]{16})-[0-9a-f]{2}$")


class Events(Protocol):
    """A dialect's stream: server-sent events, encoded, for an answer as it comes."""

    def push(self, choice: Choice) -> Iterable[bytes]:
        """For what was sampled of a choice since the last call."""
        ...

    def finish(self, replies: Sequence[Reply]) -> Iterable[bytes]:
        """For the end of the answer."""
        ...

    def fail(self, error: RequestError) -> Iterable[bytes]:
        """For an answer that broke off."""
        ...


def attempt_of(gateway: Gateway, request: Request) -> Access:
    """The attempt that a request belongs to.

    Raises:
        RequestError: 401, the key is not good for an open attempt.
    """
    return gateway.find_attempt(request.path_params["rollout"], request.path_params["attempt"], request.headers)


def begin_request(gateway: Gateway, request: Request, response_id: str) -> PendingRequest:
    """Note that a request came in, which `Gateway.complete` or `refuse` must follow.

    Raises:
        RequestError: 401, the key is not good for an open attempt; 429, the attempt has too many requests running.
    """
    access = attempt_of(gateway, request)
    most = _limits(request).requests_per_attempt
    if len(access.unsettled) >= most:
        raise RequestError(429, f"the attempt has {most} requests running; try again", code="too_many_requests")
    return gateway.begin_request(access, request.path_params["agent"], response_id, _span_id(request))


async def body_of(request: Request) -> Any:
    """The JSON of a request's body.

    Raises:
        RequestError: it is too long, too deep, or no JSON.
        ClientDisconnect: the client hung up.
    """
    try:
        received = await request.body()
    except Refused as refused:
        raise RequestError(refused.status, refused.message, code=refused.code) from None
    try:
        return parse_json(received, _limits(request).json_depth)
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON that can be read: {error}") from None


async def stream(
    gateway: Gateway,
    request: Request,
    wire: PendingRequest,
    asked: ChatRequest,
    begin: Callable[[ServedPolicy], Events],
) -> Response:
    """Answer as the tokens come.

    Args:
        gateway: that answers. request: of the client. wire: the request's. asked: what it says.
        begin: makes the dialect's stream for the policy that answers.

    Raises:
        RequestError: the request cannot be served, and nothing was sampled yet; later the stream tells.
        ClientDisconnect: the client hung up before the first token.
    """
    queue: asyncio.Queue[Choice | None] = asyncio.Queue()

    def on_tokens(choice: Choice, _: Sequence[int]) -> None:
        queue.put_nowait(choice)

    work: asyncio.Task[list[Reply]] = asyncio.ensure_future(gateway.complete(wire, asked, on_tokens))
    work.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        # The first tokens decide between a stream and an error with a status of its own.
        first = await unless_gone(request, queue.get())
        if first is None:
            await work
    except BaseException:
        work.cancel()
        raise
    told = begin(gateway.served(wire.policy))

    async def events() -> AsyncIterator[bytes]:
        item = first
        try:
            while item is not None:
                for event in told.push(item):
                    yield event
                item = await queue.get()
            for event in told.finish(await work):
                yield event
        except RequestError as error:
            for event in told.fail(error):
                yield event

    return _Response(events(), work)


def sse(data: Any, event: str | None = None) -> bytes:
    """A server-sent event with JSON in it."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + orjson.dumps(data) + b"\n\n"


def _limits(request: Request) -> Limits:
    return request.app.state.limits


def _span_id(request: Request) -> str | None:
    # Instrumentation of an HTTP client can put a span of its own into `traceparent`.
    headers = request.headers
    match = _TRACEPARENT.match(headers.get("x-agl-traceparent") or headers.get("traceparent", ""))
    return match.group(1) if match else None


class _Response(StreamingResponse):
    """Server-sent events that cancel what makes them when they are no longer read."""

    def __init__(self, events: AsyncIterator[bytes], work: asyncio.Task[Any]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.cancel()

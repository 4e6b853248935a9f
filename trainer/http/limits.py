"""Bounds on the resources that one client, or all together, can take from a server, as ASGI middleware.

A request beyond a bound is answered with 408, 413 or 503 and its connection is closed. None waits without limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agl.errors import ConfigError, nearest
from agl.trainer.http.json_pieces import parse_in_pieces
from agl.trainer.http.responses import RETRY_SECONDS

log = logging.getLogger("agl.http")

VARIABLE = "AGL_LIMIT_"
"""Begins the variables that set limits: AGL_LIMIT_MESSAGES=20000."""
LIMITS = "agl.limits"
"""ASGI scope entry, set by `Bounded`: the limits of the server that got the request."""
ABORT = "agl.abort"
"""ASGI extension, set by `connections`: a function that drops the connection at once."""
_ORJSON_DEPTH = 254
"""The depth of nesting up to which orjson writes."""
_DRAIN_SECONDS = 2.0
_MOST_DEPTH = 200
_SCAN_BYTES = 256 * 1024
_PIECES_BYTES = 16 * 1024
"""Text of this length is parsed piece by piece."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server allows. `AGL_LIMIT_<NAME>` in its environment sets a limit (`of_environment`).

    Attributes:
        connections: open at once; beyond that the one that is idle longest is dropped.
        requests: running at once.
        requests_per_attempt: running at once for one attempt.
        header_bytes, body_bytes: of one request.
        buffered_bytes: of the bodies of all running requests together.
        header_seconds: for the head of a request.
        idle_seconds: of a connection between two requests.
        body_seconds: for a body, plus one second per `body_rate` bytes of it.
        write_seconds: without the client reading any of its answer.
        wait_seconds: of a request that waits for work.
        json_depth: nesting of objects and lists, at most 200.
        request_bytes: of a request to a model.
        bytes_per_token: the longest that a prompt's tokens are on average; a
            request that would then not fit into the policy's context is refused unread.
        json_values: in a request to a model.
        messages: in it, each of their parts and tool calls included.
        tools: that it offers.
        body_values: JSON values, or fields of protobuf, in any other body.
    """

    connections: int = 8192
    requests: int = 4096
    requests_per_attempt: int = 64
    header_bytes: int = 64 * 1024
    body_bytes: int = 64 * 1024 * 1024
    buffered_bytes: int = 1024 * 1024 * 1024
    header_seconds: float = 15.0
    idle_seconds: float = 75.0
    body_seconds: float = 30.0
    body_rate: int = 64 * 1024
    write_seconds: float = 60.0
    wait_seconds: float = 30.0
    json_depth: int = 100
    request_bytes: int = 8 * 1024 * 1024
    bytes_per_token: int = 32
    json_values: int = 100_000
    messages: int = 10_000
    tools: int = 1_000
    body_values: int = 250_000

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Limits:
        """The limits that variables set, and the default ones.

        Raises:
            ConfigError: a variable names no limit, or its value is no positive number.
        """
        defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(VARIABLE):
                continue
            name = variable.removeprefix(VARIABLE).lower()
            if name not in defaults:
                raise ConfigError(f"{variable} names no limit", hint=nearest(name, defaults))
            try:
                values[name] = type(defaults[name])(text)
            except ValueError:
                values[name] = 0
            if not 0 < values[name] < (_MOST_DEPTH + 1 if name == "json_depth" else float("inf")):
                raise ConfigError(f"{variable} is {text!r}", hint=f"give a number, such as {defaults[name]}")
        return cls(**values)


def setting(name: str) -> str:
    """How to raise a limit, as the end of an error's message."""
    return f"{VARIABLE}{name.upper()} in the server's environment raises it"


class Refused(HTTPException):
    """A request that is refused. Attributes: status: HTTP status. message: for the client. code: machine-readable."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(status, message, {"retry-after": str(RETRY_SECONDS)} if status in (429, 503) else None)
        self.status = status
        self.message = message
        self.code = code


class _Unread(OSError):
    """The client does not read its answer."""


def parse_json(body: bytes | bytearray, depth: int) -> Any:
    """The value of JSON text.

    Raises:
        ValueError: it is not JSON, or nested deeper than `depth`.
    """
    if len(body) >= _PIECES_BYTES:
        return parse_in_pieces(bytes(body), depth, orjson.loads)
    data = orjson.loads(body)
    if body.count(b"[") + body.count(b"{") <= depth:
        return data
    # orjson fails beyond a fixed depth. With enough lists around the value, it checks `depth` in C.
    wrapped = data
    for _ in range(_ORJSON_DEPTH - depth):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)
    except orjson.JSONEncodeError as error:
        if "recursion" in str(error).lower():
            raise ValueError(f"nested more than {depth} deep: {setting('json_depth')}") from None
    return data


def check_json(body: bytes, depth: int, values: int, name: str = "json_values") -> None:
    """Refuse JSON text by its shape, before it takes the memory of its values.

    Exact for valid JSON; of other text, it counts at least what stands before the error. Most of the work leaves
    other threads the interpreter.

    Args:
        name: of the limit of values.

    Raises:
        Refused: 400, it is nested deeper than `depth`; 413, it has more than this many values.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    inside = count = level = 0
    for start in range(0, len(body), _SCAN_BYTES):
        text = np.frombuffer(body, np.uint8, min(_SCAN_BYTES, len(body) - start), start)
        # An even number of quotes before a character: it is outside of strings. Parity survives the overflow.
        quotes = np.cumsum(text == ord('"'), dtype=np.uint8) + np.uint8(inside)
        inside = int(quotes[-1]) & 1
        outside = text[(quotes & 1) == 0]
        # "[" and "{" differ in one bit, and so do "]" and "}".
        opening = (outside | 0x20) == ord("{")
        closing = (outside | 0x20) == ord("}")
        count += int(np.count_nonzero(opening)) + int(np.count_nonzero(outside == ord(",")))
        if count > values:
            found = f"the body has {count} JSON values or more, the limit is {values}"
            raise Refused(413, f"{found}: {setting(name)}", "request_too_large")
        levels = np.cumsum(opening.view(np.int8) - closing.view(np.int8), dtype=np.int32)
        if levels.size:
            if (deepest := level + int(levels.max())) > depth:
                found = f"the body is nested {deepest} deep or more, the limit is {depth}"
                raise Refused(400, f"{found}: {setting('json_depth')}", "invalid_json")
            level += int(levels[-1])


def limits_of(request: Request) -> Limits:
    """The limits of the server that got a request."""
    return request.scope.get(LIMITS) or Limits()


class Bounded:
    """ASGI middleware that enforces `limits` on an application."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self._running = 0
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[LIMITS] = self.limits
        exchange = _Exchange(self, scope, receive, send)
        if self._running >= self.limits.requests:
            await exchange.refuse(Refused(503, "the server has as many requests as it takes; try again", "overloaded"))
            return
        self._running += 1
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except Refused as refused:
            if exchange.answered:
                raise
            await exchange.refuse(refused)
        except _Unread:
            # The connection is lost, so there is nothing to answer.
            pass
        except Exception as error:
            # Starlette raises again what it has answered. uvicorn would then close the connection unannounced, while
            # the client sends its next request.
            if not exchange.ended:
                raise
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
        finally:
            self._running -= 1
            self._buffered -= exchange.size

    def buffer(self, size: int) -> None:
        """Count bytes of a running request's body."""
        self._buffered += size
        if self._buffered > self.limits.buffered_bytes:
            raise Refused(503, "the server holds as many bytes of requests as it takes; try again", "overloaded")


class _Exchange:
    """One request and its answer, within bounds."""

    def __init__(self, bounded: Bounded, scope: Scope, receive: Receive, send: Send) -> None:
        self._bounded = bounded
        self._limits = bounded.limits
        self._scope = scope
        self._receive = receive
        self._send = send
        self._started: float | None = None
        self._complete = not any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        self.size = 0
        self.answered = self.ended = False

    async def receive(self) -> Message:
        if self._complete and self._started is not None:
            # The application waits for the client to hang up.
            return await self._receive()
        now = asyncio.get_running_loop().time()
        if self._started is None:
            self._started = now
        deadline = self._started + self._limits.body_seconds + self.size / self._limits.body_rate
        try:
            async with asyncio.timeout_at(max(deadline, now)):
                message = await self._receive()
        except TimeoutError:
            raise Refused(408, "the request's body came too slowly", "request_timeout") from None
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.size += size
            self._bounded.buffer(size)
            if self.size > self._limits.body_bytes:
                message = f"the body has more than {self._limits.body_bytes} bytes: {setting('body_bytes')}"
                raise Refused(413, message, "body_too_large")
            self._complete = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answered = True
            if not self._complete:
                await self._drain()
                # Otherwise the rest of the body would be read before the next request, as slowly as the client sends.
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                await self._send(message)
        except TimeoutError:
            self._scope.get("extensions", {}).get(ABORT, lambda: None)()
            raise _Unread from None
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def _drain(self) -> None:
        """Read the rest of the body for a while: a client that is still writing would get a reset, not the answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while not self._complete:
                    message = await self._receive()
                    self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        self._complete = False

    async def refuse(self, refused: Refused) -> None:
        """Answer instead of the application."""
        body = orjson.dumps(refusal_body(refused))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if refused.status in (429, 503):
            headers.append((b"retry-after", b"%d" % RETRY_SECONDS))
        await self.send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def refusal_body(refused: Refused) -> dict[str, Any]:
    """The body of a refusal, in the shape of OpenAI's errors."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}

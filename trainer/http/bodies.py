"""Bodies of requests: the one place where a server of agl reads them.

Invariants: a body is bounded in bytes, values and depth before any of it becomes an object; what is large is read off
the event loop, in the turn of whoever was authenticated, which nothing that a request merely claims decides.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request

from agl.trainer.http.limits import Limits, Refused, check_json, limits_of, parse_json, setting
from agl.trainer.http.turns import LARGE_BYTES, Turns

T = TypeVar("T")

_LINES = 20
"""How many times the values of a body may be in a file of tasks, whose lines are values by themselves."""
Parse = Callable[[bytes, int], Any]
"""(JSON text, greatest depth) -> its value; raises ValueError."""


class Body:
    """A body that has come.

    Attributes:
        content: its bytes.
        limits: of the server.
    """

    def __init__(self, content: bytes, request: Request, turn: Turns | None) -> None:
        self.content, self.limits = content, limits_of(request)
        self._request = request
        self._turn = turn

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a function of the bytes and the arguments: on a thread where the body is large."""
        if self._turn is None:
            return function(self.content, *arguments)
        return await self._turn.run(function, self.content, *arguments)

    async def json(
        self, parse: Parse = parse_json, then: Callable[[Any], Any] = lambda value: value, *, depth: int | None = None
    ) -> Any:
        """What `then` makes of the value of JSON.

        Args:
            depth: the greatest, where that is less than any body may have.

        Raises:
            Refused: 415, it is not sent as JSON; 400, it is no JSON, or nested too deep; 413, it has too many values.
        """
        # A browser may send any page's text to this machine, but no JSON that it calls JSON.
        if media_type(self._request) != "application/json":
            raise Refused(415, "send application/json", "unsupported_media_type")

        limits = self.limits if depth is None else replace(self.limits, json_depth=depth)

        def value(content: bytes) -> Any:
            return then(json_value(content, limits, parse))

        return await self.read(value)


@contextlib.asynccontextmanager
async def body_in_turn(
    request: Request, turns: Callable[[], Awaitable[Turns]] | Turns, *, most: int | None = None, large: bool = False
) -> AsyncIterator[Body]:
    """The body of a request.

    Few large ones of a sender are received at a time, and one has its turn until the block ends: many at once would
    fill the memory, and stop everything while Python looks through them.

    Args:
        turns: of the sender, or what finds them; it is not asked for a small body.
        most: bytes, where that is less than any body may have.
        large: whether it is large when read, such as a packed
            one.

    Raises:
        Refused: 413, it has more than `most` bytes.
    """

    def too_large(size: int) -> Refused | None:
        if most is None or size <= most:
            return None
        return Refused(413, f"the body has {size} bytes or more, the limit here is {most}", "body_too_large")

    if not large and declared_bytes(request) < LARGE_BYTES:
        yield Body(await received(request, too_large), request, None)
        return
    sender = turns if isinstance(turns, Turns) else await turns()
    async with sender.uploads:
        content = await received(request, too_large)
        async with sender as turn:
            yield Body(content, request, turn)


async def received(request: Request, refuse: Callable[[int], Exception | None]) -> bytes:
    """All of a body. What is refused is read to its end, but not kept: then its sender reads the answer.

    Args:
        refuse: (bytes that it says or proves to have) -> why that is too much; None if it is not.

    Raises:
        Exception: what `refuse` returned.
        Refused: it exceeds what any body may have, or comes too slowly.
        ClientDisconnect: the client hung up.
    """
    content = bytearray()
    size = int(request.headers.get("content-length", 0))
    refusal = None
    try:
        async for chunk in request.stream():
            size = max(size, len(content) + len(chunk))
            if refusal is None and (refusal := refuse(size)) is None:
                content += chunk
            else:
                content.clear()
    except Refused as refused:
        raise refusal or refused from None
    if refusal is not None:
        raise refusal
    return bytes(content)


def declared_bytes(request: Request) -> int:
    """How long a body says it is; one that does not say counts as large."""
    if "transfer-encoding" in request.headers:
        return LARGE_BYTES
    return int(request.headers.get("content-length", 0))


def media_type(request: Request) -> str:
    """The type of a body, without its parameters; "" if it has none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def json_value(content: bytes, limits: Limits, parse: Parse = parse_json) -> Any:
    """The value of JSON text.

    Raises:
        Refused: 400, it is no JSON, or nested too deep; 413, it has too many values.
    """
    # A value has two bytes or more, its comma included. The parser counts the depth of what is shorter.
    if len(content) > 2 * limits.body_values:
        check_json(content, limits.json_depth, limits.body_values, "body_values")
    try:
        return parse(content, limits.json_depth)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON that can be read: {error}", "invalid_json") from None


def check_json_lines(content: bytes, limits: Limits) -> None:
    """Refuse JSON lines of which one has too many values or is nested too deep, or all together are too many values.

    Raises:
        Refused: 400 or 413.
    """
    values = 0
    most = _LINES * limits.body_values
    for line in io.BytesIO(content):
        opening = line.count(b"[") + line.count(b"{")
        # Texts have commas, too, but not so many.
        values += opening + line.count(b",") + 1
        if values > most:
            found = f"the lines have {values} JSON values or more, the limit is {most}"
            raise Refused(413, f"{found}: {_LINES} times what {setting('body_values')}", "request_too_large")
        if opening > limits.json_depth or len(line) > 2 * limits.body_values:
            check_json(line, limits.json_depth, limits.body_values, "body_values")


def unpacked(content: bytes, encoding: str, most: int, *, whole: bool = True) -> bytes:
    """The bytes of a `Content-Encoding`, which is "", "identity", "gzip" or "deflate".

    Args:
        most: how many there may be.
        whole: whether one that ends too soon is an error.

    Raises:
        ValueError: another encoding, more bytes, or not of this encoding.
    """
    encoding = encoding.strip().lower().removeprefix("x-")
    if encoding in ("", "identity"):
        return content
    if encoding not in ("gzip", "deflate"):
        raise ValueError(f"content-encoding {encoding!r} is unknown; send gzip or none")
    # What is called deflate comes with zlib's header, and from some without.
    raw = encoding == "deflate" and content[:1] and content[0] & 0x0F != 8
    unpacker = zlib.decompressobj(wbits=31 if encoding == "gzip" else -15 if raw else 15)
    try:
        data = unpacker.decompress(content, most + 1)
    except zlib.error as error:
        raise ValueError(f"the body is not {encoding}: {error}") from None
    if len(data) > most:
        raise ValueError(f"the body has more than {most} bytes once unpacked: {setting('body_bytes')}")
    if whole and not unpacker.eof:
        raise ValueError(f"the {encoding} body ends too soon")
    return data

"""Bounded connections: a request's head has a deadline and a maximum size, idle connections are closed for new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agl.trainer.http.limits import ABORT, Limits
from agl.trainer.http.responses import RETRY_SECONDS

_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: %d\r\ncontent-length: 0\r\n\r\n"


class Connections:
    """The open connections of one server. Invariant: no more than `limits.connections`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._idle: dict[_Connection, None] = {}
        self._open = 0

    def protocol(self) -> Callable[..., asyncio.Protocol]:
        """uvicorn's protocol factory, called for each connection."""
        return lambda **options: _Connection(self, **options)

    def opened(self, connection: _Connection) -> bool:
        """Count a connection, dropping the one that is idle longest if there are too many. False if none is idle."""
        self._open += 1
        if self._open > self.limits.connections:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                return False
            del self._idle[oldest]
            oldest.transport.abort()
        self._idle[connection] = None
        return True

    def closed(self, connection: _Connection) -> None:
        self._open -= 1
        self._idle.pop(connection, None)

    def busy(self, connection: _Connection) -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: _Connection) -> None:
        self._idle[connection] = None


class _Connection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._limits = connections.limits
        self._head: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._trailing = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._connections.opened(self):
            self._drop(_FULL % RETRY_SECONDS)
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)
        self._head_ended()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._head is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.header_bytes:
                self._drop(_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._trailing = False
        if self._head is None:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers would be stored, and nothing reads them.
        if not self._trailing:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_ended()
        self._trailing = True
        # A head that came in one piece was never incomplete when its bytes were counted.
        if self._head_size() > self._limits.header_bytes:
            self._drop(_LARGE)
            return
        self._connections.busy(self)
        super().on_headers_complete()
        self.scope.setdefault("extensions", {})[ABORT] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self.pipeline:
            self._connections.idle(self)

    def _head_size(self) -> int:
        """Bytes of a whole head: request line, headers with colon, one space and line end, and the empty line."""
        assert self.parser is not None
        line = len(self.parser.get_method()) + len(self.url) + len(b"  HTTP/1.1\r\n")
        return line + sum(len(name) + len(value) + 4 for name, value in self.headers) + 2

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head = self.loop.call_later(self._limits.header_seconds, self._drop, _SLOW)

    def _head_ended(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _drop(self, answer: bytes) -> None:
        self._head_ended()
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()

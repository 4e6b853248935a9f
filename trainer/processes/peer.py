"""Calls between two processes over a socket, in both directions, with what streams meanwhile.

Invariant: every call ends: with its result, its error, or the error of a connection that was lost.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from agl.errors import AglError, EngineError
from agl.trainer.processes.frames import FrameReader, to_frame

Emit = Callable[[Any], None]
"""Sends a value to the caller's `on_event`."""
Handler = Callable[..., Any]
"""Called with `Emit` and the arguments. What it returns is the result, or is awaited for it; calls of plain functions
run in the order in which they were sent."""


class _Request(NamedTuple):
    id: int
    name: str
    arguments: tuple[Any, ...]


class _Event(NamedTuple):
    id: int
    value: Any


class _Done(NamedTuple):
    id: int
    result: Any


class _Failed(NamedTuple):
    id: int
    error: AglError


class _Cancel(NamedTuple):
    id: int


class Peer(asyncio.Protocol):
    """One end of the socket. Lives on the event loop that connects it.

    Args:
        handlers: what the other end may call.
        on_loss: called when the connection is lost, but for one that `fail` has
            given up.

    Attributes:
        lost: what all calls fail with from now on; None while there is a connection.
    """

    def __init__(self, handlers: Mapping[str, Handler], on_loss: Callable[[], None]) -> None:
        self.lost: AglError | None = None
        self._handlers = handlers
        self._on_loss = on_loss
        self._reader = FrameReader()
        self._ids = itertools.count()
        self._calls: dict[int, tuple[asyncio.Future[Any], Emit | None]] = {}
        self._handling: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, name: str, *arguments: Any, on_event: Emit | None = None) -> asyncio.Future[Any]:
        """Call a handler at the other end; cancelling the result cancels it there.

        Raises:
            EngineError: called from another event loop.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self.lost is not None or self._loop is None:
            future.set_exception(self.lost or EngineError("not connected"))
            return future
        if loop is not self._loop:
            raise EngineError(
                "a child process was called from another event loop than the one that started it",
                hint="start it inside the loop that uses it, or pass the call on by asyncio.run_coroutine_threadsafe",
            )
        call_id = next(self._ids)
        self._calls[call_id] = future, on_event
        self._send(_Request(call_id, name, arguments))
        future.add_done_callback(lambda done: self._end(call_id, done))
        return future

    def fail(self, error: AglError) -> None:
        """End every call, and all later ones, with this error; an earlier one stays."""
        self.lost = self.lost or error
        for future, _ in list(self._calls.values()):
            if not future.done():
                future.set_exception(self.lost)
                # No warning for those that are no longer awaited.
                future.exception()
        for handled in list(self._handling.values()):
            handled.cancel()

    def _end(self, call_id: int, future: asyncio.Future[Any]) -> None:
        if self._calls.pop(call_id, None) is not None and future.cancelled():
            self._send(_Cancel(call_id))

    def _send(self, message: Any) -> None:
        """Send it with the others of this turn of the event loop, in one write."""
        self._outbox.append(to_frame(message))
        if len(self._outbox) == 1 and self._loop is not None:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        frames = self._outbox
        self._outbox = []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._loop = transport, asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lost is None:
            self._on_loss()

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            match message:
                case _Request():
                    self._handle(message)
                case _Cancel():
                    if (handled := self._handling.get(message.id)) is not None:
                        handled.cancel()
                case _Event():
                    self._on_event(message)
                case _Done() | _Failed():
                    future, _ = self._calls.get(message.id, (None, None))
                    if future is not None and not future.done():
                        if isinstance(message, _Done):
                            future.set_result(message.result)
                        else:
                            future.set_exception(message.error)

    def _on_event(self, event: _Event) -> None:
        future, on_event = self._calls.get(event.id, (None, None))
        if future is None or on_event is None or future.done():
            return
        try:
            on_event(event.value)
        except Exception as error:
            future.set_exception(error)
            self._send(_Cancel(event.id))

    def _handle(self, request: _Request) -> None:
        try:
            result = self._handlers[request.name](
                lambda value: self._send(_Event(request.id, value)), *request.arguments
            )
        except Exception as error:
            self._send(_Failed(request.id, _portable(request.name, error)))
            return
        if isinstance(result, Awaitable):
            handled = self._handling[request.id] = asyncio.ensure_future(result)
            handled.add_done_callback(lambda done: self._answer(request, done))
        else:
            self._send(_Done(request.id, result))

    def _answer(self, request: _Request, handled: asyncio.Future[Any]) -> None:
        del self._handling[request.id]
        if handled.cancelled():
            return
        if (error := handled.exception()) is None:
            self._send(_Done(request.id, handled.result()))
        else:
            self._send(_Failed(request.id, _portable(request.name, error)))


def _portable(name: str, error: BaseException) -> AglError:
    """The error for the other end: ours unchanged, others with their type's name and the call's."""
    if isinstance(error, AglError):
        return error
    traceback.print_exception(error)
    return EngineError(f"{name} failed: {type(error).__name__}: {error}")

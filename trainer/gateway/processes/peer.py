"""Calls between two processes over a socket, in both directions, with what streams meanwhile.

Invariant: every call ends: with its result, its error, or the error of a connection that was lost.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agl.errors import AglError, EngineError, GatewayError
from agl.trainer.engines.frames import FrameReader, to_frame

Handler = Callable[..., Any]
"""Called with `emit`, which sends a value to the caller's `on_event`, and the arguments. What it returns is the result,
or is awaited for it; calls of plain functions run in the order in which they were sent."""


@dataclass(frozen=True, slots=True)
class _Request:
    id: int
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Event:
    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class _Done:
    id: int
    result: Any


@dataclass(frozen=True, slots=True)
class _Failed:
    id: int
    error: AglError


@dataclass(frozen=True, slots=True)
class _Cancel:
    id: int


class Peer(asyncio.Protocol):
    """One end of the socket.

    Args:
        handlers: what the other end may call. on_loss: called when the connection is lost.
    """

    def __init__(self, handlers: Mapping[str, Handler], on_loss: Callable[[], None]) -> None:
        self._handlers, self._on_loss = handlers, on_loss
        self._reader = FrameReader()
        self._ids = itertools.count()
        self._calls: dict[int, tuple[asyncio.Future[Any], Callable[[Any], None]]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._transport: asyncio.Transport | None = None
        self._lost: AglError | None = None

    def call(self, name: str, *arguments: Any, on_event: Callable[[Any], None] = lambda value: None) -> Awaitable[Any]:
        """Call a handler at the other end; cancelling the result cancels it there."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._lost is not None or self._transport is None:
            future.set_exception(self._lost or GatewayError("not connected"))
            return future
        call_id = next(self._ids)
        self._calls[call_id] = future, on_event
        self._send(_Request(call_id, name, arguments))
        future.add_done_callback(lambda done: self._end(call_id, done))
        return future

    def fail(self, error: AglError) -> None:
        """End every call, and all later ones, with this error."""
        self._lost = self._lost or error
        for future, _ in list(self._calls.values()):
            if not future.done():
                future.set_exception(self._lost)
                # Those that nobody awaits any more are no news.
                future.exception()
        for task in list(self._tasks.values()):
            task.cancel()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def _end(self, call_id: int, future: asyncio.Future[Any]) -> None:
        if self._calls.pop(call_id, None) is not None and future.cancelled():
            self._send(_Cancel(call_id))

    def _send(self, message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(to_frame(message))

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_loss()

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            match message:
                case _Request():
                    self._handle(message)
                case _Cancel():
                    if (task := self._tasks.get(message.id)) is not None:
                        task.cancel()
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
            self._send(_Failed(request.id, _portable(error)))
            return
        if isinstance(result, Awaitable):
            task = self._tasks[request.id] = asyncio.ensure_future(self._answer(request.id, result))
            task.add_done_callback(lambda _: self._tasks.pop(request.id, None))
        else:
            self._send(_Done(request.id, result))

    async def _answer(self, request_id: int, result: Awaitable[Any]) -> None:
        try:
            self._send(_Done(request_id, await result))
        except Exception as error:
            self._send(_Failed(request_id, _portable(error)))


def _portable(error: Exception) -> AglError:
    """The error for the other end: ours unchanged, others with their type's name."""
    if isinstance(error, AglError):
        return error
    traceback.print_exception(error)
    return EngineError(f"{type(error).__name__}: {error}")

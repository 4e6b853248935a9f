"""Objects over a socket between a process and its child. A frame is a length and a pickled object."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<Q")
_PARENT_CHECK_MS = 2000


def to_frame(message: Any) -> bytes:
    """A message as one frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Reassembles the messages from the bytes of a stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add bytes; returns the messages that they complete."""
        self._buffer += data
        messages, at = [], 0
        while len(self._buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            end = at + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(memoryview(self._buffer)[at + _LENGTH.size : end]))
            at = end
        if at:
            del self._buffer[:at]
        return messages


def exit_with_parent(connection: socket.socket, end: Callable[[], object]) -> None:
    """End this process, whatever it is computing, when the other end of the socket closes or the parent dies.

    Args:
        connection: to the parent. end: ends the process.
    """
    parent = os.getppid()

    def watch() -> None:
        poller = select.poll()
        poller.register(connection, 0)
        while not poller.poll(_PARENT_CHECK_MS) and os.getppid() == parent:
            pass
        end()

    threading.Thread(target=watch, daemon=True).start()

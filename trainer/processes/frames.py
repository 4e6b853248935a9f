"""Objects over a socket between a process and its child. A frame is a length and a pickled object."""

from __future__ import annotations

import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


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
        messages = []
        at = 0
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

"""The tokens of a conversation, each kept once: a prompt is a view of a buffer that the next prompt is appended to.

Invariant: what was appended never changes. Buffers double, so a conversation of T turns takes memory in O(tokens).
"""

from __future__ import annotations

import threading

import numpy as np

from agl.mdp.types import IntArray


class TokenBuffer:
    """Tokens of one conversation, with room for more."""

    def __init__(self, ids: IntArray) -> None:
        self._ids = np.empty(2 * ids.size, np.int32)
        self._ids[: ids.size] = ids
        self._used = ids.size
        self._lock = threading.Lock()

    def view(self, size: int) -> IntArray:
        """The first `size` tokens, read-only."""
        view = self._ids[:size]
        view.flags.writeable = False
        return view

    def extended(self, size: int, ids: IntArray) -> tuple[TokenBuffer, IntArray]:
        """The buffer that holds `ids`, and a view of them.

        Args:
            size: how many tokens of this buffer `ids` begin with.
            ids: int32 [P].
        """
        with self._lock:
            # Where another continuation was appended before, this one begins a new buffer.
            if size == self._used and ids.size <= self._ids.size:
                self._ids[size : ids.size] = ids[size:]
                self._used = ids.size
                return self, self.view(ids.size)
        other = TokenBuffer(ids)
        return other, other.view(ids.size)

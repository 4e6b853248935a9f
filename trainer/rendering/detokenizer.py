"""Token ids to text as they are sampled; the texts add up to the whole answer and none ends within a character."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding of one answer. Not thread-safe: one per stream.

    Args:
        decode: ids -> text.
        skip: ids that are never text, such as the stop tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: Collection[int] = ()) -> None:
        self._decode = decode
        self._skip = frozenset(skip)
        self._ids: list[int] = []
        self._context = 0
        self._sent = 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with `ids`."""
        self._ids.extend(i for i in ids if i not in self._skip)
        return self._take(final=False)

    def flush(self) -> str:
        """The text held back until the end of the answer."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        # The last ids that were sent stay in front as context: some tokenizers drop a leading space when decoding.
        before = self._decode(self._ids[self._context : self._sent])
        after = self._decode(self._ids[self._context :])
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""
        self._context, self._sent = self._sent, len(self._ids)
        return after[len(before) :]

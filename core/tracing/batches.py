"""Divides spans into batches for whatever sends them: bounded in number and bytes, and smaller where one is refused.

Invariant: a span that is refused takes no other one with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from agl.mdp.spans import Span

BATCH_SPANS = 256
BATCH_BYTES = 4 * 1024 * 1024
"""Of a batch's texts; a longer span is a batch by itself. Servers of agl take 64 MiB (`Limits.body_bytes`)."""


def text_bytes(span: Span) -> int:
    """The length of a span's texts: about that of its JSON."""
    values = [span.status_message, *span.attributes.values()]
    for event in span.events:
        values += event.attributes.values()
    return sum(len(value) for value in values if isinstance(value, str))


def batches(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """The spans in order, in batches."""
    batch: list[Span] = []
    size = 0
    for span in spans:
        more = text_bytes(span)
        if batch and (len(batch) == BATCH_SPANS or size + more > BATCH_BYTES):
            yield batch
            batch = []
            size = 0
        batch.append(span)
        size += more
    if batch:
        yield batch


class Outbox:
    """Spans on their way: `next()` until it is None, and `refused` for each batch that is not taken.

    Attributes:
        lost: a sentence for each span that was refused alone.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._batches = deque(batches(spans))
        self.lost: list[str] = []

    def next(self) -> list[Span] | None:
        """The next batch to send; None after the last."""
        return self._batches.popleft() if self._batches else None

    def refused(self, batch: list[Span], error: Exception) -> None:
        """Divide a batch that was not taken."""
        if len(batch) > 1:
            middle = len(batch) // 2
            self._batches.extendleft([batch[middle:], batch[:middle]])
        else:
            (span,) = batch
            why = str(error) or type(error).__name__
            self.lost.append(f"span {span.name!r} ({span.span_id}, {text_bytes(span)} bytes of text): {why}")

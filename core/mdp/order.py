"""The order in which the spans of an attempt began: by their sequence numbers, whatever the wall clock says.

A number is a reading of the system-wide monotonic clock, which nobody can set, made to grow with each: so the spans of
several processes of one machine are in one order. A span without a number (of another tracing SDK, or made of a
record) comes after its nearest ancestor that has one, and else by its start, kept within that ancestor's: its sender
says no more.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Iterable, Sequence

from agl import semconv
from agl.mdp.spans import Span
from agl.mdp.types import Call

_STEP = 1_000_000
"""Between the numbers of calls without a span: there is room for their tools."""

_lock = threading.Lock()
_last = 0


def next_number() -> int:
    """A sequence number: greater than all before it, and than those that other processes of this machine took."""
    global _last
    with _lock:
        _last = max(_last + 1, time.monotonic_ns())
        return _last


def number_after(spans: Iterable[Span]) -> int:
    """A number after all of these, for what is added to an attempt that has ended, perhaps on another machine."""
    return max((span.sequence or 0 for span in spans), default=0) + 1


def in_order(spans: Iterable[Span]) -> list[Span]:
    """The spans in the order in which they began."""
    listed = list(spans)
    by_id = {span.span_id: span for span in listed}

    numbered = sorted((s for s in listed if s.sequence is not None), key=lambda s: (s.sequence, s.span_id))
    places = {span.span_id: place for place, span in enumerate(numbered)}
    # Of the spans up to each, the latest start: the clock may have been set back.
    latest = list(itertools.accumulate((span.start for span in numbered), max))

    def place(span: Span) -> tuple[int, int, float, str]:
        ancestor = span
        depth = 0
        while ancestor.sequence is None and ancestor.parent_id in by_id and depth < len(by_id):
            ancestor = by_id[ancestor.parent_id]
            depth = depth + 1
        if ancestor is span and span.sequence is not None:
            return places[span.span_id], 0, span.start, span.span_id
        start = span.start
        after = -1
        if ancestor.sequence is not None:
            # Its sender's clock may be wrong.
            start = min(max(start, ancestor.start), ancestor.end)
            after = places[ancestor.span_id]
        return max(after, bisect.bisect_left(latest, start) - 1), 1, span.start, span.span_id

    return sorted(listed, key=place)


def beginnings(spans: Sequence[Span]) -> list[float]:
    """When each span began, in seconds since any moment: by the monotonic clock where all have numbers."""
    numbers = [span.sequence for span in spans if span.sequence is not None]
    if len(numbers) < len(spans):
        return [span.start for span in spans]
    # An inferred tool has the number of the request that brings its result.
    before = [span.seconds if span.attributes.get(semconv.INFERRED) else 0.0 for span in spans]
    return [number / 1e9 - seconds for number, seconds in zip(numbers, before, strict=True)]


def numbers_of_calls(calls: Sequence[Call], spans: Iterable[Span]) -> dict[str, int]:
    """Call id -> sequence number: its span's, or one that puts it where the gateway received it among the others."""
    known = {span.span_id: span.sequence for span in spans if span.sequence is not None}
    ordered = sorted(calls, key=lambda call: (call.index, call.id))
    own = [known.get(call.span_id or "") for call in ordered]
    before = min(known.values(), default=0)
    numbers: dict[str, int] = {}
    for place, call in enumerate(ordered):
        number = own[place]
        if number is None:
            after = next((later for later in own[place:] if later is not None and later > before), None)
            number = before + _STEP
            if after is not None:
                number = max(after - _STEP, (before + after) // 2)
        numbers[call.id] = number
        before = max(before, number)
    return numbers

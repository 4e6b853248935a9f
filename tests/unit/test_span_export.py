"""Spans on their way out of a process: how many and how large at once, what is refused, and what stays in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import semconv
from agl.instrument import auto
from agl.mdp.spans import Event, Span
from agl.tracing import batches as bounds
from agl.tracing import exporter as exporting
from agl.tracing.batches import BATCH_BYTES, BATCH_SPANS, Outbox, batches, text_bytes
from agl.tracing.exporter import BackgroundSpanExporter


def span(n: int, size: int = 0) -> Span:
    texts = {semconv.OPERATION_NAME: semconv.CHAT, semconv.INPUT_MESSAGES: "x" * size}
    return Span("a" * 32, f"{n + 1:016x}", None, "ro", 1, f"chat {n}", 0.0, 1.0, attributes=texts)


class Sink:
    """Takes what `refuses` does not refuse, once `gate` is open."""

    def __init__(self, refuses: Callable[[Sequence[Span]], Exception | None] = lambda _: None) -> None:
        self.refuses, self.gate = refuses, threading.Event()
        self.taken: list[list[str]] = []

    def send(self, spans: Sequence[Span]) -> None:
        self.gate.wait(10)
        if (error := self.refuses(spans)) is not None:
            raise error
        self.taken.append([s.name for s in spans])

    def finish(self, error: str | None) -> None:
        self.taken.append([f"end: {error}"])


def sent(sink: Sink, spans: Sequence[Span]) -> list[str]:
    """Send the spans, which all wait before the first is taken; the losses that are reported."""
    reports: list[str] = []
    exporter = BackgroundSpanExporter(lambda: sink, reports.append)
    for one in spans:
        exporter.put(one)
    sink.gate.set()
    exporter.finish(None)
    return reports


@given(st.lists(st.integers(0, BATCH_BYTES * 2), max_size=12), st.integers(0, 600))
def test_batches_hold_every_span_once_in_order_and_within_bounds(sizes: list[int], more: int) -> None:
    spans = [span(n, size) for n, size in enumerate([*sizes, *[1] * more])]
    divided = list(batches(spans))
    assert [s for batch in divided for s in batch] == spans
    assert all(len(b) <= BATCH_SPANS and (len(b) == 1 or sum(map(text_bytes, b)) <= BATCH_BYTES) for b in divided)


@given(st.sets(st.integers(0, 39)), st.integers(40, 80))
def test_of_a_refused_batch_only_the_spans_at_fault_are_lost(bad: set[int], n: int) -> None:
    spans, taken = [span(i) for i in range(n)], list[Span]()
    outbox = Outbox(spans)
    while batch := outbox.next():
        if any(s.name == f"chat {i}" for s in batch for i in bad):
            outbox.refused(batch, ValueError("no"))
        else:
            taken += batch
    assert taken == [s for i, s in enumerate(spans) if i not in bad]
    assert [line.partition(" (")[0] for line in outbox.lost] == [f"span 'chat {i}'" for i in sorted(bad)]


def test_large_spans_go_in_small_batches() -> None:
    sink = Sink(lambda spans: RuntimeError("413") if sum(map(text_bytes, spans)) > 2 * BATCH_BYTES else None)
    assert sent(sink, [span(n, BATCH_BYTES // 2) for n in range(40)]) == []
    names = [name for batch in sink.taken for name in batch]
    assert names == [*(f"chat {n}" for n in range(40)), "end: None"]


def test_a_span_that_is_refused_is_named_and_loses_no_other() -> None:
    def refuses(spans: Sequence[Span]) -> Exception | None:
        return RuntimeError("agl run answered 413") if any(s.name == "chat 7" for s in spans) else None

    sink = Sink(refuses)
    (report,) = sent(sink, [span(n, 10) for n in range(20)])
    assert report.startswith("span 'chat 7' (0000000000000008, 14 bytes of text)")
    assert "413" in report
    assert sorted(name for batch in sink.taken[:-1] for name in batch) == sorted(
        f"chat {n}" for n in range(20) if n != 7
    )


def test_of_many_losses_the_first_are_named_and_all_counted() -> None:
    reports = sent(Sink(lambda _: ValueError("no")), [span(n) for n in range(exporting.REPORTED + 3)])
    named = [report.partition(" (")[0] for report in reports]
    assert named == [
        *(f"span 'chat {n}'" for n in range(exporting.REPORTED)),
        f"{exporting.REPORTED + 3} losses in all",
    ]


def test_a_destination_that_is_lost_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    # The exporter's own name alone: other threads sleep, too.
    monkeypatch.setattr(exporting, "time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic))
    sink = Sink(lambda _: ConnectionRefusedError("gone"))
    reports = sent(sink, [span(n, BATCH_BYTES) for n in range(8)])
    assert pauses == [*exporting.RETRIES]
    assert reports == ["gone"]


def test_spans_that_wait_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "WAITING_BYTES", 1000)
    sink = Sink()
    reports = sent(sink, [span(0, 2000), *(span(n, 300) for n in range(1, 6))])
    [report] = reports
    assert "1000 bytes" in report
    assert [*sink.taken] == [["chat 0"], ["end: None"]]


def test_a_program_keeps_the_texts_of_few_spans() -> None:
    recent = auto.RecentSpans()
    for n in range(3 * auto.KEPT_SPANS // 2):
        recent.append(span(n, auto.KEPT_BYTES // 100))
    assert sum(map(text_bytes, recent)) < auto.KEPT_BYTES * 1.1
    assert [s.name for s in recent] == [f"chat {n}" for n in range(auto.KEPT_SPANS // 2, 3 * auto.KEPT_SPANS // 2)]
    assert {s.operation for s in recent} == {semconv.CHAT}
    assert semconv.INPUT_MESSAGES in recent[-1].attributes
    assert [*auto.RecentSpans(recent)] == [*recent]


def test_one_span_above_the_bound_keeps_no_text() -> None:
    recent = auto.RecentSpans()
    recent.append(span(0, auto.KEPT_BYTES + 1))
    recent.append(span(1, 5))
    assert [semconv.INPUT_MESSAGES in s.attributes for s in recent] == [False, True]


def test_the_texts_of_events_count() -> None:
    event = Event("exception", 0.0, {"exception.stacktrace": "y" * 100})
    assert text_bytes(Span("a" * 32, "b" * 16, None, "ro", 1, "n", 0.0, 1.0, "error", "why", {}, (event,))) == 103
    assert bounds.text_bytes(span(0, 5)) == 9

"""Sends finished spans from a process while it runs, in a background thread that never blocks the program."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from agl.mdp.spans import Span
from agl.tracing.batches import BATCH_BYTES, BATCH_SPANS, Outbox, text_bytes

WAITING_SPANS = 20_000
WAITING_BYTES = 512 * 1024 * 1024
"""Spans that may wait, and the bytes of their texts; further ones are dropped, which is reported once."""
RETRIES = (0.1, 0.5, 2.0)
"""Seconds between the attempts to send a batch."""
EXIT_SECONDS = 10.0
"""How long the program's exit waits for the next of the last spans to be sent."""
MOST_EXIT_SECONDS = 60.0
"""How long it waits for all of them."""
REPORTED = 5
"""Losses that are reported one by one."""

T = TypeVar("T")


class SpanSink(Protocol):
    """The destination of spans. Made and used in the exporter's thread."""

    def send(self, spans: Sequence[Span]) -> None:
        """Send spans; returns when they are stored.

        Raises:
            OSError: the destination cannot be reached now. Any other exception: these spans are not taken, though fewer
                of them may be.
        """
        ...

    def finish(self, error: str | None) -> None:
        """The program has ended, with this error if any; no span follows."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    """Queued after the last span: the program has ended, with this error if any."""

    error: str | None


class BackgroundSpanExporter:
    """Exports the spans of this process, and of every process forked from it.

    Args:
        open_sink: makes the sink, in the thread that uses it, when there is something to send.
        report: called once for each reason for which spans are lost; after `REPORTED` only once more, at the end.
    """

    def __init__(self, open_sink: Callable[[], SpanSink], report: Callable[[str], None]) -> None:
        self._open_sink = open_sink
        self._report = report
        self.owner = os.getpid()
        self._reset()
        os.register_at_fork(after_in_child=self._after_fork)

    def _reset(self) -> None:
        self._queue: queue.Queue[Span | _End] = queue.Queue(WAITING_SPANS)
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._unsent = 0
        self._waiting_bytes = 0
        self._reachable = True
        self._sink: SpanSink | None = None
        self._thread: threading.Thread | None = None
        self._losses: set[str] = set()

    def put(self, item: Span | _End) -> None:
        """Queue a span; does not block."""
        self._start()
        size = _size(item)
        with self._idle:
            full = size > 0 and self._waiting_bytes > 0 and self._waiting_bytes + size > WAITING_BYTES
            self._unsent += 1
            self._waiting_bytes += size
        try:
            if full:
                raise queue.Full
            self._queue.put_nowait(item)
        except queue.Full:
            self._sent([item])
            self._lost(f"more than {WAITING_SPANS} spans, or {WAITING_BYTES} bytes of them, wait to be sent")

    def flush(self, seconds: float = EXIT_SECONDS) -> bool:
        """Wait until every span is sent or given up; False if for so long none is, or `MOST_EXIT_SECONDS` are over."""
        deadline = time.monotonic() + MOST_EXIT_SECONDS
        with self._idle:
            while left := self._unsent:
                wait = min(seconds, deadline - time.monotonic())
                if wait <= 0 or not self._idle.wait_for(lambda left=left: self._unsent < left, wait):
                    return False
        return True

    def finish(self, error: str | None) -> None:
        """Send the remaining spans and, in the process that made this exporter, the program's end."""
        if self.owner == os.getpid():
            self.put(_End(error))
        if not self.flush():
            self._lost(f"the last {self._unsent} spans could not be sent in time")
        if len(self._losses) > REPORTED:
            self._report(f"{len(self._losses)} losses in all")

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name="agl-spans", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the interpreter is ending
                self._lost(str(error))

    def _work(self) -> None:
        while True:
            items = [self._queue.get()]
            size = _size(items[0])
            while len(items) < BATCH_SPANS and size < BATCH_BYTES:
                try:
                    items.append(self._queue.get_nowait())
                except queue.Empty:
                    break
                size += _size(items[-1])
            try:
                self._send([item for item in items if isinstance(item, Span)])
                for item in items:
                    if isinstance(item, _End) and self._sink is not None:
                        self._sink.finish(item.error)
            except Exception as error:
                self._lost(str(error) or type(error).__name__)
            self._sent(items)

    def _send(self, spans: list[Span]) -> None:
        outbox = Outbox(spans)
        while batch := outbox.next():
            try:
                self._reached(lambda batch=batch: self._open().send(batch))
            except OSError:
                raise
            except Exception as error:
                if self._sink is None:
                    raise
                outbox.refused(batch, error)
        for why in outbox.lost:
            self._lost(why)

    def _open(self) -> SpanSink:
        if self._sink is None:
            self._sink = self._open_sink()
        return self._sink

    def _reached(self, call: Callable[[], T]) -> T:
        """The result of a call to the destination, which is repeated while that cannot be reached. One that could not
        be reached before is tried once: a program does not wait for it at its end."""
        for pause in RETRIES if self._reachable else ():
            try:
                return call()
            except OSError:
                time.sleep(pause)
        try:
            result = call()
        except OSError:
            self._reachable = False
            raise
        self._reachable = True
        return result

    def _sent(self, items: Sequence[Span | _End]) -> None:
        with self._idle:
            self._unsent -= len(items)
            self._waiting_bytes -= sum(map(_size, items))
            self._idle.notify_all()

    def _lost(self, why: str) -> None:
        if why not in self._losses:
            self._losses.add(why)
            if len(self._losses) <= REPORTED:
                self._report(why)

    def _after_fork(self) -> None:
        """In a forked child: the parent's threads do not exist here, and the parent sends its own spans."""
        self._reset()
        # A child of `multiprocessing` exits without running `atexit` callbacks.
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, lambda exporter: util.Finalize(exporter, exporter.flush, exitpriority=0))


def _size(item: Span | _End) -> int:
    return text_bytes(item) if isinstance(item, Span) else 0

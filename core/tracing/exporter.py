"""Sends finished spans from a process while it runs: at once, in a thread of its own, never in the program's way."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agl.mdp.spans import Span

WAITING_SPANS = 20_000
"""How many spans may wait; what comes beyond is dropped and counted."""
BATCH = 256
RETRIES = (0.1, 0.5, 2.0)
"""Seconds between the tries to send a batch."""
LEAVE_SECONDS = 10.0
"""How long the end of the program waits for the last spans."""


class SpanSink(Protocol):
    """Where spans go. Made and used in the outbox's thread."""

    def send(self, spans: Sequence[Span]) -> None:
        """Returns when they are kept."""
        ...

    def finish(self, error: str | None) -> None:
        """The program has ended, with this error; nothing comes after."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    """The end of the program, behind its last span."""

    error: str | None


class BackgroundSpanExporter:
    """Spans on their way out of this process, and of every process forked from it.

    Args:
        open_sink: makes the sink, in the thread that uses it and not before there is something to send.
        report: is told, once, that spans are lost and why.
    """

    def __init__(self, open_sink: Callable[[], SpanSink], report: Callable[[str], None]) -> None:
        self._open_sink, self._report = open_sink, report
        self.owner = os.getpid()
        self._fresh()
        os.register_at_fork(after_in_child=self._forked)

    def _fresh(self) -> None:
        self._queue: queue.Queue[Span | _End] = queue.Queue(WAITING_SPANS)
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._unsent = 0
        self._sink: SpanSink | None = None
        self._thread: threading.Thread | None = None
        self._reported = False

    def put(self, span: Span) -> None:
        """Send a span; does not wait."""
        self._put(span)

    def _put(self, item: Span | _End) -> None:
        self._start()
        with self._idle:
            self._unsent += 1
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._sent(1)
            self._lost(f"more than {WAITING_SPANS} spans wait to be sent")

    def flush(self, seconds: float = LEAVE_SECONDS) -> bool:
        """Wait until everything is sent or given up; False if that took too long."""
        with self._idle:
            return self._idle.wait_for(lambda: self._unsent == 0, seconds)

    def finish(self, error: str | None) -> None:
        """Send what is left and, in the process that began it, say how the program ended."""
        if self.owner == os.getpid():
            self._put(_End(error))
        if not self.flush():
            self._lost(f"the last spans could not be sent within {LEAVE_SECONDS:g} s")

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
            while len(items) < BATCH:
                try:
                    items.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            try:
                self._send([item for item in items if isinstance(item, Span)])
                for item in items:
                    if isinstance(item, _End) and self._sink is not None:
                        self._sink.finish(item.error)
            except Exception as error:
                self._lost(str(error) or type(error).__name__)
            self._sent(len(items))

    def _send(self, batch: list[Span]) -> None:
        for pause in (*RETRIES, None) if batch else ():
            try:
                if self._sink is None:
                    self._sink = self._open_sink()
                self._sink.send(batch)
                return
            except OSError:
                if pause is None:
                    raise
                time.sleep(pause)

    def _sent(self, n: int) -> None:
        with self._idle:
            self._unsent -= n
            self._idle.notify_all()

    def _lost(self, why: str) -> None:
        if not self._reported:
            self._reported = True
            self._report(why)

    def _forked(self) -> None:
        """In a forked child nothing of the parent's threads is left, and its spans are the parent's to send."""
        self._fresh()
        # A child of `multiprocessing` ends without running what `atexit` holds.
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, lambda outbox: util.Finalize(outbox, outbox.flush, exitpriority=0))

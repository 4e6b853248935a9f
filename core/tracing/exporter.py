"""Sends finished spans from a process while it runs, in a background thread that never blocks the program."""

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
"""Spans that may wait; further ones are dropped, which is reported once."""
BATCH = 256
RETRIES = (0.1, 0.5, 2.0)
"""Seconds between the attempts to send a batch."""
EXIT_SECONDS = 10.0
"""How long the program's exit waits for the last spans."""


class SpanSink(Protocol):
    """The destination of spans. Made and used in the exporter's thread."""

    def send(self, spans: Sequence[Span]) -> None:
        """Send spans; returns when they are stored."""
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
        report: called once with the reason when spans are lost.
    """

    def __init__(self, open_sink: Callable[[], SpanSink], report: Callable[[str], None]) -> None:
        self._open_sink, self._report = open_sink, report
        self.owner = os.getpid()
        self._reset()
        os.register_at_fork(after_in_child=self._after_fork)

    def _reset(self) -> None:
        self._queue: queue.Queue[Span | _End] = queue.Queue(WAITING_SPANS)
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._unsent = 0
        self._sink: SpanSink | None = None
        self._thread: threading.Thread | None = None
        self._reported = False

    def put(self, item: Span | _End) -> None:
        """Queue a span; does not block."""
        self._start()
        with self._idle:
            self._unsent += 1
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._sent(1)
            self._lost(f"more than {WAITING_SPANS} spans wait to be sent")

    def flush(self, seconds: float = EXIT_SECONDS) -> bool:
        """Wait until every span is sent or given up; False if that takes longer."""
        with self._idle:
            return self._idle.wait_for(lambda: self._unsent == 0, seconds)

    def finish(self, error: str | None) -> None:
        """Send the remaining spans and, in the process that made this exporter, the program's end."""
        if self.owner == os.getpid():
            self.put(_End(error))
        if not self.flush():
            self._lost(f"the last spans could not be sent within {EXIT_SECONDS:g} s")

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

    def _after_fork(self) -> None:
        """In a forked child: the parent's threads do not exist here, and the parent sends its own spans."""
        self._reset()
        # A child of `multiprocessing` exits without running `atexit` callbacks.
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, lambda exporter: util.Finalize(exporter, exporter.flush, exitpriority=0))

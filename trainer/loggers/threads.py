"""Loggers in separate threads: whatever a tracker does, the run keeps its pace.

Invariant: nothing here waits for a logger but `close`, and that for a bounded time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agl.surroundings import start_thread
from agl.trainer.loggers.base import Logger, Sample
from agl.trainer.loggers.choose import name_of, samples_of

MAX_WAITING = 256
"""Steps that may wait for a logger before the oldest is dropped."""
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for loggers that have something left, all together."""


class LoggerThread:
    """One logger and the thread that calls it.

    Args:
        logger: whatever has the methods of `Logger`.
    """

    def __init__(self, logger: Logger) -> None:
        self.name, self.samples = name_of(logger), samples_of(logger)
        self._logger = logger
        self._calls: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._changed = threading.Condition()
        self._notes: list[str] = []
        self._dropped = 0
        self._over = False
        self._began: float | None = None
        self._thread: threading.Thread | None = None

    def call(self, method: str, *args: Any) -> None:
        """Have a method called after those that wait; of too many steps the oldest is dropped."""
        with self._changed:
            if self._over:
                return
            if self._thread is None:
                self._thread = start_thread(self._work, f"agl-log-{self.name}")
            steps = [call for call in self._calls if call[0] == "step"]
            if method == "step" and len(steps) >= MAX_WAITING:
                self._calls.remove(steps[0])
                self._dropped += 1
                if self._dropped == 1:
                    self._notes.append(
                        f"the logger {self.name} is slower than the run: of more than {MAX_WAITING} steps that wait "
                        "for it, the oldest are dropped"
                    )
            self._calls.append((method, args))
            self._changed.notify_all()

    def notes(self) -> list[str]:
        """Notes for the user since the last call."""
        with self._changed:
            notes = self._notes
            self._notes = []
        return notes

    def close(self, deadline: float) -> None:
        """Wait for the logger to end, at most until `deadline` (of `time.monotonic`); a timeout is noted."""
        with self._changed:
            # A call that has lasted this long already will not end in another half minute.
            while not self._over and (left := min(deadline, (self._began or deadline) + CLOSE_SECONDS)) > (
                now := time.monotonic()
            ):
                self._changed.wait(left - now)
            if not self._over:
                self._over = True
                waiting = sum(method == "step" for method, _ in self._calls)
                self._notes.append(f"the logger {self.name} did not end: {waiting} steps were not logged")
            elif self._dropped:
                self._notes.append(f"the logger {self.name} did not get {self._dropped} steps")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._began = None
                while not self._calls and not self._over:
                    self._changed.wait()
                if self._over:
                    return
                method, args = self._calls.popleft()
                self._began = time.monotonic()
            try:
                getattr(self._logger, method)(*args)
            except BaseException as error:  # SystemExit of a tracker must not end silently either
                self._finish(f"the logger {self.name} failed and is not called again: {type(error).__name__}: {error}")
                return
            if method == "end":
                self._finish(None)
                return

    def _finish(self, note: str | None) -> None:
        with self._changed:
            self._over = True
            self._calls.clear()
            if note is not None:
                self._notes.append(note)
            self._changed.notify_all()


class Loggers:
    """All loggers of one run.

    Args:
        loggers: of the run; none is fine.
    """

    def __init__(self, loggers: Iterable[Logger] = ()) -> None:
        self._threads = [LoggerThread(logger) for logger in loggers]
        self._started = False

    @property
    def samples(self) -> int:
        """The most rollouts of a step that any logger asks for."""
        return max((thread.samples for thread in self._threads), default=0)

    def start(self, run_id: str, config: Mapping[str, Any], resumed_from: int | None) -> None:
        """As `Logger.start`."""
        self._started = True
        for thread in self._threads:
            thread.call("start", run_id, config, resumed_from)

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """As `Logger.step`; each logger gets as many samples as it asks for."""
        if self._started:
            for thread in self._threads:
                thread.call("step", step, metrics, samples[: thread.samples])

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        """As `Logger.end`; waits until all have ended, at most `CLOSE_SECONDS`."""
        if not self._started:
            return
        for thread in self._threads:
            thread.call("end", status, summary)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.close(deadline)

    def notes(self) -> list[str]:
        """Notes for the user since the last call."""
        return [note for thread in self._threads for note in thread.notes()]

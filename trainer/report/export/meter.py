"""Progress of an export (count, rate, time left): a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agl.trainer.report import terminal

LINE_SECONDS = 5.0


class Meter:
    """Counts exported rollouts; a context manager.

    Args:
        total: number of rollouts. quiet: no output. console: for the output; stderr if None.
    """

    def __init__(self, total: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.total, self.done = total, 0
        self.console = console or terminal.console(stderr=True)
        self._quiet = quiet
        self._started = self._last = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Meter:
        if self.console.is_terminal and not self._quiet:
            self._bar = Progress(
                TextColumn("[bold]rollouts"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[rate]:.0f}/s"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=self.console,
                transient=True,
            )
            self._task = self._bar.add_task("export", total=self.total, rate=0.0)
            self._bar.start()
        return self

    def add(self) -> None:
        """Count one more rollout."""
        self.done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, rate=self.rate)
        elif not self._quiet and now - self._last > LINE_SECONDS:
            self._last = now
            left = round((self.total - self.done) / self.rate)
            self.console.print(
                f"{self.done}/{self.total} rollouts · {self.rate:.0f}/s · ETA {left // 60}:{left % 60:02d}"
            )

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def rate(self) -> float:
        """Rollouts per second."""
        return self.done / max(self.seconds, 1e-9)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

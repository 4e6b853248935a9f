"""A run's progress on the screen: step, reward, rate and time left; a bar on a terminal or in a notebook, lines
elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.status import Status

from agl.trainer.report import terminal

LINE_SECONDS = 2.0
STEP_SECONDS = 30.0
"""Between two lines where there is no bar; and between two lines of a step's rollouts."""


class Progress:
    """Progress of one run: of its steps, or of its rollouts where nothing is trained or they are exported.

    Args:
        enabled: False prints nothing.
        console: where to; stderr if None.
        label: what is measured, where nothing is trained; the purpose of the rollouts if "".
    """

    def __init__(self, enabled: bool = True, console: Console | None = None, label: str = "") -> None:
        self.enabled = enabled
        self.label = label
        self.console = console or terminal.console(stderr=True)
        self._bar: Bar | None = None
        self._task: Any = None
        self._status: Status | None = None
        self._started = time.monotonic()
        self._steps = self._first_step = self._rollouts = self._failed = self._expected = 0
        self._unit = "step"
        self._doing = self._loaded = self._facts = ""
        self._last_line = 0.0

    def loading(self, text: str) -> None:
        """A policy is being loaded; `text` says how far."""
        if not self.enabled:
            return
        if self.console.is_terminal:
            if self._status is None:
                self._status = self.console.status("")
                self._status.start()
            self._status.update(escape(text))
        elif not self._last_line:
            # Most models are there in a few seconds.
            self._last_line = time.monotonic()
        elif text != self._loaded and time.monotonic() - self._last_line > LINE_SECONDS:
            self._loaded, self._last_line = text, time.monotonic()
            self.console.print(escape(text))

    def start(self, steps: int, first_step: int = 0, *, unit: str = "step") -> None:
        """Training begins, or a search: `steps` in all, `first_step` of them done. `unit`: what they are."""
        self._steps, self._first_step, self._started, self._unit = steps, first_step, time.monotonic(), unit
        self._open(unit, steps, first_step)

    def began(self, mode: str, step: int, rollouts: int) -> None:
        """Rollouts were enqueued."""
        self._rollouts = 0
        self._failed = 0
        self._expected = rollouts
        self._doing = {"train": "rollouts", "val": "validation"}.get(mode, mode)
        if not self._steps:
            self._started = self._last_line = time.monotonic()
            self._open(self.label or self._doing, rollouts)

    def count(self, *, failed: bool = False) -> None:
        """One more of the rollouts is done."""
        self._rollouts += 1
        self._failed += failed
        done = self._rollouts
        total = self._expected
        if not self._steps:
            self._show(self.label or self._doing, done, total, f"failed {self._failed}" if self._failed else "")
            if done == total:
                self.stop()
        else:
            # Of rollouts that run ahead, some count before those that a step waits for.
            doing = f"{self._doing} {min(done, total)}/{total}"
            now = time.monotonic()
            if self._bar is not None and done % 8 == 0:
                self._bar.update(self._task, facts=f"{self._facts} · {doing}")
            elif self._bar is None and self.enabled and now - max(self._last_line, self._started) > STEP_SECONDS:
                self._last_line = now
                self.console.print(f"  {doing}")

    def _open(self, title: str, total: int, done: int = 0) -> None:
        self.stop()
        # In a notebook rich draws with ipywidgets.
        live = self.console.is_terminal or (self.console.is_jupyter and find_spec("ipywidgets") is not None)
        if self.enabled and live:
            self._bar = Bar(
                TextColumn("[bold]{task.description}"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=self.console,
            )
            self._task = self._bar.add_task(escape(title), total=total, completed=done, facts="")
            self._bar.start()

    def _show(self, title: str, done: int, total: int, facts: str, *, first: int = 0, important: bool = False) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, facts=facts)
        elif self.enabled and (now - self._last_line > LINE_SECONDS or done == total or important):
            self._last_line = now
            left = round((now - self._started) / max(1, done - first) * max(0, total - done))
            parts = [f"{title} {done}/{total}", *filter(None, [facts]), f"ETA {left // 60}:{left % 60:02d}"]
            self.console.print(" · ".join(parts))

    def step(self, entry: dict[str, Any]) -> None:
        """A step ended."""
        shown = (
            ("train/reward", "reward"),
            ("train/reverse_kl", "reverse KL"),
            ("learner/nll", "nll"),
            ("learner/reward_margin", "margin"),
            ("val/reward", "val"),
        )
        parts = [f"{name} {entry[key]:.3f}" for key, name in shown if key in entry]
        if entry.get("train/dropped_groups"):
            parts.append(f"dropped {entry['train/dropped_groups']} groups")
        if entry.get("train/failed_rollouts"):
            parts.append(f"failed {entry['train/failed_rollouts']}")
        if entry.get("train/policy_faults"):
            parts.append(f"ended by the policy {entry['train/policy_faults']}")
        if "rollouts_per_second" in entry:
            parts.append(f"{entry['rollouts_per_second']:.0f} rollouts/s")
        elif "train/tokens" in entry:
            parts.append(f"{entry['train/tokens'] / max(1e-9, entry['seconds']):,.0f} tokens/s")
        self.advance(entry["step"], parts, important="val/reward" in entry)

    def advance(self, done: int, facts: Sequence[str], *, important: bool = False) -> None:
        """`done` steps are done. `important`: print a line however little time has passed since the last one."""
        self._facts = " · ".join(facts)
        self._show(self._unit, done, self._steps, self._facts, first=self._first_step, important=important)

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        if self.enabled:
            (self._bar.console if self._bar is not None else self.console).print(text)

    def stop(self) -> None:
        """Remove the bar."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._bar is not None:
            self._bar.refresh()  # In a notebook its last state would not be drawn.
            self._bar.stop()
            self._bar = None

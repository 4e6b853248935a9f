"""The run's side of runners that people start on other machines: reports when none of them sends requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agl.errors import RolloutError
from agl.trainer.runners.coordinator import RunCoordinator

PATIENCE_SECONDS = 3600.0
"""How long a run waits for a runner before it ends; it can be resumed."""
FIRST_NOTE_SECONDS = 60.0
"""After what silence a run first reports that it waits for a runner; then each time the silence has doubled."""
CHECKS = 60
"""How often the silence is checked within the patience."""


class RemoteRunner:
    """A `Runner` whose rollouts are executed by `agl runner` processes; it only waits for them.

    Args:
        coordinator: where they lease rollouts.
        url: its address.
        waiting: returns how many rollouts wait for a runner.
        note: called with a text for the person at the terminal.
        on_failure: called when no runner was heard of for `patience` seconds while rollouts wait.
    """

    def __init__(
        self,
        coordinator: RunCoordinator,
        url: str,
        *,
        waiting: Callable[[], int],
        note: Callable[[str], None],
        on_failure: Callable[[BaseException], None],
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.coordinator = coordinator
        self.waiting = waiting
        self.note = note
        self.on_failure = on_failure
        self.patience = patience
        self._command = f"agl runner --store {url} --agent module:agent"
        self._watch_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to give up attempts of silent runners, and to report when there are no runners."""
        self.coordinator.watch()
        self.note(f"waiting for runners: {self._command}")
        self._watch_task = asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        """Stop watching. Idempotent."""
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)

    async def _watch(self) -> None:
        next_note = FIRST_NOTE_SECONDS
        while True:
            await asyncio.sleep(self.patience / CHECKS)
            silent = self.coordinator.silent_for()
            waiting = self.waiting()
            if not waiting or silent < FIRST_NOTE_SECONDS:
                next_note = FIRST_NOTE_SECONDS
            if waiting and silent >= self.patience:
                self.on_failure(
                    RolloutError(
                        f"no runner has been heard of for {silent:.0f} s, and {waiting} rollouts wait for one",
                        hint=f"start one ({self._command}) and resume the run: resume=True, --resume",
                    )
                )
                return
            if waiting and silent >= next_note:
                next_note *= 2
                self.note(f"no runner has been heard of for {silent:.0f} s; {waiting} rollouts wait: {self._command}")

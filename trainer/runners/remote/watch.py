"""Runners that others start on their machines: here it is only noticed when none of them is heard of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agl.errors import RolloutError
from agl.trainer.runners.coordinator import RunCoordinator

PATIENCE_SECONDS = 3600.0
"""How long a run waits for a runner before it ends; it can be gone on with."""
FIRST_NEWS_SECONDS = 60.0
LOOKS = 60


class RemoteRunner:
    """Waits for runners.

    Args:
        desk: that they come to. url: its address.
        waiting: how many rollouts wait for them. note: is told what a person should know.
        broken: called when none was heard of for `patience` seconds while rollouts wait.
    """

    def __init__(
        self,
        desk: RunCoordinator,
        url: str,
        *,
        waiting: Callable[[], int],
        note: Callable[[str], None],
        broken: Callable[[BaseException], None],
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.desk, self.waiting, self.note, self.broken, self.patience = desk, waiting, note, broken, patience
        self._how = f"agl runner --store {url} --agent module:agent"
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Give up attempts of runners that fall silent, and say so when there are none."""
        self.desk.watch()
        self.note(f"waiting for runners: {self._how}")
        self._watching = asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        """Stop looking. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        news = FIRST_NEWS_SECONDS
        while True:
            await asyncio.sleep(self.patience / LOOKS)
            silent, waiting = self.desk.silent_for(), self.waiting()
            if not waiting or silent < FIRST_NEWS_SECONDS:
                news = FIRST_NEWS_SECONDS
            if waiting and silent >= self.patience:
                self.broken(
                    RolloutError(
                        f"no runner has been heard of for {silent:.0f} s, and {waiting} rollouts wait for one",
                        hint=f"start one ({self._how}) and go on with the run: resume=True, --resume",
                    )
                )
                return
            if waiting and silent >= news:
                news *= 2
                self.note(f"no runner has been heard of for {silent:.0f} s; {waiting} rollouts wait: {self._how}")

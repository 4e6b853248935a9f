"""Who in this process waits for work, or for rollouts to end, and how they are woken."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from agl.trainer.store.base import NO_RUN
from agl.trainer.store.sql.dialect import Change

LOOK_SECONDS: Final = 30.0
"""How often somebody who waits looks by himself, should no bell reach him."""


class _Waiter:
    """One who waits, on the event loop where he was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self) -> bool:
        """From any thread. False when his loop was closed without cancelling him."""
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:
            return False
        return True

    async def rest(self, seconds: float) -> None:
        """Until he is woken, or `seconds` have passed."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()


class Seeker(_Waiter):
    """One who waits for a rollout to lease, of one run or, with None, of any."""

    def __init__(self, run_id: str | None) -> None:
        super().__init__()
        self.run_id = run_id
        self.rung = False
        self.scouts = False


class Watcher(_Waiter):
    """One who waits until all of some rollouts have ended."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        super().__init__()
        self.open = set(rollout_ids)


class Waiters:
    """All who wait for a store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # In the order in which they began to wait, so that none is passed over.
        self._seekers: dict[Seeker, None] = {}
        self._watchers: set[Watcher] = set()

    # -- for work -------------------------------------------------------------------------------------------------
    @contextmanager
    def seeking(self, run_id: str | None) -> Iterator[Seeker]:
        """Wait for work inside this."""
        seeker = Seeker(run_id)
        with self._lock:
            self._seekers[seeker] = None
        try:
            yield seeker
        finally:
            with self._lock:
                del self._seekers[seeker]
                unheard = seeker.rung
            if unheard:
                self._ring_one(run_id, scouts=seeker.scouts)

    async def rest(self, seeker: Seeker, seconds: float) -> None:
        """Until there may be work for him, or `seconds` have passed."""
        await seeker.rest(seconds)
        with self._lock:
            seeker.rung = False
            # Behind the others who wait.
            del self._seekers[seeker]
            self._seekers[seeker] = None

    def found(self, seeker: Seeker) -> None:
        """He has found work; if he was sent to see whether there is any, there may be more."""
        if seeker.scouts:
            self._ring_one(seeker.run_id, scouts=True)

    def _ring_one(self, run_id: str | None, *, scouts: bool) -> bool:
        with self._lock:
            for seeker in self._seekers:
                if not seeker.rung and seeker.run_id in (None, run_id) and seeker.wake():
                    seeker.rung, seeker.scouts = True, scouts
                    return True
        return False

    def _ring(self, queued: Mapping[str | None, int]) -> None:
        for run_id, count in queued.items():
            for _ in range(count):
                if not self._ring_one(NO_RUN if run_id is None else run_id, scouts=False):
                    break

    def _send_scouts(self) -> None:
        with self._lock:
            runs = {seeker.run_id for seeker in self._seekers}
        for run_id in runs:
            self._ring_one(run_id, scouts=True)

    # -- for ends -------------------------------------------------------------------------------------------------
    @contextmanager
    def watching(self, rollout_ids: Sequence[str]) -> Iterator[Watcher]:
        """Wait for ends inside this."""
        watcher = Watcher(rollout_ids)
        with self._lock:
            self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            with self._lock:
                self._watchers.discard(watcher)

    def _end(self, ended: Sequence[str]) -> None:
        with self._lock:
            for watcher in self._watchers:
                before = len(watcher.open)
                watcher.open.difference_update(ended)
                if before and not watcher.open:
                    watcher.wake()

    # -- both -----------------------------------------------------------------------------------------------------
    def changed(self, change: Change | None) -> None:
        """Wake those whom a change concerns; None for a change of which nothing is known. From any thread."""
        if change is not None:
            self._ring(change.queued)
            self._end(change.ended)
            return
        self._send_scouts()
        with self._lock:
            for watcher in self._watchers:
                watcher.wake()

    def wake_all(self) -> None:
        """Wake everybody, since the store was closed."""
        with self._lock:
            for waiter in (*self._seekers, *self._watchers):
                waiter.wake()

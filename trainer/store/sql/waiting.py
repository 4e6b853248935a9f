"""Which callers in this process wait for work or for rollouts to end, and how they are woken."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from agl.trainer.store.sql.dialect import Change
from agl.trainer.store.types import NO_RUN

LOOK_SECONDS: Final = 30.0
"""How often a waiting caller looks without having been woken, in case a notification was lost."""


class _Waiter:
    """A caller that waits, on the event loop where this was created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self) -> bool:
        """Wake the caller, from any thread. False if its loop was closed without cancelling it."""
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:
            return False
        return True

    async def sleep(self, seconds: float) -> None:
        """Sleep until woken, or until `seconds` have passed."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()


class WorkWaiter(_Waiter):
    """Waits for a rollout to lease.

    Attributes:
        run_id: the run whose rollouts are leased; None for any.
        notified: whether it was woken and has not looked since.
        probing: whether it was woken only to see whether there is work. If it leases a rollout there may be more, and
            the next one is woken.
    """

    def __init__(self, run_id: str | None) -> None:
        super().__init__()
        self.run_id = run_id
        self.notified = False
        self.probing = False


class EndWaiter(_Waiter):
    """Waits until all of some rollouts have ended. Attributes: open: those that have not."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        super().__init__()
        self.open = set(rollout_ids)


class Waiters:
    """All callers that wait for a store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # In the order in which they began to wait, so that none is passed over.
        self._for_work: dict[WorkWaiter, None] = {}
        self._for_ends: set[EndWaiter] = set()

    # -- for work -------------------------------------------------------------------------------------------------
    @contextmanager
    def waiting_for_work(self, run_id: str | None) -> Iterator[WorkWaiter]:
        """A waiter that is woken for rollouts of that run, registered within the block."""
        waiter = WorkWaiter(run_id)
        with self._lock:
            self._for_work[waiter] = None
        try:
            yield waiter
        finally:
            with self._lock:
                del self._for_work[waiter]
                unused = waiter.notified
            if unused:
                self._notify_one(run_id, probing=waiter.probing)

    async def sleep(self, waiter: WorkWaiter, seconds: float) -> None:
        """Sleep until there may be work for this waiter, or until `seconds` have passed."""
        await waiter.sleep(seconds)
        with self._lock:
            waiter.notified = False
            # Behind the others.
            del self._for_work[waiter]
            self._for_work[waiter] = None

    def leased(self, waiter: WorkWaiter) -> None:
        """Note that a waiter has leased a rollout."""
        if waiter.probing:
            self._notify_one(waiter.run_id, probing=True)

    def _notify_one(self, run_id: str | None, *, probing: bool) -> bool:
        with self._lock:
            for waiter in self._for_work:
                if not waiter.notified and waiter.run_id in (None, run_id) and waiter.wake():
                    waiter.notified = True
                    waiter.probing = probing
                    return True
        return False

    # -- for ends -------------------------------------------------------------------------------------------------
    @contextmanager
    def waiting_for_ends(self, rollout_ids: Sequence[str]) -> Iterator[EndWaiter]:
        """A waiter that is woken when all of these rollouts have ended, registered within the block."""
        waiter = EndWaiter(rollout_ids)
        with self._lock:
            self._for_ends.add(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._for_ends.discard(waiter)

    # -- both -----------------------------------------------------------------------------------------------------
    def notify(self, change: Change | None) -> None:
        """Wake the waiters that a change concerns; None for a change without details. From any thread."""
        if change is not None:
            for run_id, count in change.queued.items():
                for _ in range(count):
                    if not self._notify_one(NO_RUN if run_id is None else run_id, probing=False):
                        break
            with self._lock:
                for waiter in self._for_ends:
                    before = len(waiter.open)
                    waiter.open.difference_update(change.ended)
                    if before and not waiter.open:
                        waiter.wake()
            return
        with self._lock:
            for waiter in self._for_ends:
                waiter.wake()
            runs = {waiter.run_id for waiter in self._for_work}
        # One waiter of each run sees whether there is work.
        for run_id in runs:
            self._notify_one(run_id, probing=True)

    def wake_all(self) -> None:
        """Wake every waiter, since the store was closed."""
        with self._lock:
            for waiter in (*self._for_work, *self._for_ends):
                waiter.wake()

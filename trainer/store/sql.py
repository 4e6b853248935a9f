"""`SqlStore`: the store on a SQL database. What a method has returned is committed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agl.mdp import Call
from agl.spans import Span
from agl.trainer.store import dialect, records
from agl.trainer.store import rollouts as lives
from agl.trainer.store.base import (
    ROLLOUT_TERMINAL,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Mode,
    NewRollout,
    Rollout,
    RolloutStatus,
    TrainedCall,
)
from agl.trainer.store.database import Database

POLL_SECONDS = 1.0
"""How often a waiter looks by itself: rollouts that end in this process wake it at once, those of others do not."""

LEASE_POLL_SECONDS = 0.1
"""How often a worker that waits looks for work."""


class _Waiter:
    """Somebody who waits for rollouts to end."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        self.loop = asyncio.get_running_loop()
        self.open = set(rollout_ids)
        self.all_ended = asyncio.Event()

    def end(self, rollout_id: str) -> None:
        """Note one that has ended. On the waiter's loop."""
        self.open.discard(rollout_id)
        if not self.open:
            self.all_ended.set()


class SqlStore:
    """A `Store` on a SQLite file, which several processes may share, or on a private database in memory."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiters: set[_Waiter] = set()
        self._waiters_lock = threading.Lock()

    @classmethod
    async def open(cls, path: str = dialect.MEMORY) -> SqlStore:
        """Open a file, made if it is not there.

        Raises:
            StoreVersionError: a newer version of agl wrote it.
            StoreError: it cannot be opened, or is not an agl store.
        """
        database = Database(path)
        await database.open()
        return cls(database)

    # -- rollouts and attempts ------------------------------------------------------------------------------------
    async def enqueue_rollouts(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        now = time.time()
        return await self._database.write(lambda c: lives.enqueue(c, rollouts, now))

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        *,
        run_id: str | None = None,
        wait: float = 0.0,
        request_id: str | None = None,
    ) -> AttemptedRollout | None:
        deadline = time.monotonic() + wait
        while (leased := await self._lease(worker_id, run_id, request_id)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await asyncio.sleep(min(LEASE_POLL_SECONDS, left))
        return leased

    async def _lease(
        self, worker_id: str | None, run_id: str | None, request_id: str | None
    ) -> AttemptedRollout | None:
        now = time.time()
        leased = self._database.write(lambda c: lives.dequeue(c, worker_id, run_id, request_id, now))
        try:
            return await asyncio.shield(leased)
        except asyncio.CancelledError:
            # A lease that nobody hears of would hold its rollout back for good.
            if (lease := await leased) is not None:
                await self._database.write(lambda c: lives.give_back(c, lease))
            raise

    async def give_back(self, request_id: str) -> None:
        await self._database.write(lambda c: lives.give_back_request(c, request_id))

    async def update_attempt(
        self, rollout_id: str, attempt: int, status: AttemptStatus, *, error: str | None = None
    ) -> Rollout:
        now = time.time()
        rollout = await self._database.write(lambda c: lives.move(c, rollout_id, attempt, status, error, now))
        if rollout.status in ROLLOUT_TERMINAL:
            self._wake([rollout_id])
        return rollout

    async def heartbeat(self, rollout_id: str, attempt: int) -> None:
        now = time.time()
        await self._database.write(lambda c: lives.beat(c, rollout_id, attempt, now))

    async def expire_attempts(self, now: float | None = None) -> list[Attempt]:
        at = time.time() if now is None else now
        given_up, ended = await self._database.write(lambda c: lives.expire(c, at))
        self._wake(ended)
        return given_up

    async def cancel_rollouts(self, rollout_ids: Sequence[str]) -> None:
        now = time.time()
        await self._database.write(lambda c: lives.cancel(c, rollout_ids, now))
        self._wake(rollout_ids)

    async def get_rollout(self, rollout_id: str) -> Rollout:
        return await self._database.read(lambda c: lives.get(c, rollout_id))

    async def query_rollouts(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        mode: Mode | None = None,
        status: Sequence[RolloutStatus] | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        return await self._database.read(lambda c: lives.query(c, run_id, step, mode, status, limit))

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        return await self._database.read(lambda c: lives.query_attempts(c, rollout_id))

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        deadline = None if timeout is None else time.monotonic() + timeout
        waiter = _Waiter(rollout_ids)
        # Registered before the first look, so that none can end unseen in between.
        with self._waiters_lock:
            self._waiters.add(waiter)
        try:
            while True:
                look = list(waiter.open)
                found = await self._database.read(lambda c, ids=look: lives.statuses(c, ids))
                for rollout_id, status in found.items():
                    if status in ROLLOUT_TERMINAL:
                        waiter.end(rollout_id)
                left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
                if not waiter.open or left <= 0:
                    break
                try:
                    await asyncio.wait_for(waiter.all_ended.wait(), min(POLL_SECONDS, left))
                    break
                except TimeoutError:
                    continue
        finally:
            with self._waiters_lock:
                self._waiters.discard(waiter)
        ended = [rollout_id for rollout_id in rollout_ids if rollout_id not in waiter.open]
        return await self._database.read(lambda c: lives.load(c, ended))

    def _wake(self, ended: Sequence[str]) -> None:
        with self._waiters_lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            for rollout_id in ended:
                try:
                    waiter.loop.call_soon_threadsafe(waiter.end, rollout_id)
                except RuntimeError:
                    # Its loop was closed without cancelling it.
                    break

    # -- calls and spans ------------------------------------------------------------------------------------------
    async def add_calls(self, calls: Sequence[Call]) -> None:
        await self._database.write(lambda c: records.add_calls(c, calls))

    async def query_calls(self, rollout_id: str, attempt: int | None = None) -> list[Call]:
        return await self._database.read(lambda c: records.query_calls(c, rollout_id, attempt))

    async def add_spans(self, spans: Sequence[Span]) -> None:
        await self._database.write(lambda c: records.add_spans(c, spans))

    async def query_spans(self, rollout_id: str, attempt: int | None = None) -> list[Span]:
        return await self._database.read(lambda c: records.query_spans(c, rollout_id, attempt))

    # -- resources, policies, training ----------------------------------------------------------------------------
    async def update_resources(self, resources: Mapping[str, Any], *, resources_id: str | None = None) -> str:
        now = time.time()
        return await self._database.write(lambda c: records.add_resources(c, resources, resources_id, now))

    async def get_resources(self, resources_id: str | None = None) -> tuple[str, Mapping[str, Any]] | None:
        return await self._database.read(lambda c: records.get_resources(c, resources_id))

    async def add_policy_version(
        self, run_id: str, policy: str, version: int, step: int, checkpoint: str | None = None
    ) -> None:
        row = {
            "run_id": run_id,
            "policy": policy,
            "version": version,
            "step": step,
            "checkpoint": checkpoint,
            "created_at": time.time(),
        }
        await self._database.write(lambda c: records.add_policy_version(c, row))

    async def add_trained_calls(self, run_id: str, rows: Sequence[TrainedCall]) -> None:
        await self._database.write(lambda c: records.add_trained(c, run_id, rows))

    async def query_trained_calls(self, rollout_id: str) -> list[TrainedCall]:
        return await self._database.read(lambda c: records.query_trained(c, rollout_id))

    async def close(self) -> None:
        """Finish what was submitted and release the file. Idempotent."""
        await self._database.close()

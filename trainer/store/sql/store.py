"""`SqlStore`: the store on a SQL database. What a method has returned is committed."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.trainer.store.base import (
    ROLLOUT_TERMINAL,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Mode,
    NewRollout,
    Pruned,
    Rollout,
    RolloutStatus,
    TrainedCall,
    new_rollout_id,
)
from agl.trainer.store.sql import pruning, records
from agl.trainer.store.sql import rollouts as lives
from agl.trainer.store.sql.clock import Clock, Observer
from agl.trainer.store.sql.database import Database
from agl.trainer.store.sql.dialect import Change, Dialect, Watch
from agl.trainer.store.sql.waiting import LOOK_SECONDS, Waiters


class SqlStore:
    """A `Store` on SQLite (a file that several processes may share, or private memory) or PostgreSQL."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._clock = database.clock
        self._observer = Observer(self._clock.steady)
        self._waiters = Waiters()
        self._watch: Watch | None = None
        self._watches = False

    @classmethod
    async def open(cls, dialect: Dialect, clock: Clock | None = None) -> SqlStore:
        """Open a database; the tables are made if they are not there.

        Raises:
            StoreVersionError: a newer version of agl wrote it.
            StoreError: it cannot be opened, or is not an agl store.
        """
        database = Database(dialect, clock)
        await database.open()
        return cls(database)

    async def _change(self, operation: Callable[[Connection], tuple[Any, Change]]) -> Any:
        """Write, and wake whoever waits for what it did: here when it is committed, elsewhere by the database."""

        def announced(connection: Connection) -> tuple[Any, Change]:
            result, change = operation(connection)
            if change:
                self._database.dialect.announce(connection, change)
            return result, change

        result, change = await self._database.write(announced)
        if change:
            self._waiters.changed(change)
        return result

    def _watch_others(self) -> None:
        # Most stores are never waited for, and need no thread that watches.
        if not self._watches:
            self._watches = True
            self._watch = self._database.dialect.watch(self._waiters.changed)

    # -- rollouts and attempts ------------------------------------------------------------------------------------
    async def enqueue_rollouts(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        now = self._clock.now()
        # Named here, so that the operation can be run twice.
        named = [r if r.rollout_id else dataclasses.replace(r, rollout_id=new_rollout_id()) for r in rollouts]

        def enqueue(connection: Connection) -> tuple[list[Rollout], Change]:
            stored = lives.enqueue(connection, named, now)
            return stored, Change(Counter(r.run_id for r in stored if r.status == "queuing"))

        return await self._change(enqueue)

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        *,
        run_id: str | None = None,
        wait: float = 0.0,
        request_id: str | None = None,
    ) -> AttemptedRollout | None:
        leased = await self._lease(worker_id, run_id, request_id)
        if leased is not None or wait <= 0:
            return leased
        self._watch_others()
        deadline = time.monotonic() + wait
        with self._waiters.seeking(run_id) as seeker:
            while True:
                # Looked for again, now that whatever is queued rings.
                leased = await self._lease(worker_id, run_id, request_id)
                if leased is not None:
                    self._waiters.found(seeker)
                    return leased
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                await self._waiters.rest(seeker, min(left, LOOK_SECONDS))

    async def _lease(
        self, worker_id: str | None, run_id: str | None, request_id: str | None
    ) -> AttemptedRollout | None:
        now = self._clock.now()
        request, repeated = request_id or uuid.uuid4().hex, request_id is not None

        def lease(connection: Connection) -> AttemptedRollout | None:
            nonlocal repeated
            found = lives.dequeue(connection, worker_id, run_id, request, repeated, now)
            # Run again because the connection broke, it may have leased one already.
            repeated = True
            return found

        leased = self._database.write(lease)
        try:
            return await asyncio.shield(leased)
        except asyncio.CancelledError:
            # A lease that nobody hears of would hold its rollout back for good.
            if (lost := await leased) is not None:
                await self._change(lambda c: (None, _queued(lost.rollout, lives.give_back(c, lost))))
            raise

    async def give_back(self, request_id: str) -> None:
        def undo(connection: Connection) -> tuple[None, Change]:
            undone = lives.give_back_request(connection, request_id)
            return None, Change() if undone is None else _queued(undone, True)

        await self._change(undo)

    async def update_attempt(
        self, rollout_id: str, attempt: int, status: AttemptStatus, *, error: str | None = None
    ) -> Rollout:
        now = self._clock.now()

        def move(connection: Connection) -> tuple[Rollout, Change]:
            rollout = lives.move(connection, rollout_id, attempt, status, error, now)
            return rollout, _followed([rollout])

        return await self._change(move)

    async def heartbeat(self, rollout_id: str, attempt: int) -> None:
        now = self._clock.now()
        await self._database.write(lambda c: lives.beat(c, rollout_id, attempt, now))

    async def expire_attempts(self, now: float | None = None) -> list[Attempt]:
        at = self._clock.now() if now is None else now
        observer = self._observer if now is None else None

        def expire(connection: Connection) -> tuple[list[Attempt], Change]:
            given_up, moved = lives.expire(connection, at, observer)
            return given_up, _followed(moved)

        return await self._change(expire)

    async def cancel_rollouts(self, rollout_ids: Sequence[str]) -> None:
        now = self._clock.now()

        def cancel(connection: Connection) -> tuple[None, Change]:
            lives.cancel(connection, rollout_ids, now)
            return None, Change(ended=rollout_ids)

        await self._change(cancel)

    async def get_rollout(self, rollout_id: str) -> Rollout:
        return await self._database.read(lambda c: lives.get(c, rollout_id))

    async def query_rollouts(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        mode: Mode | None = None,
        status: Sequence[RolloutStatus] | None = None,
        since: float | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        wanted = lives.Filter(run_id, step, mode, status, since)
        return await self._database.read(lambda c: lives.query(c, wanted, after, limit))

    async def count_rollouts(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        mode: Mode | None = None,
        status: Sequence[RolloutStatus] | None = None,
        since: float | None = None,
    ) -> int:
        wanted = lives.Filter(run_id, step, mode, status, since)
        return await self._database.read(lambda c: lives.count(c, wanted))

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        return await self._database.read(lambda c: lives.query_attempts(c, rollout_id))

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._watch_others()
        # Registered before the first look, so that none can end unseen in between.
        with self._waiters.watching(rollout_ids) as watcher:
            while True:
                look = list(watcher.open)
                found = await self._database.read(lambda c, ids=look: lives.statuses(c, ids))
                watcher.open.difference_update(i for i, status in found.items() if status in ROLLOUT_TERMINAL)
                left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
                if not watcher.open or left <= 0:
                    break
                await watcher.rest(min(left, LOOK_SECONDS))
                if not watcher.open:
                    break
        ended = [rollout_id for rollout_id in rollout_ids if rollout_id not in watcher.open]
        return await self._database.read(lambda c: lives.load(c, ended))

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
        now, version = self._clock.now(), resources_id or uuid.uuid4().hex
        return await self._database.write(lambda c: records.add_resources(c, version, resources, now))

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
            "created_at": self._clock.now(),
        }
        await self._database.write(lambda c: records.add_policy_version(c, row))

    async def add_trained_calls(self, run_id: str, rows: Sequence[TrainedCall]) -> None:
        await self._database.write(lambda c: records.add_trained(c, run_id, rows))

    async def query_trained_calls(self, rollout_id: str) -> list[TrainedCall]:
        return await self._database.read(lambda c: records.query_trained(c, rollout_id))

    # -- the store itself -----------------------------------------------------------------------------------------
    async def prune(self, before: float, *, run_ids: Sequence[str] | None = None) -> Pruned:
        total, cursor = Pruned(), 0
        while cursor is not None:
            deleted, cursor = await self._database.write(lambda c, seq=cursor: pruning.prune(c, before, run_ids, seq))
            total = total + deleted
        if total.rollouts:
            try:
                await asyncio.to_thread(self._database.dialect.compact)
            except Exception as error:
                raise self._database.dialect.store_error(error) from error
        return total

    async def close(self) -> None:
        """Finish what was submitted and release the database. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        await self._database.close()
        self._waiters.wake_all()


def _followed(rollouts: Sequence[Rollout]) -> Change:
    """What rollouts that were moved are now waited for as: work, or ended."""
    queued = Counter(rollout.run_id for rollout in rollouts if rollout.status == "queuing")
    return Change(queued, [rollout.rollout_id for rollout in rollouts if rollout.status in ROLLOUT_TERMINAL])


def _queued(rollout: Rollout, again: bool) -> Change:
    return Change({rollout.run_id: 1} if again else {})

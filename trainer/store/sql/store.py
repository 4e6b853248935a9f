"""`SqlStore`: the store on a SQL database. A write is committed before its method returns."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from sqlalchemy import Connection

from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.trainer.store.base import Store
from agl.trainer.store.sql import codec, memories, pruning, records, runs
from agl.trainer.store.sql import rollouts as lifecycle
from agl.trainer.store.sql.clock import Beginnings, Clock, Observer
from agl.trainer.store.sql.database import Database
from agl.trainer.store.sql.dialect import Change, Changed, Dialect, Watch
from agl.trainer.store.sql.waiting import LOOK_SECONDS, Waiters
from agl.trainer.store.types import (
    ROLLOUT_TERMINAL,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    MemoryEntry,
    MemoryId,
    NewRollout,
    Pruned,
    Rollout,
    TrainingRun,
    new_rollout_id,
)
from agl.trainer.wire.forwarding import forwarding

T = TypeVar("T")

SPANS_AT_A_TIME = 50
"""Spans of one rollout that are written before others have their turn."""

_READS: Mapping[str, Callable[..., Any]] = {
    "is_leased_with": lifecycle.is_leased_with,
    "get_rollout": lifecycle.get,
    "query_rollouts": lifecycle.query,
    "count_rollouts": lifecycle.count,
    "query_attempts": lifecycle.query_attempts,
    "query_open_attempts": lifecycle.query_open_attempts,
    "query_calls": records.query_calls,
    "query_trained_calls": records.query_trained,
    "get_resources": records.get_resources,
    "query_resources": records.query_resources,
    "query_notes": records.query_notes,
    "query_memories": memories.query,
    "query_runs": runs.query,
    "query_metrics": runs.query_metrics,
    "query_step": runs.query_step,
    "find_rollouts": runs.find_rollouts,
    "statistics": lifecycle.statistics,
}
_WRITES: Mapping[str, Callable[..., Any]] = {
    "put_note": records.put_note,
    "add_trained_calls": records.add_trained,
    "delete_metrics": runs.delete_metrics,
}


@forwarding(Store, (*_READS, *_WRITES))
class SqlStore(Store):
    """A `Store` on SQLite (a file that several processes may share, or private memory) or PostgreSQL.

    Methods that are not written here are functions of a connection and their arguments: `_READS`, `_WRITES`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._clock = database.clock
        self._observer = Observer(self._clock.steady)
        self._beginnings = Beginnings(self._clock.steady)
        self._waiters = Waiters()
        self._indexes = memories.Indexes()
        self._turns: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()
        self._watch: Watch | None = None
        self._watches = False

    @classmethod
    async def open(cls, dialect: Dialect, clock: Clock | None = None) -> SqlStore:
        """Open a database; its tables are created or upgraded.

        Raises:
            StoreVersionError: another version of agl made the database, whose tables this one does not read.
            StoreError: the database cannot be opened, or is not an agl store.
        """
        database = Database(dialect, clock)
        await database.open()
        return cls(database)

    async def _call(self, method: str, /, **arguments: Any) -> Any:
        if (function := _READS.get(method)) is not None:
            return await self._database.read(lambda c: function(c, **arguments))
        return await self._database.write(lambda c: _WRITES[method](c, **arguments))

    async def _changed(self, committed: asyncio.Future[Changed[T]]) -> T:
        """The result of a write, once callers here that wait for its change are woken."""
        changed = await committed
        if changed.change:
            self._waiters.notify(changed.change)
        return changed.result

    def _watch_others(self) -> None:
        # Most stores have no waiting callers, and need no thread that watches.
        if not self._watches:
            self._watches = True
            self._watch = self._database.dialect.watch(self._waiters.notify)

    # -- rollouts and attempts ------------------------------------------------------------------------------------
    async def enqueue_rollouts(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        now = self._clock.now()
        steady = self._clock.steady()
        # Ids are chosen before the operation, so that it can be run twice.
        new = [r if r.rollout_id else dataclasses.replace(r, rollout_id=new_rollout_id()) for r in rollouts]
        for r in new:
            ago = 0.0 if r.created_at is None else max(0.0, now - r.created_at)
            self._beginnings.began(r.rollout_id, steady - ago)

        return await self._changed(self._database.write_each(lifecycle.enqueue, lifecycle.Enqueued(new, now)))

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
        with self._waiters.waiting_for_work(run_id) as waiter:
            while True:
                # Again, since rollouts that were queued before the waiter was registered have not woken it.
                leased = await self._lease(worker_id, run_id, request_id)
                if leased is not None:
                    self._waiters.leased(waiter)
                    return leased
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                await self._waiters.sleep(waiter, min(left, LOOK_SECONDS))

    async def _lease(
        self, worker_id: str | None, run_id: str | None, request_id: str | None
    ) -> AttemptedRollout | None:
        request = self._lease_request(worker_id, run_id, request_id)
        steady = self._clock.steady()
        future = self._database.write_each(lifecycle.dequeue, request)
        try:
            leased = await asyncio.shield(future)
            if leased is not None:
                self._beginnings.began(_key(leased.attempt), steady)
            return leased
        except asyncio.CancelledError:
            # A lease that nobody receives would block its rollout for good.
            if (lost := await future) is not None:
                undo = self._database.write(lambda c: _requeued(lost.rollout, lifecycle.give_back(c, lost)))
                await self._changed(undo)
            raise

    def _lease_request(
        self, worker_id: str | None, run_id: str | None, request_id: str | None
    ) -> lifecycle.LeaseRequest:
        return lifecycle.LeaseRequest(
            worker_id,
            run_id,
            request_id or uuid.uuid4().hex,
            secrets.token_urlsafe(32),
            self._clock.now(),
            repeated=request_id is not None,
        )

    async def give_back(self, request_id: str, *, begun: bool = False) -> None:
        def undo(connection: Connection) -> Changed[None]:
            rollout = lifecycle.give_back_request(connection, request_id, begun)
            return Changed(None, Change()) if rollout is None else _requeued(rollout, True)

        await self._changed(self._database.write(undo))

    async def update_attempt(
        self, rollout_id: str, attempt: int, status: AttemptStatus, *, error: str | None = None
    ) -> Rollout:
        passed = self._beginnings.seconds(rollout_id)
        ran = self._beginnings.seconds((rollout_id, attempt))
        move = lifecycle.Move(rollout_id, attempt, status, error, self._clock.now(), passed, ran)
        return await self._changed(self._database.write_each(lifecycle.move, move))

    async def heartbeat(self, rollout_id: str, attempt: int) -> None:
        await self._database.write_each(lifecycle.beat, (rollout_id, attempt, self._clock.now()))

    async def expire_attempts(self, now: float | None = None) -> list[Attempt]:
        at = self._clock.now() if now is None else now
        observer = self._observer if now is None else None

        def expire(connection: Connection) -> Changed[list[Attempt]]:
            expired, rollouts = lifecycle.expire(connection, at, observer, self._beginnings)
            return Changed(expired, lifecycle.change_of(rollouts))

        return await self._changed(self._database.write(expire))

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, request_id: str | None = None
    ) -> AttemptedRollout:
        request = self._lease_request(worker_id, None, request_id)
        steady = self._clock.steady()
        started = await self._database.write(lambda c: lifecycle.start_attempt(c, rollout_id, request))
        self._beginnings.began(_key(started.attempt), steady)
        return started

    async def update_rollout(self, rollout_id: str, values: Mapping[str, Any]) -> Rollout:
        now = self._clock.now()
        passed = self._beginnings.seconds(rollout_id)
        return await self._changed(
            self._database.write(lambda c: lifecycle.set_fields(c, rollout_id, values, now, passed))
        )

    async def cancel_rollouts(self, rollout_ids: Sequence[str]) -> None:
        now = self._clock.now()

        def cancel(connection: Connection) -> Changed[None]:
            lifecycle.cancel(connection, rollout_ids, now, self._beginnings)
            return Changed(None, Change(ended=rollout_ids))

        await self._changed(self._database.write(cancel))

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._watch_others()
        # Registered before the first look, so that no end is missed in between.
        with self._waiters.waiting_for_ends(rollout_ids) as waiter:
            while True:
                statuses = await self._database.read(lambda c, ids=list(waiter.open): lifecycle.statuses(c, ids))
                waiter.open.difference_update(i for i, status in statuses.items() if status in ROLLOUT_TERMINAL)
                left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
                if not waiter.open or left <= 0:
                    break
                await waiter.sleep(min(left, LOOK_SECONDS))
                if not waiter.open:
                    break
        ended = [rollout_id for rollout_id in rollout_ids if rollout_id not in waiter.open]
        return await self._database.read(lambda c: lifecycle.load(c, ended))

    # -- calls and spans ------------------------------------------------------------------------------------------
    async def add_calls(self, calls: Sequence[Call]) -> None:
        await self._database.write_each(records.add_calls, calls)

    async def add_spans(self, spans: Sequence[Span]) -> None:
        of_rollouts: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            of_rollouts[span.rollout_id].append(span)
        await asyncio.gather(*map(self._add_spans_in_turn, of_rollouts.values()))

    async def _add_spans_in_turn(self, spans: Sequence[Span]) -> None:
        """A rollout with many spans takes turns with the others, however many requests bring them at once."""
        turn = self._turns.setdefault((spans[0].rollout_id, id(asyncio.get_running_loop())), asyncio.Lock())
        async with turn:
            for first in range(0, len(spans), SPANS_AT_A_TIME):
                await self._database.write_each(records.add_spans, spans[first : first + SPANS_AT_A_TIME])

    async def move_spans(self, rollout_id: str, to_rollout_id: str, to_attempt: int) -> None:
        await self._database.write(lambda c: records.move_spans(c, rollout_id, to_rollout_id, to_attempt))

    async def query_spans(self, rollout_id: str, attempt: int | None = None) -> list[Span]:
        return await self._database.read_each(records.query_spans, (rollout_id, attempt))

    # -- resources, policies, training ----------------------------------------------------------------------------
    async def update_resources(self, resources: Mapping[str, Any], *, resources_id: str | None = None) -> str:
        now, version = self._clock.now(), resources_id or uuid.uuid4().hex
        return await self._database.write(lambda c: records.add_resources(c, version, resources, now))

    # -- memories -------------------------------------------------------------------------------------------------
    async def merge_memories(
        self, scope: str, version: int, entries: Sequence[MemoryEntry] = (), removed: Sequence[MemoryId] = ()
    ) -> None:
        await self._database.write(lambda c: memories.merge(c, scope, version, entries, removed))
        self._indexes.forget(scope)

    async def rank_memories(self, scope: str, query: str, version: int | None = None) -> list[tuple[MemoryId, float]]:
        return await self._database.read(lambda c: memories.rank(c, self._indexes, scope, query, version))

    async def revert_memories(self, scope: str, version: int) -> None:
        await self._database.write(lambda c: memories.revert(c, scope, version))
        self._indexes.forget(scope)

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

    # -- runs -----------------------------------------------------------------------------------------------------
    async def put_run(self, run: TrainingRun) -> None:
        row = codec.run_row(run, self._clock.now())
        await self._database.write(lambda c: runs.put(c, row))

    async def add_metrics(self, run_id: str, step: int, values: Mapping[str, float | None]) -> None:
        rows, now = codec.metric_rows(run_id, step, values), self._clock.now()
        await self._database.write(lambda c: runs.add_metrics(c, run_id, rows, now))

    # -- the store itself -----------------------------------------------------------------------------------------
    async def prune(self, before: float, *, run_ids: Sequence[str] | None = None) -> Pruned:
        total = Pruned()
        cursor = 0
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
        """Finish pending operations and release the database. Idempotent."""
        watch = self._watch
        self._watch = None
        if watch is not None:
            watch.stop()
        await self._database.close()
        self._waiters.wake_all()


def _requeued(rollout: Rollout, undone: bool) -> Changed[None]:
    return Changed(None, Change({rollout.run_id: 1} if undone else {}))


def _key(attempt: Attempt) -> tuple[str, int]:
    return attempt.rollout_id, attempt.attempt

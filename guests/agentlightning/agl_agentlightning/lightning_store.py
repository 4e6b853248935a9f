"""`LightningStore`: Agent Lightning 0.3's method names over agl's store.

What 0.3 records and agl does not (an attempt's metadata, workers) stands in the store's notes, so that every process
that uses the store sees it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from agl.errors import AttemptOverError, NotStoredError, StoreError
from agl.options import reject_unknown
from agl_agentlightning import types as T
from agl_agentlightning.missing import MissingClass

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from agl.trainer.store import base
    from agl.trainer.store import types as stored

__all__ = [
    "UNSET",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "MongoLightningStore",
    "Unset",
    "is_finished",
    "is_queuing",
    "is_running",
]

V = TypeVar("V")
log = logging.getLogger("agl.store")

_STARTED = "/started"
"""Rollouts that their caller runs itself are in a separate run, where no runner looks for work."""
_FACTS = "agl.compat"
"""The key, next to the named resources, of their version (from 1) and when they were stored."""
_SERVER = "compat/server"
"""The note of what a server serves."""
_MOST_ROLLOUTS = 1000
"""Of how many rollouts the latest sequence id and the spans are known without reading them again."""


class Unset:
    """The type of `UNSET`: an argument that was left out, where None is a value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"


UNSET: Any = Unset()


class LightningStoreCapabilities(TypedDict, total=False):
    """What a store can do."""

    thread_safe: bool
    async_safe: bool
    zero_copy: bool
    otlp_traces: bool


class LightningStoreStatistics(TypedDict, total=False):
    """Numbers about a store; `uptime` in seconds."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    uptime: float


class NotFoundError(NotStoredError, ValueError):
    """What is asked for is not in the store. 0.3's programs catch ValueError."""


def is_queuing(rollout: T.Rollout) -> bool:
    return rollout.status in ("queuing", "requeuing")


def is_running(rollout: T.Rollout) -> bool:
    return rollout.status in ("preparing", "running")


def is_finished(rollout: T.Rollout) -> bool:
    return rollout.status in ("failed", "succeeded", "cancelled")


class _Spans:
    """Of one rollout: the spans that are stored, by trace and span id, and the highest sequence id."""

    def __init__(self, spans: Sequence[T.Span]) -> None:
        self.ids = {(span.trace_id, span.span_id) for span in spans}
        self.last = max((span.sequence_id for span in spans), default=0)


class LightningStore:
    """A store with 0.3's methods; every method may be called from any event loop.

    Args:
        store: an open store, or the URL of one ("sqlite:///run.db"), which is opened on first use; None keeps it in
            memory.
        run_id: rollouts are enqueued for, and seen of, this run alone; None = all.
        scan_debounce_seconds: how often, at most, this store looks for attempts past their limits when it is used;
            None leaves that to what runs them.
    """

    def __init__(
        self,
        store: base.Store | str | None = None,
        *,
        run_id: str | None = None,
        scan_debounce_seconds: float | None = None,
    ) -> None:
        self._url = store if isinstance(store, str) else None
        self._store: base.Store | None = None if isinstance(store, str) else store
        self._opening = threading.Lock()
        self._opened_at = time.time()
        self._opened = time.monotonic()
        self.run_id = run_id
        self._scan_seconds, self._scanned_at = scan_debounce_seconds, -float("inf")
        self._spans: OrderedDict[str, _Spans] = OrderedDict()
        self._live: dict[str, T.NamedResources] = {}
        """The store's id -> resources of this process, with their keys, which are not stored."""

    @property
    def agl_store(self) -> base.Store:
        """The store itself, opened on first use."""
        with self._opening:
            if self._store is None:
                from agl.trainer.http.aio import run_in_thread
                from agl.trainer.store import open_store

                self._store = run_in_thread(open_store(self._url))
            return self._store

    def bound(self, run_id: str) -> LightningStore:
        """The same store, seen from one run."""
        other = LightningStore(self.agl_store, run_id=run_id)
        other._live = self._live
        return other

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {"thread_safe": True, "async_safe": True, "zero_copy": False, "otlp_traces": False}

    async def statistics(self) -> LightningStoreStatistics:
        """How much there is, in the whole store; of rollouts also by status."""
        counts, workers = await asyncio.gather(self.agl_store.statistics(), self.query_workers())
        by_status = {name: n for name, n in counts.items() if name in T.RolloutStatus.__args__}  # type: ignore[attr-defined]
        return {
            "name": type(self).__name__,
            "total_rollouts": counts["rollouts"],
            "total_attempts": counts["attempts"],
            "total_spans": counts["spans"],
            "total_resources": counts["resources"],
            "total_workers": len(workers),
            "uptime": time.monotonic() - self._opened,
            **by_status,
        }  # type: ignore[return-value]

    async def close(self) -> None:
        """Release the database."""
        if self._store is not None:
            await self._store.close()

    def otlp_traces_endpoint(self) -> str:
        """Where exporters of spans send them; StoreError for a store that is not served."""
        raise StoreError("a store in this process has no endpoint", hint="serve it: LightningStoreServer(store)")

    # -- rollouts -----------------------------------------------------------------------------------------------------
    async def enqueue_rollout(
        self,
        input: Any,
        mode: T.RolloutMode | None = None,
        resources_id: str | None = None,
        config: T.RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> T.Rollout:
        """Queue one rollout; StoreError for an input that is no JSON value."""
        request = T.EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        return (await self.enqueue_many_rollouts([request]))[0]

    async def enqueue_many_rollouts(self, rollouts: Sequence[T.EnqueueRolloutRequest]) -> Sequence[T.Rollout]:
        """Queue several, all or none. Those that name no resources get the latest of this moment."""
        return [T.Rollout.of(r) for r in await self._enqueue(rollouts, self.run_id)]

    async def _enqueue(
        self, rollouts: Sequence[T.EnqueueRolloutRequest], run_id: str | None
    ) -> Sequence[stored.Rollout]:
        from agl.trainer.store.types import NewRollout

        stored_ids = {name: await self._stored_id(name) for name in {r.resources_id for r in rollouts}}
        new = [
            NewRollout(
                task=r.input,
                mode=_mode(r.mode),
                run_id=run_id,
                # The same question asked twice is sampled twice.
                seed=uuid.uuid4().int >> 66,
                resources_id=stored_ids[r.resources_id],
                config=(r.config or T.RolloutConfig()).to_agl(),
                metadata={**(r.metadata or {}), T.MODE: r.mode},
                rollout_id=f"ro-{uuid.uuid4().hex[:12]}",
            )
            for r in rollouts
        ]
        return await self.agl_store.enqueue_rollouts(new)

    async def start_rollout(
        self,
        input: Any,
        mode: T.RolloutMode | None = None,
        resources_id: str | None = None,
        config: T.RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> T.AttemptedRollout:
        """A rollout that the caller runs: never queued for a runner, its first attempt open."""
        request = T.EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        run_id = f"{self.run_id or uuid.uuid4().hex}{_STARTED}/{uuid.uuid4().hex[:8]}"
        [rollout] = await self._enqueue([request], run_id)
        return await self.start_attempt(rollout.rollout_id, worker_id)

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> T.AttemptedRollout:
        """Open the rollout's next attempt, which the caller runs, whatever `max_attempts` says."""
        with _ValueErrors(rollout_id):
            leased = await self.agl_store.start_attempt(rollout_id, worker_id)
        return await self._leased(leased)

    async def dequeue_rollout(self, worker_id: str | None = None) -> T.AttemptedRollout | None:
        """Lease the next queued rollout and open its attempt; None when there is none."""
        await self._scan()
        leased = await self.agl_store.dequeue_rollout(worker_id, run_id=self.run_id)
        return None if leased is None else await self._leased(leased)

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[T.AttemptedRollout]:
        """Lease up to `limit`."""
        leased = []
        while len(leased) < limit and (one := await self.dequeue_rollout(worker_id)) is not None:
            leased.append(one)
        return leased

    async def _leased(self, leased: stored.AttemptedRollout) -> T.AttemptedRollout:
        rollout = T.AttemptedRollout.of_leased(leased)
        if rollout.attempt.worker_id:
            await self.set_worker(rollout.attempt, last_dequeue_time=time.time())
        return rollout

    async def get_rollout_by_id(self, rollout_id: str) -> T.Rollout | None:
        """One rollout, with its latest attempt if it has one; None if there is no such rollout."""
        await self._scan()
        return next(iter(await self._with_attempts(await self._existing([rollout_id]))), None)

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[T.RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: Literal["and", "or"] = "and",
        sort_by: str | None = None,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[T.RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> T.PaginatedResult[T.Rollout]:
        """Rollouts that fit the filters, oldest first unless sorted otherwise, each with its latest attempt."""
        await self._scan()
        states = _first(status_in, status)
        ids = _first(rollout_id_in, rollout_ids)
        among = {"status": states, "rollout_id": ids}
        contains = {"rollout_id": rollout_id_contains}
        started = f"{self.run_id}{_STARTED}"
        stored = {
            r.rollout_id: r
            for r in await self.agl_store.query_rollouts()
            if self.run_id in (None, r.run_id) or str(r.run_id).startswith(started)
        }
        rollouts = [T.Rollout.of(r) for r in stored.values()]
        page = _page(rollouts, among, contains, filter_logic, sort_by, sort_order, limit, offset)
        shown = await self._with_attempts([stored[r.rollout_id] for r in page])
        return T.PaginatedResult(shown, page.limit, page.offset, page.total)

    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> list[T.Rollout]:
        """Those that have ended, as soon as all that exist have or `timeout` seconds have passed."""
        existing = [r.rollout_id for r in await self._existing(rollout_ids)]
        return await self._with_attempts(await self.agl_store.wait_for_rollouts(existing, timeout))

    async def _existing(self, rollout_ids: Sequence[str]) -> list[stored.Rollout]:
        found = await asyncio.gather(*map(self.agl_store.get_rollout, rollout_ids), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, NotStoredError):
                raise error
        # The store knows a rollout by the first digits of its id, too.
        return [r for r, id in zip(found, rollout_ids, strict=True) if getattr(r, "rollout_id", None) == id]  # type: ignore[misc]

    async def _with_attempts(self, rollouts: Sequence[stored.Rollout]) -> list[T.Rollout]:
        """0.3's view of rollouts: `AttemptedRollout` as soon as there is an attempt."""

        async def view(stored: stored.Rollout) -> T.Rollout:
            rollout = T.Rollout.of(stored)
            attempts = await self._attempts(stored.rollout_id) if stored.attempts else ()
            return T.AttemptedRollout(**vars(rollout), attempt=attempts[-1]) if attempts else rollout

        return list(await asyncio.gather(*map(view, rollouts)))

    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,
        mode: T.RolloutMode | None = UNSET,
        resources_id: str | None = UNSET,
        status: T.RolloutStatus = UNSET,
        config: T.RolloutConfig = UNSET,
        metadata: dict[str, Any] = UNSET,
    ) -> T.Rollout:
        """Change the fields that are given. "cancelled" ends open attempts too.

        Raises:
            ValueError: there is no such rollout, or None for a field that cannot be None.
        """
        self._refuse_none(input=input, status=status, config=config, metadata=metadata)
        rollout = await self._rollout(rollout_id)
        if status == "cancelled":
            await self.agl_store.cancel_rollouts([rollout_id])
        values: dict[str, Any] = {} if resources_id is UNSET else {"resources_id": resources_id}
        if input is not UNSET:
            values["task"] = input
        if config is not UNSET:
            values["config"] = config.to_agl()
        if status not in (UNSET, "cancelled"):
            values["status"] = "queuing" if status == "requeuing" else status
        kept = {k: v for k, v in rollout.metadata.items() if k == T.MODE}
        if mode is not UNSET:
            values["mode"], kept = _mode(mode), {T.MODE: mode}
        if mode is not UNSET or metadata is not UNSET:
            values["metadata"] = {**(rollout.metadata if metadata is UNSET else metadata), **kept}
        updated = await self.agl_store.update_rollout(rollout_id, values)
        return (await self._with_attempts([updated]))[0]

    def _refuse_none(self, **values: Any) -> None:
        for name, value in values.items():
            if value is None:
                raise ValueError(f"{name} is None; leave it out to keep it")

    async def _rollout(self, rollout_id: str) -> stored.Rollout:
        found = await self._existing([rollout_id])
        if not found:
            raise _no_rollout(rollout_id)
        return found[0]

    # -- attempts -----------------------------------------------------------------------------------------------------
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> T.PaginatedResult[T.Attempt]:
        """A rollout's attempts."""
        await self._scan()
        return _page(await self._attempts(rollout_id), {}, {}, "and", sort_by, sort_order, limit, offset)

    async def get_latest_attempt(self, rollout_id: str) -> T.Attempt | None:
        """The last attempt, or None."""
        attempts = await self.query_attempts(rollout_id)
        return attempts[-1] if attempts else None

    async def _attempts(self, rollout_id: str) -> list[T.Attempt]:
        """A rollout's attempts; [] if there is no such rollout."""
        try:
            stored, notes = await asyncio.gather(
                self.agl_store.query_attempts(rollout_id), self.agl_store.query_notes(_attempt_note(rollout_id))
            )
        except NotStoredError:
            return []
        attempts = [T.Attempt.of(a) for a in stored]
        return [a.model_copy(update=notes.get(_attempt_note(rollout_id, a.attempt_id))) for a in attempts]

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: T.AttemptStatus = UNSET,
        worker_id: str = UNSET,
        last_heartbeat_time: float = UNSET,
        metadata: dict[str, Any] = UNSET,
    ) -> T.Attempt:
        """Change an attempt; its status changes its rollout's. `attempt_id` may be "latest".

        A heartbeat is recorded with the store's own time. An attempt that has ended stays as it ended.

        Raises:
            ValueError: there is no such attempt, or None for a field that cannot be None.
        """
        self._refuse_none(
            status=status, worker_id=worker_id, last_heartbeat_time=last_heartbeat_time, metadata=metadata
        )
        attempt = await self._attempt(rollout_id, attempt_id)
        number = attempt.sequence_id
        if last_heartbeat_time is not UNSET:
            await self.agl_store.heartbeat(rollout_id, number)
        if status is not UNSET:
            try:
                await self.agl_store.update_attempt(rollout_id, number, status)
            except AttemptOverError as error:
                log.warning("%s", error)
        noted = {k: v for k, v in (("worker_id", worker_id), ("metadata", metadata)) if v is not UNSET}
        if noted:
            key = _attempt_note(rollout_id, attempt.attempt_id)
            before = (await self.agl_store.query_notes(key)).get(key, {})
            await self.agl_store.put_note(key, {**before, **noted})
        attempt = await self._attempt(rollout_id, attempt.attempt_id)
        if attempt.worker_id and (noted or status is not UNSET):
            await self.set_worker(attempt)
        return attempt

    async def _attempt(self, rollout_id: str, attempt_id: str) -> T.Attempt:
        """The attempt that `attempt_id` names; "latest" is the last one."""
        attempts = await self._attempts(rollout_id)
        if not attempts:
            raise NotFoundError(
                f"No attempts found for rollout {rollout_id}", hint="an attempt begins when it is leased"
            )
        found = attempts[-1:] if attempt_id == "latest" else [a for a in attempts if a.attempt_id == attempt_id]
        if not found:
            raise _no_attempt(rollout_id, attempt_id)
        return found[0]

    # -- workers ------------------------------------------------------------------------------------------------------
    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] = UNSET) -> T.Worker:
        """Record a worker's heartbeat, with what it reports about itself."""
        try:
            self._refuse_none(heartbeat_stats=heartbeat_stats)
        except ValueError as error:
            raise TypeError(str(error)) from None
        stats = {} if heartbeat_stats is UNSET else {"heartbeat_stats": heartbeat_stats}
        return await self._note_worker(worker_id, last_heartbeat_time=time.time(), **stats)

    async def query_workers(
        self,
        *,
        status_in: Sequence[T.WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: Literal["and", "or"] = "and",
        sort_by: str | None = None,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> T.PaginatedResult[T.Worker]:
        """The workers that have sent a heartbeat, or have an attempt."""
        notes, attempts = await asyncio.gather(
            self.agl_store.query_notes(_worker_note()), self.agl_store.query_open_attempts()
        )
        workers = {worker.worker_id: worker for worker in (T.Worker(**note) for note in notes.values())}
        for attempt in attempts:
            # Attempts of agl's own runners, which write no notes.
            if attempt.worker_id and attempt.worker_id not in workers:
                workers[attempt.worker_id] = _busy(T.Attempt.of(attempt))
        among = {"status": status_in}
        contains = {"worker_id": worker_id_contains}
        return _page(list(workers.values()), among, contains, filter_logic, sort_by, sort_order, limit, offset)

    async def get_worker_by_id(self, worker_id: str) -> T.Worker | None:
        """That worker, or None."""
        return next((w for w in await self.query_workers() if w.worker_id == worker_id), None)

    async def set_worker(self, attempt: T.Attempt, **times: float) -> None:
        """Record that the attempt's worker runs it, or has ended it."""
        assert attempt.worker_id
        if attempt.status in ("preparing", "running"):
            busy = {k: v for k, v in vars(_busy(attempt)).items() if v is not None}
            await self._note_worker(**{**busy, "last_busy_time": time.time(), **times})
        else:
            idle = {"current_rollout_id": None, "current_attempt_id": None, "last_idle_time": time.time()}
            await self._note_worker(attempt.worker_id, status="idle", **idle, **times)

    async def _note_worker(self, worker_id: str, **values: Any) -> T.Worker:
        key = _worker_note(worker_id)
        before = (await self.agl_store.query_notes(key)).get(key, {})
        worker = T.Worker(**{"worker_id": worker_id, **before, **values})
        await self.agl_store.put_note(key, vars(worker))
        return worker

    # -- resources ----------------------------------------------------------------------------------------------------
    async def add_resources(self, resources: T.NamedResources) -> T.ResourcesUpdate:
        """Store named resources under a new id; rollouts that name none get the latest."""
        return await self._store_resources(f"rs-{uuid.uuid4().hex[:12]}", resources, None)

    async def update_resources(self, resources_id: str, resources: T.NamedResources) -> T.ResourcesUpdate:
        """Store named resources under this id, as its next version."""
        return await self._store_resources(resources_id, resources, await self.get_resources_by_id(resources_id))

    async def _store_resources(
        self, resources_id: str, resources: T.NamedResources, before: T.ResourcesUpdate | None
    ) -> T.ResourcesUpdate:
        body = {name: T.resource_json(value) for name, value in resources.items()}
        now = time.time()
        body[_FACTS] = {
            "version": before.version + 1 if before else 1,
            "created": before.create_time if before else now,
            "updated": now,
        }
        # The store's own versions never change, so a later one has an id of its own.
        stored_id = T.version_id(resources_id) if before else resources_id
        await self.agl_store.update_resources(body, resources_id=stored_id)
        self._live[stored_id] = dict(resources)
        return self._update(stored_id, body)

    async def _stored_id(self, resources_id: str | None) -> str | None:
        """The store's id of the latest version of those resources, or of all; None if there are none."""
        if resources_id is None:
            latest = await self.agl_store.get_resources()
            return latest[0] if latest else None
        stored = await self.agl_store.query_resources(resources_id)
        own = [id for id, _ in stored if T.resources_name(id) == resources_id]
        return own[-1] if own else resources_id

    async def resources_of(self, rollout: stored.Rollout) -> T.ResourcesUpdate | None:
        """The resources that a rollout was enqueued with; the latest ones if it was with none."""
        stored = await self.agl_store.get_resources(rollout.resources_id)
        return None if stored is None else self._update(*stored)

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> T.PaginatedResult[T.ResourcesUpdate]:
        """Resources that fit the filters, the latest version of each, oldest first unless sorted otherwise."""
        stored = await self.agl_store.query_resources(resources_id or "")
        latest = {update.resources_id: update for update in (self._update(*each) for each in stored)}
        among = {"resources_id": None if resources_id is None else [resources_id]}
        contains = {"resources_id": resources_id_contains}
        return _page(list(latest.values()), among, contains, "and", sort_by, sort_order, limit, offset)

    async def get_resources_by_id(self, resources_id: str) -> T.ResourcesUpdate | None:
        """The latest version of those resources, or None."""
        return next(iter(await self.query_resources(resources_id=resources_id)), None)

    async def get_latest_resources(self) -> T.ResourcesUpdate | None:
        """The resources that were stored last, or None."""
        stored = await self.agl_store.get_resources()
        return None if stored is None else self._update(*stored)

    def _update(self, stored_id: str, body: Mapping[str, Any]) -> T.ResourcesUpdate:
        facts = body.get(_FACTS, {})
        stored = {k: T.resource_of_json(v) for k, v in body.items() if k != _FACTS and isinstance(v, Mapping)}
        return T.ResourcesUpdate(
            resources_id=T.resources_name(stored_id),
            create_time=float(facts.get("created", 0.0)),
            update_time=float(facts.get("updated", 0.0)),
            version=int(facts.get("version", 1)),
            resources={**stored, **self._live.get(stored_id, {})},
        )

    # -- spans --------------------------------------------------------------------------------------------------------
    async def add_span(self, span: T.Span) -> T.Span | None:
        """Store a span, which is a heartbeat of its attempt; None if it is stored already."""
        return next(iter(await self.add_many_spans([span])), None)

    async def add_many_spans(self, spans: Sequence[T.Span]) -> Sequence[T.Span]:
        """Store several; returns those that were new.

        Raises:
            ValueError: there is no such rollout or attempt.
        """
        await self._scan()
        for rollout_id, attempt_id in dict.fromkeys((s.rollout_id, s.attempt_id) for s in spans):
            await self._rollout(rollout_id)
            attempts = {a.attempt_id: a for a in await self._attempts(rollout_id)}
            if attempt_id not in attempts:
                raise _no_attempt(rollout_id, attempt_id)
            attempt = attempts[attempt_id]
            if attempt.status in ("preparing", "unresponsive"):
                await self.agl_store.update_attempt(rollout_id, attempt.sequence_id, "running")
            await self.agl_store.heartbeat(rollout_id, attempt.sequence_id)
        new = []
        for span in spans:
            known = await self._known_spans(span.rollout_id)
            if (span.trace_id, span.span_id) in known.ids:
                log.error("Duplicated span added: %s of rollout %s", span.span_id, span.rollout_id)
                continue
            known.ids.add((span.trace_id, span.span_id))
            known.last = max(known.last, span.sequence_id)
            new.append(span)
        await self.agl_store.add_spans([span.to_agl() for span in new])
        return new

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> T.Span | None:
        """Store an SDK span."""
        if sequence_id is None:
            await self._rollout(rollout_id)
            sequence_id = await self.get_next_span_sequence_id(rollout_id, attempt_id)
        return await self.add_span(T.Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """One more than the highest that this store has given out, or that is stored, for the rollout."""
        known = await self._known_spans(rollout_id)
        with self._opening:
            known.last += 1
            return known.last

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One such number each."""
        return [await self.get_next_span_sequence_id(*each) for each in rollout_attempt_ids]

    async def _known_spans(self, rollout_id: str) -> _Spans:
        known = self._spans.get(rollout_id)
        if known is None:
            stored = await self.agl_store.query_spans(rollout_id)
            with self._opening:
                known = self._spans.setdefault(rollout_id, _Spans(T.numbered(stored)))
                if len(self._spans) > _MOST_ROLLOUTS:
                    self._spans.popitem(last=False)
        return known

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: Literal["and", "or"] = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: Literal["asc", "desc"] = "asc",
    ) -> T.PaginatedResult[T.Span]:
        """A rollout's spans, in order; `attempt_id` may be "latest", None is every attempt.

        The `chat` spans of trained agents carry what was sampled: `prompt_token_ids`, `response_token_ids`, and the
        conversation as `gen_ai.input.messages` and `gen_ai.output.messages`.
        """
        number = None
        if attempt_id is not None:
            try:
                number = (await self._attempt(rollout_id, attempt_id)).sequence_id
            except NotFoundError:
                return T.PaginatedResult([], limit, offset, 0)
        stored = await self.agl_store.query_spans(rollout_id, number)
        calls = await self.agl_store.query_calls(rollout_id, number)
        spans = T.numbered(T.without_root(T.with_calls(stored, calls)))
        exact = {"trace_id": trace_id, "span_id": span_id, "parent_id": parent_id, "name": name}
        among = {field: None if value is None else (value,) for field, value in exact.items()}
        contains = {
            "trace_id": trace_id_contains,
            "span_id": span_id_contains,
            "parent_id": parent_id_contains,
            "name": name_contains,
        }
        return _page(spans, among, contains, filter_logic, sort_by, sort_order, limit, offset)

    async def _scan(self) -> None:
        """Give up attempts past their limits, where that is left to this store."""
        now = time.monotonic()
        if self._scan_seconds is not None and now - self._scanned_at >= self._scan_seconds:
            self._scanned_at = now
            await self.agl_store.expire_attempts()


class InMemoryLightningStore(LightningStore):
    """A store that ends with the process.

    Args:
        scan_debounce_seconds: as of `LightningStore`.
        eviction_memory_threshold, safe_memory_threshold: without effect: spans are not evicted. `agl store prune`
            deletes old ones of a store on disk.
        thread_safe, span_size_estimator, tracker: without effect.

    Raises:
        ValueError: the safe threshold is not below the other one.
    """

    def __init__(
        self,
        *,
        thread_safe: bool = True,
        eviction_memory_threshold: float | None = None,
        safe_memory_threshold: float | None = None,
        span_size_estimator: Any = None,
        tracker: Any = None,
        scan_debounce_seconds: float = 10.0,
    ) -> None:
        super().__init__(scan_debounce_seconds=scan_debounce_seconds)
        if eviction_memory_threshold is not None:
            if safe_memory_threshold is not None and safe_memory_threshold >= eviction_memory_threshold:
                raise ValueError(f"{safe_memory_threshold=} is not below {eviction_memory_threshold=}")
            log.warning(
                "eviction_memory_threshold= has no effect; LightningStore('sqlite:///run.db') keeps spans on disk"
            )


class MongoLightningStore(
    MissingClass, instead="LightningStore('postgresql://user:password@host/database'), or 'sqlite:///run.db'"
):
    """0.3's store on MongoDB."""


class _Delegate(LightningStore):
    """A store whose methods are another one's, also where that one overrides them."""

    def __init__(self, store: LightningStore) -> None:
        super().__init__(run_id=store.run_id)
        self.store = store

    def _target(self) -> LightningStore:
        return self.store

    @property
    def agl_store(self) -> base.Store:
        return self._target().agl_store

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return self._target().capabilities

    def bound(self, run_id: str) -> LightningStore:
        return self._target().bound(run_id)

    async def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        return await getattr(self._target(), name)(*args, **kwargs)


def _delegated(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(getattr(LightningStore, name))
    async def method(self: _Delegate, *args: Any, **kwargs: Any) -> Any:
        return await self._call(name, args, kwargs)

    return method


for _name, _function in list(vars(LightningStore).items()):
    if inspect.iscoroutinefunction(_function) and not _name.startswith("_"):
        setattr(_Delegate, _name, _delegated(_name))


class LightningStoreThreaded(_Delegate):
    """A store whose methods run one at a time, on whichever threads they are called.

    Only a store of one's own needs it: those that are here may be called from any thread.
    """

    def __init__(self, store: LightningStore) -> None:
        super().__init__(store)
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {**super().capabilities, "thread_safe": True, "async_safe": True}

    async def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        if name == "wait_for_rollouts":
            return await super()._call(name, args, kwargs)
        # A blocking wait would keep the holder from going on, where both run on one event loop.
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(0.001)
        try:
            return await super()._call(name, args, kwargs)
        finally:
            self._lock.release()


class LightningStoreClient(LightningStore):
    """The store of a server.

    Args:
        server_address: its URL, as `agl store` or `LightningStoreServer.endpoint` shows it; a key in it or in AGL_KEY.
        **timeouts: 0.3's delays and timeouts, which have no effect: requests are repeated for up to a minute.
    """

    def __init__(self, server_address: str, **timeouts: Any) -> None:
        known = ("retry_delays", "health_retry_delays", "request_timeout", "connection_timeout")
        reject_unknown(timeouts, known, "LightningStoreClient")
        super().__init__(server_address.rstrip("/"))
        self.server_address = server_address
        self._process = os.getpid()

    @property
    def agl_store(self) -> base.Store:
        if self._process != os.getpid():
            # A connection, and the thread that serves it, do not survive a fork.
            self.__init__(self.server_address)
        return super().agl_store

    def __reduce__(self) -> Any:
        return type(self), (self.server_address,)

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": True}

    def otlp_traces_endpoint(self) -> str:
        """Where exporters of spans send them."""
        return f"{self._url}/v1/traces"

    async def statistics(self) -> LightningStoreStatistics:
        """As of the server's own store."""
        own, notes = await asyncio.gather(super().statistics(), self.agl_store.query_notes(_SERVER))
        served = notes.get(_SERVER)
        if served is not None:
            own.update(name=served["name"], uptime=max(0.0, time.time() - served["opened_at"]))
        return own

    def _refuse_none(self, **values: Any) -> None:
        from aiohttp import ClientResponseError, RequestInfo
        from multidict import CIMultiDict, CIMultiDictProxy
        from yarl import URL

        try:
            super()._refuse_none(**values)
        except ValueError as error:
            request = RequestInfo(URL(self.server_address), "POST", CIMultiDictProxy(CIMultiDict()))
            raise ClientResponseError(request, (), status=400, message=str(error)) from error


def as_store(store: Any) -> LightningStore:
    """A `LightningStore` from one, from an open store, or from a URL."""
    return store if isinstance(store, LightningStore) else LightningStore(store)


class _ValueErrors:
    """Turns the store's own error for what it does not have into one that is a ValueError too."""

    def __init__(self, rollout_id: str) -> None:
        self._rollout_id = rollout_id

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, NotStoredError):
            raise _no_rollout(self._rollout_id) from error


def _no_rollout(rollout_id: str) -> NotFoundError:
    return NotFoundError(f"Rollout {rollout_id} not found", hint="check the id, and that this is the right store")


def _no_attempt(rollout_id: str, attempt_id: str) -> NotFoundError:
    return NotFoundError(
        f"Attempt {attempt_id} not found", hint="take it from rollout.attempt.attempt_id", rollout=rollout_id
    )


def _attempt_note(rollout_id: str, attempt_id: str = "") -> str:
    return f"compat/attempt/{rollout_id}/{attempt_id}"


def _worker_note(worker_id: str = "") -> str:
    return f"compat/worker/{worker_id}"


def _busy(attempt: T.Attempt) -> T.Worker:
    """The worker that runs an attempt."""
    return T.Worker(
        worker_id=attempt.worker_id or "",
        status="busy",
        last_busy_time=attempt.start_time,
        current_rollout_id=attempt.rollout_id,
        current_attempt_id=attempt.attempt_id,
    )


def _mode(mode: str | None) -> Any:
    """The store's mode for one of 0.3's."""
    return mode if mode in ("train", "val") else "dev"


def _first(*values: V | None) -> V | None:
    return next((value for value in values if value is not None), None)


def _page(
    items: Sequence[V],
    among: Mapping[str, Sequence[str] | None],
    contains: Mapping[str, str | None],
    logic: str,
    sort_by: str | None,
    order: str,
    limit: int,
    offset: int,
) -> T.PaginatedResult[V]:
    """The items that all (or any) filters let through, sorted; `limit` of them from `offset` on, -1 is all.

    Args:
        among: field -> its values that pass.
        contains: field -> a part of its value. None in either is no filter.
        logic: "and" or "or".
        order: "asc" or "desc".
    """
    filters: list[Callable[[V], bool]] = []
    for field, values in among.items():
        if values is not None:
            filters.append(lambda i, field=field, values=values: getattr(i, field) in values)
    for field, part in contains.items():
        if part is not None:
            filters.append(lambda i, field=field, part=part: part in (getattr(i, field) or ""))
    passing = [i for i in items if not filters or (all if logic == "and" else any)(f(i) for f in filters)]
    if sort_by is not None:
        passing.sort(key=lambda i: (getattr(i, sort_by) is not None, getattr(i, sort_by)), reverse=order == "desc")
    page = passing[offset:] if limit < 0 else passing[offset : offset + limit]
    return T.PaginatedResult(page, limit, offset, len(passing))

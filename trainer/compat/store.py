"""`LightningStore`: Agent Lightning 0.3's method names over agl's store."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agl.agents.resources import resource_from_json, resource_to_json
from agl.errors import ConfigError
from agl.trainer.compat import types as T
from agl.trainer.compat.missing import missing_method, refuse
from agl.trainer.compat.store_server import LightningStoreServer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from agl.trainer.store.base import Store

__all__ = [
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreThreaded",
]

V = TypeVar("V")
UNSET: Any = object()
_STARTED = "/started"
"""Rollouts that their caller runs itself are in a separate run, where no runner looks for work."""
_FACTS = "agl.compat"
"""The key, next to the named resources, of their version (from 1) and when they were stored."""
_WORKER_HINT = "an attempt names its worker: query_attempts(...)[i].worker_id"


class LightningStore:
    """A store with 0.3's methods; every method may be called from any event loop.

    Args:
        store: an open store, or the URL of one ("sqlite:///run.db"), which is opened on first use; None keeps it in
            memory.
        run_id: rollouts are enqueued for, and seen of, this run alone; None = all.
    """

    def __init__(self, store: Store | str | None = None, *, run_id: str | None = None) -> None:
        self._url = store if isinstance(store, str) else None
        self._store: Store | None = None if isinstance(store, str) else store
        self._opening = threading.Lock()
        self.run_id = run_id
        self._sequence = itertools.count(1)
        self._stored_ids: dict[str, str] = {}
        """The caller's id of resources -> the store's."""
        self._live: dict[str, T.NamedResources] = {}
        """The store's id -> resources of this process, with their keys, which are not stored."""

    @property
    def agl_store(self) -> Store:
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
        other._stored_ids, other._live = self._stored_ids, self._live
        return other

    @property
    def capabilities(self) -> dict[str, bool]:
        return {"thread_safe": True, "async_safe": True, "zero_copy": False, "otlp_traces": False}

    async def statistics(self) -> dict[str, Any]:
        """How many rollouts there are, in all and by status."""
        rollouts = await self._rollouts()
        counts: dict[str, Any] = {"name": type(self).__name__, "total_rollouts": len(rollouts)}
        for rollout in rollouts:
            counts[rollout.status] = counts.get(rollout.status, 0) + 1
        return counts

    async def close(self) -> None:
        """Release the database."""
        if self._store is not None:
            await self._store.close()

    def otlp_traces_endpoint(self) -> str:
        raise refuse("the OTLP endpoint of a store")

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
        """Queue several, all or none."""
        return await self._enqueue(rollouts, self.run_id)

    async def _enqueue(self, rollouts: Sequence[T.EnqueueRolloutRequest], run_id: str | None) -> list[T.Rollout]:
        from agl.trainer.store.base import NewRollout

        new = [
            NewRollout(
                task=r.input,
                mode=r.mode if r.mode in ("train", "val") else "dev",  # type: ignore[arg-type]
                run_id=run_id,
                # The same question asked twice is sampled twice.
                seed=uuid.uuid4().int >> 66,
                resources_id=self.stored_id(r.resources_id) if r.resources_id else None,
                config=(r.config or T.RolloutConfig()).to_agl(),
                metadata={**(r.metadata or {}), T.MODE: r.mode},
                rollout_id=f"ro-{uuid.uuid4().hex[:12]}",
            )
            for r in rollouts
        ]
        return [T.Rollout.of(r) for r in await self.agl_store.enqueue_rollouts(new)]

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
        await self._enqueue([request], run_id)
        leased = await self.agl_store.dequeue_rollout(worker_id, run_id=run_id)
        assert leased is not None
        return T.AttemptedRollout.of_leased(leased)

    async def dequeue_rollout(self, worker_id: str | None = None) -> T.AttemptedRollout | None:
        """Lease the next queued rollout and open its attempt; None when there is none."""
        leased = await self.agl_store.dequeue_rollout(worker_id, run_id=self.run_id)
        return None if leased is None else T.AttemptedRollout.of_leased(leased)

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[T.AttemptedRollout]:
        """Lease up to `limit`."""
        leased = []
        while len(leased) < limit and (one := await self.dequeue_rollout(worker_id)) is not None:
            leased.append(one)
        return leased

    async def get_rollout_by_id(self, rollout_id: str) -> T.Rollout | None:
        """One rollout, or None."""
        rollouts = await self.query_rollouts(rollout_id_in=[rollout_id])
        return rollouts[0] if rollouts else None

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
    ) -> Sequence[T.Rollout]:
        """Rollouts that fit the filters, oldest first unless sorted otherwise."""
        states, ids = status_in or status, rollout_id_in or rollout_ids
        among, contains = {"status": states, "rollout_id": ids}, {"rollout_id": rollout_id_contains}
        return _page(await self._rollouts(), among, contains, filter_logic, sort_by, sort_order, limit, offset)

    async def _rollouts(self) -> list[T.Rollout]:
        started = f"{self.run_id}{_STARTED}"
        return [
            T.Rollout.of(r)
            for r in await self.agl_store.query_rollouts()
            if self.run_id in (None, r.run_id) or str(r.run_id).startswith(started)
        ]

    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> list[T.Rollout]:
        """Those that have ended, as soon as all have or `timeout` seconds have passed."""
        return [T.Rollout.of(r) for r in await self.agl_store.wait_for_rollouts(rollout_ids, timeout)]

    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,
        mode: Any = UNSET,
        resources_id: Any = UNSET,
        status: Any = UNSET,
        config: Any = UNSET,
        metadata: Any = UNSET,
    ) -> T.Rollout:
        """Cancel a rollout (`status="cancelled"`); nothing else of a rollout changes once it is enqueued."""
        fields = {"input": input, "mode": mode, "resources_id": resources_id, "config": config, "metadata": metadata}
        changed = [name for name, value in fields.items() if value is not UNSET]
        if changed or status != "cancelled":
            what = ", ".join(changed) or f"status={status!r}"
            raise refuse(f"update_rollout({what})", "enqueue another rollout; update_attempt moves one on")
        await self.agl_store.cancel_rollouts([rollout_id])
        return T.Rollout.of(await self.agl_store.get_rollout(rollout_id))

    # -- attempts -----------------------------------------------------------------------------------------------------
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Sequence[T.Attempt]:
        """A rollout's attempts."""
        attempts = [T.Attempt.of(a) for a in await self.agl_store.query_attempts(rollout_id)]
        return _page(attempts, {}, {}, "and", sort_by, sort_order, limit, offset)

    async def get_latest_attempt(self, rollout_id: str) -> T.Attempt | None:
        """The last attempt, or None."""
        attempts = await self.agl_store.query_attempts(rollout_id)
        return T.Attempt.of(attempts[-1]) if attempts else None

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: Any = UNSET,
        worker_id: Any = UNSET,
        last_heartbeat_time: Any = UNSET,
        metadata: Any = UNSET,
    ) -> T.Attempt:
        """Change an attempt's status, and so its rollout's; `attempt_id` may be "latest"."""
        if worker_id is not UNSET or metadata is not UNSET:
            raise refuse("update_attempt(worker_id=, metadata=)", "emit what you want to keep as a span")
        number = await self._number(rollout_id, attempt_id)
        if last_heartbeat_time is not UNSET:
            await self.agl_store.heartbeat(rollout_id, number)
        if status is not UNSET:
            await self.agl_store.update_attempt(rollout_id, number, status)
        return T.Attempt.of((await self.agl_store.query_attempts(rollout_id))[number - 1])

    async def _number(self, rollout_id: str, attempt_id: str) -> int:
        """The number of the attempt that `attempt_id` names; "latest" is the last one."""
        if attempt_id != "latest":
            return T.attempt_number(attempt_id)
        attempts = await self.agl_store.query_attempts(rollout_id)
        if not attempts:
            raise ConfigError(f"rollout {rollout_id} has no attempt yet", hint="dequeue it first")
        return attempts[-1].attempt

    # -- resources ----------------------------------------------------------------------------------------------------
    def stored_id(self, resources_id: str) -> str:
        """The store's id of resources whose id the caller may have chosen."""
        return self._stored_ids.get(resources_id, resources_id)

    async def add_resources(self, resources: T.NamedResources) -> T.ResourcesUpdate:
        """A new version of the named resources; rollouts that name none get the latest."""
        latest = await self.agl_store.get_resources()
        version = latest[1].get(_FACTS, {}).get("version", 0) + 1 if latest else 1
        body = {name: resource_to_json(value) for name, value in resources.items()}
        body[_FACTS] = {"version": version, "created": time.time()}
        resources_id = await self.agl_store.update_resources(body)
        self._live[resources_id] = dict(resources)
        return self._update(resources_id, resources_id, body)

    async def update_resources(self, resources_id: str, resources: T.NamedResources) -> T.ResourcesUpdate:
        """The same under an id that the caller chooses and later calls of this store may use."""
        update = await self.add_resources(resources)
        self._stored_ids[resources_id] = update.resources_id
        return update.model_copy(update={"resources_id": resources_id})

    async def get_resources_by_id(self, resources_id: str) -> T.ResourcesUpdate | None:
        """That version, or None."""
        stored = await self.agl_store.get_resources(self.stored_id(resources_id))
        return None if stored is None else self._update(resources_id, *stored)

    async def get_latest_resources(self) -> T.ResourcesUpdate | None:
        """The latest version, or None."""
        stored = await self.agl_store.get_resources()
        return None if stored is None else self._update(stored[0], *stored)

    def _update(self, name: str, resources_id: str, body: Mapping[str, Any]) -> T.ResourcesUpdate:
        facts = body.get(_FACTS, {})
        created = float(facts.get("created", 0.0))
        stored = {k: resource_from_json(v) for k, v in body.items() if k != _FACTS and isinstance(v, Mapping)}
        return T.ResourcesUpdate(
            resources_id=name,
            create_time=created,
            update_time=created,
            version=int(facts.get("version", 1)),
            resources={**stored, **self._live.get(resources_id, {})},
        )

    # -- spans --------------------------------------------------------------------------------------------------------
    async def add_span(self, span: T.Span) -> T.Span:
        """Store a span; an attempt's first span moves it to "running"."""
        return (await self.add_many_spans([span]))[0]

    async def add_many_spans(self, spans: Sequence[T.Span]) -> Sequence[T.Span]:
        """Store several."""
        await self.agl_store.add_spans([span.to_agl() for span in spans])
        for rollout_id, number in {(s.rollout_id, T.attempt_number(s.attempt_id)) for s in spans}:
            attempts = await self.agl_store.query_attempts(rollout_id)
            if number <= len(attempts) and attempts[number - 1].status in ("preparing", "unresponsive"):
                await self.agl_store.update_attempt(rollout_id, number, "running")
        return spans

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> T.Span:
        """Store an SDK span."""
        number = await self.get_next_span_sequence_id(rollout_id, attempt_id) if sequence_id is None else sequence_id
        return await self.add_span(T.Span.from_opentelemetry(readable_span, rollout_id, attempt_id, number))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """A number above every earlier one."""
        return next(self._sequence)

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One such number each."""
        return [next(self._sequence) for _ in rollout_attempt_ids]

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
    ) -> Sequence[T.Span]:
        """A rollout's spans, in order; `attempt_id` may be "latest", None is every attempt.

        The `chat` spans of trained agents carry what was sampled: `prompt_token_ids`, `response_token_ids`, and the
        conversation as `gen_ai.input.messages` and `gen_ai.output.messages`.
        """
        number = None if attempt_id is None else await self._number(rollout_id, attempt_id)
        stored = await self.agl_store.query_spans(rollout_id, number)
        calls = await self.agl_store.query_calls(rollout_id, number)
        spans = T.numbered(T.with_calls(stored, calls))
        exact = {"trace_id": trace_id, "span_id": span_id, "parent_id": parent_id, "name": name}
        among = {field: None if value is None else (value,) for field, value in exact.items()}
        contains = {
            "trace_id": trace_id_contains,
            "span_id": span_id_contains,
            "parent_id": parent_id_contains,
            "name": name_contains,
        }
        return _page(spans, among, contains, filter_logic, sort_by, sort_order, limit, offset)

    # -- what is missing ----------------------------------------------------------------------------------------------
    start_attempt = missing_method(
        "start_attempt", "give the rollout RolloutConfig(max_attempts=..., retry_condition=[...])"
    )
    query_resources = missing_method("query_resources", "use get_resources_by_id or get_latest_resources")
    query_workers = missing_method("query_workers", _WORKER_HINT)
    get_worker_by_id = missing_method("get_worker_by_id", _WORKER_HINT)
    update_worker = missing_method("update_worker", "runners send heartbeats by themselves")


class InMemoryLightningStore(LightningStore):
    """A store that ends with the process."""

    def __init__(self, *, thread_safe: bool = True, **_: Any) -> None:
        super().__init__()


class LightningStoreThreaded(LightningStore):
    """The same store; every store here may be called from any thread."""

    def __init__(self, store: LightningStore) -> None:
        super().__init__(store.agl_store, run_id=store.run_id)


class LightningStoreClient(LightningStore):
    """The store of a server.

    Args:
        server_address: its URL, as `agl store` or `LightningStoreServer.endpoint` shows it; a key in it or in AGL_KEY.
    """

    def __init__(self, server_address: str) -> None:
        super().__init__(server_address.rstrip("/"))
        self.server_address = server_address


def as_store(store: Any) -> LightningStore:
    """A `LightningStore` from one, from an open store, or from a URL."""
    return store if isinstance(store, LightningStore) else LightningStore(store)


def _page(
    items: Sequence[V],
    among: Mapping[str, Sequence[str] | None],
    contains: Mapping[str, str | None],
    logic: str,
    sort_by: str | None,
    order: str,
    limit: int,
    offset: int,
) -> list[V]:
    """The items that all (or any) filters let through, sorted; `limit` of them from `offset` on, -1 is all.

    Args:
        among: field -> its values that pass. contains: field -> a part of its value. None in either is no filter.
        logic: "and" or "or". order: "asc" or "desc".
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
    return passing[offset:] if limit < 0 else passing[offset : offset + limit]

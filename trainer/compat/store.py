"""`LightningStore`: Agent Lightning 0.3's method names over our store."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Literal

from agl.errors import ConfigError
from agl.trainer.compat import types as T
from agl.trainer.compat.missing import refuse
from agl.trainer.compat.store_base import page
from agl.trainer.compat.store_resources import ResourceMethods
from agl.trainer.compat.store_spans import SpanMethods

if TYPE_CHECKING:
    from agl.trainer.store.base import Store
    from agl.trainer.store.http.server import StoreServer

__all__ = [
    "InMemoryLightningStore", "LightningStore", "LightningStoreClient", "LightningStoreServer",
    "LightningStoreThreaded",
]  # fmt: skip

UNSET: Any = object()
_STARTED = "/started"
"""Rollouts that their caller runs itself are in a run of their own, where no runner looks for work."""


class LightningStore(SpanMethods, ResourceMethods):
    """A store with 0.3's methods; every method may be called from any event loop.

    Args:
        store: an open store, or the URL of one ("sqlite:///run.db"); None keeps it in memory.
        run_id: rollouts are enqueued for, and seen of, this run alone; None = all.
    """

    def __init__(self, store: Store | str | None = None, *, run_id: str | None = None) -> None:
        super().__init__(store)
        self.run_id = run_id

    def bound(self, run_id: str) -> LightningStore:
        """The same store, seen from one run."""
        other = LightningStore(self.ours, run_id=run_id)
        other.share_resources(self)
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

    def otlp_traces_endpoint(self) -> str:
        raise refuse("the OTLP endpoint of a store")

    # -- rollouts -------------------------------------------------------------------------------------------------
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
                config=(r.config or T.RolloutConfig()).to_ours(),
                metadata={**(r.metadata or {}), T.MODE: r.mode},
                rollout_id=f"ro-{uuid.uuid4().hex[:12]}",
            )
            for r in rollouts
        ]
        return [T.Rollout.of(r) for r in await self.ours.enqueue_rollouts(new)]

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
        leased = await self.ours.dequeue_rollout(worker_id, run_id=run_id)
        assert leased is not None
        return T.AttemptedRollout.of_leased(leased)

    async def dequeue_rollout(self, worker_id: str | None = None) -> T.AttemptedRollout | None:
        """Lease the next queued rollout and open its attempt; None when there is none."""
        leased = await self.ours.dequeue_rollout(worker_id, run_id=self.run_id)
        return None if leased is None else T.AttemptedRollout.of_leased(leased)

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[T.AttemptedRollout]:
        """Lease up to `limit`."""
        leased = []
        while len(leased) < limit and (one := await self.dequeue_rollout(worker_id)) is not None:
            leased.append(one)
        return leased

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> T.AttemptedRollout:
        raise refuse("start_attempt", "give the rollout RolloutConfig(max_attempts=..., retry_condition=[...])")

    async def get_rollout_by_id(self, rollout_id: str) -> T.Rollout | None:
        """One rollout, or None."""
        found = await self.query_rollouts(rollout_id_in=[rollout_id])
        return found[0] if found else None

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
        filters: list[Callable[[T.Rollout], bool]] = []
        if states is not None:
            filters.append(lambda r: r.status in states)
        if ids is not None:
            filters.append(lambda r: r.rollout_id in ids)
        if rollout_id_contains is not None:
            filters.append(lambda r: rollout_id_contains in r.rollout_id)
        return page(await self._rollouts(), filters, filter_logic, sort_by, sort_order, limit, offset)

    async def _rollouts(self) -> list[T.Rollout]:
        found = await self.ours.query_rollouts()
        if self.run_id is not None:
            found = [
                r for r in found if r.run_id == self.run_id or str(r.run_id).startswith(f"{self.run_id}{_STARTED}")
            ]
        return [T.Rollout.of(r) for r in found]

    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> list[T.Rollout]:
        """Those that have ended, as soon as all have or `timeout` seconds have passed."""
        return [T.Rollout.of(r) for r in await self.ours.wait_for_rollouts(rollout_ids, timeout)]

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
        given = {"input": input, "mode": mode, "resources_id": resources_id, "config": config, "metadata": metadata}
        changed = [name for name, value in given.items() if value is not UNSET]
        if changed or status != "cancelled":
            what = ", ".join(changed) or f"status={status!r}"
            raise refuse(f"update_rollout({what})", "enqueue another rollout; update_attempt moves one on")
        await self.ours.cancel_rollouts([rollout_id])
        return T.Rollout.of(await self.ours.get_rollout(rollout_id))

    # -- attempts -------------------------------------------------------------------------------------------------
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
        found = [T.Attempt.of(a) for a in await self.ours.query_attempts(rollout_id)]
        return page(found, [], "and", sort_by, sort_order, limit, offset)

    async def get_latest_attempt(self, rollout_id: str) -> T.Attempt | None:
        """The last attempt, or None."""
        found = await self.ours.query_attempts(rollout_id)
        return T.Attempt.of(found[-1]) if found else None

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: Any = UNSET,
        worker_id: Any = UNSET,
        last_heartbeat_time: Any = UNSET,
        metadata: Any = UNSET,
    ) -> T.Attempt:
        """Move an attempt on, its rollout with it; `attempt_id` may be "latest"."""
        if worker_id is not UNSET or metadata is not UNSET:
            raise refuse("update_attempt(worker_id=, metadata=)", "emit what you want to keep as a span")
        number = await self.number(rollout_id, attempt_id)
        if last_heartbeat_time is not UNSET:
            await self.ours.heartbeat(rollout_id, number)
        if status is not UNSET:
            await self.ours.update_attempt(rollout_id, number, status)
        return T.Attempt.of((await self.ours.query_attempts(rollout_id))[number - 1])

    # -- workers --------------------------------------------------------------------------------------------------
    async def query_workers(self, **_: Any) -> Sequence[Any]:
        raise refuse("query_workers", "an attempt names its worker: query_attempts(...)[i].worker_id")

    async def get_worker_by_id(self, worker_id: str) -> Any:
        raise refuse("get_worker_by_id", "an attempt names its worker: query_attempts(...)[i].worker_id")

    async def update_worker(self, worker_id: str, heartbeat_stats: Any = UNSET) -> Any:
        raise refuse("update_worker", "runners send heartbeats by themselves")


class InMemoryLightningStore(LightningStore):
    """A store that ends with the process."""

    def __init__(self, *, thread_safe: bool = True, **_: Any) -> None:
        super().__init__()


class LightningStoreThreaded(LightningStore):
    """The store as it is: it may be called from any thread."""

    def __init__(self, store: LightningStore) -> None:
        super().__init__(store.ours, run_id=store.run_id)


class LightningStoreClient(LightningStore):
    """The store that a server has.

    Args:
        server_address: its URL, as `agl store` or `LightningStoreServer.endpoint` tells it; a key in it or in AGL_KEY.
    """

    def __init__(self, server_address: str) -> None:
        super().__init__(server_address.rstrip("/"))
        self.server_address = server_address


class LightningStoreServer:
    """Serves a store over HTTP, to `LightningStoreClient`, runners and OTLP exporters.

    Args:
        store: what to serve. host, port: where; None = this machine alone, a free port. Other hosts need a key in
            AGL_OPERATOR_KEY.
    """

    def __init__(self, store: LightningStore, host: str | None = None, port: int | None = None) -> None:
        self.store, self._where = store, (host or "127.0.0.1", port or 0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: StoreServer | None = None

    @property
    def endpoint(self) -> str:
        """Where it listens; ConfigError before `start`."""
        if self._server is None:
            raise ConfigError("the store's server has not been started", hint="await server.start()")
        return self._server.url

    async def start(self) -> None:
        """Listen; StoreError if the port is taken."""
        from agl.trainer.http.auth import Keys
        from agl.trainer.store.http.server import StoreServer

        host, port = self._where
        server = StoreServer(self.store.ours, host=host, port=port, keys=Keys.find())
        # On a loop of its own: a client in this process may hold up the caller's while it connects.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agl-store-server", daemon=True).start()
        try:
            await self._there(server.start())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        self._server = server

    async def stop(self) -> None:
        """Stop listening; the store stays open. Idempotent."""
        server, self._server = self._server, None
        if server is not None and self._loop is not None:
            await self._there(server.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _there(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def as_store(given: Any) -> LightningStore:
    """A `LightningStore` from one, from an open store, or from a URL."""
    return given if isinstance(given, LightningStore) else LightningStore(given)

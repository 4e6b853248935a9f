"""Whatever goes wrong between a worker's request for a rollout and its answer, the rollout is leased again."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import pytest
from scripted import ScriptedEngine, in_loop, quick_tokenizer, rendering_of, until

from agl.errors import StoreError
from agl.mdp.selection import select
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.remote.coordinator import coordinator_routes
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.sql import sqlite
from agl.trainer.store.types import NewRollout, RolloutConfig

pytestmark = pytest.mark.slow

Fault = Literal["refused", "answer lost", "cancelled"]
CALLS = ("dequeue_rollout", "get_resources", "update_attempt")
"""What a lease asks of the store."""


class Faulty:
    """A store with one fault: in the first call of a method, and in some calls of `give_back`.

    Attributes:
        faults: how often one has occurred.
    """

    def __init__(self, store: Store, method: str, fault: Fault, give_backs: int = 0) -> None:
        self._store, self._method, self._fault, self._give_backs = store, method, fault, give_backs
        self.faults = 0
        self.caller: asyncio.Task[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if name == "give_back" and self._give_backs:
                self._give_backs -= 1
                raise StoreError("the database cannot be written")
            if name != self._method or self.faults:
                return await method(*args, **kwargs)
            self.faults += 1
            if self._fault == "refused":
                raise StoreError("the database cannot be written")
            result = await method(*args, **kwargs)
            if self._fault == "answer lost":
                raise StoreError("the connection broke while this was being committed, and did not come back")
            assert self.caller is not None
            self.caller.cancel()
            await asyncio.sleep(0)
            return result

        return call if callable(method) else method


class Leased:
    """A coordinator on a faulty store, with a gateway, and one rollout that has one attempt."""

    def __init__(self, store: Store, faulty: Faulty, gateway: Gateway) -> None:
        self.store, self.faulty, self.gateway = store, faulty, gateway
        self.coordinator = RunCoordinator(cast(Store, faulty), gateway, selection=select(None), model="policy")

    async def first(self) -> None:
        """A worker's request, in which the fault occurs."""
        asking = asyncio.ensure_future(self.coordinator.lease("first", 0.0))
        self.faulty.caller = asking
        with pytest.raises((StoreError, asyncio.CancelledError)):
            await asking
        assert self.faulty.faults == 1


async def opened(path: Path, faulty: Faulty, store: Store) -> tuple[Leased, GatewayServer]:
    gateway = Gateway(store)
    tokenizer = quick_tokenizer()
    gateway.serve("policy", ScriptedEngine(tokenizer, ("four",)), rendering_of(tokenizer))
    server = GatewayServer(gateway)
    await server.start()
    return Leased(store, faulty, gateway), server


@pytest.mark.parametrize("give_backs", [0, 2], ids=["taken back", "not taken back at first"])
@pytest.mark.parametrize("fault", ["refused", "answer lost", "cancelled"])
@pytest.mark.parametrize("method", CALLS)
@in_loop
async def test_a_rollout_whose_lease_failed_is_leased_again(
    method: str, fault: Fault, give_backs: int, tmp_path: Path
) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    faulty = Faulty(store, method, fault, give_backs)
    world, server = await opened(tmp_path, faulty, store)
    only = RolloutConfig(max_attempts=1)
    [rollout] = await store.enqueue_rollouts([NewRollout("q", config=only)])
    try:
        await world.first()
        lease = await world.coordinator.lease("second", 20.0)
        assert lease is not None
        assert lease.id == (rollout.rollout_id, 1), "the fault cost an attempt"
        # The key is that of the second lease, and it is good.
        answer = await completion(lease.url, lease.key)
        assert answer.status_code == 200, answer.text
        [attempt] = await store.query_attempts(rollout.rollout_id)
        assert (attempt.status, attempt.worker_id) == ("running", "second")
        assert len(world.coordinator._open) == 1
    finally:
        await world.coordinator.stop()
        await server.stop()
        await store.close()


class Disturbed(Faulty):
    """A store whose file cannot be written from the first call of a method on, until `heal`: an error of SQLite's own.

    Args:
        disturb: makes it so, and returns what ends it.
    """

    def __init__(
        self, store: Store, method: str, disturb: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]
    ) -> None:
        super().__init__(store, method, "refused")
        self._disturb = disturb
        self.heal: Callable[[], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if name == self._method and not self.faults:
                self.faults += 1
                self.heal = await self._disturb()
            return await method(*args, **kwargs)

        return call if callable(method) else method


def locked_by_another(path: Path, _: Any) -> Callable[[], Awaitable[Callable[[], Awaitable[None]]]]:
    async def lock() -> Callable[[], Awaitable[None]]:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")

        async def unlock() -> None:
            holder.close()

        return unlock

    return lock


def read_only(_: Path, store: Any) -> Callable[[], Awaitable[Callable[[], Awaitable[None]]]]:
    def only_read(connection: Any) -> sqlite3.Connection:
        connection.exec_driver_sql("PRAGMA query_only=ON").close()
        return connection.connection.driver_connection

    async def begin() -> Callable[[], Awaitable[None]]:
        opened_file = await store._database.write(only_read)

        async def end() -> None:
            opened_file.execute("PRAGMA query_only=OFF").close()

        return end

    return begin


@pytest.mark.parametrize("disturbance", [locked_by_another, read_only])
@pytest.mark.parametrize("method", ["dequeue_rollout", "update_attempt"])
@in_loop
async def test_a_rollout_whose_lease_sqlite_refused_is_leased_again(
    method: str, disturbance: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is locked by another process for longer than anybody waits, or cannot be written for a while."""
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.05)
    path = tmp_path / "s.db"
    store = await open_store(str(path))
    faulty = Disturbed(store, method, disturbance(path, store))
    world, server = await opened(tmp_path, faulty, store)
    [rollout] = await store.enqueue_rollouts([NewRollout("q", config=RolloutConfig(max_attempts=1))])
    try:
        await world.first()
        # It is taken back again and again meanwhile, which is refused, too.
        await asyncio.sleep(1.0)
        assert faulty.heal is not None
        await faulty.heal()
        lease = await world.coordinator.lease("second", 20.0)
        assert lease is not None
        assert lease.id == (rollout.rollout_id, 1), "the fault cost an attempt"
        [attempt] = await store.query_attempts(rollout.rollout_id)
        assert (attempt.status, attempt.worker_id) == ("running", "second")
    finally:
        await world.coordinator.stop()
        await server.stop()
        await store.close()


async def completion(url: str, key: str | None) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(
            f"{url}/agents/a/v1/chat/completions",
            json={"model": "policy", "messages": [{"role": "user", "content": "2+2"}]},
            headers={"authorization": f"Bearer {key}"},
        )


@in_loop
async def test_what_a_worker_leased_and_no_longer_wants_costs_no_attempt(tmp_path: Path) -> None:
    """It was cancelled while the answer was on its way, and withdraws its request."""
    store = await open_store(str(tmp_path / "s.db"))
    coordinator = RunCoordinator(store, selection=select(None))
    gateway = Gateway(store)
    server = GatewayServer(gateway, extra_routes=coordinator_routes(lambda: coordinator, lambda request: None))
    url = await server.start()
    only = RolloutConfig(max_attempts=1)
    [rollout] = await store.enqueue_rollouts([NewRollout("q", config=only)])
    async with httpx.AsyncClient(trust_env=False) as client:
        body = {"worker_id": "w", "wait": 1.0, "request_id": "same"}
        assert (await client.post(f"{url}/runner/lease", json=body)).status_code == 200
        assert (await store.get_rollout(rollout.rollout_id)).status == "running"
        assert (await client.post(f"{url}/runner/forget", json={"request_id": "same"})).status_code == 200
    lease = await coordinator.lease("second", 20.0)
    assert lease is not None
    assert lease.id == (rollout.rollout_id, 1)
    await coordinator.stop()
    await server.stop()
    await store.close()


@in_loop
async def test_a_coordinator_that_ends_gives_back_what_nobody_received(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    coordinator = RunCoordinator(
        cast(Store, Faulty(store, "dequeue_rollout", "answer lost", give_backs=1)), selection=select(None)
    )
    [rollout] = await store.enqueue_rollouts([NewRollout("q")])
    with pytest.raises(StoreError, match="the connection broke"):
        await coordinator.lease("w", 0.0)
    await coordinator.stop()
    await until(lambda: True)
    assert (await store.get_rollout(rollout.rollout_id)).status == "queuing"
    await store.close()

"""Attacks on a store's server by one that writes too much: what others send is served in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agl.mdp.spans import Span
from agl.trainer.http.auth import LEASE_HEADER, Keys
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.http.client import HttpStore
from agl.trainer.store.http.server import StoreServer
from agl.trainer.store.types import NewRollout


class Noting:
    """A store that notes whose spans it is to add, in order."""

    def __init__(self, store: Store) -> None:
        self._store, self.order = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def add_spans(self, spans: Sequence[Span]) -> None:
        self.order.append(spans[0].rollout_id)
        await self._store.add_spans(spans)


def add_spans(rollout_id: str, first: int, count: int) -> dict[str, Any]:
    same = {"trace_id": f"{1:032x}", "parent_id": None, "rollout_id": rollout_id, "attempt": 1, "name": "chat"}
    same |= {"start": 0.0, "end": 1.0, "attributes": {"text": "x" * 500}}
    return {"spans": [same | {"span_id": f"{first + i:016x}"} for i in range(count)]}


async def post(server: str, path: str, body: Any, lease: str = "") -> asyncio.Task[bytes]:
    """Send a request whole; the task gets the head of its answer."""
    host, _, port = server.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{LEASE_HEADER}: {lease}\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()

    async def answer() -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return head

    return asyncio.ensure_future(answer())


@pytest.mark.parametrize("way", ["a method", "batches"])
@pytest.mark.parametrize("spans", [1, 300])
def test_one_that_writes_many_spans_does_not_come_first(way: str, spans: int, tmp_path: Path) -> None:
    """All that it had sent was once read before the next request, which waited a second for 16 of 6 MB."""

    async def main() -> None:
        store = Noting(await open_store(f"sqlite:///{tmp_path}/s.db"))
        await store.enqueue_rollouts([NewRollout("t", rollout_id=name) for name in ("greedy", "other")])
        server = StoreServer(cast(Store, store), port=0, keys=Keys())
        url = await server.start()
        client = await HttpStore.open(url)
        leased = [await client.dequeue_rollout() for _ in range(2)]
        await client.close()
        leases = {one.rollout.rollout_id: one.secret or "" for one in leased if one is not None}
        path = "/v1/store/add_spans" if way == "a method" else "/v1/store/batch"

        async def write(rollout_id: str, first: int, count: int) -> asyncio.Task[bytes]:
            sent = add_spans(rollout_id, first, count)
            operation = {"operations": [{"method": "add_spans", "arguments": sent}]}
            return await post(url, path, sent if way == "a method" else operation, lease=leases[rollout_id])

        greedy = [await write("greedy", 1000 * k, 600) for k in range(16)]
        before = len(store.order)
        other = await write("other", 10**6, spans)
        answers = await asyncio.gather(*greedy, other)
        assert all(head.startswith(b"HTTP/1.1 200") for head in answers)
        assert len(await store.query_spans("greedy")) == 9600
        await server.stop()
        await store.close()
        first = store.order.index("other") - before
        assert first <= 3, f"{first} requests of the greedy one came first"

    asyncio.run(main())

"""A memory as LangGraph's `BaseStore`, for graphs and agents that take `store=`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from langgraph.store.base import BaseStore, GetOp, Item, ListNamespacesOp, Op, PutOp, Result, SearchItem, SearchOp


class MemoryStore(BaseStore):
    """A `BaseStore` on an `agl.Memory`. Entries do not expire, so `ttl=` is refused.

    Args:
        memory: what has its methods `put`, `get`, `delete`, `search` and `list_namespaces`.
    """

    __slots__ = ("memory",)

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        return [self._run(op) for op in ops]

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        # In a thread, with this context: it waits for a database.
        return await asyncio.to_thread(self.batch, list(ops))

    def _run(self, op: Op) -> Result:
        memory = self.memory
        match op:
            case GetOp():
                hit = memory.get(op.namespace, op.key)
                return None if hit is None else Item(**_fields(hit))
            case PutOp(value=None):
                memory.delete(op.namespace, op.key)
            case PutOp():
                # A path such as "a.b" or "a[*]" is the field that it begins with.
                index = op.index and [path.split(".")[0].split("[")[0] for path in op.index]
                memory.put(op.namespace, op.key, dict(op.value or {}), None if index == ["$"] else index)
            case SearchOp():
                found = memory.search(
                    op.namespace_prefix, query=op.query, filter=op.filter, limit=op.limit, offset=op.offset
                )
                return [SearchItem(**_fields(hit), score=hit.score) for hit in found]
            case ListNamespacesOp():
                ends = {condition.match_type: condition.path for condition in op.match_conditions or ()}
                return memory.list_namespaces(**ends, max_depth=op.max_depth, limit=op.limit, offset=op.offset)  # type: ignore[arg-type]
        return None


def _fields(hit: Any) -> dict[str, Any]:
    return {
        "namespace": hit.namespace,
        "key": hit.key,
        "value": hit.value if isinstance(hit.value, dict) else {"value": hit.value},
        "created_at": datetime.fromtimestamp(hit.created_at, UTC),
        "updated_at": datetime.fromtimestamp(hit.updated_at, UTC),
    }

"""What the parts of `LightningStore` share: the store itself, opened when it is needed, and pages of answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from agl.errors import ConfigError
from agl.trainer.compat import types as T

if TYPE_CHECKING:
    from agl.trainer.store.base import Store

V = TypeVar("V")


class OpenedStore:
    """An open store, or one that is opened from its URL on first use; None keeps it in memory."""

    def __init__(self, store: Store | str | None) -> None:
        self._url = store if isinstance(store, str) else None
        self._store: Store | None = None if isinstance(store, str) else store
        self._opening = threading.Lock()

    @property
    def ours(self) -> Store:
        """The store itself, opened on first use."""
        with self._opening:
            if self._store is None:
                from agl.trainer.http.aio import run_in_thread
                from agl.trainer.store import open_store

                self._store = run_in_thread(open_store(self._url))
            return self._store

    async def close(self) -> None:
        """Release the database."""
        if self._store is not None:
            await self._store.close()

    async def number(self, rollout_id: str, attempt_id: str) -> int:
        """Of an attempt's id; "latest" is the last one."""
        if attempt_id != "latest":
            return T.attempt_number(attempt_id)
        found = await self.ours.query_attempts(rollout_id)
        if not found:
            raise ConfigError(f"rollout {rollout_id} has no attempt yet", hint="dequeue it first")
        return found[-1].attempt


def page(
    items: Sequence[V],
    filters: Sequence[Callable[[V], bool]],
    logic: str,
    sort_by: str | None,
    order: str,
    limit: int,
    offset: int,
) -> list[V]:
    """The items that all (or any) filters let through, sorted; `limit` of them from `offset` on, -1 is all."""
    chosen = [i for i in items if not filters or (all if logic == "and" else any)(f(i) for f in filters)]
    if sort_by is not None:
        chosen.sort(key=lambda i: (getattr(i, sort_by) is not None, getattr(i, sort_by)), reverse=order == "desc")
    return chosen[offset:] if limit < 0 else chosen[offset : offset + limit]

"""Finds the store if none is named: the newest run's for reading, the default one for writing."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from agl.errors import StoreError
from agl.trainer.http.aio import run_in_thread
from agl.trainer.store import open_store
from agl.trainer.store.base import Store

T = TypeVar("T")

DEFAULT_STORE = "agl-runs/traces.db"


def store_url(store: str | None = None) -> str:
    """The URL of the store to write to: `store`, or AGL_STORE, or the default. Its folder is made."""
    url = store or os.environ.get("AGL_STORE") or DEFAULT_STORE
    path = Path(url.removeprefix("sqlite:///"))
    if "://" in str(path):
        return url
    if path.is_dir() or url.endswith("/"):
        path = path / "run.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{path}"


def find_store(store: str | Path | None) -> str:
    """The URL of an existing store: `store`, or AGL_STORE, or that of the newest run below ./agl-*.

    Raises:
        StoreError: there is none at that path, or no run below ./agl-*.
    """
    store = store or os.environ.get("AGL_STORE")
    if store is None:
        patterns = ("agl-*/run.db", "agl-*/*/run.db", DEFAULT_STORE)
        stores = sorted((p for pattern in patterns for p in Path().glob(pattern)), key=_last_write)
        if not stores:
            raise StoreError("there is no run below this directory", hint="name its store with --store PATH")
        return f"sqlite:///{stores[-1]}"
    text = str(store)
    path = Path(text.removeprefix("sqlite:///"))
    if "://" not in text.removeprefix("sqlite:///"):
        if path.is_dir():
            path = path / "run.db"
        if not path.exists():
            raise StoreError("there is no store at this path", hint="a run's store is its run.db", path=path)
        return f"sqlite:///{path}"
    return text


def read_store(store: str | Path | None, query: Callable[[Store], Awaitable[T]]) -> T:
    """The result of a query of an existing store, for callers outside an event loop.

    Raises:
        StoreError: there is no such store; or as the query, with the store's name.
    """

    async def main() -> T:
        url = find_store(store)
        opened = await open_store(url)
        try:
            return await query(opened)
        except StoreError as error:
            error.where.setdefault("store", re.sub(r"//[^/@]*@", "//", url))
            raise
        finally:
            await opened.close()

    return run_in_thread(main())


def _last_write(path: Path) -> float:
    """When a store was last written to; new rows are in its log first."""
    log = path.with_name(f"{path.name}-wal")
    return max(p.stat().st_mtime for p in (path, log) if p.exists())

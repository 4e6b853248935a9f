"""Stores: where rollouts, calls, spans and what was trained are kept; `open_store` opens one by its URL."""

from __future__ import annotations

from agl.errors import ConfigError
from agl.trainer.store.base import Store


async def open_store(url: str | None = None) -> Store:
    """Open a store, create or upgrade its tables.

    Args:
        url: "sqlite:///run.db" or a bare path for a file; None or "memory" for a private one that ends with `close`;
            "http://host:4747" for one that `agl store` serves, with a key as "http://:KEY@host:4747" or in AGL_KEY.

    Raises:
        ConfigError: a kind of store that there is not.
        StoreVersionError: a newer version of agl wrote it.
        StoreError: it cannot be opened, or is not an agl store.
    """
    scheme = (url or "").partition(":")[0].partition("+")[0]
    if scheme in ("http", "https"):
        from agl.trainer.store.client import HttpStore

        return await HttpStore.open(str(url))
    if scheme in ("postgresql", "postgres"):
        raise ConfigError(
            f"stores at {scheme}: URLs are not available yet", hint='use a file: store="sqlite:///run.db"', store=url
        )
    if "://" in (url or "") and scheme != "sqlite":
        raise ConfigError(
            f"no store knows URLs that begin with {scheme}:", hint='use a file: store="sqlite:///run.db"', store=url
        )
    # SQLAlchemy takes a while to import, which users of the contract alone should not wait for.
    from agl.trainer.store.dialect import sqlite_path
    from agl.trainer.store.sql import SqlStore

    return await SqlStore.open(sqlite_path(url))

"""Stores of rollouts, calls, spans and training records; `open_store` opens one by its URL."""

from __future__ import annotations

from agl.errors import ConfigError
from agl.trainer.store.base import Store


def require_known_store(url: str) -> None:
    """Raise `ConfigError` for the URL of a kind of store that there is not."""
    scheme = url.partition(":")[0].partition("+")[0]
    if "://" in url and scheme not in ("http", "https", "sqlite", "postgresql", "postgres"):
        raise ConfigError(
            f"no store knows URLs that begin with {scheme}:",
            hint="use sqlite:///run.db, postgresql://user:password@host/database or http://host:4747",
            store=url,
        )


async def open_store(url: str | None = None) -> Store:
    """Open a store; its tables are created or upgraded.

    Args:
        url: "sqlite:///run.db" or a path for a file; None or "memory" for a private store that ends with `close`;
            "postgresql://user:password@host/database" for PostgreSQL; "http://host:4747" for a store that `agl store`
            serves, with its key as "http://:KEY@host:4747" or in AGL_KEY.

    Raises:
        ConfigError: the kind of store is unknown, or its driver is not installed.
        StoreVersionError: another version of agl made the store, whose tables this one does not read.
        StoreError: the store cannot be opened, or is not an agl store.
    """
    require_known_store(url or "")
    scheme = (url or "").partition(":")[0].partition("+")[0]
    if scheme in ("http", "https"):
        from agl.trainer.store.http.client import HttpStore

        return await HttpStore.open(str(url))
    # Importing SQLAlchemy is slow; users of the interface alone do without it.
    from agl.trainer.store.sql.store import SqlStore

    if url is not None and scheme in ("postgresql", "postgres"):
        from agl.trainer.store.sql.postgres import Postgres

        return await SqlStore.open(Postgres(url))
    from agl.trainer.store.sql.sqlite import Sqlite, sqlite_path

    return await SqlStore.open(Sqlite(sqlite_path(url)))

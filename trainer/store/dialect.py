"""What is particular to SQLite, all of it: opening a file, locking it, inserting what may exist, naming errors."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

from sqlalchemy import Engine, create_engine, exc
from sqlalchemy.dialects.sqlite import insert as insert
from sqlalchemy.pool import StaticPool

from agl.errors import StoreError

MEMORY: Final = ":memory:"
BUSY_SECONDS: Final = 30.0
"""How long a write waits for another process's."""

CACHE_KIB: Final = 64 * 1024
"""Of pages in memory; SQLite's own 2 MiB hold the upper levels of the indices of some 10,000 rollouts."""
CHECKPOINT_PAGES: Final = 16_384
"""When the journal goes into the file: at 64 MiB, so that a page written many times is copied and synced once."""

BEGIN_WRITE: Final = "BEGIN IMMEDIATE"
"""Takes the write lock at once: a transaction that reads first could not upgrade after another process's write."""
BEGIN_READ: Final = "BEGIN"

_FAILURES: Mapping[str, tuple[str, str]] = {
    "SQLITE_BUSY": ("the database is locked by another process", "find out who holds a transaction open on it"),
    "SQLITE_LOCKED": ("the database is locked by another process", "find out who holds a transaction open on it"),
    "SQLITE_FULL": ("the disk is full; nothing of this operation was stored", "free some space and try again"),
    "SQLITE_READONLY": ("the database cannot be written", "check the permissions of the file and of its folder"),
    "SQLITE_IOERR": ("the disk failed", "check the disk, and that the file is not on a network share"),
    "SQLITE_CORRUPT": ("the database is damaged", "restore it from a copy, or start with a new file"),
    "SQLITE_NOTADB": ("the file is not a database", "name another file, or move this one away"),
    "SQLITE_CANTOPEN": ("the database file cannot be opened", "check that its folder exists and can be written"),
}


def open_engine(path: str) -> Engine:
    """An engine whose one connection is an open SQLite database in WAL mode. `path` may be `MEMORY`.

    The engine is in autocommit: `Database` says BEGIN and COMMIT itself.

    Raises:
        sqlite3.Error: the file cannot be opened or is not a database.
    """
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        if path != MEMORY:
            _use_wal(connection)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA cache_size={-CACHE_KIB}")
        connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
    except BaseException:
        connection.close()
        raise
    return create_engine(
        "sqlite+pysqlite://",
        creator=lambda: connection,
        poolclass=StaticPool,
        isolation_level="AUTOCOMMIT",
    )


def _use_wal(connection: sqlite3.Connection) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            with closing(connection.execute("PRAGMA journal_mode")) as cursor:
                if cursor.fetchone()[0] == "wal":
                    return
            connection.execute("PRAGMA journal_mode=WAL").close()
        except sqlite3.OperationalError as error:
            # SQLite does not wait by itself when two processes switch the same new file at once.
            if error.sqlite_errorname not in ("SQLITE_BUSY", "SQLITE_LOCKED") or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def store_error(error: BaseException, path: str) -> BaseException:
    """A database driver's error as a `StoreError` that names the file; any other error as it is."""
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    if not isinstance(original, sqlite3.Error):
        return error
    name = getattr(original, "sqlite_errorname", None) or ""
    for prefix, (message, hint) in _FAILURES.items():
        if name.startswith(prefix):
            return StoreError(message, hint=hint, store=path)
    return StoreError(f"the database refused it: {original}", store=path)


def sqlite_path(url: str | None) -> str:
    """The file that a store URL names: "sqlite:///run.db", "run.db"; `MEMORY` for None and "memory"."""
    if url is None or url in ("memory", "sqlite://", "sqlite:///:memory:"):
        return MEMORY
    return str(Path(url.removeprefix("sqlite:///")).expanduser())

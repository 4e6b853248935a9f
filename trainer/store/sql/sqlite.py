"""SQLite: opens, locks and shrinks a file, notices writes by other processes, explains errors."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, create_engine, exc
from sqlalchemy.pool import StaticPool

from agl.errors import StoreError, StoreGoneError
from agl.trainer.store.sql.dialect import MEMORY, Change
from agl.trainer.store.sql.schema import VERSION_TABLE

BUSY_SECONDS: Final = 30.0
"""How long a write waits for another process's."""
LOOK_SECONDS: Final = 1.0
"""How often a watch checks for writes by other processes: SQLite has no notifications."""
CACHE_KIB: Final = 64 * 1024
"""Size of the page cache; SQLite's default of 2 MiB holds the upper index levels of some 10,000 rollouts."""
CHECKPOINT_PAGES: Final = 16_384
"""The journal is copied into the file at 64 MiB, so that a page that is written often is copied and synced once."""
_VACUUM_PAGES: Final = 1000
"""Number of free pages that one transaction releases."""

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


class Sqlite:
    """A file, which the processes of one machine may share, or a private database in memory.

    Args:
        path: the file; `MEMORY` for none.
    """

    begin_read = "BEGIN"
    # Takes the write lock at once: a transaction that reads first cannot upgrade after another process's write.
    begin_write = "BEGIN IMMEDIATE"
    begin_schema: Sequence[str] = (begin_write,)
    not_a_store_hint = "name another file; a new one is created automatically"

    def __init__(self, path: str) -> None:
        self.url = path
        self._files: dict[str, tuple[int, int]] = {}
        """The file and its journal, once they were there: device and inode."""

    def open_engine(self) -> Engine:
        """An engine whose one connection is open, in WAL mode. Raises sqlite3.Error."""
        if self.url != MEMORY:
            _create_private(self.url)
            self._require_ours()
        connection = _connect(self.url)
        try:
            # A store has neither; they compute, without end if they please, when a table is read or written.
            if planted := _names(connection, "view", "trigger"):
                raise StoreError(
                    f"this database is not an agl store: it has a view or trigger, {min(planted)!r}",
                    hint=self.not_a_store_hint,
                    store=self.url,
                )
            # Affects new files only; existing ones keep freed space and reuse it.
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            if self.url != MEMORY:
                _use_wal(connection)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(f"PRAGMA cache_size={-CACHE_KIB}")
            connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        except BaseException:
            connection.close()
            raise
        return _engine(connection)

    def _require_ours(self) -> None:
        """Refuse another program's database before anything in it is changed, and one that computes when it is read.

        Raises:
            StoreError: it is not a store of agl's.
        """
        # A store is in WAL mode from its first moment on; reading such a file would leave files next to it.
        if not _is_in_wal_mode(self.url):
            uri = f"{Path(self.url).resolve().as_uri()}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS)) as connection:
                if (names := _names(connection, "table")) and not names >= {VERSION_TABLE, "rollouts"}:
                    raise StoreError("this database is not an agl store", hint=self.not_a_store_hint, store=self.url)

    @property
    def reads_beside_writes(self) -> bool:
        return self.url != MEMORY

    def open_reader(self) -> Engine:
        connection = _connect(self.url)
        connection.execute("PRAGMA query_only=ON")
        connection.execute(f"PRAGMA cache_size={-CACHE_KIB}")
        return _engine(connection)

    def require_place(self) -> None:
        """See `Dialect`. SQLite goes on to write into a file that has no name any more, and reports success."""
        if self.url == MEMORY:
            return
        for path in (self.url, f"{self.url}-wal"):
            try:
                found = os.stat(path)
                place = (found.st_dev, found.st_ino)
            except OSError:
                place = None
            known = self._files.get(path)
            if known is None and place is not None:
                # Of the journal, which begins with the first write.
                self._files[path] = place
            elif place != known:
                what = "deleted or moved away" if place is None else "replaced by another one"
                raise StoreGoneError(
                    f"the store's file {path} was {what} while it was in use; what was written since is not kept",
                    hint="put it back, with its journal (-wal), and resume; or start again in a folder that nothing "
                    "cleans up or synchronises",
                    store=self.url,
                )

    def now(self, connection: Connection) -> None:
        return None

    def store_error(self, error: BaseException) -> BaseException:
        original = error.orig if isinstance(error, exc.DBAPIError) else error
        if not isinstance(original, (sqlite3.Error, UnicodeEncodeError)):
            return error
        name = getattr(original, "sqlite_errorname", None) or ""
        for prefix, (message, hint) in _FAILURES.items():
            if name.startswith(prefix):
                return StoreError(message, hint=hint, store=self.url)
        return StoreError(f"the database refused it: {original}", store=self.url)

    def is_lost(self, error: BaseException) -> bool:
        return False

    def is_unsure(self, error: BaseException) -> bool:
        return False

    def is_conflict(self, error: BaseException) -> bool:
        return False

    def announce(self, connection: Connection, change: Change) -> None:
        pass

    def watch(self, changed: Callable[[Change | None], None]) -> _Watch | None:
        return None if self.url == MEMORY else _Watch(self.url, changed)

    def compact(self) -> None:
        if self.url == MEMORY:
            return
        with closing(_connect(self.url)) as connection:
            while connection.execute("PRAGMA freelist_count").fetchone()[0]:
                before = connection.execute("PRAGMA page_count").fetchone()[0]
                connection.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
                if connection.execute("PRAGMA page_count").fetchone()[0] >= before:
                    break
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


class _Watch:
    """Checks once a second whether another connection committed to the file."""

    def __init__(self, path: str, changed: Callable[[Change | None], None]) -> None:
        self._path = path
        self._changed = changed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="agl-store-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        # The last connection to close removes the journal, which must not be this thread's.
        self._thread.join(BUSY_SECONDS)

    def _look(self) -> None:
        with closing(_connect(self._path)) as connection:
            seen = None
            while not self._stop.wait(LOOK_SECONDS):
                try:
                    version = connection.execute("PRAGMA data_version").fetchone()[0]
                except sqlite3.Error:
                    # Waiting callers look now and then anyway, and get an error with details.
                    continue
                if version != seen:
                    seen = version
                    self._changed(None)


def _is_in_wal_mode(path: str) -> bool:
    """Whether SQLite keeps changes next to a file; true of one that cannot be read, as SQLite explains that better.

    Source: sqlite.org/fileformat2.html, offset 18 of the header.
    """
    try:
        with open(path, "rb") as file:
            return file.read(20)[18:19] == b"\2"
    except OSError:
        return True


def _names(connection: sqlite3.Connection, *types: str) -> set[str]:
    """The names of the things of these types in a database."""
    marks = ", ".join("?" * len(types))
    with closing(connection.execute(f"SELECT name FROM sqlite_master WHERE type IN ({marks})", types)) as cursor:
        return {name for (name,) in cursor if not name.startswith("sqlite_")}


def _create_private(path: str) -> None:
    """Create the file, if it is missing, for its owner alone; its journals have the same permissions."""
    # SQLite explains better than this why a file cannot be created.
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def _engine(connection: sqlite3.Connection) -> Engine:
    """An engine with this one connection."""
    return create_engine(
        "sqlite+pysqlite://", creator=lambda: connection, poolclass=StaticPool, isolation_level="AUTOCOMMIT"
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


def sqlite_path(url: str | None) -> str:
    """The file that a store URL names: "sqlite:///run.db", "run.db"; `MEMORY` for None and "memory"."""
    if url is None or url in ("memory", "sqlite://", "sqlite:///:memory:"):
        return MEMORY
    return str(Path(url.removeprefix("sqlite:///")).expanduser())

"""PostgreSQL: connects with bounds on every wait, notifies other processes by NOTIFY, explains errors."""

from __future__ import annotations

import json
import random
import select
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event, exc, make_url
from sqlalchemy.pool import NullPool

from agl.errors import ConfigError, StoreError
from agl.extras import install_line
from agl.trainer.store.sql.dialect import Change

CONNECT_SECONDS: Final = 10
LOCK_SECONDS: Final = 30
"""How long a statement waits for a lock of another transaction."""
STATEMENT_SECONDS: Final = 120
COMPACT_SECONDS: Final = 3600
_CHANNEL: Final = "agl_store"
_PAYLOAD_BYTES: Final = 7900
"""PostgreSQL's limit is 8000."""
_SCHEMA_LOCK: Final = 0x61676C73
"""Key of the advisory lock under which tables are created: "agls"."""
_QUIET_SECONDS: Final = 30.0
"""A listener without notifications for this long checks whether the server still responds."""

_READ_ONLY: Final = "25006"
"""A standby that is about to take over, or a setting that somebody changes for a while."""

_FAILURES: Mapping[str, tuple[str, str]] = {
    "53100": ("the server's disk is full; nothing of this operation was stored", "free some space and try again"),
    "53200": ("the server is out of memory; nothing of this operation was stored", "see the server's log"),
    "53300": ("the server has no connection left", "raise max_connections, or share stores by `agl store`"),
    "55P03": ("the rows are locked by another process", "find out who holds a transaction open (pg_stat_activity)"),
    "57014": ("the server cancelled the statement", "it took too long, or it was cancelled; see the server's log"),
    _READ_ONLY: ("the database cannot be written", "is this a read-only replica?"),
    "42501": ("the database's user may not do this", "give it CREATE and USAGE on the schema, or name another one"),
    "XX001": ("the database is damaged", "restore it from a copy, or start with a new database"),
    "XX002": ("the database is damaged", "restore it from a copy, or start with a new database"),
}
# Shut down, crashed, starting, dropped, idle too long.
_LOST: Final = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "25P03"})
# Serialization failure, deadlock.
_CONFLICTS: Final = frozenset({"40001", "40P01"})


class Postgres:
    """A PostgreSQL database, reached directly: a pooler that shares sessions between clients loses notifications.

    Args:
        url: "postgresql://..." or "postgresql+psycopg://...", as SQLAlchemy takes it.

    Raises:
        ConfigError: the URL cannot be read, or psycopg is not installed.
    """

    begin_read = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    begin_write = "BEGIN"
    # Other processes that open the same new database wait here until the tables exist.
    begin_schema: Sequence[str] = (begin_write, f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
    reads_beside_writes = True
    not_a_store_hint = "name an empty database, or a separate schema: ?options=-csearch_path%3DNAME"

    def __init__(self, url: str) -> None:
        try:
            self._url = make_url(url).set(drivername="postgresql+psycopg")
        except (exc.ArgumentError, ValueError) as error:
            raise ConfigError(
                "this is not the URL of a database", hint="postgresql://user:password@host:5432/database"
            ) from error
        try:
            import psycopg
        except ImportError as error:
            raise ConfigError(
                "the driver of PostgreSQL is not installed", hint=install_line("postgres"), store=self.url
            ) from error
        self._psycopg = psycopg
        self.Error = psycopg.Error
        # A notification reaches every listener, including this process's own.
        self._sender = uuid.uuid4().hex

    @property
    def url(self) -> str:
        return self._url.set(drivername="postgresql").render_as_string(hide_password=True)

    def open_engine(self) -> Engine:
        """An engine whose connections are in autocommit; one is opened for each `connect`."""
        return self._engine(
            {
                "lock_timeout": f"{LOCK_SECONDS}s",
                "statement_timeout": f"{STATEMENT_SECONDS}s",
                "idle_in_transaction_session_timeout": f"{STATEMENT_SECONDS}s",
                # Every query has its index. Plans are kept, and would go on to scan a table that was small once.
                "enable_seqscan": "off",
                "jit": "off",
            }
        )

    def open_reader(self) -> Engine:
        """As `open_engine`: what only reads begins its transactions READ ONLY."""
        return self.open_engine()

    def _engine(self, settings: Mapping[str, str]) -> Engine:
        arguments = {
            "connect_timeout": CONNECT_SECONDS,
            "tcp_user_timeout": LOCK_SECONDS * 1000,
            "keepalives_idle": LOCK_SECONDS,
            "application_name": "agl",
        }
        defaults = {key: value for key, value in arguments.items() if key not in self._url.query}
        engine = create_engine(
            self._url,
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={**defaults, "autocommit": True},
            use_native_hstore=False,
        )

        @event.listens_for(engine, "connect")
        def configure(connection: Any, record: Any) -> None:
            with connection.cursor() as cursor:
                for name, value in settings.items():
                    cursor.execute(f"SET {name} = '{value}'")

        return engine

    def require_place(self) -> None:
        # The server answers for its files.
        pass

    def now(self, connection: Connection) -> float:
        return float(connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())::float8").scalar_one())

    def store_error(self, error: BaseException) -> BaseException:
        original = _original(error)
        if not isinstance(original, (self._psycopg.Error, UnicodeEncodeError)):
            return error
        if (known := _FAILURES.get(getattr(original, "sqlstate", None) or "")) is not None:
            message, hint = known
            return StoreError(message, hint=hint, store=self.url)
        reason = str(original).strip() or type(original).__name__
        if self.is_lost(error):
            return StoreError(
                f"the database cannot be reached: {reason}",
                hint="check that PostgreSQL runs there, and the name and password in the URL",
                store=self.url,
            )
        return StoreError(f"the database refused it: {reason}", store=self.url)

    def is_lost(self, error: BaseException) -> bool:
        original = _original(error)
        read_only = self._psycopg.errors.ReadOnlySqlTransaction
        if not isinstance(original, (self._psycopg.OperationalError, self._psycopg.InterfaceError, read_only)):
            return False
        state = original.sqlstate
        # The driver's own errors, of a connection that broke or failed, have no state.
        return state is None or state in _LOST or state == _READ_ONLY or state.startswith("08")

    def is_unsure(self, error: BaseException) -> bool:
        return self.is_lost(error) and getattr(_original(error), "sqlstate", None) != _READ_ONLY

    def is_conflict(self, error: BaseException) -> bool:
        return getattr(_original(error), "sqlstate", None) in _CONFLICTS

    def announce(self, connection: Connection, change: Change) -> None:
        for payload in _payloads(self._sender, change):
            connection.connection.cursor().execute(f"SELECT pg_notify('{_CHANNEL}', %s)", (payload,))

    def watch(self, changed: Callable[[Change | None], None]) -> _Listener:
        return _Listener(self, changed)

    def listen(self) -> Any:
        """A psycopg connection that receives notifications."""
        borrowed = self._engine({}).raw_connection()
        connection = borrowed.driver_connection
        borrowed.detach()
        assert connection is not None
        connection.execute(f"LISTEN {_CHANNEL}")
        return connection

    def parse(self, payload: str) -> Change | None:
        """The change in a notification; an empty one if this process sent it, None if it has no details."""
        sender, _, text = payload.partition(" ")
        if sender == self._sender:
            return Change()
        if not text:
            return None
        change = json.loads(text)
        return Change({run: count for run, count in change["queued"]}, change["ended"])

    def compact(self) -> None:
        # Frees space inside the tables for new rows; the server does the same now and then.
        engine = self._engine({"lock_timeout": f"{LOCK_SECONDS}s", "statement_timeout": f"{COMPACT_SECONDS}s"})
        with engine.connect() as connection:
            for table in ("calls", "spans", "attempts"):
                connection.exec_driver_sql(f"VACUUM (ANALYZE) {table}")


class _Listener:
    """Receives the notifications of other processes on a separate connection, and reconnects when that breaks."""

    def __init__(self, postgres: Postgres, changed: Callable[[Change | None], None]) -> None:
        self._postgres = postgres
        self._changed = changed
        # Closing the first end makes the second one readable, which stops the thread.
        self._stop_end, self._thread_end = socket.socketpair()
        self._thread = threading.Thread(target=self._work, name="agl-store-listen", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop_end.close()

    def _work(self) -> None:
        pause = 0.1
        while True:
            try:
                with self._postgres.listen() as connection:
                    # Earlier notifications were missed.
                    self._changed(None)
                    pause = 0.1
                    if self._receive(connection):
                        break
            except (exc.DBAPIError, self._postgres.Error):
                # Waiting callers look now and then anyway, and get an error with details.
                pass
            if select.select([self._thread_end], [], [], pause * random.uniform(0.5, 1.5))[0]:
                break
            pause = min(2 * pause, 5.0)
        self._thread_end.close()

    def _receive(self, connection: Any) -> bool:
        """Pass on notifications until `stop` is called; then True."""
        while True:
            ready, _, _ = select.select([connection, self._thread_end], [], [], _QUIET_SECONDS)
            if self._thread_end in ready:
                return True
            if not ready:
                connection.execute("SELECT 1")
            for notification in connection.notifies(timeout=0):
                change = self._postgres.parse(notification.payload)
                if change is None or change:
                    self._changed(change)


def _original(error: BaseException) -> BaseException:
    return error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error


def _payloads(sender: str, change: Change) -> Iterator[str]:
    """Payloads of notifications of the change; one that would be too long has no details."""
    ended = list(change.ended)
    queued = [[run, count] for run, count in change.queued.items()]
    while queued or ended:
        part = ended[:100]
        ended = ended[100:]
        text = f"{sender} {json.dumps({'queued': queued, 'ended': part}, separators=(',', ':'))}"
        yield text if len(text) <= _PAYLOAD_BYTES else sender
        queued = []

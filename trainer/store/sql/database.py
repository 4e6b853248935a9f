"""One thread owns the connection that writes: pending operations are committed together and acknowledged after that.

Another thread has a connection that only reads, so that no query waits for a write; each of its transactions begins
after every write that was acknowledged before. A private database in memory has one thread for both.

An operation is a function of a connection and may be run twice: when another one in its batch fails (each fails alone),
when the connection breaks, or when another process's transaction takes precedence. If the first run was committed, the
second one must have no effect, also outside the database. Operations that wait together are concurrent: those with the
same function of many arguments run as one call, so that a database on a server gets one statement for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine.interfaces import DBAPICursor

from agl.errors import StoreError
from agl.trainer.store.sql import schema
from agl.trainer.store.sql.clock import Clock
from agl.trainer.store.sql.dialect import Change, Changed, Dialect

A = TypeVar("A")
R = TypeVar("R")

RETRY_SECONDS: Final = 30.0
"""How long a batch is repeated while the database cannot be reached."""
_CLOSING_SECONDS: Final = 3.0
"""The same while the store is being closed."""


Each = Callable[[Connection, Sequence[A]], Sequence[R | Exception]]
"""A function of many arguments: one result for each, or the error of an argument that had no effect."""


@dataclass(slots=True, eq=False)
class _Operation:
    """A pending function of a connection and arguments, and later its result or error."""

    each: Each[Any, Any]
    argument: Any
    writes: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None

    def deliver(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Database:
    """A database, and the only threads that use it.

    Attributes:
        dialect: the database.
        clock: set by the database's own clock, if it has one.
    """

    def __init__(self, dialect: Dialect, clock: Clock | None = None) -> None:
        self.dialect = dialect
        self.clock = clock or Clock()
        self._writer = _Worker(dialect, dialect.open_engine, self._prepare, self._keep_time)
        self._reader = self._writer
        if dialect.reads_beside_writes:
            self._reader = _Worker(dialect, dialect.open_reader)

    async def open(self) -> None:
        """Open the database; its tables are created or upgraded.

        Raises:
            StoreVersionError: another version of agl made the database, whose tables this one does not read.
            StoreError: the database cannot be opened, or is not an agl store.
        """
        try:
            await self.write(lambda connection: None)
            # Opened before it is needed, so that no query waits for it.
            await self.read(lambda connection: None)
        except BaseException:
            await self.close()
            raise

    def read(self, operation: Callable[[Connection], R]) -> asyncio.Future[R]:
        """Run a function that only reads. It sees every write that was acknowledged before."""
        return self._reader.submit(lambda connection, _: [operation(connection)], None, writes=False)

    def read_each(self, each: Each[A, R], argument: A) -> asyncio.Future[R]:
        """Read by a function of many arguments; see `read` and `Each`."""
        return self._reader.submit(each, argument, writes=False)

    def write(self, operation: Callable[[Connection], R]) -> asyncio.Future[R]:
        """Run a function in a transaction; the future resolves once that is committed.

        If the future is cancelled before the function has started, it does not run; later the write takes effect.
        """
        return self._writer.submit(lambda connection, _: [operation(connection)], None, writes=True)

    def write_each(self, each: Each[A, R], argument: A) -> asyncio.Future[R]:
        """Write by a function of many arguments; see `write` and `Each`."""
        return self._writer.submit(each, argument, writes=True)

    async def close(self) -> None:
        """Finish pending operations, then close the connections. Idempotent."""
        # The reader first: the last connection that is closed empties SQLite's journal, which a reader cannot.
        await self._reader.close()
        await self._writer.close()

    def _prepare(self, connection: Connection) -> None:
        schema.create(connection, self.dialect)
        self.clock.set(self.dialect.now(connection))

    def _keep_time(self, connection: Connection) -> None:
        if self.clock.is_stale:
            self.clock.set(self.dialect.now(connection))


def _nothing(connection: Connection) -> None: ...


class _Worker:
    """A thread with a connection, and the operations that wait for it.

    Args:
        dialect: the database.
        open_engine: what makes the connection.
        prepare: called with each new connection.
        before: called with the connection before each batch.
    """

    def __init__(
        self,
        dialect: Dialect,
        open_engine: Callable[[], Engine],
        prepare: Callable[[Connection], None] = _nothing,
        before: Callable[[Connection], None] = _nothing,
    ) -> None:
        self.dialect = dialect
        self._open_engine = open_engine
        self._prepare = prepare
        self._before = before
        self._pending: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, each: Each[A, R], argument: A, *, writes: bool) -> asyncio.Future[R]:
        """Queue an operation; the thread begins with the first one."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed", hint="open it again with open_store", store=self.dialect.url)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="agl-store", daemon=True)
                self._thread.start()
            self._pending.put(_Operation(each, argument, writes, loop, future))
        return future

    async def close(self) -> None:
        """Finish what is pending, then close the connection. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pending.put(None)
        # Not in a worker thread: at interpreter exit no thread can be started.
        while self._thread is not None and self._thread.is_alive():
            await asyncio.sleep(0.002)

    # -- on the thread --------------------------------------------------------------------------------------------
    def _work(self) -> None:
        self._connection: Connection | None = None
        try:
            self._engine = self._open_engine()
            self._connect()
        except BaseException as error:
            self._disconnect()
            self._fail_all(error)
            return
        try:
            while batch := self._next_batch():
                try:
                    self._commit(batch)
                except BaseException as error:
                    # Any error must reach the callers.
                    self._fail(batch, error, unsure=True)
                _deliver(batch)
        finally:
            self._disconnect()
            self._engine.dispose()

    def _connect(self) -> Connection:
        if self._connection is None:
            connection = self._engine.connect()
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            # A broken connection cannot be closed.
            with contextlib.suppress(Exception):
                connection.close()

    def _commit(self, batch: Sequence[_Operation]) -> None:
        """Run a batch until it is committed; if that is impossible, all its operations fail."""
        deadline = time.monotonic() + RETRY_SECONDS
        pause = 0.02
        unsure = False
        while True:
            try:
                connection = self._connect()
                self._before(connection)
                self.dialect.require_place()
                _run(connection, batch, self.dialect)
                # What was committed is acknowledged if somebody can find it.
                self.dialect.require_place()
                return
            except _RolledBack as rolled_back:
                error = rolled_back.error
                unsure = unsure or rolled_back.unsure
            except BaseException as other:
                error = other
            lost = self.dialect.is_lost(error)
            conflict = self.dialect.is_conflict(error)
            if lost:
                self._disconnect()
            if self._closed:
                deadline = min(deadline, time.monotonic() + _CLOSING_SECONDS)
            if not (lost or conflict) or time.monotonic() + pause > deadline:
                break
            if conflict and len(batch) > 1:
                # One by one, so that fewer rows are locked at once, each time in the order of one operation.
                for operation in batch:
                    self._commit([operation])
                return
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, 1.0)
        self._fail(batch, error, unsure)

    def _fail(self, batch: Sequence[_Operation], error: BaseException, unsure: bool) -> None:
        reported = self.dialect.store_error(error)
        if unsure and isinstance(reported, StoreError):
            reported = StoreError(
                f"the connection broke while this was being committed, and did not come back: {reported.message}",
                hint="it may or may not be stored; doing it again does no harm",
                **reported.where,
            )
        for operation in batch:
            operation.error = reported

    def _next_batch(self) -> list[_Operation]:
        """All pending operations, at least one; an empty list once the store is closed."""
        operation = self._pending.get()
        batch: list[_Operation] = []
        while operation is not None:
            if not operation.future.cancelled():
                batch.append(operation)
            try:
                operation = self._pending.get_nowait()
            except queue.Empty:
                if batch:
                    return batch
                operation = self._pending.get()
        if batch:
            self._pending.put(None)
        return batch

    def _fail_all(self, error: BaseException) -> None:
        """Fail every operation with the error of opening, until the store is closed."""
        while batch := self._next_batch():
            for operation in batch:
                operation.error = self.dialect.store_error(error)
            _deliver(batch)


class _RolledBack(Exception):
    """The transaction of a batch was not committed; if `unsure`, it may have been."""

    def __init__(self, error: BaseException, unsure: bool) -> None:
        self.error = error
        self.unsure = unsure


def _run(connection: Connection, batch: Sequence[_Operation], dialect: Dialect) -> None:
    """Run a batch in one transaction and set the result of each operation. Raises _RolledBack if none took effect.

    A savepoint costs about as much as a small operation, with a server two more round trips, and operations rarely
    fail. So there are none at first; when an operation fails, all are rolled back and run again, each in a savepoint.
    """
    writes = any(operation.writes for operation in batch)
    begin = dialect.begin_write if writes else dialect.begin_read
    # The driver's own cursor: these statements are part of every batch and need nothing from SQLAlchemy.
    cursor = connection.connection.cursor()
    committing = False
    try:
        committing = writes
        if not _run_at_once(connection, cursor, begin, batch, dialect):
            committing = False
            # No effect where the failure has ended the transaction already, as a full disk may.
            connection.connection.rollback()
            if len(batch) == 1:
                return
            cursor.execute(begin)
            for operation in batch:
                _run_in_savepoint(connection, cursor, operation, dialect)
            committing = writes
            _announce(connection, batch, dialect)
            cursor.execute("COMMIT")
    except BaseException as error:
        try:
            connection.connection.rollback()
        except Exception:
            # The connection is lost.
            pass
        raise _RolledBack(error, committing and dialect.is_unsure(error)) from error
    finally:
        cursor.close()


def _run_at_once(
    connection: Connection, cursor: DBAPICursor, begin: str, batch: Sequence[_Operation], dialect: Dialect
) -> bool:
    """Run and commit a batch, the operations of one function together; False if one failed and none took effect."""
    functions: dict[Any, list[_Operation]] = {}
    for operation in batch:
        functions.setdefault(operation.each, []).append(operation)
    cursor.execute(begin)
    if not all(_run_each(connection, operations, dialect) for operations in functions.values()):
        return False
    _announce(connection, batch, dialect)
    cursor.execute("COMMIT")
    return True


def _run_each(connection: Connection, operations: Sequence[_Operation], dialect: Dialect) -> bool:
    """Run operations of one function; whether all of them succeeded or had no effect."""
    for operation in operations:
        operation.result = operation.error = None
    try:
        results = operations[0].each(connection, [operation.argument for operation in operations])
    except Exception as error:
        if dialect.is_lost(error) or dialect.is_conflict(error):
            raise
        for operation in operations:
            operation.error = dialect.store_error(error)
        return False
    for operation, result in zip(operations, results, strict=True):
        if isinstance(result, Exception):
            operation.error = result
        else:
            operation.result = result
    return True


def _announce(connection: Connection, batch: Sequence[_Operation], dialect: Dialect) -> None:
    """Announce what succeeded, all of it at once."""
    changes = [operation.result.change for operation in batch if isinstance(operation.result, Changed)]
    if change := Change.of_all(changes):
        dialect.announce(connection, change)


def _run_in_savepoint(connection: Connection, cursor: DBAPICursor, operation: _Operation, dialect: Dialect) -> None:
    cursor.execute("SAVEPOINT operation")
    if not _run_each(connection, [operation], dialect):
        try:
            cursor.execute("ROLLBACK TO operation")
        except Exception:
            # The transaction has ended, and the operation's own error says why.
            raise operation.error or StoreError("the transaction has ended") from None
    cursor.execute("RELEASE operation")


def _deliver(batch: Sequence[_Operation]) -> None:
    """Resolve the futures, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
    for operation in batch:
        by_loop.setdefault(operation.loop, []).append(operation)
    for loop, operations in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver_here, operations)
        except RuntimeError:
            # The loop is closed, so nothing waits for the futures.
            pass


def _deliver_here(operations: Sequence[_Operation]) -> None:
    for operation in operations:
        operation.deliver()

"""One thread that owns the database connection: what waits is committed together, and acknowledged after that.

An operation is a function of a connection, and may be run twice: one that fails fails alone, for which its batch is run
again; so it is when the connection breaks, or another process's transaction is preferred. What may have been committed
already must do nothing the second time, and what an operation does outside the database has to stand that.
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

from sqlalchemy import Connection
from sqlalchemy.engine.interfaces import DBAPICursor

from agl.errors import StoreError
from agl.trainer.store.sql import migrations
from agl.trainer.store.sql.clock import Clock
from agl.trainer.store.sql.dialect import Dialect

T = TypeVar("T")

RETRY_SECONDS: Final = 30.0
"""How long a batch is tried again while the database cannot be reached."""
_CLOSING_SECONDS: Final = 3.0
"""The same once the store is being closed."""


@dataclass(slots=True, eq=False)
class _Operation:
    """A function that waits for its turn, and then its outcome."""

    run: Callable[[Connection], Any]
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
    """A database and the thread that alone touches it.

    Attributes:
        dialect: which database. clock: set by the database's own where that has one.
    """

    def __init__(self, dialect: Dialect, clock: Clock | None = None) -> None:
        self.dialect = dialect
        self.clock = clock or Clock()
        self._waiting: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="agl-store", daemon=True)

    async def open(self) -> None:
        """Open the database, create or upgrade its tables.

        Raises:
            StoreVersionError: a newer version of agl wrote it.
            StoreError: it cannot be opened, or is not an agl store.
        """
        self._thread.start()
        try:
            await self._submit(lambda connection: None, writes=False)
        except BaseException:
            await self.close()
            raise

    def read(self, operation: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Run a function that only reads; it sees every write acknowledged before. Awaited on the running loop."""
        return self._submit(operation, writes=False)

    def write(self, operation: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Run a function in a transaction; the future resolves once that is committed.

        A future cancelled before its turn is skipped; after that the write stands.
        """
        return self._submit(operation, writes=True)

    async def close(self) -> None:
        """Finish what was submitted, then close the connection. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)
        # Not in a worker thread: while the interpreter ends there are none to be had.
        while self._thread.is_alive():
            await asyncio.sleep(0.002)

    def _submit(self, operation: Callable[[Connection], T], *, writes: bool) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed", hint="open it again with open_store", store=self.dialect.url)
            self._waiting.put(_Operation(operation, writes, loop, future))
        return future

    # -- on the thread --------------------------------------------------------------------------------------------
    def _work(self) -> None:
        self._connection: Connection | None = None
        try:
            self._engine = self.dialect.open_engine()
            self._connect()
        except BaseException as error:
            self._disconnect()
            self._refuse(error)
            return
        try:
            while batch := self._next():
                try:
                    self._commit(batch)
                except BaseException as error:
                    # Whatever it is, those who wait have to hear of it.
                    self._fail(batch, error, unsure=True)
                _deliver(batch)
        finally:
            self._disconnect()
            self._engine.dispose()

    def _connect(self) -> Connection:
        if self._connection is None:
            connection = self._engine.connect()
            try:
                migrations.upgrade(connection, self.dialect)
                self.clock.set(self.dialect.now(connection))
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            # One that broke cannot be closed, only forgotten.
            with contextlib.suppress(Exception):
                connection.close()

    def _commit(self, batch: Sequence[_Operation]) -> None:
        """Run a batch until it is committed; where it cannot be, all of it has failed."""
        deadline, pause, unsure = time.monotonic() + RETRY_SECONDS, 0.02, False
        while True:
            try:
                _run(self._connect(), batch, self.dialect)
                return
            except _Undone as undone:
                error, unsure = undone.error, unsure or undone.unsure
            except BaseException as other:
                error = other
            lost, conflict = self.dialect.is_lost(error), self.dialect.is_conflict(error)
            if lost:
                self._disconnect()
            if self._closed:
                deadline = min(deadline, time.monotonic() + _CLOSING_SECONDS)
            if not (lost or conflict) or time.monotonic() + pause > deadline:
                break
            if conflict and len(batch) > 1:
                # Fewer rows are held at once, in an order that is each operation's own.
                for operation in batch:
                    self._commit([operation])
                return
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, 1.0)
        self._fail(batch, error, unsure)

    def _fail(self, batch: Sequence[_Operation], error: BaseException, unsure: bool) -> None:
        refused = self.dialect.store_error(error)
        if unsure and isinstance(refused, StoreError):
            refused = StoreError(
                f"the connection broke while this was being committed, and did not come back: {refused.message}",
                hint="it may or may not be stored; doing it again does no harm",
                **refused.where,
            )
        for operation in batch:
            operation.error = refused

    def _next(self) -> list[_Operation]:
        """Everything that waits, at least one; nothing when the store was closed."""
        operation = self._waiting.get()
        batch: list[_Operation] = []
        while operation is not None:
            if not operation.future.cancelled():
                batch.append(operation)
            try:
                operation = self._waiting.get_nowait()
            except queue.Empty:
                if batch:
                    return batch
                operation = self._waiting.get()
        if batch:
            self._waiting.put(None)
        return batch

    def _refuse(self, error: BaseException) -> None:
        """Answer every operation with the error that opening met, until the store is closed."""
        while batch := self._next():
            for operation in batch:
                operation.error = self.dialect.store_error(error)
            _deliver(batch)


class _Undone(Exception):
    """The transaction of a batch was not committed, or, if `unsure`, may not have been."""

    def __init__(self, error: BaseException, unsure: bool) -> None:
        self.error, self.unsure = error, unsure


def _run(connection: Connection, batch: Sequence[_Operation], dialect: Dialect) -> None:
    """Run a batch in one transaction and note each outcome. Raises _Undone if all of it came to nothing.

    Savepoints cost about as much as a small operation does, at a server two more journeys, and hardly any operation
    fails. So there are none at first; when one fails, all is rolled back and run again with a savepoint around each.
    """
    writes = any(operation.writes for operation in batch)
    begin = dialect.begin_write if writes else dialect.begin_read
    # The driver's own cursor: these statements come with every batch and need nothing from SQLAlchemy.
    cursor = connection.connection.cursor()
    committing = False
    try:
        cursor.execute(begin)
        if not _run_freely(connection, batch, dialect):
            # Does nothing where the failure ended the transaction already, as a full disk may.
            connection.connection.rollback()
            if len(batch) == 1:
                return
            cursor.execute(begin)
            for operation in batch:
                _run_guarded(connection, cursor, operation, dialect)
        committing = writes
        cursor.execute("COMMIT")
    except BaseException as error:
        try:
            connection.connection.rollback()
        except Exception:
            # There is no connection any more.
            pass
        raise _Undone(error, committing and dialect.is_lost(error)) from error
    finally:
        cursor.close()


def _run_freely(connection: Connection, batch: Sequence[_Operation], dialect: Dialect) -> bool:
    """Whether all went well; stops at the first that fails."""
    for operation in batch:
        _run_plain(connection, operation, dialect)
        if operation.error is not None:
            return False
    return True


def _run_plain(connection: Connection, operation: _Operation, dialect: Dialect) -> None:
    operation.result = operation.error = None
    try:
        operation.result = operation.run(connection)
    except Exception as error:
        if dialect.is_lost(error) or dialect.is_conflict(error):
            raise
        operation.error = dialect.store_error(error)


def _run_guarded(connection: Connection, cursor: DBAPICursor, operation: _Operation, dialect: Dialect) -> None:
    cursor.execute("SAVEPOINT operation")
    _run_plain(connection, operation, dialect)
    if operation.error is not None:
        try:
            cursor.execute("ROLLBACK TO operation")
        except Exception:
            # The transaction is gone, and the operation's own error says why.
            raise operation.error from None
    cursor.execute("RELEASE operation")


def _deliver(batch: Sequence[_Operation]) -> None:
    """Hand the outcomes over, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
    for operation in batch:
        by_loop.setdefault(operation.loop, []).append(operation)
    for loop, operations in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver_here, operations)
        except RuntimeError:
            # The loop was closed meanwhile, so nobody waits any more.
            pass


def _deliver_here(operations: Sequence[_Operation]) -> None:
    for operation in operations:
        operation.deliver()

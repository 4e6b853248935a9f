"""One thread that owns the database connection: what waits is committed together, and acknowledged after that.

An operation is a function of a connection, and may be run twice: one that fails fails alone, for which its batch is run
again. What it does outside the database has to stand that.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.engine.interfaces import DBAPICursor

from agl.errors import StoreError
from agl.trainer.store import dialect, migrations

T = TypeVar("T")


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
    """A SQLite file, or a private database in memory, and the thread that alone touches it.

    Attributes:
        path: the file; `dialect.MEMORY` for none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
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
                raise StoreError("the store is closed", hint="open it again with open_store", store=self.path)
            self._waiting.put(_Operation(operation, writes, loop, future))
        return future

    # -- on the thread --------------------------------------------------------------------------------------------
    def _work(self) -> None:
        try:
            engine = dialect.open_engine(self.path)
        except BaseException as error:
            self._refuse(error)
            return
        try:
            with engine.connect() as connection:
                try:
                    migrations.upgrade(connection, self.path)
                except BaseException as error:
                    self._refuse(error)
                    return
                while batch := self._next():
                    _run(connection, batch, self.path)
                    _deliver(batch)
        finally:
            engine.dispose()

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
                operation.error = dialect.store_error(error, self.path)
            _deliver(batch)


def _run(connection: Connection, batch: Sequence[_Operation], path: str) -> None:
    """Run a batch in one transaction and note each outcome; if it cannot be committed, all of it has failed.

    Savepoints cost about as much as a small operation does, and hardly any operation fails. So there are none at
    first; when one fails, all is rolled back and run again with a savepoint around each.
    """
    begin = dialect.BEGIN_WRITE if any(operation.writes for operation in batch) else dialect.BEGIN_READ
    # The driver's own cursor: these statements come with every batch and need nothing from SQLAlchemy.
    cursor = connection.connection.cursor()
    try:
        cursor.execute(begin)
        if not _run_freely(connection, batch):
            connection.connection.rollback()
            cursor.execute(begin)
            for operation in batch:
                _run_guarded(connection, cursor, operation, path)
        cursor.execute("COMMIT")
    except BaseException as error:
        refused = dialect.store_error(error, path)
        for operation in batch:
            operation.error = refused
        # Does nothing where the failure ended the transaction already, as a full disk may.
        connection.connection.rollback()
    finally:
        cursor.close()


def _run_freely(connection: Connection, batch: Sequence[_Operation]) -> bool:
    """Whether all went well; stops at the first that fails."""
    try:
        for operation in batch:
            operation.result = operation.run(connection)
    except Exception:
        return False
    return True


def _run_guarded(connection: Connection, cursor: DBAPICursor, operation: _Operation, path: str) -> None:
    cursor.execute("SAVEPOINT operation")
    try:
        operation.result = operation.run(connection)
    except Exception as error:
        operation.error = dialect.store_error(error, path)
        try:
            cursor.execute("ROLLBACK TO operation")
        except Exception:
            # The transaction is gone, and `error` says why.
            raise error from None
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

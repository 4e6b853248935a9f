"""The interface of what differs between databases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from sqlalchemy import Connection, Engine

# SQLite took its ON CONFLICT from PostgreSQL, so that one statement compiles for both.
from sqlalchemy.dialects.postgresql import insert as insert

T = TypeVar("T")

MEMORY: Final = ":memory:"


@dataclass(frozen=True, slots=True)
class Change:
    """The effects of an operation for which callers may be waiting.

    Attributes:
        queued: run -> number of rollouts that can be leased now.
        ended: ids of the rollouts that ended.
    """

    queued: Mapping[str | None, int] = field(default_factory=dict)
    ended: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.queued or self.ended)

    @classmethod
    def of_all(cls, changes: Sequence[Change]) -> Change:
        """The effects of several operations together."""
        if len(changes) == 1:
            return changes[0]
        queued: Counter[str | None] = Counter()
        for change in changes:
            queued.update(change.queued)
        return cls(queued, [rollout_id for change in changes for rollout_id in change.ended])


@dataclass(frozen=True, slots=True)
class Changed(Generic[T]):
    """The result of an operation whose `change` is announced when it is committed."""

    result: T
    change: Change


class Watch(Protocol):
    """A thread that notices changes by other processes."""

    def stop(self) -> None:
        """Stop the thread."""
        ...


class Dialect(Protocol):
    """One database, not yet open.

    Attributes:
        begin_read, begin_write: statements that begin a transaction.
        begin_schema: statements that begin one in which no other process can change the tables.
        not_a_store_hint: what to do about a database that is no store.
        reads_beside_writes: whether a second connection sees what the first one has committed.
    """

    begin_read: str
    begin_write: str
    begin_schema: Sequence[str]
    not_a_store_hint: str

    @property
    def url(self) -> str:
        """Identifies the database in messages, without the password."""
        ...

    @property
    def reads_beside_writes(self) -> bool: ...

    def open_engine(self) -> Engine:
        """An engine in autocommit: `Database` sends BEGIN and COMMIT itself. May raise the driver's errors."""
        ...

    def open_reader(self) -> Engine:
        """Another engine, for a connection that only reads. May raise the driver's errors."""
        ...

    def require_place(self) -> None:
        """Raise `StoreGoneError` if what is written to the open database can be found by nobody any more."""
        ...

    def now(self, connection: Connection) -> float | None:
        """The database's own clock, seconds since the epoch; None where it is this machine's."""
        ...

    def store_error(self, error: BaseException) -> BaseException:
        """A driver's error as a `StoreError` that names the database, as is a lone surrogate in an id; any other error
        unchanged."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection is lost, or of no use for now: the transaction can be repeated on another one."""
        ...

    def is_unsure(self, error: BaseException) -> bool:
        """Whether a transaction that ended with this error while it was being committed may be committed."""
        ...

    def is_conflict(self, error: BaseException) -> bool:
        """Whether the transaction was rolled back in favour of another one, and can be repeated."""
        ...

    def announce(self, connection: Connection, change: Change) -> None:
        """Notify other processes of the change when the transaction is committed, where the database supports it."""
        ...

    def watch(self, changed: Callable[[Change | None], None]) -> Watch | None:
        """Call `changed` for changes by other processes, from another thread; with None where details are unknown.

        Returns None for a database that no other process can see.
        """
        ...

    def compact(self) -> None:
        """Release the space of deleted rows, on a separate connection. May raise the driver's errors."""
        ...

"""What differs from one database to another, as one small interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from sqlalchemy import Connection, Engine

# SQLite took its ON CONFLICT from PostgreSQL, so that one statement compiles for both.
from sqlalchemy.dialects.postgresql import insert as insert

MEMORY: Final = ":memory:"


@dataclass(frozen=True, slots=True)
class Change:
    """What an operation did that somebody may be waiting for.

    Attributes:
        queued: how many rollouts can be leased that could not before, by run. ended: ids of those that ended.
    """

    queued: Mapping[str | None, int] = field(default_factory=dict)
    ended: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.queued or self.ended)


class Watch(Protocol):
    """A thread that learns of what other processes changed."""

    def stop(self) -> None:
        """End it. Returns at once; the thread follows within a moment."""
        ...


class Dialect(Protocol):
    """One database, not yet open.

    Attributes:
        begin_read, begin_write: statements that open a transaction.
        begin_schema: statements that open one in which no other process can change the tables.
        not_a_store_hint: what to do about a database of somebody else's.
    """

    begin_read: str
    begin_write: str
    begin_schema: Sequence[str]
    not_a_store_hint: str

    @property
    def url(self) -> str:
        """Names it in messages, without its password."""
        ...

    def open_engine(self) -> Engine:
        """An engine in autocommit: `Database` says BEGIN and COMMIT itself. May raise the driver's errors."""
        ...

    def now(self, connection: Connection) -> float | None:
        """The database's own clock, seconds since the epoch; None where it is this machine's."""
        ...

    def store_error(self, error: BaseException) -> BaseException:
        """A driver's error as a `StoreError` that names the database; any other error as it is."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection has gone, so that the transaction may be run again on another one."""
        ...

    def is_conflict(self, error: BaseException) -> bool:
        """Whether the transaction was undone in favour of another one, and may be run again."""
        ...

    def announce(self, connection: Connection, change: Change) -> None:
        """Tell other processes once the transaction is committed, where the database can."""
        ...

    def watch(self, changed: Callable[[Change | None], None]) -> Watch | None:
        """Start to learn what other processes change; None as an argument means: something, look for yourself.

        Returns None for a database that no other process can see.
        """
        ...

    def compact(self) -> None:
        """Give the room of deleted rows back, on a connection of its own. May raise the driver's errors."""
        ...

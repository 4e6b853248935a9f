"""Statements compiled once and run by the driver's own cursor: what the hot operations use in place of SQLAlchemy's.

SQLAlchemy takes several times as long for its part of a small statement as SQLite takes to run it. A statement given
here is compiled for the connection's dialect the first time and kept, so it has to live as long as the process: one per
module, with named `bindparam`s, none of them expanding. Values go to the driver and come back unconverted: texts,
integers, floats, bytes and None alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Delete, Insert, Select, Update
from sqlalchemy.engine.interfaces import DBAPICursor

Row = dict[str, Any]
Statement = Select[Any] | Insert | Update | Delete


class _Prepared:
    """The SQL of a statement in one dialect, and how its values are handed to the driver."""

    def __init__(self, statement: Statement, connection: Connection) -> None:
        keys = None
        if isinstance(statement, Insert):
            # All columns but the one that counts up; inline, or PostgreSQL would be asked to return that.
            counts_up = statement.table.autoincrement_column  # pyright: ignore[reportAttributeAccessIssue]
            keys = [column.name for column in statement.table.columns if column is not counts_up]
            statement = statement.inline()
        compiled: Any = statement.compile(dialect=connection.dialect, column_keys=keys)
        self.sql: str = compiled.string
        self.literals = {name: bind.value for name, bind in compiled.binds.items() if not bind.required}
        self.columns = [str(column.key) for column in statement.exported_columns]
        self.pack: Callable[[Mapping[str, Any]], Any] = _identity
        names: list[str] | None = compiled.positiontup
        if names is not None:
            self.pack = itemgetter(*names) if len(names) > 1 else lambda values: [values[name] for name in names]

    def values(self, values: Mapping[str, Any]) -> Any:
        return self.pack({**self.literals, **values} if self.literals else values)


def _identity(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return values


_prepared: dict[tuple[Statement, str], _Prepared] = {}


def _prepare(connection: Connection, statement: Statement) -> _Prepared:
    key = (statement, connection.dialect.name)
    found = _prepared.get(key)
    if found is None:
        found = _prepared[key] = _Prepared(statement, connection)
    return found


def _cursor(connection: Connection) -> DBAPICursor:
    return connection.connection.cursor()


def rows(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """All rows of a statement that returns some, each in the order of its columns."""
    prepared, cursor = _prepare(connection, statement), _cursor(connection)
    cursor.execute(prepared.sql, prepared.values(values))
    return list(cursor.fetchall())


def first(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> Row | None:
    """The only row of a statement that returns at most one, by the names of its columns."""
    found = rows(connection, statement, values)
    return dict(zip(_prepare(connection, statement).columns, found[0], strict=True)) if found else None


def change(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> int:
    """Run a statement that returns no rows; how many rows it changed."""
    prepared, cursor = _prepare(connection, statement), _cursor(connection)
    cursor.execute(prepared.sql, prepared.values(values))
    return cursor.rowcount


def change_many(connection: Connection, statement: Statement, many: Sequence[Mapping[str, Any]]) -> int:
    """Run such a statement with each of `many` values; how many rows were changed in all."""
    prepared, cursor = _prepare(connection, statement), _cursor(connection)
    cursor.executemany(prepared.sql, [prepared.values(values) for values in many])
    return cursor.rowcount

"""Statements that are compiled once and run by the driver's own cursor, for the most frequent operations.

SQLAlchemy's part of a small statement takes several times as long as SQLite takes to run it. A statement is compiled
for the connection's dialect on first use and cached for the life of the process, so it must be a module's constant,
with named `bindparam`s, none of them expanding. Values are not converted: only text, integers, floats, bytes and None.
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
    """The SQL of a statement in one dialect, and the form in which the driver takes its values."""

    def __init__(self, statement: Statement, connection: Connection) -> None:
        keys = None
        if isinstance(statement, Insert):
            # All columns but the autoincremented one; inline, so that PostgreSQL does not return that.
            serial = statement.table.autoincrement_column  # pyright: ignore[reportAttributeAccessIssue]
            keys = [column.name for column in statement.table.columns if column is not serial]
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
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepared[key] = _Prepared(statement, connection)
    return prepared


def _cursor(connection: Connection) -> DBAPICursor:
    return connection.connection.cursor()


def rows(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """All rows that a statement returns, each in the order of its columns."""
    prepared, cursor = _prepare(connection, statement), _cursor(connection)
    cursor.execute(prepared.sql, prepared.values(values))
    return list(cursor.fetchall())


def first(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> Row | None:
    """The row of a statement that returns at most one, by column names."""
    result = rows(connection, statement, values)
    return dict(zip(_prepare(connection, statement).columns, result[0], strict=True)) if result else None


def change(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> int:
    """Run a statement that returns no rows; the number of rows that it changed."""
    prepared, cursor = _prepare(connection, statement), _cursor(connection)
    cursor.execute(prepared.sql, prepared.values(values))
    return cursor.rowcount


def change_many(connection: Connection, statement: Statement, many: Sequence[Mapping[str, Any]]) -> int:
    """Run such a statement with each of `many` values; the total number of rows that it changed."""
    prepared, cursor = _prepare(connection, statement), _cursor(connection)
    cursor.executemany(prepared.sql, [prepared.values(values) for values in many])
    return cursor.rowcount

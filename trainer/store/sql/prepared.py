"""Statements that are compiled once and run by the driver's own cursor, for the most frequent operations.

SQLAlchemy's part of a small statement takes several times as long as SQLite takes to run it. A statement is compiled
for the connection's dialect on first use and cached for the life of the process, so it must be a module's constant,
with named `bindparam`s, none of them expanding. Values are not converted: only text, integers, floats, bytes and None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, Final
from typing import cast as cast_type

import orjson
from sqlalchemy import (
    JSON,
    BindParameter,
    Column,
    ColumnClause,
    ColumnElement,
    Connection,
    Delete,
    Insert,
    Integer,
    LargeBinary,
    Select,
    TableValuedAlias,
    Text,
    Update,
    bindparam,
    cast,
    func,
    literal_column,
    select,
    true,
)
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.sql import visitors
from sqlalchemy.types import TypeEngine

Row = dict[str, Any]
_ROWS: Final = 256
"""Maximum number of rows in one statement: a parameter has at most 1 GB."""
Statement = Select[Any] | Insert | Update | Delete


class _Prepared:
    """The SQL of a statement in one dialect, and the form in which the driver takes its values."""

    def __init__(self, statement: Statement, connection: Connection, keys: list[str] | None = None) -> None:
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


class _PreparedForRecords(_Prepared):
    """A statement of PostgreSQL that is run once with a JSON array of all values: its one parameter is "records".

    The driver takes longer over each parameter, and over each statement, than the server over the JSON. Bytes are in
    hexadecimal. A select's first column is the index of the values.
    """

    def __init__(self, statement: Statement, connection: Connection) -> None:
        if isinstance(statement, Insert):
            inserted = _inserted(statement)
            records = _records([(column.name, column.type) for column in inserted])
            values = [_value(records, column.name, column.type) for column in inserted]
            statement = statement.from_select([column.name for column in inserted], select(*values)).inline()
            self.binary = [column.name for column in inserted if isinstance(column.type, LargeBinary)]
        else:
            binds: dict[str, TypeEngine[Any]] = {
                each.key: each.type
                for each in visitors.iterate(statement)
                if isinstance(each, BindParameter) and each.required
            }
            records = _records([("i", Integer()), *binds.items()])

            def value(element: Any, **_: Any) -> Any:
                is_value = isinstance(element, BindParameter) and element.required
                return _value(records, element.key, element.type) if is_value else None

            statement = cast_type(Statement, visitors.replacement_traverse(statement, {}, value))
            self.binary = [name for name, type_ in binds.items() if isinstance(type_, LargeBinary)]
            if isinstance(statement, Select):
                found = statement.subquery().lateral()
                statement = select(records.c.i, found).join_from(records, found, true())
        super().__init__(statement, connection)

    def parameters(self, many: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The parameters of as many statements as it takes."""
        for start in range(0, len(many), _ROWS):
            records = [{**values, "i": start + i} for i, values in enumerate(many[start : start + _ROWS])]
            for record in records if self.binary else ():
                record.update((name, record[name].hex()) for name in self.binary)
            yield {**self.literals, "records": orjson.dumps(records).decode()}


def _inserted(statement: Insert) -> list[ColumnClause[Any]]:
    """All columns but the autoincremented one."""
    serial = statement.table.autoincrement_column  # pyright: ignore[reportAttributeAccessIssue]
    return [column for column in statement.table.columns if column is not serial]


def _records(columns: Sequence[tuple[str, TypeEngine[Any]]]) -> TableValuedAlias:
    parts = [Column(name, Text() if isinstance(type_, LargeBinary) else type_) for name, type_ in columns]
    function = func.json_to_recordset(cast(bindparam("records", type_=Text()), JSON))
    return function.table_valued(*parts).render_derived(with_types=True)


def _value(records: TableValuedAlias, name: str, type_: TypeEngine[Any]) -> ColumnElement[Any]:
    value = records.c[name]
    return func.decode(value, literal_column("'hex'")) if isinstance(type_, LargeBinary) else value


def _identity(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return values


_prepared: dict[tuple[Statement, str], _Prepared] = {}
_prepared_for_records: dict[Statement, _PreparedForRecords] = {}


def _prepare(connection: Connection, statement: Statement) -> _Prepared:
    key = (statement, connection.dialect.name)
    prepared = _prepared.get(key)
    if prepared is None:
        if isinstance(statement, Insert):
            # Inline, so that PostgreSQL does not return the autoincremented column.
            keys = [column.name for column in _inserted(statement)]
            prepared = _prepared[key] = _Prepared(statement.inline(), connection, keys)
        else:
            prepared = _prepared[key] = _Prepared(statement, connection)
    return prepared


def _prepare_for_records(connection: Connection, statement: Statement) -> _PreparedForRecords:
    prepared = _prepared_for_records.get(statement)
    if prepared is None:
        prepared = _prepared_for_records[statement] = _PreparedForRecords(statement, connection)
    return prepared


def _cursor(connection: Connection) -> DBAPICursor:
    return connection.connection.cursor()


def _is_server(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def together(connection: Connection) -> AbstractContextManager[Any]:
    """Within the block, a database on a server is sent statements without waiting for the results of earlier ones.

    SQLAlchemy's own results cannot be read there, and an error can come with a later statement or the block's end.
    """
    driver: Any = connection.connection.driver_connection
    if not _is_server(connection) or driver.info.pipeline_status:
        return nullcontext()
    return driver.pipeline()


def rows(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> list[Row]:
    """All rows that a statement returns, by column names."""
    prepared, cursor = _prepare(connection, statement), _cursor(connection)
    cursor.execute(prepared.sql, prepared.values(values))
    return [dict(zip(prepared.columns, row, strict=True)) for row in cursor.fetchall()]


def rows_each(
    connection: Connection, statement: Statement, many: Sequence[Mapping[str, Any]]
) -> list[list[tuple[Any, ...]]]:
    """All rows that a statement returns for each of `many` values, in the order of its columns."""
    cursor = _cursor(connection)
    found: list[list[tuple[Any, ...]]] = [[] for _ in many]
    if _is_server(connection):
        prepared = _prepare_for_records(connection, statement)
        for parameters in prepared.parameters(many):
            cursor.execute(prepared.sql, parameters)
            for i, *row in cursor.fetchall():
                found[i].append(tuple(row))
    else:
        prepared = _prepare(connection, statement)
        for i, values in enumerate(many):
            cursor.execute(prepared.sql, prepared.values(values))
            found[i] = list(cursor.fetchall())
    return found


def first_each(connection: Connection, statement: Statement, many: Sequence[Mapping[str, Any]]) -> list[Row | None]:
    """The row of a statement that returns at most one, by column names, for each of `many` values."""
    columns = _prepare(connection, statement).columns
    found = rows_each(connection, statement, many)
    return [dict(zip(columns, rows[0], strict=True)) if rows else None for rows in found]


def change(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> int:
    """Run a statement that returns no rows; the number of rows that it changed."""
    prepared, cursor = _prepare(connection, statement), _cursor(connection)
    cursor.execute(prepared.sql, prepared.values(values))
    return cursor.rowcount


def change_many(
    connection: Connection, statement: Statement, many: Sequence[Mapping[str, Any]], *, count: bool = False
) -> int:
    """Run such a statement with each of `many` values, which concern different rows.

    Returns:
        The total number of rows that it changed, if `count`; otherwise the results are not waited for.
    """
    cursor = _cursor(connection)
    if not _is_server(connection):
        prepared = _prepare(connection, statement)
        cursor.executemany(prepared.sql, [prepared.values(values) for values in many])
        return cursor.rowcount
    prepared, changed = _prepare_for_records(connection, statement), 0
    for parameters in prepared.parameters(many):
        cursor.execute(prepared.sql, parameters)
        if count:
            # Waits for the result, which the driver has no plainer way to say.
            cursor.nextset()
            changed += cursor.rowcount
    return changed

"""One statement for many values: what SQLAlchemy's `execute` leaves to its callers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Delete, Insert, Row, Select, Update


def rows_each(
    connection: Connection, statement: Select[Any], many: Sequence[Mapping[str, Any]]
) -> list[list[Row[Any]]]:
    """All rows that a statement returns for each of `many` values."""
    return [list(connection.execute(statement, values)) for values in many]


def first_each(
    connection: Connection, statement: Select[Any], many: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any] | None]:
    """The row of a statement that returns at most one, by column names, for each of `many` values."""
    found = rows_each(connection, statement, many)
    return [dict(rows[0]._mapping) if rows else None for rows in found]


def change_many(connection: Connection, statement: Insert | Update | Delete, many: Sequence[Mapping[str, Any]]) -> int:
    """Run a statement with each of `many` values; the total number of rows that it changed."""
    if not many:
        return 0
    # SQLAlchemy would read the number of rows of an UPDATE or DELETE alone.
    return connection.execute(statement, list(many), execution_options={"preserve_rowcount": True}).rowcount

"""Runs one statement with many values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Delete, Insert, RowMapping, Select, Update


def first_each(
    connection: Connection, statement: Select[Any], many: Sequence[Mapping[str, Any]]
) -> list[RowMapping | None]:
    """The row of a statement that returns at most one, by column names, for each of `many` values."""
    return [connection.execute(statement, values).mappings().first() for values in many]


def change_many(connection: Connection, statement: Insert | Update | Delete, many: Sequence[Mapping[str, Any]]) -> int:
    """Run a statement with each of `many` values; the total number of rows that it changed."""
    if not many:
        return 0
    # SQLAlchemy would read the number of rows of an UPDATE or DELETE alone.
    return connection.execute(statement, list(many), execution_options={"preserve_rowcount": True}).rowcount

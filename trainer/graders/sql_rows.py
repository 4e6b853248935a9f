"""Compares two query results: rows as multisets or in order, numbers by value, NULL equal to NULL."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from decimal import Decimal
from typing import Any

Rows = Sequence[tuple[Any, ...]]

_SEARCHED = 2000
"""The most rows, equal but for their numbers, that are matched one by one where sorting does not pair them."""


def same_rows(rows: Rows, expected: Rows, *, ordered: bool, distinct: bool, tolerance: float) -> bool:
    """Whether two results are the same.

    Args:
        rows, expected: the two results.
        ordered: whether to compare row by row, in order; otherwise as multisets.
        distinct: whether to compare as sets, in no order.
        tolerance: relative, between numbers; absolute below 1.
    """
    left, right = ([tuple(map(_cell, row)) for row in result] for result in (rows, expected))
    if ordered and not distinct:
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(_close(a, b, tolerance) for a, b in pairs)
    if distinct:
        left = list(dict.fromkeys(left))
        right = list(dict.fromkeys(right))
        groups = _grouped(left)
        others = _grouped(right)
        return groups.keys() == others.keys() and all(
            _covered(groups[key], others[key], tolerance) and _covered(others[key], groups[key], tolerance)
            for key in groups
        )
    if len(left) != len(right):
        return False
    groups = _grouped(left)
    others = _grouped(right)
    return groups.keys() == others.keys() and all(_paired(groups[key], others[key], tolerance) for key in groups)


Cell = tuple[str, Hashable]


def _cell(value: Any) -> Cell:
    match value:
        case None:
            return "null", None
        case bool() | int() | float() | Decimal():
            return "number", value
        case bytes() | bytearray() | memoryview():
            return "bytes", bytes(value)
        case str():
            return "text", value
        case _:
            try:
                hash(value)
            except TypeError:
                return "other", repr(value)
            return "other", value


def _close(left: tuple[Cell, ...], right: tuple[Cell, ...], tolerance: float) -> bool:
    return len(left) == len(right) and all(
        a == b or (a[0] == b[0] == "number" and _near(a[1], b[1], tolerance)) for a, b in zip(left, right, strict=True)
    )


def _near(left: Any, right: Any, tolerance: float) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    try:
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False


def _grouped(rows: list[tuple[Cell, ...]]) -> dict[Hashable, list[tuple[Cell, ...]]]:
    """Rows grouped by their cells, in which all numbers count as equal."""
    groups: dict[Hashable, list[tuple[Cell, ...]]] = defaultdict(list)
    for row in rows:
        groups[tuple("number" if kind == "number" else (kind, value) for kind, value in row)].append(row)
    return groups


def _paired(left: list[tuple[Cell, ...]], right: list[tuple[Cell, ...]], tolerance: float) -> bool:
    if len(left) != len(right):
        return False
    left = sorted(left, key=_numbers)
    right = sorted(right, key=_numbers)
    if all(_close(a, b, tolerance) for a, b in zip(left, right, strict=True)):
        return True
    if len(left) > _SEARCHED:
        return False
    for row in left:
        match = next((i for i, other in enumerate(right) if _close(row, other, tolerance)), None)
        if match is None:
            return False
        right.pop(match)
    return True


def _covered(left: list[tuple[Cell, ...]], right: list[tuple[Cell, ...]], tolerance: float) -> bool:
    """Whether each row on the left is among those on the right."""
    exact = set(right)
    return all(row in exact or any(_close(row, other, tolerance) for other in right[:_SEARCHED]) for row in left)


def _numbers(row: tuple[Cell, ...]) -> tuple[float, ...]:
    """A sort key of a row's numbers to six digits, so that rounding errors do not separate rows that match."""
    return tuple(_rounded(value) for kind, value in row if kind == "number")


def _rounded(value: Any) -> float:
    try:
        return float(f"{float(value):.6g}")
    except OverflowError:
        return math.inf if value > 0 else -math.inf

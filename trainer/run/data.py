"""Tasks in JSON Lines: read line by line, so that an error names the file, the line and the field."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agl.errors import DatasetError, nearest

FIRST_LINES = 10
"""A field that these have (but for one of them), all lines must have."""
_EXAMPLE = 'each line is one task, for example {"question": "What is 2 + 2?", "answer": "4"}'


def read_tasks(path: str | Path) -> list[Any]:
    """Tasks of a file.

    Raises:
        DatasetError: no such file, or as `parse_tasks`.
    """
    file = Path(path)
    if not file.is_file():
        raise DatasetError("there is no such task file", path=file)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"the task file cannot be read: {error}", hint="it must be UTF-8 text", path=file) from error
    return parse_tasks(text, file)


def parse_tasks(text: str, path: object) -> list[Any]:
    """One JSON value per line; empty lines are skipped.

    Args:
        path: its name in errors.

    Raises:
        DatasetError: no task in it, a line that is not JSON, or one that lacks a field which the first lines have.
    """
    tasks: list[Any] = []
    numbers: list[int] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            tasks.append(json.loads(line))
        except (json.JSONDecodeError, RecursionError) as error:
            is_syntax = isinstance(error, json.JSONDecodeError)
            why = f"{error.msg} at column {error.colno}" if is_syntax else "nested too deep"
            raise DatasetError(f"line {number} is not JSON: {why}", hint=_EXAMPLE, path=path) from None
        numbers.append(number)
    if not tasks:
        raise DatasetError("the task file is empty", hint="one JSON value per line", path=path)
    check_tasks(tasks, path, numbers)
    return tasks


def check_tasks(tasks: Iterable[Any], path: object, numbers: Iterable[int] | None = None) -> None:
    """Compare each task with the first ones, where those are objects.

    Args:
        numbers: the tasks' lines; counted from 1 if None.

    Raises:
        DatasetError: a task is no object, or lacks a field that the first ones have.
    """
    tasks = list(tasks)
    first = tasks[:FIRST_LINES]
    if not isinstance(first[0], dict) or not first[0]:
        return
    lines = list(numbers) if numbers is not None else list(range(1, len(tasks) + 1))
    fields = list(first[0])
    for number, task in zip(lines, tasks, strict=True):
        if not isinstance(task, dict):
            kinds = {str: "a text", list: "a list", bool: "a boolean", type(None): "null"}
            raise DatasetError(
                f"line {number} is {kinds.get(type(task), 'a number')}, while line {lines[0]} is an object",
                hint=_EXAMPLE,
                path=path,
                line=number,
            )
    # A field that two of the first lines lack is an optional one.
    fields = [f for f in fields if sum(f not in t for t in first) <= 1]
    for number, task in zip(lines, tasks, strict=True):
        for field in fields:
            if field not in task:
                others = [f for f in task if f not in fields]
                close = nearest(field, others) if others else "it has " + (", ".join(map(repr, task)) or "no field")
                raise DatasetError(
                    f"line {number} has no field {field!r}, which the first lines have",
                    hint=f"{close}; where a task has no value for it, write null",
                    path=path,
                    line=number,
                    field=field,
                )

"""What an assistant works on: a policy, tools, and a database that is a copy for one conversation alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

Database = dict[str, dict[str, Any]]
"""Table -> key -> row."""


class Environment:
    """The tools of a domain, as methods with Strands' `@tool`.

    Args:
        policy: the assistant's system prompt.
        start: the database before the conversation; it is copied, so that rollouts never see each other's changes.
    """

    names: tuple[str, ...] = ()
    """Of the methods that are tools."""

    def __init__(self, policy: str, start: Mapping[str, Mapping[str, Any]]) -> None:
        self.policy = policy
        self._start = start
        self.database: Database = copy.deepcopy({table: dict(rows) for table, rows in start.items()})

    @property
    def tools(self) -> list[Any]:
        return [getattr(self, name) for name in self.names]

    def play(self, actions: Iterable[Mapping[str, Any]]) -> None:
        """Call tools as a task lists them: {"name", "arguments"}. What a tool refuses changes nothing, as in tau2."""
        for action in actions:
            try:
                getattr(self, action["name"])(**action["arguments"])
            except ValueError:
                continue

    def changes(self) -> Database:
        """The rows that differ from the start; None for one that is gone. Equal changes are equal databases."""
        changed: Database = {}
        for table, rows in self.database.items():
            before = self._start.get(table, {})
            keys = [key for key in {**before, **rows} if before.get(key) != rows.get(key)]
            if keys:
                changed[table] = {key: rows.get(key) for key in sorted(keys)}
        return changed

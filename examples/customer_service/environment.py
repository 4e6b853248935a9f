"""What an assistant works on: a policy, tools, and a database that is a copy for one conversation alone."""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


class Table(ChainMap[str, Any]):
    """A table's rows by key: a rollout's own rows in front of the shared ones, which are never changed.

    A row is copied when it is first looked up. So a rollout costs the rows that it touches, however large the database.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        super().__init__({}, start)  # type: ignore[arg-type]  # ChainMap writes into the first one only

    def __getitem__(self, key: str) -> Any:
        own, start = self.maps
        if key not in own:
            own[key] = copy.deepcopy(start[key])
        return own[key]

    def scan(self) -> Iterator[Any]:
        """All rows, to search through and not to change: none is copied."""
        return map(super().__getitem__, self)

    def changes(self) -> dict[str, Any]:
        """The rows that differ from the shared ones."""
        own, start = self.maps
        return {key: own[key] for key in sorted(own) if start.get(key) != own[key]}


class Environment:
    """The tools of a domain, as methods; each framework makes its own tools of them, by signature and docstring.

    Args:
        policy: the assistant's system prompt.
        start: the database before the conversation, which is not changed: rollouts never see each other's changes.
    """

    names: tuple[str, ...] = ()
    """Of the methods that are tools."""

    def __init__(self, policy: str, start: Mapping[str, Mapping[str, Any]]) -> None:
        self.policy = policy
        self.database = {table: Table(rows) for table, rows in start.items()}

    @property
    def tools(self) -> list[Callable[..., str]]:
        return [getattr(self, name) for name in self.names]

    def play(self, actions: Iterable[Mapping[str, Any]]) -> list[str]:
        """Call tools as a task lists them: {"name", "arguments"}. What a tool refuses changes nothing, as in tau2.

        Returns:
            The result of each, or why it was refused.
        """
        results: list[str] = []
        for action in actions:
            try:
                results.append(getattr(self, action["name"])(**action["arguments"]))
            except ValueError as error:
                results.append(str(error))
        return results

    def changes(self) -> dict[str, dict[str, Any]]:
        """The rows that differ from the start, by table. Equal changes are equal databases."""
        return {table: changed for table, rows in self.database.items() if (changed := rows.changes())}

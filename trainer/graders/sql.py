"""The grader of SQL: whether a query gives the same rows as the reference query, on the same database."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl.errors import ConfigError
from agl.options import checked_options
from agl.rewards.trace import Trace
from agl.trainer.graders.base import AgainstReference
from agl.trainer.graders.fences import fenced
from agl.trainer.graders.fields import failure, references, text_of
from agl.trainer.graders.sql_worker import without_quoted
from agl.trainer.processes.workers import WorkerDied, Workers, WorkerStuck, WorkerUnavailable

_LANGUAGES = ("", "sql", "sqlite", "postgresql", "mysql")
_STUCK_SECONDS = 60.0
_KEPT = ("HOME", "PG*", "ODBC*", "KRB5*", "SSL_CERT_FILE")
"""What drivers read of an environment besides the URL."""


@checked_options
@dataclass(frozen=True)
class SQLResult(AgainstReference):
    """1 if the output's query gives a reference query's rows, else 0.

    Rows are compared as multisets, in order where the reference's outermost SELECT has an ORDER BY; columns by
    position, whatever their names; numbers by value within `tolerance`; NULL equals NULL. The output may be the query,
    or a text with the query in its last code block.

    A SQLite database is opened read-only, and only reading is authorised (no ATTACH, PRAGMA or write). Other databases
    are reached through SQLAlchemy in a transaction that is never committed, and read-only on PostgreSQL: give an
    account that can only read.

    The queries run in a separate process (a few are shared) with a limit of memory.

    Attributes:
        database: a path or an SQLAlchemy URL, either with the task's fields in braces ("data/{db_id}.sqlite"), or a
            function of the task that returns one.
        timeout: seconds per query; for SQLite of processor time, so that a busy machine changes no grade.
        max_rows: a query that gives more rows is wrong; a reference that does is an error.
        max_mb: likewise, of MiB in all rows; their process has sixteen times that.
        tolerance: relative, of numbers.
        ignore_duplicates: whether to compare sets of rows, as BIRD does (Li et al. 2023, arXiv:2305.03111).
        ordered: whether order counts; None = if the reference has an ORDER BY.
    """

    waits = True
    needs = ("sqlalchemy",)

    database: str | Path | Callable[[Any], str | Path] = ""
    timeout: float = 5.0
    max_rows: int = 100_000
    max_mb: int = 128
    tolerance: float = 1e-6
    ignore_duplicates: bool = False
    ordered: bool | None = None

    def __post_init__(self) -> None:
        if not self.database:
            raise ConfigError("SQLResult has no database", hint='SQLResult("data/{db_id}.sqlite", answer="query")')
        if not (self.timeout > 0 and self.max_rows > 0 and self.max_mb > 0 and self.tolerance >= 0):
            raise ConfigError("SQLResult: timeout, max_rows and max_mb are more than 0, tolerance is not negative")

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """1 or 0.

        Raises:
            RewardError: no such database, or a reference that fails on it.
        """
        gold_queries = references(task, self.answer, self.label)
        job = {
            "database": self._database_of(task),
            "folder": os.getcwd(),
            "references": gold_queries,
            "ordered": [has_order(gold) if self.ordered is None else self.ordered for gold in gold_queries],
            "query": query_of(text_of(output)).encode(errors="replace").decode() or None,
            "timeout": self.timeout,
            "max_rows": self.max_rows,
            "max_mb": self.max_mb,
            "tolerance": self.tolerance,
            "distinct": self.ignore_duplicates,
        }
        # A query that kills its process twice is a wrong one, if the references alone do not.
        for tried in (job, job, job | {"query": None}):
            try:
                result = _workers().ask(tried, _STUCK_SECONDS + 10 * self.timeout * (len(gold_queries) + 1))
                break
            except WorkerUnavailable as error:
                raise failure(f"the process that runs queries does not start: {error}") from error
            except (WorkerDied, WorkerStuck):
                continue
        else:
            raise failure(
                f"the reference query ends or blocks the process that runs it: {gold_queries[0][:300]}",
                hint="correct it, drop the task, or raise max_mb=",
            )
        if "missing" in result:
            name, text = result["missing"]
            raise ModuleNotFoundError(text, name=name)
        if "failed" in result:
            what, hint = result["failed"]
            raise failure(what, hint=hint)
        return float(result["equal"])

    def _database_of(self, task: Any) -> str:
        if callable(self.database):
            return str(self.database(task))
        name = str(self.database)
        if "{" not in name:
            return name
        try:
            return name.format_map(task if isinstance(task, Mapping) else {"task": task})
        except (KeyError, IndexError, AttributeError, ValueError) as error:
            raise failure(
                f"the task has no field {error} for SQLResult({name!r})", hint="database= may be a function of the task"
            ) from error


def query_of(text: str) -> str:
    """The query in a text: its last code block, or all of it; without the closing semicolon."""
    blocks = fenced(text, lambda info: info.lower() in _LANGUAGES)
    return (blocks[-1][1] if blocks else text).strip().rstrip("; \n\t")


def has_order(query: str) -> bool:
    """Whether the outermost SELECT has an ORDER BY."""
    bare = without_quoted(query)
    # Where each parenthesis closes; what is not closed hides nothing.
    opened: list[int] = []
    closes: dict[int, int] = {}
    for place in re.finditer(r"[()]", bare):
        if place[0] == "(":
            opened.append(place.start())
        elif opened:
            closes[opened.pop()] = place.end()
    outside: list[str] = []
    at = 0
    for start in sorted(closes):
        if start >= at:
            outside += [bare[at:start], " "]
            at = closes[start]
    return re.search(r"\border\s+by\b", "".join([*outside, bare[at:]]), re.I) is not None


@functools.cache
def _workers() -> Workers:
    return Workers.of_module("agl.trainer.graders.sql_worker", keep=_KEPT)

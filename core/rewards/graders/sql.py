"""The grader of SQL: whether a query gives the same rows as the reference query, on the same database."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl.errors import ConfigError, checked_options
from agl.rewards.graders.base import AgainstReference
from agl.rewards.graders.fields import failure, references, text_of
from agl.rewards.graders.sql_rows import Rows, same_rows
from agl.rewards.trace import Trace

_FENCED = re.compile(r"```[ \t]*(?:sql|sqlite|postgresql|mysql)?[ \t]*\n(.*?)```", re.S | re.I)
_QUOTED_OR_COMMENT = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/", re.S)
_PARENTHESES = re.compile(r"\([^()]*\)")

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_OUTSIDE = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
_DATABASE_ERRORS = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
}
_LONGEST_VALUE = 16 << 20


class _QueryFailed(Exception):
    """The query was refused, failed, or exceeded a limit."""


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

    Attributes:
        database: a path or an SQLAlchemy URL, either with the task's fields in braces ("data/{db_id}.sqlite"), or a
            function of the task that returns one.
        timeout: seconds per query; for SQLite of processor time, so that a busy machine changes no grade.
        max_rows: a query that gives more rows is wrong; a reference that does is an error.
        tolerance: relative, of numbers.
        ignore_duplicates: whether to compare sets of rows, as BIRD does (Li et al. 2023, arXiv:2305.03111).
        ordered: whether order counts; None = if the reference has an ORDER BY.
    """

    waits = True
    needs = ("sqlalchemy",)

    database: str | Path | Callable[[Any], str | Path] = ""
    timeout: float = 5.0
    max_rows: int = 100_000
    tolerance: float = 1e-6
    ignore_duplicates: bool = False
    ordered: bool | None = None

    def __post_init__(self) -> None:
        if not self.database:
            raise ConfigError("SQLResult has no database", hint='SQLResult("data/{db_id}.sqlite", answer="query")')
        if not (self.timeout > 0 and self.max_rows > 0 and self.tolerance >= 0):
            raise ConfigError("SQLResult: timeout and max_rows are more than 0, tolerance is not negative")

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """1 or 0.

        Raises:
            RewardError: no such database, or a reference that fails on it.
        """
        gold_queries = references(task, self.answer, self.label)
        with self._open(self._database_of(task)) as run:
            gold_rows = [self._expected(run, query) for query in gold_queries]
            query = query_of(text_of(output))
            if not query:
                return 0.0
            try:
                rows = run(query)
            except _QueryFailed:
                return 0.0
        return float(any(self._same(q, rows, gold) for q, gold in zip(gold_queries, gold_rows, strict=True)))

    def _expected(self, run: Callable[[str], Rows], query: str) -> Rows:
        try:
            return run(query.strip().rstrip(";"))
        except _QueryFailed as error:
            raise failure(
                f"the reference query fails: {error}: {query[:300]}",
                hint="correct it, drop the task, or raise timeout= or max_rows=",
            ) from error

    def _same(self, query: str, rows: Rows, gold: Rows) -> bool:
        ordered = has_order(query) if self.ordered is None else self.ordered
        return same_rows(rows, gold, ordered=ordered, distinct=self.ignore_duplicates, tolerance=self.tolerance)

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

    @contextlib.contextmanager
    def _open(self, database: str) -> Iterator[Callable[[str], Rows]]:
        """A function query -> rows on the database, which raises `_QueryFailed` if the query is at fault."""
        path = re.sub(r"^sqlite(\+\w+)?:///", "", database)
        if "://" in path:
            with _sqlalchemy(path, self.timeout, self.max_rows) as run:
                yield run
        else:
            with _sqlite(path, self.timeout, self.max_rows) as run:
                yield run


def query_of(text: str) -> str:
    """The query in a text: its last code block, or all of it; without the closing semicolon."""
    blocks = _FENCED.findall(text)
    return (blocks[-1] if blocks else text).strip().rstrip("; \n\t")


def has_order(query: str) -> bool:
    """Whether the outermost SELECT has an ORDER BY."""
    bare = _QUOTED_OR_COMMENT.sub(" ", query)
    while (inner := _PARENTHESES.sub(" ", bare)) != bare:
        bare = inner
    return re.search(r"\border\s+by\b", bare, re.I) is not None


@contextlib.contextmanager
def _sqlite(path: str, timeout: float, max_rows: int) -> Iterator[Callable[[str], Rows]]:
    if not Path(path).is_file():
        raise failure(f"there is no database {path!r}", hint="SQLResult(database=) takes a path, a URL, or a function")
    try:
        connection = sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True, timeout=timeout)
    except sqlite3.Error as error:
        raise failure(f"cannot open the database {path!r}: {error}") from error
    deadline = 0.0

    def authorise(action: int, first: str | None, second: str | None, *_: object) -> int:
        if action not in _READING or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _OUTSIDE):
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    def run(query: str) -> Rows:
        nonlocal deadline
        deadline = time.thread_time() + timeout
        try:
            rows = connection.execute(query).fetchmany(max_rows + 1)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DATABASE_ERRORS:
                raise failure(f"the database {path!r} cannot be read: {error}") from error
            raise _QueryFailed(str(error)) from error
        except (sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            raise _QueryFailed(str(error)) from error
        return _within(rows, max_rows)

    with contextlib.closing(connection):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)
        connection.set_authorizer(authorise)
        connection.set_progress_handler(lambda: int(time.thread_time() > deadline), 1000)
        connection.text_factory = lambda data: data.decode(errors="surrogateescape")
        yield run


@contextlib.contextmanager
def _sqlalchemy(url: str, timeout: float, max_rows: int) -> Iterator[Callable[[str], Rows]]:
    import sqlalchemy
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    milliseconds = max(1, round(timeout * 1000))
    setup = {"postgresql": ("SET TRANSACTION READ ONLY", f"SET LOCAL statement_timeout = {milliseconds}")}
    try:
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        masked_url = engine.url.render_as_string()
    except SQLAlchemyError as error:
        raise failure(f"SQLResult cannot read the database's URL: {type(error).__name__}") from error
    except ImportError as error:
        raise failure(f"the driver of {url.partition('://')[0]!r} is not installed: {error}") from error

    def run(query: str) -> Rows:
        if not re.match(r"\s*(select|with|values)\b", _QUOTED_OR_COMMENT.sub(" ", query), re.I):
            raise _QueryFailed("only SELECT, WITH and VALUES are run")
        if ";" in _QUOTED_OR_COMMENT.sub(" ", query):
            raise _QueryFailed("only one statement is run")
        with _connection() as connection:
            try:
                for statement in setup.get(engine.dialect.name, ()):
                    connection.exec_driver_sql(statement)
                options = {"stream_results": True, "no_parameters": True}  # a % in a query is no placeholder
                rows = connection.exec_driver_sql(query, execution_options=options).fetchmany(max_rows + 1)
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise failure(f"the connection to {masked_url} was lost: {error.orig}") from error
                raise _QueryFailed(str(error.orig)) from error
            except SQLAlchemyError as error:
                raise _QueryFailed(str(error)) from error
            finally:
                with contextlib.suppress(SQLAlchemyError):
                    connection.rollback()
        return _within([tuple(row) for row in rows], max_rows)

    @contextlib.contextmanager
    def _connection() -> Iterator[Any]:
        try:
            connection = engine.connect()
        except SQLAlchemyError as error:
            raise failure(f"cannot reach {masked_url}: {error}", hint="is it running, and is the URL right?") from error
        with connection:
            yield connection

    try:
        yield run
    finally:
        engine.dispose()


def _within(rows: list[tuple[Any, ...]], max_rows: int) -> Rows:
    if len(rows) > max_rows:
        raise _QueryFailed(f"more than {max_rows} rows")
    return rows

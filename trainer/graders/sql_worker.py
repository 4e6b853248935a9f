"""The process that runs queries for `agl.rewards.SQLResult`: a JSON line in, a JSON line out.

A query's memory, processor time and rows are bounded here, so that the trainer's are not its to use. Time on SQLite is
processor time, so that a busy machine changes no grade: after `timeout` seconds a query is given up, after twice that
the process dies. The process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agl.trainer.graders.sql_rows import Rows, same_rows
from agl.trainer.processes.limited_worker import limit_memory

_OPENS = re.compile(r"['\"`\[]|--|/\*")
_CLOSES = {"'": "'", '"': '"', "`": "`", "[": "]", "--": "\n", "/*": "*/"}

MEMORY_TIMES = 16
"""The process's memory over that of one result: two results are compared, and databases sort in memory."""

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
_FETCHED = 50
"""Rows that are fetched before their bytes are counted."""


class QueryFailed(Exception):
    """The query was refused, failed, or exceeded a limit."""


class DatabaseFailed(Exception):
    """The database is at fault: (what happened, what to do)."""


def without_quoted(query: str) -> str:
    """The query with a space for each quoted text, quoted name and comment; what is not closed stays. Linear in its
    length: a policy writes it."""
    kept: list[str] = []
    at = 0
    never_closed: set[str] = set()
    while opening := _OPENS.search(query, at):
        mark = opening[0]
        end = -1
        if mark not in never_closed:
            close = _CLOSES[mark]
            end = query.find(close, opening.end())
            while end >= 0 and mark in "'\"" and query.startswith(close, end + 1):
                end = query.find(close, end + 2)  # a doubled quote is one of the text
            if mark == "--":
                end = len(query) if end < 0 else end
            elif end >= 0:
                end += len(close)
        if end < 0:
            never_closed.add(mark)
            kept.append(query[at : opening.end()])
            at = opening.end()
        else:
            kept += [query[at : opening.start()], " "]
            at = end
    return "".join([*kept, query[at:]])


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """{"equal": bool}, {"failed": [what, hint]}, or {"missing": [module, error]}.

    Args:
        job: `database`, a path or URL; `references` and whether each is `ordered`; `query`, or None to run the
            references alone; `timeout`, `max_rows`, `max_mb`, `tolerance`, `distinct`.
    """
    try:
        path = re.sub(r"^sqlite(\+\w+)?:///", "", job["database"])
        with (_sqlalchemy if "://" in path else _sqlite)(path, job) as run:
            expected = [_expected(run, query) for query in job["references"]]
            if job["query"] is None:
                return {"equal": False}
            try:
                rows = run(job["query"])
                options = {"distinct": job["distinct"], "tolerance": job["tolerance"]}
                return {
                    "equal": any(
                        same_rows(rows, gold, ordered=ordered, **options)
                        for gold, ordered in zip(expected, job["ordered"], strict=True)
                    )
                }
            except (QueryFailed, MemoryError):
                return {"equal": False}
    except DatabaseFailed as error:
        return {"failed": error.args}
    except ModuleNotFoundError as error:
        return {"missing": [error.name, str(error)]}


def _expected(run: Callable[[str], Rows], query: str) -> Rows:
    try:
        return run(query.strip().rstrip(";"))
    except QueryFailed as error:
        hint = "correct it, drop the task, or raise timeout=, max_rows= or max_mb="
        raise DatabaseFailed(f"the reference query fails: {error}: {query[:300]}", hint) from error


@contextlib.contextmanager
def _sqlite(path: str, job: dict[str, Any]) -> Iterator[Callable[[str], Rows]]:
    """A function query -> rows on the database, which raises `QueryFailed` if the query is at fault."""
    timeout: float = job["timeout"]
    if not Path(path).is_file():
        raise DatabaseFailed(
            f"there is no database {path!r}", "SQLResult(database=) takes a path, a URL, or a function"
        )
    try:
        connection = sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True, timeout=timeout)
    except sqlite3.Error as error:
        raise DatabaseFailed(f"cannot open the database {path!r}: {error}", None) from error
    deadline = 0.0

    def authorise(action: int, first: str | None, second: str | None, *_: object) -> int:
        if action not in _READING or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _OUTSIDE):
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    def run(query: str) -> Rows:
        nonlocal deadline
        deadline = time.thread_time() + timeout
        # What one long function call does is no step of SQLite's.
        signal.setitimer(signal.ITIMER_PROF, 2 * timeout + 1)
        try:
            return _within(connection.execute(query), job)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DATABASE_ERRORS:
                raise DatabaseFailed(f"the database {path!r} cannot be read: {error}", None) from error
            raise QueryFailed(str(error)) from error
        except (sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            raise QueryFailed(str(error) or type(error).__name__) from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    with contextlib.closing(connection):
        with contextlib.suppress(sqlite3.Error):  # a file that is no database says so when it is read
            connection.execute(f"PRAGMA hard_heap_limit = {job['max_mb'] * MEMORY_TIMES << 19}")
            connection.execute("PRAGMA temp_store = MEMORY")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)
        connection.set_authorizer(authorise)
        connection.set_progress_handler(lambda: int(time.thread_time() > deadline), 1000)
        connection.text_factory = lambda data: data.decode(errors="surrogateescape")
        yield run


@contextlib.contextmanager
def _sqlalchemy(url: str, job: dict[str, Any]) -> Iterator[Callable[[str], Rows]]:
    """`_sqlite` of another database."""
    import sqlalchemy
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    milliseconds = max(1, round(job["timeout"] * 1000))
    setup = (
        "SET TRANSACTION READ ONLY",
        f"SET LOCAL statement_timeout = {milliseconds}",
        "SET LOCAL work_mem = '64MB'",
    )
    try:
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        masked_url = engine.url.render_as_string()
    except SQLAlchemyError as error:
        raise DatabaseFailed(f"SQLResult cannot read the database's URL: {type(error).__name__}", None) from error
    except ImportError as error:
        raise DatabaseFailed(f"the driver of {url.partition('://')[0]!r} is not installed: {error}", None) from error

    def run(query: str) -> Rows:
        if not re.match(r"\s*(select|with|values)\b", without_quoted(query), re.I):
            raise QueryFailed("only SELECT, WITH and VALUES are run")
        if ";" in without_quoted(query):
            raise QueryFailed("only one statement is run")
        try:
            connection = engine.connect()
        except SQLAlchemyError as error:
            raise DatabaseFailed(
                f"cannot reach {masked_url}: {error}", "is it running, and is the URL right?"
            ) from error
        with connection:
            try:
                if engine.dialect.name == "postgresql":
                    for statement in setup:
                        connection.exec_driver_sql(statement)
                    with contextlib.suppress(SQLAlchemyError), connection.begin_nested():  # not for every account
                        connection.exec_driver_sql(f"SET LOCAL temp_file_limit = '{job['max_mb'] * MEMORY_TIMES}MB'")
                # A % in a query is no placeholder.
                options = {"stream_results": True, "max_row_buffer": _FETCHED, "no_parameters": True}
                return _within(connection.exec_driver_sql(query, execution_options=options), job)
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise DatabaseFailed(f"the connection to {masked_url} was lost: {error.orig}", None) from error
                raise QueryFailed(str(error.orig)) from error
            except (SQLAlchemyError, MemoryError) as error:
                raise QueryFailed(str(error) or type(error).__name__) from error
            finally:
                with contextlib.suppress(SQLAlchemyError):
                    connection.rollback()

    try:
        yield run
    finally:
        engine.dispose()


def _within(result: Any, job: dict[str, Any]) -> Rows:
    """The rows of a cursor, a few at a time, within the limits of their number and bytes."""
    rows: list[tuple[Any, ...]] = []
    size = 0
    most = job["max_mb"] << 20
    while part := result.fetchmany(_FETCHED):
        for row in map(tuple, part):
            rows.append(row)
            size += sys.getsizeof(row) + sum(map(sys.getsizeof, row))
            if size > most:
                raise QueryFailed(f"rows of more than {job['max_mb']} MiB")
            if len(rows) > job["max_rows"]:
                raise QueryFailed(f"more than {job['max_rows']} rows")
    return rows


def main() -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # what a driver prints is no answer
    os.write(answers, b"ready\n")
    os.dup2(null, 2)  # it is not read from here on
    for line in sys.stdin:
        job = json.loads(line)
        limit_memory(job["max_mb"] * MEMORY_TIMES << 20)
        with contextlib.suppress(OSError):
            os.chdir(job["folder"])
        os.write(answers, json.dumps(answer(job)).encode() + b"\n")

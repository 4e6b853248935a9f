"""Questions and SQLite databases from a folder of defog's sql-eval: python databases.py SQL_EVAL_FOLDER OUT_FOLDER

The folder holds `questions_gen_sqlite.csv` (columns `db_name`, `question`, `query`; alternatives of the query separated
by semicolons) and a PostgreSQL dump `<db_name>.sql` per database. The dumps date many rows relative to the day on which
a database is made.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import sqlite3
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlglot
from sqlglot import exp

QUESTIONS = "questions_gen_sqlite.csv"
_DAYS = {"week": 7, "day": 1}


def make_databases(sql_eval: Path, out: Path) -> dict[str, Path]:
    """Make one SQLite file per dump; returns name -> path. An existing file is replaced."""
    dumps = sorted(sql_eval.glob("*.sql"))
    if not dumps or not (sql_eval / QUESTIONS).is_file():
        sys.exit(f"{sql_eval} does not hold {QUESTIONS} and .sql files; see the README for where to get them")
    out.mkdir(parents=True, exist_ok=True)
    return {dump.stem: make_database(dump, out / f"{dump.stem}.sqlite") for dump in dumps}


def make_database(dump: Path, path: Path) -> Path:
    """Make a SQLite file of a PostgreSQL dump of tables and rows."""
    path.unlink(missing_ok=True)
    dates: dict[str, set[str]] = {}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.create_function("to_char", 2, _to_char)
        for statement in sqlglot.parse(dump.read_text(), read="postgres"):
            if statement is None or (isinstance(statement, exp.Create) and statement.kind == "SCHEMA"):
                continue
            if isinstance(statement, exp.Create):
                dates[statement.find(exp.Table).name] = _date_columns(statement)
            elif isinstance(statement, exp.Insert):
                _cut_to_dates(statement, dates.get(statement.find(exp.Table).name, set()))
            connection.execute(_for_sqlite(statement).sql("sqlite"))
        connection.commit()
    return path


def tasks(sql_eval: Path, databases: Path) -> list[dict[str, Any]]:
    """The questions: `id`, `db`, `question`, `schema` (CREATE TABLE statements), `queries` (each a right answer)."""
    schemas: dict[str, str] = {}
    questions = []
    with (sql_eval / QUESTIONS).open(newline="") as file:
        for row in csv.DictReader(file):
            db = row["db_name"]
            if db not in schemas:
                schemas[db] = schema(databases / f"{db}.sqlite")
            question = " ".join(filter(None, (row["question"].strip(), (row.get("instructions") or "").strip())))
            questions.append(
                {
                    "id": hashlib.blake2b(f"{db}/{question}".encode(), digest_size=6).hexdigest(),
                    "db": db,
                    "question": question,
                    "schema": schemas[db],
                    "queries": [q.strip() for q in row["query"].split(";") if q.strip()],
                }
            )
    return questions


def schema(database: Path) -> str:
    """The CREATE TABLE statements of a database."""
    with contextlib.closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        statements = connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table' ORDER BY rowid").fetchall()
    return "\n".join(sql for (sql,) in statements)


# -- PostgreSQL's dialect, where sqlglot does not translate it --------------------------------------------------------


def _for_sqlite(statement: exp.Expression) -> exp.Expression:
    # Inner expressions first: the replacement of an outer one contains them.
    for node in reversed(list(statement.bfs())):
        if (new := _translate(node)) is not node:
            node.replace(new)
    return statement


def _translate(node: exp.Expression) -> exp.Expression:
    if isinstance(node, exp.Table):
        node.set("db", None)
    elif isinstance(node, exp.Cast) and node.find_ancestor(exp.DefaultColumnConstraint):
        return node.this
    elif isinstance(node, exp.Add | exp.Sub) and isinstance(node.expression, exp.Interval):
        sign = "-" if isinstance(node, exp.Sub) else "+"
        return _call("DATETIME", node.this, exp.Literal.string(sign + _amount(node.expression)))
    elif isinstance(node, exp.TimestampTrunc | exp.DateTrunc):
        unit = node.text("unit").lower()
        start = ("-6 days", "weekday 1", "start of day") if unit == "week" else (f"start of {unit}",)
        return _call("DATETIME", node.this, *map(exp.Literal.string, start))
    elif isinstance(node, exp.Extract):
        part = {"YEAR": "%Y", "MONTH": "%m", "DAY": "%d", "EPOCH": "%s"}[node.name.upper()]
        return exp.cast(_call("STRFTIME", exp.Literal.string(part), node.expression), "integer")
    elif isinstance(node, exp.TimeToStr):
        return _call("TO_CHAR", node.this, node.args["format"])
    return node


def _call(name: str, *arguments: exp.Expression) -> exp.Expression:
    return exp.Anonymous(this=name, expressions=list(arguments))


def _amount(interval: exp.Interval) -> str:
    """An interval as one of SQLite's date modifiers: '5 months' of `INTERVAL '5 months'`."""
    count, unit = int(interval.this.name), interval.text("unit").lower().rstrip("s")
    if unit in _DAYS:
        return f"{count * _DAYS[unit]} days"
    return f"{count} {'minute' if unit == 'min' else unit}s"


def _to_char(moment: str, format: str) -> str:
    """A date as text. The format has names of months, and MySQL's marks, which one of the dumps uses."""
    for theirs, ours in (("Month", "%B"), ("%%u", "%d"), ("%i", "%M"), ("%s", "%S")):
        format = format.replace(theirs, ours)
    return datetime.fromisoformat(moment).strftime(format)


def _date_columns(create: exp.Create) -> set[str]:
    return {
        c.name for c in create.find_all(exp.ColumnDef) if c.kind is not None and c.kind.this == exp.DataType.Type.DATE
    }


def _cut_to_dates(insert: exp.Insert, dates: set[str]) -> None:
    """Keep only the date in date columns, as PostgreSQL does because of the column's type."""
    places = [i for i, column in enumerate(insert.this.expressions) if column.name in dates]
    for row in insert.expression.expressions if places else ():
        for i in places:
            if not isinstance(cell := row.expressions[i], exp.Literal | exp.Null):
                cell.replace(_call("DATE", cell.copy()))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    paths = make_databases(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{len(paths)} databases, {len(tasks(Path(sys.argv[1]), Path(sys.argv[2])))} questions -> {sys.argv[2]}")

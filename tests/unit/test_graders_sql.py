"""SQL results: real questions and databases, what makes two results the same, and queries that mean harm."""

from __future__ import annotations

import asyncio
import csv
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from postgres import Server
from real_data import folder

from agl.errors import ConfigError, RewardError
from agl.rewards import SQLResult
from agl.trainer.graders.sql import has_order, query_of
from agl.trainer.graders.sql_rows import same_rows


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(
            """CREATE TABLE item (name TEXT, price REAL, n INTEGER);
            INSERT INTO item VALUES ('pen', 0.1, 3), ('ink', 0.2, NULL), ('pad', 0.30000000001, 3), ('pad', 4, 1);"""
        )
    connection.close()
    return path


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real databases, their PostgreSQL text read by SQLite."""
    target = tmp_path_factory.mktemp("databases")
    for source in folder("sql_eval").glob("*.sql"):
        text = re.sub(r"\bpublic\.", "", source.read_text())
        text = re.sub(r"::[\w ]+(?:\(\d+\))?|\bON UPDATE NO ACTION\b", "", text)
        connection = sqlite3.connect(target / f"{source.stem}.sqlite")
        for statement in re.split(r";\s*(?:\n|$)", text):
            try:
                connection.execute(statement)
            except sqlite3.Error:
                continue  # sequences and the like, which only PostgreSQL has
        connection.commit()
        connection.close()
    return target


def graded(database: Any, gold: Any, query: str, **options: Any) -> float:
    return SQLResult(database, answer="gold", **options)({"gold": gold}, query)


def test_every_real_gold_query_meets_itself_and_its_alternatives(databases: Path) -> None:
    with (folder("sql_eval") / "questions_gen_sqlite.csv").open() as file:
        questions = list(csv.DictReader(file))
    grader = SQLResult(
        f"{databases}/{{db_name}}.sqlite",
        answer=lambda task: [q for q in task["query"].split(";") if q.strip()],
        timeout=20,
    )
    ran = 0
    for question in questions:
        alternatives = [q for q in question["query"].split(";") if q.strip()]
        try:
            values = [grader(question, f"Here it is:\n```sql\n{query};\n```") for query in alternatives]
        except RewardError as failed:
            if "the reference query fails: no such" in str(failed):  # what PostgreSQL alone has
                continue
            raise
        assert values == [1.0] * len(alternatives)
        assert grader(question, "SELECT 'none of these'") == 0.0
        assert grader(question, "SELECT") == 0.0
        ran += 1
    assert ran >= 190


@pytest.mark.parametrize(
    ("gold", "query", "value"),
    [
        ("SELECT name FROM item", "SELECT name FROM item ORDER BY name DESC", 1.0),
        ("SELECT name FROM item ORDER BY name", "SELECT name FROM item ORDER BY name DESC", 0.0),
        ("SELECT name FROM item ORDER BY price", "select name from item order by price", 1.0),
        ("SELECT name FROM item", "SELECT DISTINCT name FROM item", 0.0),
        ("SELECT name FROM item", "SELECT name AS other FROM item", 1.0),
        ("SELECT name, n FROM item", "SELECT n, name FROM item", 0.0),
        ("SELECT n FROM item", "SELECT coalesce(n, 0) FROM item", 0.0),
        ("SELECT NULL", "SELECT NULL", 1.0),
        ("SELECT 1", "SELECT 1.0", 1.0),
        ("SELECT 1", "SELECT '1'", 0.0),
        ("SELECT 0.3", "SELECT 0.1 + 0.2", 1.0),
        ("SELECT price FROM item", "SELECT price + 1e-12 FROM item", 1.0),
        ("SELECT 0.3", "SELECT 0.31", 0.0),
        ("SELECT name FROM item WHERE 0", "SELECT 1 WHERE 0", 1.0),
        ("SELECT name FROM item", "SELEKT", 0.0),
        ("SELECT name FROM item", "", 0.0),
        ("SELECT name FROM item", "SELECT name FROM item; SELECT 1", 0.0),
        (["SELECT 1", "SELECT 2"], "SELECT 2", 1.0),
    ],
)
def test_when_two_results_are_the_same(shop: Path, gold: Any, query: str, value: float) -> None:
    assert graded(shop, gold, query) == value


def test_order_and_duplicates_are_options(shop: Path) -> None:
    assert graded(shop, "SELECT name FROM item", "SELECT DISTINCT name FROM item", ignore_duplicates=True) == 1.0
    up, down = "SELECT name FROM item ORDER BY name", "SELECT name FROM item ORDER BY name DESC"
    assert graded(shop, up, down, ordered=False) == 1.0
    assert graded(shop, "SELECT name FROM item", down, ordered=True) == 0.0
    assert graded(f"sqlite:///{shop}", up, up) == 1.0
    assert graded(lambda task: shop, up, up) == 1.0


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 3)", False),
        ("SELECT row_number() OVER (PARTITION BY (b) ORDER BY a) FROM t", False),
        ("SELECT ' order by ' AS x -- order by\n FROM t /* order by */", False),
        ('SELECT "order by" FROM t\nORDER\n  BY (a)', True),
    ],
)
def test_order_by_counts_where_it_orders_the_result(query: str, ordered: bool) -> None:
    assert has_order(query) is ordered


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE item",
        "DELETE FROM item",
        "INSERT INTO item VALUES ('x', 1, 1)",
        "UPDATE item SET n = 0",
        "CREATE TABLE t (a)",
        "CREATE TEMP TABLE t (a)",
        "ATTACH DATABASE '{folder}/new.sqlite' AS other",
        "VACUUM INTO '{folder}/new.sqlite'",
        "PRAGMA writable_schema = 1",
        "PRAGMA table_info(item)",
        "SELECT load_extension('evil')",
        "SELECT writefile('{folder}/new.sqlite', 'x')",
        "SELECT name FROM item; DROP TABLE item",
        "WITH x AS (SELECT 1) DELETE FROM item",
        "BEGIN EXCLUSIVE",
    ],
)
def test_what_does_not_read_is_refused_and_changes_nothing(shop: Path, query: str) -> None:
    before = shop.read_bytes()
    assert graded(shop, "SELECT name FROM item", query.replace("{folder}", str(shop.parent))) == 0.0
    assert shop.read_bytes() == before
    assert [file.name for file in shop.parent.iterdir()] == ["shop.sqlite"]
    assert graded(shop, "SELECT count(*) FROM item", "SELECT 4") == 1.0


@pytest.mark.parametrize(
    "query",
    [
        "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT max(i) FROM r",
        "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT i FROM r",
        "SELECT length(zeroblob(1000000000))",
        "SELECT count(*) FROM item a, item b, item c, item d, item e, item f, item g, item h, item i, item j, item k, "
        "item l, item m, item n, item o, item p",
    ],
)
def test_a_query_without_end_or_bound_is_a_wrong_one(shop: Path, query: str) -> None:
    assert graded(shop, "SELECT 1", query, timeout=0.2, max_rows=1000) == 0.0


def test_what_is_not_the_agents_fault_is_an_error(shop: Path) -> None:
    with pytest.raises(RewardError, match="there is no database"):
        graded(shop.parent / "none.sqlite", "SELECT 1", "SELECT 1")
    with pytest.raises(RewardError, match="the task has no field 'db_id'"):
        graded("{db_id}.sqlite", "SELECT 1", "SELECT 1")
    with pytest.raises(RewardError, match="the reference query fails: no such table: missing"):
        graded(shop, "SELECT * FROM missing", "SELECT 1")
    with pytest.raises(RewardError, match="the reference query fails: more than 3 rows"):
        graded(shop, "SELECT * FROM item", "SELECT 1", max_rows=3)
    (shop.parent / "text.sqlite").write_text("this is no database, whatever its name says" * 50)
    with pytest.raises(RewardError, match="cannot be read"):
        graded(shop.parent / "text.sqlite", "SELECT * FROM item", "SELECT 1")
    with pytest.raises(RewardError, match="the driver of 'mssql' is not installed") as caught:
        graded("mssql://user:secret@127.0.0.1:1/x", "SELECT 1", "SELECT 1")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="has no database"):
        SQLResult()


def test_a_database_that_somebody_else_holds_is_an_error(shop: Path) -> None:
    holder = sqlite3.connect(shop, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RewardError, match="cannot be read: database is locked"):
        graded(shop, "SELECT * FROM item", "SELECT 1", timeout=0.1)
    holder.close()


@pytest.mark.full
def test_another_database_through_sqlalchemy(postgres: Server) -> None:
    import sqlalchemy

    database = postgres.new_database().replace("postgresql:", "postgresql+psycopg:")
    engine = sqlalchemy.create_engine(database)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE item (name TEXT, price NUMERIC)")
        connection.exec_driver_sql("INSERT INTO item VALUES ('pen', 0.1), ('ink', NULL), ('100', 2)")
        connection.exec_driver_sql("UPDATE item SET name = '100%%' WHERE name = '100'", ())
    gold = "SELECT name, price FROM item"
    # Where the server's own user could write.
    evil = Path(postgres.directory, "evil")
    assert graded(database, gold, f"```sql\n{gold} ORDER BY name;\n```") == 1.0
    assert graded(database, gold, "SELECT name, price::float8 FROM item -- 100% ; sure") == 1.0
    assert graded(database, "SELECT 1", "SELECT count(*) FROM item WHERE name LIKE '%0%'") == 1.0
    assert graded(database, gold, "SELECT name, 1 FROM item") == 0.0
    for query in (
        "DELETE FROM item",
        "WITH gone AS (DELETE FROM item RETURNING *) SELECT * FROM gone",
        "SELECT name, price INTO other FROM item",
        "SELECT 1; DROP TABLE item",
        "SELECT pg_sleep(100)",
        "SELECT nothing",
        f"COPY item TO '{evil}'",
    ):
        assert graded(database, gold, query, timeout=5) == 0.0
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM item").scalar() == 3
    engine.dispose()
    assert not evil.exists()
    with pytest.raises(RewardError, match="cannot reach postgresql"):
        graded("postgresql+psycopg://u:secret@127.0.0.1:1/x", gold, gold)
    with pytest.raises(RewardError, match="the reference query fails"):
        graded(database, "SELECT missing FROM item", gold)


def test_from_many_threads_and_from_an_event_loop(shop: Path) -> None:
    grader = SQLResult(shop, answer="gold")

    def grade(i: int) -> float:
        return grader({"gold": f"SELECT {i % 2}"}, "SELECT 1")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(grade, range(60))) == [0.0, 1.0] * 30

    async def together() -> list[float]:
        return await asyncio.gather(*(grader.call_async({"gold": "SELECT 1"}, f"SELECT {i}") for i in range(3)))

    assert asyncio.run(together()) == [0.0, 1.0, 0.0]


def test_the_query_in_a_text() -> None:
    assert query_of("first\n```sql\nSELECT 1\n```\nbetter:\n```\nSELECT 2;\n```") == "SELECT 2"
    assert query_of(" SELECT 3 ; ") == "SELECT 3"


CELLS = st.none() | st.integers(-3, 3) | st.sampled_from([0.1, 0.3, 1e9, "a", "b", b"a"])
ROWS = st.lists(st.tuples(CELLS, CELLS), max_size=8)


@given(ROWS, st.randoms(use_true_random=False))
def test_a_shuffled_and_slightly_rounded_result_is_the_same(rows: list[tuple[Any, Any]], random: Any) -> None:
    def nudged(cell: Any) -> Any:
        return cell * (1 + random.choice([0, 1e-12, -1e-12])) if isinstance(cell, float) else cell

    other = [(nudged(a), nudged(b)) for a, b in rows]
    random.shuffle(other)
    for distinct in (False, True):
        assert same_rows(rows, other, ordered=False, distinct=distinct, tolerance=1e-6)
        assert same_rows(other, rows, ordered=False, distinct=distinct, tolerance=1e-6)
    assert same_rows(rows, rows, ordered=True, distinct=False, tolerance=0)


@given(ROWS, ROWS)
def test_sameness_is_symmetric_and_counts_rows(left: list[Any], right: list[Any]) -> None:
    same = same_rows(left, right, ordered=False, distinct=False, tolerance=1e-6)
    assert same == same_rows(right, left, ordered=False, distinct=False, tolerance=1e-6)
    assert not same_rows([*left, (1, 1)], left, ordered=False, distinct=False, tolerance=1e-6)

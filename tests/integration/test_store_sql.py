"""SQLite files: opening them, sharing them between processes, surviving a kill, staying small."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from agl import semconv
from agl.errors import ConfigError, StoreError, StoreVersionError
from agl.mdp.spans import Span
from agl.mdp.types import Call, float_array, int_array
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.sql import schema, sqlite
from agl.trainer.store.sql.database import Database
from agl.trainer.store.sql.sqlite import Sqlite
from agl.trainer.store.sql.store import SqlStore
from agl.trainer.store.types import NewRollout, TrainedCall, TrainingRun


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def sql(path: Path, statement: str, *values: object) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def refused(coroutine: Coroutine[Any, Any, Any]) -> str:
    """The message of the StoreError that the coroutine ends with."""
    with pytest.raises(StoreError) as raised:
        asyncio.run(coroutine)
    return str(raised.value)


async def create(path: Path) -> None:
    await (await open_store(str(path))).close()


# -- opening ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("url", ["sqlite:///{}", "{}"])
def test_a_file_keeps_what_was_written(path: Path, url: str) -> None:
    async def write() -> None:
        store = await open_store(url.format(path))
        await store.enqueue_rollouts([NewRollout("kept", rollout_id="a")])
        await store.close()

    async def read() -> Any:
        store = await open_store(url.format(path))
        try:
            return (await store.get_rollout("a")).task
        finally:
            await store.close()

    asyncio.run(write())
    assert asyncio.run(read()) == "kept"
    assert [p.name for p in path.parent.iterdir()] == ["store.db"], "closing leaves no journal behind"


def test_a_private_store_is_private_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        one, other = await open_store(None), await open_store("memory")
        await one.enqueue_rollouts([NewRollout("t")])
        assert await other.query_rollouts() == []
        await one.close()
        await other.close()

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["mysql://host/db"])
def test_kinds_of_stores_that_there_are_not_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"use sqlite:///run\.db, postgresql://.+ or http://"):
        asyncio.run(open_store(url))


def test_a_leases_secret_outlives_a_restart_and_only_its_hash_is_stored(path: Path) -> None:
    async def lease() -> tuple[str, str]:
        store = await open_store(str(path))
        await store.enqueue_rollouts([NewRollout("t")])
        leased = await store.dequeue_rollout("w")
        assert leased is not None
        assert leased.secret is not None
        assert await store.is_leased_with(leased.rollout.rollout_id, 1, [leased.secret])
        await store.close()
        return leased.rollout.rollout_id, leased.secret

    async def is_leased(rollout_id: str, secrets: list[str]) -> bool:
        store = await open_store(str(path))
        try:
            return await store.is_leased_with(rollout_id, 1, secrets)
        finally:
            await store.close()

    rollout_id, secret = asyncio.run(lease())
    assert asyncio.run(is_leased(rollout_id, [secret])), "it is known after a restart"
    assert not asyncio.run(is_leased(rollout_id, [secret[:-1], ""]))
    assert secret.encode() not in path.read_bytes(), "only its hash is kept"


@pytest.mark.parametrize(
    ("version", "hint"), [("0999", "upgrade agl"), ("0006", r"agl export --store STORE --out DIR")]
)
def test_a_file_of_another_version_is_refused_and_left_alone(path: Path, version: str, hint: str) -> None:
    asyncio.run(create(path))
    sql(path, "UPDATE alembic_version SET version_num = ?", version)
    before = path.read_bytes()
    with pytest.raises(StoreVersionError) as raised:
        asyncio.run(open_store(str(path)))
    message = str(raised.value)
    assert f"schema version {version}" in message
    assert f"knows version {schema.VERSION} (store={path})" in message
    assert hint in message
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    path.write_text("dear diary, " * 200)
    assert "the file is not a database" in refused(open_store(str(path)))
    assert path.read_text() == "dear diary, " * 200


@pytest.mark.parametrize("version", [None, "ae1027a6acf", "0001"])
def test_somebody_elses_database_is_refused_and_left_alone(path: Path, version: str | None) -> None:
    sql(path, "CREATE TABLE customers (name TEXT)")
    if version is not None:
        sql(path, "CREATE TABLE alembic_version (version_num TEXT)")
        sql(path, "INSERT INTO alembic_version VALUES (?)", version)
    before = path.read_bytes()
    assert "this database is not an agl store" in refused(open_store(str(path)))
    assert path.read_bytes() == before, "its journal mode included"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "planted",
    [
        "CREATE VIEW notes AS WITH RECURSIVE n(key) AS (SELECT 1 UNION ALL SELECT key + 1 FROM n) "
        "SELECT key, key AS value FROM n",
        "CREATE TRIGGER forever AFTER INSERT ON notes BEGIN SELECT count(*) FROM (WITH RECURSIVE n(key) AS "
        "(SELECT 1 UNION ALL SELECT key + 1 FROM n) SELECT key FROM n); END",
    ],
)
def test_a_store_with_what_computes_without_end_is_refused(path: Path, planted: str) -> None:
    async def made() -> None:
        await (await open_store(str(path))).close()

    asyncio.run(made())
    if "VIEW" in planted:
        sql(path, "DROP TABLE notes")
    sql(path, planted)
    assert "it has a view or trigger" in refused(open_store(str(path)))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    message = refused(open_store(str(tmp_path / "missing" / "store.db")))
    assert "cannot be opened" in message
    assert "missing" in message
    assert "check that its folder exists" in message


# -- failures -----------------------------------------------------------------------------------------------------
def test_a_file_locked_by_another_process_is_an_error_not_a_hang(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.05)

    async def scenario() -> None:
        store = await open_store(str(path))
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        try:
            with pytest.raises(StoreError, match="locked by another process"):
                await store.enqueue_rollouts([NewRollout("t")])
            assert await store.query_rollouts() == []
        finally:
            holder.close()
        await store.enqueue_rollouts([NewRollout("t")])
        await store.close()

    asyncio.run(scenario())


def test_a_full_disk_fails_the_write_and_loses_nothing(path: Path) -> None:
    async def scenario() -> None:
        database = Database(Sqlite(str(path)))
        await database.open()
        await database.write(lambda c: c.exec_driver_sql("CREATE TABLE t (x)").close())
        pages = await database.write(lambda c: c.exec_driver_sql("PRAGMA page_count").scalar_one())
        await database.write(lambda c: c.exec_driver_sql("INSERT INTO t VALUES (1)").close())
        await database.write(lambda c: c.exec_driver_sql(f"PRAGMA max_page_count={pages + 2}").close())
        with pytest.raises(StoreError, match=r"the disk is full.*nothing of this operation was stored"):
            await database.write(lambda c: c.exec_driver_sql("INSERT INTO t VALUES (zeroblob(100000))").close())
        await database.write(lambda c: c.exec_driver_sql("INSERT INTO t VALUES (2)").close())
        assert await database.read(lambda c: c.exec_driver_sql("SELECT x FROM t").scalars().all()) == [1, 2]
        await database.close()

    asyncio.run(scenario())


def test_a_write_cancelled_before_its_turn_is_skipped(path: Path) -> None:
    async def scenario() -> None:
        database = Database(Sqlite(str(path)))
        await database.open()
        started, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold(connection: Any) -> None:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

        ran: list[str] = []
        holding = database.write(hold)
        await started.wait()
        skipped = database.write(lambda c: ran.append("skipped"))
        kept = database.write(lambda c: ran.append("kept"))
        skipped.cancel()
        go_on.set()
        await asyncio.gather(holding, kept)
        assert ran == ["kept"]
        await database.close()

    asyncio.run(scenario())


def test_a_query_does_not_wait_for_a_write_and_sees_what_was_acknowledged(path: Path) -> None:
    async def scenario() -> None:
        database = Database(Sqlite(str(path)))
        await database.open()
        await database.write(lambda c: c.exec_driver_sql("CREATE TABLE t (x)").close())
        await database.write(lambda c: c.exec_driver_sql("INSERT INTO t VALUES (1)").close())
        started, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def insert_slowly(connection: Any) -> None:
            connection.exec_driver_sql("INSERT INTO t VALUES (2)").close()
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

        def values(connection: Any) -> list[int]:
            return connection.exec_driver_sql("SELECT x FROM t ORDER BY x").scalars().all()

        writing = database.write(insert_slowly)
        await started.wait()
        assert await asyncio.wait_for(database.read(values), 20) == [1]
        go_on.set()
        await writing
        assert await database.read(values) == [1, 2]
        with pytest.raises(StoreError, match="cannot be written"):
            await database.read(lambda c: c.exec_driver_sql("INSERT INTO t VALUES (3)").close())
        await database.close()

    asyncio.run(scenario())


def test_one_request_that_waits_twice_gets_one_lease(path: Path) -> None:
    async def scenario() -> None:
        store = await open_store(str(path))
        await store.enqueue_rollouts([NewRollout("t", rollout_id=i) for i in "abc"])
        one, again, other = await asyncio.gather(
            *(store.dequeue_rollout("w", request_id=request) for request in ("one", "one", "other"))
        )
        assert one is not None
        assert again is not None
        assert other is not None
        assert one.rollout.rollout_id == again.rollout.rollout_id != other.rollout.rollout_id
        assert await store.is_leased_with(again.rollout.rollout_id, 1, [again.secret or ""])
        assert await store.count_rollouts(status=["queuing"]) == 1
        await store.close()

    asyncio.run(scenario())


def test_attempts_of_one_rollout_that_move_together_move_one_after_the_other(path: Path) -> None:
    async def scenario() -> None:
        store = await open_store(str(path))
        await store.enqueue_rollouts([NewRollout("t", rollout_id="a"), NewRollout("t", rollout_id="b")])
        await asyncio.gather(store.dequeue_rollout(), store.dequeue_rollout())
        outcomes = await asyncio.gather(
            store.update_attempt("a", 1, "running"),
            store.update_attempt("b", 1, "failed", error="why"),
            store.update_attempt("missing", 1, "running"),
            store.update_attempt("a", 1, "failed", error="because"),
            store.update_attempt("a", 1, "succeeded"),
            return_exceptions=True,
        )
        kinds = [type(outcome).__name__ for outcome in outcomes]
        assert kinds == ["Rollout", "Rollout", "NotStoredError", "Rollout", "AttemptOverError"]
        (attempt,) = await store.query_attempts("a")
        assert (attempt.status, attempt.error) == ("failed", "because")
        assert (await store.get_rollout("a")).status == "queuing", "it failed, and is tried again"
        await store.close()

    asyncio.run(scenario())


def test_what_fails_in_a_batch_fails_alone_and_leaves_nothing(path: Path) -> None:
    async def scenario() -> None:
        database = Database(Sqlite(str(path)))
        await database.open()
        await database.write(lambda c: c.exec_driver_sql("CREATE TABLE t (x UNIQUE)").close())
        started, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold(connection: Any) -> None:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

        def add(*values: int) -> asyncio.Future[list[int]]:
            def run(connection: Any) -> list[int]:
                for value in values:
                    connection.exec_driver_sql("INSERT INTO t VALUES (?)", (value,))
                return list(values)

            return database.write(run)

        def missing(connection: Any) -> None:
            raise StoreError("there is no such row")

        # Held, so that all of them wait and are one batch.
        holding = database.write(hold)
        await started.wait()
        batch = [add(1), add(2, 1), database.read(missing), add(3), add(4, 4), add(5)]
        go_on.set()
        await holding
        outcomes = await asyncio.gather(*batch, return_exceptions=True)
        assert [type(o).__name__ for o in outcomes] == [
            "list",
            "StoreError",
            "StoreError",
            "list",
            "StoreError",
            "list",
        ]
        seen = await database.read(lambda c: c.exec_driver_sql("SELECT x FROM t ORDER BY x").scalars().all())
        assert seen == [1, 3, 5]
        await database.close()
        assert sql(path, "SELECT x FROM t ORDER BY x") == [(1,), (3,), (5,)]

    asyncio.run(scenario())


# -- several processes --------------------------------------------------------------------------------------------
WORKER = """
import asyncio, sys
from agl.trainer.store import open_store
print("ready", flush=True)
sys.stdin.readline()
async def work(store):
    while (leased := await store.dequeue_rollout()) is not None:
        await store.update_attempt(leased.rollout.rollout_id, 1, "succeeded")
        print(leased.rollout.rollout_id)
async def main():
    store = await open_store(sys.argv[1])
    await asyncio.gather(*(work(store) for _ in range(4)))
    await store.close()
asyncio.run(main())
"""


def test_processes_share_a_queue_and_wake_each_other(path: Path) -> None:
    async def scenario() -> tuple[list[str], list[str]]:
        store = await open_store(str(path))
        rollouts = await store.enqueue_rollouts([NewRollout(i) for i in range(60)])
        ids = [rollout.rollout_id for rollout in rollouts]
        workers = [started(WORKER, path) for _ in range(2)]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdin is not None
            worker.stdout.readline()
            worker.stdin.write("go\n")
            worker.stdin.flush()
        ended = await store.wait_for_rollouts(ids, timeout=60)
        assert [rollout.status for rollout in ended] == ["succeeded"] * len(ids)
        await store.close()
        return ids, [line for worker in workers for line in worker.communicate()[0].split()]

    ids, leased = asyncio.run(scenario())
    assert sorted(leased) == sorted(ids)


OPENER = """
import asyncio, sys
from agl.trainer.store import open_store
import agl.trainer.store.sql.store
print("ready", flush=True)
sys.stdin.readline()
async def main():
    await (await open_store(sys.argv[1])).close()
asyncio.run(main())
print("done")
"""


def test_processes_can_create_the_same_file_at_once(path: Path) -> None:
    openers = [started(OPENER, path) for _ in range(3)]
    for opener in openers:
        assert opener.stdout is not None
        opener.stdout.readline()
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("go\n")
        opener.stdin.flush()
    assert [opener.communicate()[0].strip() for opener in openers] == ["done"] * 3
    assert sql(path, "SELECT version_num FROM alembic_version") == [(schema.VERSION,)]


WRITER = """
import asyncio, itertools, sys
from agl.mdp.spans import Span
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import Metric, NewRollout, TrainedCall, TrainingRun
async def write(store, lane):
    for n in itertools.count():
        name = f"{lane}-{n}"
        await store.enqueue_rollouts([NewRollout(n, rollout_id=name)])
        await store.add_spans([Span("0" * 32, name, None, name, 1, "chat", 0.0, 1.0)])
        print(name, flush=True)
async def main():
    store = await open_store(sys.argv[1])
    await asyncio.gather(*(write(store, lane) for lane in range(8)))
asyncio.run(main())
"""


def test_what_was_acknowledged_survives_kill_9(path: Path) -> None:
    writer = started(WRITER, path)
    assert writer.stdout is not None
    acknowledged = [writer.stdout.readline() for _ in range(200)]
    writer.kill()
    # The last line may be torn by the kill.
    acknowledged += writer.communicate()[0].splitlines(keepends=True)
    assert writer.returncode == -signal.SIGKILL
    names = [line.strip() for line in acknowledged if line.endswith("\n")]

    async def scenario() -> None:
        store = await open_store(str(path))
        there = {rollout.rollout_id for rollout in await store.query_rollouts()}
        assert there.issuperset(names)
        for name in names[:20] + names[-20:]:
            assert len(await store.query_spans(name)) == 1
        await store.enqueue_rollouts([NewRollout("still writable")])
        await store.close()

    asyncio.run(scenario())


# -- size ---------------------------------------------------------------------------------------------------------
def conversation(rollout_id: str, turns: int, new_tokens: int = 50, sampled: int = 20) -> list[Call]:
    calls: list[Call] = []
    prompt = list(range(new_tokens))
    for index in range(turns):
        response = list(range(1000 * index, 1000 * index + sampled))
        calls.append(
            Call(
                f"{rollout_id}/{index}",
                rollout_id,
                1,
                index,
                "a",
                "policy",
                0,
                int_array(prompt),
                int_array(response),
                float_array([-1.0] * sampled),
                parent_id=calls[-1].id if calls else None,
            )
        )
        prompt = [*prompt, *response, *range(new_tokens)]
    return calls


def test_a_rollout_of_t_turns_takes_bytes_in_proportion_to_t(path: Path) -> None:
    async def stored(turns: int, batched: bool) -> int:
        store = await open_store(str(path))
        name = f"{turns}-{batched}"
        calls = conversation(name, turns)
        for batch in [calls] if batched else [[call] for call in calls]:
            await store.add_calls(batch)
        rebuilt = await store.query_calls(name)
        assert [c.prompt_ids.tolist() for c in rebuilt] == [c.prompt_ids.tolist() for c in calls]
        await store.close()
        bytes_of = "SELECT sum(length(prompt) + length(response) + length(logprobs)) FROM calls WHERE rollout_id = ?"
        return sql(path, bytes_of, name)[0][0]

    for batched in (True, False):
        for turns in (1, 4, 32):
            assert asyncio.run(stored(turns, batched)) == turns * 4 * (50 + 20 + 20)


# -- runs ---------------------------------------------------------------------------------------------------------
async def fill_step(store: Store, run_id: str, rollouts: int) -> None:
    """A step's rollouts, each with a call that was trained and a reward."""
    ids = [f"{run_id}-{n}" for n in range(rollouts)]
    await store.put_run(TrainingRun(run_id))
    await store.enqueue_rollouts(
        [NewRollout("t", run_id=run_id, step=0, index=n, rollout_id=ids[n]) for n in range(rollouts)]
    )
    await asyncio.gather(*(store.dequeue_rollout("w", run_id=run_id) for _ in ids))
    tokens, logprobs = int_array([1, 2]), float_array([-1.0, -2.0])
    await store.add_calls([Call(i, i, 1, 0, "writer", "policy", 1, tokens, tokens, logprobs) for i in ids])
    reward = {semconv.OPERATION_NAME: semconv.REWARD, semconv.REWARD_NAME: "reward", semconv.REWARD_VALUE: 1.0}
    await store.add_spans(
        [Span(i, "2" * 16, None, i, 1, "reward reward", 0.0, 0.0, attributes=reward) for i in ids]
    )  # fmt: skip
    await store.add_trained_calls(run_id, [TrainedCall(i, i, 1, 1, 0, 1.0, 1.0, 0.5, 2) for i in ids])
    await store.add_metrics(run_id, 1, {"train/reward": 1.0})


def test_a_table_of_128_rollouts_takes_three_queries(path: Path) -> None:
    async def scenario() -> list[str]:
        database = Database(Sqlite(str(path)))
        await database.open()
        store = SqlStore(database)
        await fill_step(store, "run", 128)
        statements: list[str] = []
        await store.query_runs()
        reader: Any = database._reader._connection

        @event.listens_for(reader.engine, "before_cursor_execute")
        def count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            statements.append(statement)

        summaries = await store.query_step("run", 0)
        assert len(summaries) == 128
        for summary in summaries:
            assert (summary.calls, summary.tokens, summary.trained_tokens) == (1, 2, 2)
            assert (summary.reward, summary.advantage) == (1.0, 0.5)
        page = statements[:]
        assert len(await store.query_step("run", 0, after=summaries[63].rollout.rollout_id)) == 64
        assert len(statements) <= 6
        await store.close()
        return page

    assert len(asyncio.run(scenario())) <= 3


def test_a_run_is_read_while_another_process_writes(path: Path) -> None:
    async def scenario() -> None:
        store = await open_store(str(path))
        await fill_step(store, "run", 3)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as writer:
            writer.execute("BEGIN IMMEDIATE")
            reads = [
                store.query_runs(),
                store.query_metrics(["run"]),
                store.query_metrics(["run"], ends=True),
                store.query_step("run", 0),
                store.query_open_attempts(),
            ]
            found = await asyncio.wait_for(asyncio.gather(*reads), 20)
            writer.execute("ROLLBACK")
        assert [len(each) for each in found] == [1, 1, 1, 3, 3]
        await store.close()

    asyncio.run(scenario())

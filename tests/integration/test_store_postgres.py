"""PostgreSQL: a new database opened by many, a server that is killed, what processes tell each other, errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from postgres import Server, private_server, require

from agl.errors import ConfigError, StoreError, StoreVersionError
from agl.mdp.spans import Span
from agl.trainer.store import open_store
from agl.trainer.store.sql import database, rollouts, schema
from agl.trainer.store.sql import postgres as dialect
from agl.trainer.store.sql.postgres import Postgres
from agl.trainer.store.types import NewRollout


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.new_database()


@pytest.fixture
def mortal() -> Iterator[Server]:
    """A server that the test may kill."""
    yield from private_server(durable=True)


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


# -- opening ------------------------------------------------------------------------------------------------------
def test_ids_are_compared_by_their_bytes(postgres: Server, url: str) -> None:
    async def create() -> None:
        await (await open_store(url)).close()

    asyncio.run(create())
    ids = "SELECT DISTINCT collation_name FROM information_schema.columns WHERE column_name = 'rollout_id'"
    assert postgres.sql(ids, url) == [("C",)]


OPENER = """
import asyncio, sys
from agl.trainer.store import open_store
import agl.trainer.store.sql.store
async def main():
    stores = await asyncio.gather(*(open_store(sys.argv[1]) for _ in range(4)))
    await asyncio.gather(*(store.close() for store in stores))
print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main())
print("done")
"""


def test_processes_can_open_the_same_new_database_at_once(postgres: Server, url: str) -> None:
    openers = [started(OPENER, url) for _ in range(2)]
    for opener in openers:
        assert opener.stdout is not None
        opener.stdout.readline()
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("go\n")
        opener.stdin.flush()
    assert [opener.communicate()[0].strip() for opener in openers] == ["done"] * 2
    assert postgres.sql("SELECT version_num FROM alembic_version", url) == [(schema.VERSION,)]


def test_somebody_elses_database_and_other_versions_are_refused(postgres: Server, url: str) -> None:
    postgres.sql("CREATE TABLE customers (name TEXT)", url)
    with pytest.raises(StoreError, match=r"not an agl store(.|\n)*search_path"):
        asyncio.run(open_store(url))
    # A schema of one's own is a way out.
    postgres.sql("CREATE SCHEMA mine", url)

    async def create() -> None:
        store = await open_store(f"{url}?options=-csearch_path%3Dmine")
        await store.enqueue_rollouts([NewRollout("t")])
        await store.close()

    asyncio.run(create())
    assert postgres.sql("SELECT count(*) FROM mine.rollouts", url) == [(1,)]
    for version in ("0999", "0006"):
        postgres.sql(f"UPDATE mine.alembic_version SET version_num = '{version}'", url)
        with pytest.raises(StoreVersionError, match=f"schema version {version}"):
            asyncio.run(open_store(f"{url}?options=-csearch_path%3Dmine"))


def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    require()
    with pytest.raises(StoreError, match=r"cannot be reached(.|\n)*check that PostgreSQL runs there") as raised:
        asyncio.run(open_store("postgresql://u:secret@127.0.0.1:1/x"))
    assert "secret" not in str(raised.value)
    assert "u:***@127.0.0.1:1/x" in str(raised.value)
    with pytest.raises(ConfigError, match="not the URL of a database"):
        asyncio.run(open_store("postgresql://host:port/x"))


# -- failures -----------------------------------------------------------------------------------------------------
WRITER = """
import asyncio, itertools, sys
from agl.mdp.spans import Span
from agl.trainer.store import open_store
from agl.trainer.store.types import NewRollout
async def write(store, lane):
    for n in itertools.count():
        name = f"{lane}-{n}"
        await store.enqueue_rollouts([NewRollout(n, rollout_id=name)])
        await store.add_spans([Span("0" * 32, name, None, name, 1, "chat", 0.0, 1.0)])
        leased = await store.dequeue_rollout(f"lane {lane}")
        await store.update_attempt(leased.rollout.rollout_id, 1, "succeeded")
        print(name, leased.rollout.rollout_id, flush=True)
async def main():
    store = await open_store(sys.argv[1])
    await asyncio.gather(*(write(store, lane) for lane in range(8)))
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_server_killed_mid_write_loses_nothing_and_stops_nobody(mortal: Server) -> None:
    """Every lane goes on over each kill; all that was acknowledged is there, and nothing was leased twice."""
    url = mortal.new_database()
    writer = started(WRITER, url)
    assert writer.stdout is not None
    lines = []
    try:
        for _ in range(3):
            lines += [writer.stdout.readline() for _ in range(60)]
            mortal.kill()
            mortal.start()
        # As many again as can have been on their way before the last kill.
        lines += [writer.stdout.readline() for _ in range(300)]
    finally:
        writer.kill()
        writer.communicate()
    assert all(lines), "the writer ended"
    acknowledged = [line.split() for line in lines]
    assert len({leased for _, leased in acknowledged}) == len(acknowledged)

    async def check() -> None:
        store = await open_store(url)
        for name, leased in acknowledged:
            assert len(await store.query_spans(name)) == 1
            assert (await store.get_rollout(leased)).status == "succeeded"
            (attempt,) = await store.query_attempts(leased)
            assert attempt.status == "succeeded"
        # A lease whose commit was not acknowledged was found again: at most one for each lane is open now.
        assert len(await store.query_rollouts(status=["preparing", "running"])) <= 8
        await store.close()

    asyncio.run(check())


def test_a_lease_whose_answer_was_lost_is_found_again(postgres: Server, url: str) -> None:
    """The server commits, and the connection breaks before it can say so: a proxy stands in between."""

    async def scenario() -> None:
        cut_after_commit = False

        lost: dict[asyncio.StreamWriter, bool] = {}

        async def to_client(upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await upstream.read(65536):
                if not lost.get(writer):
                    writer.write(data)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream, down = await asyncio.open_connection("127.0.0.1", postgres.port)

            async def to_server() -> None:
                nonlocal cut_after_commit
                while data := await reader.read(65536):
                    if cut_after_commit and b"COMMIT" in data:
                        cut_after_commit = False
                        lost[writer] = True
                    down.write(data)
                    if lost.get(writer):
                        await asyncio.sleep(0.2)
                        break
                down.close()
                writer.close()

            await asyncio.gather(to_server(), to_client(upstream, writer), return_exceptions=True)

        proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        store = await open_store(url.replace(f":{postgres.port}/", f":{port}/"))
        await store.enqueue_rollouts([NewRollout(n) for n in range(3)])
        cut_after_commit = True
        leased = await store.dequeue_rollout("w")
        assert lost, "no commit was cut off"
        assert leased is not None
        assert len(await store.query_rollouts(status=["preparing"])) == 1
        assert leased.attempt in await store.query_attempts(leased.rollout.rollout_id)
        cut_after_commit = True
        (enqueued,) = await store.enqueue_rollouts([NewRollout("once")])
        assert not cut_after_commit
        assert [r.rollout_id for r in await store.query_rollouts() if r.task == "once"] == [enqueued.rollout_id]
        await store.close()
        proxy.close()

    asyncio.run(scenario())


@pytest.mark.night
def test_a_database_that_stays_away_is_an_error_and_its_return_is_noticed(
    mortal: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RETRY_SECONDS", 0.5)
    url = mortal.new_database()

    async def scenario() -> None:
        store = await open_store(url)
        await store.enqueue_rollouts([NewRollout("kept", rollout_id="a")])
        mortal.kill()
        for operation in (store.get_rollout("a"), store.enqueue_rollouts([NewRollout("lost", rollout_id="b")])):
            with pytest.raises(StoreError, match="the database cannot be reached"):
                await operation
        mortal.start()
        assert (await store.get_rollout("a")).task == "kept"
        await store.enqueue_rollouts([NewRollout("t", rollout_id="c")])
        assert [r.rollout_id for r in await store.query_rollouts()] == ["a", "c"]
        await store.close()

    asyncio.run(scenario())


def test_a_connection_that_is_ended_is_made_anew(postgres: Server, url: str) -> None:
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"

    async def scenario() -> None:
        store, other = await open_store(url), await open_store(url)
        waiting = asyncio.ensure_future(other.dequeue_rollout(wait=60))
        await asyncio.sleep(0.2)
        assert len(postgres.sql(end, url)) == 5, "two connections each and a listener"
        await store.enqueue_rollouts([NewRollout("t", rollout_id="a")])
        leased = await asyncio.wait_for(waiting, 25)
        assert leased is not None
        await store.close()
        await other.close()

    asyncio.run(scenario())


def test_rows_that_somebody_holds_are_an_error_not_a_hang(
    postgres: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    monkeypatch.setattr(dialect, "LOCK_SECONDS", 1)

    async def scenario() -> None:
        store = await open_store(url)
        await store.enqueue_rollouts([NewRollout("t", rollout_id=i) for i in ("held", "free")])
        with psycopg.connect(url) as holder:
            holder.execute("SELECT * FROM rollouts WHERE rollout_id = 'held' FOR UPDATE")
            # Leasing passes it over; only who wants that very row has to wait.
            leased = await store.dequeue_rollout()
            assert leased is not None
            assert leased.rollout.rollout_id == "free"
            with pytest.raises(StoreError, match="locked by another process"):
                await store.cancel_rollouts(["held"])
        await store.cancel_rollouts(["held"])
        await store.close()

    asyncio.run(scenario())


def test_transactions_that_wait_for_each_other_both_succeed(postgres: Server, url: str) -> None:
    """Batches of two stores write the same rows in opposite orders, until PostgreSQL has seen deadlocks."""

    def beat(store: Any, rollout_id: str) -> Any:
        # Not by `heartbeat`, whose batches lock rows in the order of their ids.
        return store._database.write(lambda c: rollouts.beat(c, [(rollout_id, 1, 0.0)]))

    async def scenario(attempt: int) -> None:
        one, other = await open_store(url), await open_store(url)
        for run in range(15):
            ids = [f"{attempt}-{run}-{n}" for n in range(12)]
            await one.enqueue_rollouts([NewRollout("t", rollout_id=i) for i in ids])
            for _ in ids:
                await one.dequeue_rollout()
            forth = [beat(one, i) for i in ids]
            back = [beat(other, i) for i in reversed(ids)]
            await asyncio.gather(*forth, *back)
        await one.close()
        await other.close()

    def deadlocks() -> int:
        ((seen,),) = postgres.sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()", url)
        return seen

    # Whether two batches meet is chance, and PostgreSQL counts a deadlock up to a second later.
    for attempt in range(5):
        asyncio.run(scenario(attempt))
        time.sleep(1.5)
        if deadlocks():
            return
    raise AssertionError("no transactions have waited for each other")


# -- several processes --------------------------------------------------------------------------------------------
WAITER = """
import asyncio, json, sys, time
from agl.trainer.store import open_store, sql
sql.LOOK_SECONDS = 1e6
async def main():
    store = await open_store(sys.argv[1])
    print("ready", flush=True)
    leased = await store.dequeue_rollout("far", wait=60)
    print(leased.rollout.task, flush=True)
    await store.update_attempt(leased.rollout.rollout_id, 1, "succeeded")
    await store.close()
asyncio.run(main())
"""


def test_processes_tell_each_other_of_work_and_of_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without anybody looking by himself: the looks of this process are too far apart to help."""
    monkeypatch.setattr("agl.trainer.store.sql.store.LOOK_SECONDS", 1e6)

    async def scenario() -> None:
        store = await open_store(url)
        process = started(
            WAITER.replace("\nasync", "\nimport agl.trainer.store.sql.store as s\ns.LOOK_SECONDS = 1e6\nasync", 1), url
        )
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        (rollout,) = await store.enqueue_rollouts([NewRollout("from afar")])
        (ended,) = await asyncio.wait_for(store.wait_for_rollouts([rollout.rollout_id]), 30)
        assert ended.status == "succeeded"
        assert process.communicate()[0].strip() == "from afar"
        await store.close()

    asyncio.run(scenario())


def test_what_is_announced_fits_a_notification(url: str) -> None:
    """Ids as long as a store takes, and very many of them."""

    async def scenario() -> None:
        store, other = await open_store(url), await open_store(url)
        ids = [f"{n}-{'x' * 90}" for n in range(250)] + ["y" * 1190]
        await store.enqueue_rollouts([NewRollout("t", rollout_id=i, run_id=f"run {i}") for i in ids])
        waiting = asyncio.ensure_future(other.wait_for_rollouts(ids))
        await asyncio.sleep(0.3)
        await store.cancel_rollouts(ids)
        assert len(await asyncio.wait_for(waiting, 20)) == len(ids)
        await store.close()
        await other.close()

    asyncio.run(scenario())


def test_times_are_the_servers(url: str, postgres: Server) -> None:
    from agl.trainer.store.sql.clock import Clock
    from agl.trainer.store.sql.store import SqlStore

    async def scenario() -> None:
        store = await SqlStore.open(Postgres(url), Clock(wall=lambda: 5.0))
        (rollout,) = await store.enqueue_rollouts([NewRollout("t")])
        ((now,),) = postgres.sql("SELECT extract(epoch FROM now())::float8")
        assert abs(rollout.created_at - now) < 60
        await store.close()

    asyncio.run(scenario())


def test_many_connections_spans_are_stored_once(url: str) -> None:
    spans = [Span("1" * 32, f"{n:016x}", None, "r", 1, "chat", float(n), 9e9, attributes={"n": n}) for n in range(100)]

    async def scenario() -> None:
        stores = [await open_store(url) for _ in range(3)]
        orders = (spans, spans[::-1], spans[50:] + spans[:50])
        await asyncio.gather(*(s.add_spans(order) for s, order in zip(stores, orders, strict=True)))
        assert await stores[0].query_spans("r") == spans
        for store in stores:
            await store.close()

    asyncio.run(scenario())

"""Faults of a run's surroundings, in real processes: clocks that are set by hours, a database that is read-only or
restarted, answers of a store that are lost, workers that are killed. Nothing that was acknowledged is lost, no rollout
counts twice, and no duration is negative.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from clock_shift import HOUR, ShiftedClock
from lossy_proxy import CUT, RESET, WHOLE, losing
from postgres import Server, private_server
from processes import AGL, Programs, fetch, free_port, programs

from agl.trainer.store import open_store
from agl.trainer.store.types import Attempt, NewRollout, Rollout, RolloutConfig, TrainingRun

pytestmark = [pytest.mark.slow, pytest.mark.night]
SUPPORT = Path(__file__).resolve().parents[1] / "support"
TASKS = 10
EVALUATED = 300
SCRIPT = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, SUPPORT)
import agl
from running import say
from scripted import ScriptedRollouts

@agl.rollout
def agent(task, llm: agl.LLM) -> float:
    Path(f"worker-of-{task}").write_text(str(os.getpid()))
    for _ in range(3):
        say(llm, str(task))
        time.sleep(0.15)
    return float(task)

if __name__ == "__main__":
    runners, store, directory = sys.argv[1:]
    algorithm = ScriptedRollouts(["four"])
    options = {"store": store} if store else {}
    trainer = agl.Trainer(
        algorithm, directory=directory, runners=runners, n_workers=2, timeout=120.0, max_attempts=2, **options
    )
    trainer.fit(agent, list(range(TASKS)))
    print("rewards", json.dumps(algorithm.rewards))
"""
MINE = """
import asyncio
import agl

@agl.rollout
async def agent(task):
    await asyncio.sleep(0.3)
    return float(task)
"""


ASKS = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import agl
from running import say

@agl.rollout
def agent(task, llm: agl.LLM) -> float:
    return len(say(llm, str(task))) % 5 / 4
"""


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Programs]:
    (tmp_path / "script.py").write_text(SCRIPT.replace("SUPPORT", repr(str(SUPPORT))).replace("TASKS", str(TASKS)))
    (tmp_path / "mine.py").write_text(MINE)
    with programs(tmp_path) as started:
        yield started


def begun(at: Programs, runners: str, store: str = "") -> Any:
    return at.start(sys.executable, "script.py", runners, store, "out", log="run.log")


def in_store(url: str) -> tuple[list[TrainingRun], list[Rollout], list[list[Attempt]]]:
    async def query() -> tuple[list[TrainingRun], list[Rollout], list[list[Attempt]]]:
        store = await open_store(url)
        rollouts = await store.query_rollouts()
        attempts = [await store.query_attempts(r.rollout_id) for r in rollouts]
        runs = await store.query_runs()
        await store.close()
        return runs, rollouts, attempts

    return asyncio.run(query())


def require_whole(at: Programs, run: Any, url: str, *, most_attempts: int = 1) -> None:
    """The run ends as if nothing had been, and its store holds each rollout once, with all its calls."""
    try:
        status = run.wait(240)
    except Exception:
        status = None
    assert status == 0, at.text("run.log")[-4000:]
    assert f"rewards {json.dumps([float(i) for i in range(TASKS)])}" in at.text("run.log")
    _, rollouts, attempts = in_store(url)
    assert [r.status for r in rollouts] == ["succeeded"] * TASKS
    for each in attempts:
        assert each[-1].status == "succeeded"
        assert len(each) <= most_attempts, each


def count(path: Path, status: str) -> int:
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as connection:
            statement = "SELECT count(*) FROM rollouts WHERE status = ?"
            return connection.execute(statement, (status,)).fetchone()[0]
    except sqlite3.OperationalError:  # it is being made
        return 0


# -- clocks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("runners", ["local", "process"])
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param((HOUR, -HOUR), id="to and fro"),
        pytest.param(tuple(range(0, 24 * HOUR, 3 * HOUR)), id="a day in three seconds, again and again"),
        pytest.param((51 * HOUR,), id="51 hours ahead", marks=pytest.mark.night),
        pytest.param((-48 * HOUR,), id="48 hours back"),
    ],
)
def test_a_run_whose_clock_is_set_by_hours(
    at: Programs, tmp_path: Path, runners: str, seconds: tuple[int, ...]
) -> None:
    clock, path = ShiftedClock(tmp_path), tmp_path / "out" / "run.db"
    at.environment |= clock.environment
    started = time.time()
    run = begun(at, runners)
    at.until(lambda: count(path, "succeeded") >= 2, 240, "two rollouts")
    with clock.jumping(seconds, 0.3 if len(seconds) > 1 else 600):
        require_whole(at, run, str(path))
    took = time.time() - started
    [recorded], rollouts, attempts = in_store(str(path))
    if len(seconds) == 1:
        assert abs(recorded.updated_at - (time.time() + seconds[0])) < took + 60, "a live run had no heartbeat"
    assert recorded.ended_at is not None
    assert recorded.ended_at >= recorded.created_at
    for rollout in rollouts:
        assert rollout.ended_at is not None
        assert rollout.ended_at >= rollout.created_at
    assert all(a.ended_at is not None and a.ended_at >= a.started_at for each in attempts for a in each)
    with closing(sqlite3.connect(path)) as connection:
        for table in ("calls", "spans"):
            durations = [d for (d,) in connection.execute(f"SELECT ended_at - started_at FROM {table}")]
            assert durations
            assert all(0 <= d <= took for d in durations), (table, durations)


@pytest.mark.parametrize("seconds", [(3 * HOUR, -3 * HOUR)], ids=["3 hours"])
def test_leases_limits_and_heartbeats_of_a_store_whose_clock_is_set(
    at: Programs, tmp_path: Path, seconds: tuple[int, ...]
) -> None:
    """Also of its runner, whose clock is set at the same time."""
    clock, path, port = ShiftedClock(tmp_path), tmp_path / "s.db", free_port()
    at.environment |= {**clock.environment, "XDG_STATE_HOME": str(tmp_path / "state")}
    limits = RolloutConfig(max_attempts=1, timeout_seconds=60, unresponsive_seconds=30)

    async def enqueue() -> None:
        store = await open_store(str(path))
        await store.enqueue_rollouts([NewRollout(i, config=limits) for i in range(TASKS)])
        await store.close()

    asyncio.run(enqueue())
    at.start(*AGL, "store", "--db", path, "--port", port, log="store.log")
    at.until(lambda: fetch(f"http://127.0.0.1:{port}/health")[0] == 200, 240, "the store")
    with clock.jumping(seconds, 0.5):
        key = tmp_path / "state" / "agl" / "keys" / f"127.0.0.1-{port}"
        at.start(
            *AGL, "runner", "--store", f"http://127.0.0.1:{port}", "--agent", "mine.py:agent", "--key-file", key,
            log="runner.log",
        )  # fmt: skip
        at.until(lambda: count(path, "succeeded") + count(path, "failed") == TASKS, 180, "all rollouts")
    assert count(path, "succeeded") == TASKS, at.text("runner.log")[-3000:]


@pytest.mark.parametrize("seconds", [51 * HOUR, -48 * HOUR], ids=["ahead", "back"])
def test_no_command_shows_a_duration_that_the_clock_made(at: Programs, tmp_path: Path, seconds: int) -> None:
    """`agl trace ls` said "183,630 s" of a program of three seconds."""
    clock, started = ShiftedClock(tmp_path), time.monotonic()
    at.environment |= clock.environment
    program = "import time; print('begun', flush=True); time.sleep(2)"
    run = at.start(*AGL, "run", "--store", "r.db", "--", sys.executable, "-c", program, log="run.log")
    at.until(lambda: "begun" in at.text("run.log"), 240, "the program")
    clock.set(seconds)
    assert run.wait(240) == 0, at.text("run.log")
    clock.set(0)
    (tmp_path / "tasks.jsonl").write_text("".join(f"{i}\n" for i in range(40)))
    evaluation = at.start(
        *AGL, "eval", "--tasks", "tasks.jsonl", "--agent", "mine.py:agent", "--directory", "out", "--n-workers", 2,
        log="eval.log",
    )  # fmt: skip
    path = at.until(lambda: next((tmp_path / "out").rglob("*.db"), None), 240, "the store")
    at.until(lambda: count(path, "succeeded") >= 3, 240, "three rollouts")
    clock.set(seconds)
    assert evaluation.wait(240) == 0, at.text("eval.log")
    for store in ("r.db", path):
        words = (*AGL, "trace", "ls", "--store", store)
        assert at.start(*words, log="ls.log").wait(240) == 0, at.text("ls.log")
    [(rollout_id,)] = sqlite3.connect(tmp_path / "r.db").execute("SELECT rollout_id FROM rollouts").fetchall()
    words = (*AGL, "trace", "show", rollout_id, "--store", "r.db")
    assert at.start(*words, log="show.log").wait(240) == 0, at.text("show.log")
    words = (*AGL, "export", "--store", path, "--out", "exported", "--json", "export.json")
    assert at.start(*words, log="export.log").wait(240) == 0, at.text("export.log")
    passed = time.monotonic() - started
    shown = {log: durations(at.text(log)) for log in ("ls.log", "show.log")}
    assert len(shown["ls.log"]) == 41
    assert len(shown["show.log"]) == 1
    [per_rollout] = re.findall(r"seconds per rollout +([-0-9.e+]+)", at.text("eval.log"))
    exported = json.loads(at.text("export.json"))["seconds"]
    for took in (*shown["ls.log"], *shown["show.log"], float(per_rollout), exported):
        assert 0 <= took <= passed
    assert all(took >= 2 for took in shown["show.log"])


def durations(text: str) -> list[float]:
    """The durations in what a command printed, in seconds."""
    units = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
    return [float(number) * units[unit] for number, unit in re.findall(r"(-?[0-9.]+) (ms|s|min|h)\b", text)]


# -- the database -----------------------------------------------------------------------------------------------------
@pytest.fixture
def mortal() -> Iterator[Server]:
    yield from private_server(durable=True)


def rows(server: Server, url: str, status: str) -> int:
    """How many rollouts have it; 0 while nobody can be asked."""
    try:
        return server.sql(f"SELECT count(*) FROM rollouts WHERE status = '{status}'", url)[0][0]
    except Exception:
        return 0


@pytest.mark.parametrize("runners", ["local", "process"])
def test_a_database_that_is_read_only_for_a_while(at: Programs, mortal: Server, runners: str) -> None:
    """A rollout was leased to nobody for ten minutes: its lease was refused halfway."""
    url = mortal.new_database()
    run = begun(at, runners, url)
    at.until(lambda: rows(mortal, url, "succeeded") >= 2, 240, "two rollouts")
    mortal.sql("ALTER SYSTEM SET default_transaction_read_only = on")
    mortal.sql("SELECT pg_reload_conf()")
    time.sleep(6)
    assert run.poll() is None, at.text("run.log")[-3000:]
    mortal.sql("ALTER SYSTEM RESET default_transaction_read_only")
    mortal.sql("SELECT pg_reload_conf()")
    require_whole(at, run, url)


@pytest.mark.parametrize("runners", ["local", "process"])
def test_a_database_that_is_restarted_in_mid_run(at: Programs, mortal: Server, runners: str) -> None:
    url = mortal.new_database()
    run = begun(at, runners, url)
    at.until(lambda: rows(mortal, url, "succeeded") >= 2, 240, "two rollouts")
    mortal.kill()
    time.sleep(2)
    mortal.start()
    require_whole(at, run, url)


# -- lost answers, killed workers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [RESET, CUT])
def test_a_store_whose_answers_are_lost(at: Programs, tmp_path: Path, how: str) -> None:
    """Every third one, whatever was asked: leases, calls, ends."""
    path, port = tmp_path / "s.db", free_port()
    at.environment |= {"XDG_STATE_HOME": str(tmp_path / "state")}
    at.start(*AGL, "store", "--db", path, "--port", port, log="store.log")
    at.until(lambda: fetch(f"http://127.0.0.1:{port}/health")[0] == 200, 240, "the store")
    key = (tmp_path / "state" / "agl" / "keys" / f"127.0.0.1-{port}").read_text()
    with losing(port, *([WHOLE, WHOLE, how] * 400)) as proxy:
        run = begun(at, "local", proxy.url.replace("http://", f"http://:{key}@"))
        require_whole(at, run, str(path))
        assert len(proxy.seen) > 30


def test_killed_workers_cost_their_attempts_and_nothing_else(at: Programs, tmp_path: Path) -> None:
    path, worker = tmp_path / "out" / "run.db", tmp_path / f"worker-of-{TASKS - 3}"
    run = begun(at, "process")
    pid = at.until(lambda: int(worker.read_text()), 240, "an attempt in the middle of the run")
    os.kill(pid, signal.SIGKILL)
    require_whole(at, run, str(path), most_attempts=2)
    _, _, attempts = in_store(str(path))
    assert [a.status for each in attempts for a in each[:-1]] == ["failed"], "the attempt ends with its worker"


@pytest.mark.parametrize("policy", [0, 1], ids=["the first policy", "the second policy"])
def test_a_killed_evaluation_of_two_policies_is_resumed(
    at: Programs, tmp_path: Path, untrained_model: Path, policy: int
) -> None:
    """What has ended is kept, and each policy has an answer to each task."""
    tasks = 60
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "tasks.jsonl").write_text("".join(f"{i}\n" for i in range(tasks)))
    words = (
        *AGL, "eval", f"a={untrained_model}", f"b={untrained_model}", "--tasks", "tasks.jsonl", "--agent",
        "asks.py:agent", "--directory", "out", "--n-workers", 2,
    )  # fmt: skip
    first = at.start(*words, log="first.log")
    path = at.until(lambda: next((tmp_path / "out").rglob("*.db"), None), 240, "the store")
    at.until(lambda: count(path, "succeeded") >= 5 + policy * tasks, 240, "rollouts of that policy")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done = count(path, "succeeded")
    assert done < (1 + policy) * tasks
    second = at.start(*words, "--resume", log="second.log")
    assert second.wait(240) == 0, at.text("second.log")[-3000:]
    with closing(sqlite3.connect(path)) as connection:
        succeeded = "SELECT count(*), count(DISTINCT position) FROM rollouts WHERE status = 'succeeded' GROUP BY run_id"
        assert connection.execute(succeeded).fetchall() == [(tasks, tasks)] * 2
        left = "SELECT count(*) FROM rollouts WHERE status NOT IN ('succeeded', 'cancelled')"
        assert connection.execute(left).fetchone()[0] == 0
        assert connection.execute("SELECT status FROM runs").fetchall() == [("succeeded",)] * 2


@pytest.mark.parametrize(
    "settings",
    [(), ("--samples", 2, "--n-workers", 2, "--max-attempts", 1, "--seed", 7, "--success", 50)],
    ids=["as it is", "other settings"],
)
def test_a_killed_evaluation_is_resumed(at: Programs, tmp_path: Path, settings: tuple[object, ...]) -> None:
    """It ended with "cannot go from 'failed' to 'running'": workers leased what was cancelled a moment later."""
    n_tasks = EVALUATED if not settings else EVALUATED // 10
    rollouts = n_tasks if not settings else 2 * n_tasks
    (tmp_path / "tasks.jsonl").write_text("".join(f"{i}\n" for i in range(n_tasks)))
    words = (*AGL, "eval", "--tasks", "tasks.jsonl", "--agent", "mine.py:agent", "--directory", "out", *settings)
    first = at.start(*words, log="first.log")
    path = at.until(lambda: next((tmp_path / "out").rglob("*.db"), None), 240, "the store")
    at.until(lambda: count(path, "succeeded") >= 5, 240, "five rollouts")
    first.kill()
    first.wait()
    done = count(path, "succeeded")
    second = at.start(*words, "--resume", "--json", "report.json", log="second.log")
    assert second.wait(180) == 0, at.text("second.log")[-3000:]
    assert count(path, "succeeded") == rollouts
    assert done < rollouts
    with closing(sqlite3.connect(path)) as connection:
        statement = "SELECT count(DISTINCT position) FROM rollouts WHERE status = 'succeeded'"
        assert connection.execute(statement).fetchone()[0] == rollouts
        left = "SELECT count(*) FROM rollouts WHERE status NOT IN ('succeeded', 'cancelled')"
        assert connection.execute(left).fetchone()[0] == 0

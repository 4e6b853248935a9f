"""Attacks on time: clocks that are set, a database that is locked, clients that read or write next to nothing.

Nothing here asserts a speed; bounds on seconds tell a hang from slowness.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from chaos import Chaos, Plan
from processes import AGL, fetch, free_port, programs
from running import attempts, fit, say
from scripted import ScriptedEngine, in_loop, quick_tokenizer, serving, until
from store_server import OPERATOR, RUNNER

import agl
from agl.trainer.http.limits import Limits
from agl.trainer.runners.protocol import Lease
from agl.trainer.runners.store_coordinator import StoreCoordinator
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import NewRollout, RolloutConfig

pytestmark = pytest.mark.slow
HOUR = 3600.0


# -- clocks that jump ---------------------------------------------------------------------------------------------
class WallClock:
    """This process's clock, set to another hour by `jump`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._time, self._time_ns, self._ahead = time.time, time.time_ns, 0.0
        monkeypatch.setattr(time, "time", lambda: self._time() + self._ahead)
        monkeypatch.setattr(time, "time_ns", lambda: self._time_ns() + int(self._ahead * 1e9))

    def jump(self, seconds: float) -> None:
        self._ahead += seconds


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


@agl.rollout
def three_calls(task: Any, llm: agl.LLM) -> float:
    for _ in range(3):
        say(llm, str(task))
        time.sleep(0.1)
    return float(task)


@pytest.mark.parametrize("runners", ["local", "process"])
def test_a_run_whose_clock_is_set_loses_nothing(runners: str, wall: WallClock, tmp_path: Path) -> None:
    """Forwards and backwards by an hour, while worker processes keep the true time."""
    over = False

    def jump() -> None:
        ahead = True
        while not over:
            wall.jump(HOUR if ahead else -HOUR)
            ahead = not ahead
            time.sleep(0.07)

    jumping = threading.Thread(target=jump, daemon=True)
    jumping.start()
    try:
        done = fit(three_calls, list(range(8)), tmp_path / "run", runners=runners, timeout=60.0, silent_seconds=60.0)
    finally:
        over = True
        jumping.join()
    assert done.rewards == [float(i) for i in range(8)]
    assert [[a.status for a in each] for each in attempts(tmp_path / "run")] == [["succeeded"]] * 8
    for calls, trajectory in zip(done.calls, done.trajectories, strict=True):
        assert [c.index for c in calls] == [0, 1, 2]
        assert [x.call.index for x in trajectory.transitions] == [0, 1, 2]


@contextlib.asynccontextmanager
async def restarted(path: Path, wall: WallClock, jump: float) -> AsyncIterator[tuple[Store, StoreCoordinator, Lease]]:
    """A store's server that was killed after it had leased a rollout, and started again with another time of day."""
    first = await open_store(str(path))
    limits = RolloutConfig(max_attempts=2)
    await first.enqueue_rollouts([NewRollout("q", rollout_id="r", config=limits)])
    coordinator = StoreCoordinator.of_store(first, 1.0)
    lease = await coordinator.coordinator.lease("worker")
    assert lease is not None
    # Killed, not stopped: nothing is told to anybody.
    for task in (*coordinator._tasks, coordinator.coordinator._watch_task):
        task.cancel()
    await first.close()
    wall.jump(jump)
    store = await open_store(str(path))
    again = StoreCoordinator.of_store(store, 1.0)
    try:
        yield store, again, lease
    finally:
        await again.stop()
        await store.close()


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
@in_loop
async def test_a_worker_that_died_with_its_server_is_given_up_whatever_the_time_is(
    jump: float, wall: WallClock, tmp_path: Path
) -> None:
    async with restarted(tmp_path / "store.db", wall, jump) as (store, _, _):
        async with asyncio.timeout(30):
            while (await store.get_rollout("r")).status != "queuing":
                await asyncio.sleep(0.1)
        assert [a.status for a in await store.query_attempts("r")] == ["unresponsive"]


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
@in_loop
async def test_a_worker_that_outlived_its_server_keeps_its_rollout_whatever_the_time_is(
    jump: float, wall: WallClock, tmp_path: Path
) -> None:
    async with restarted(tmp_path / "store.db", wall, 0.0) as (store, again, lease):
        other = asyncio.ensure_future(again.coordinator.lease("another", 3.0))
        for beat in range(15):
            assert await again.coordinator.heartbeat(lease)
            if beat == 3:
                wall.jump(jump)
            await asyncio.sleep(0.2)
        assert await other is None, "the rollout was leased to another worker"
        assert [a.status for a in await store.query_attempts("r")] == ["running"]


# -- a database that somebody else has locked -----------------------------------------------------------------------
IMPATIENT = """
import sys
from agl.trainer.store.sql import sqlite
sqlite.BUSY_SECONDS = float(sys.argv.pop(1))
from agl.trainer.cli import main
main()
"""
HOLD = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
connection.execute("ROLLBACK")
"""


@pytest.mark.parametrize(
    ("patience", "locked"),
    [(1.0, 6.0), (30.0, 10.0), (10.0, 60.0)],
)
@pytest.mark.night
def test_a_locked_store_is_waited_for_or_ends_the_run_which_goes_on(
    patience: float, locked: float, untrained_model: Path, tmp_path: Path
) -> None:
    # It trains for longer than the two seconds after which the lock comes, on a fast machine too.
    plan = Plan(where="local", steps=3, workers=1, kills={"database": 1}, seconds=240.0)
    holder: list[subprocess.Popen[str]] = []

    def lock() -> None:
        command = [sys.executable, "-c", HOLD, str(tmp_path / "store.db"), str(locked)]
        holder.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert holder[0].stdout is not None
        assert holder[0].stdout.readline() == "locked\n"

    chaos = Chaos(plan, untrained_model, tmp_path, break_connections=lock)
    train = chaos.trainer.command
    assert train[: len(AGL)] == AGL
    train[: len(AGL)] = [sys.executable, "-c", IMPATIENT, str(patience)]
    try:
        if patience > locked:
            chaos.run()
        else:
            with pytest.raises(AssertionError, match="the database is locked by another process"):
                chaos.run()
            assert holder[0].wait(locked + 30) == 0
            assert subprocess.run(train, cwd=tmp_path, check=False, timeout=200).returncode == 0
    finally:
        holder[0].kill()
        holder[0].wait()
    counted = asyncio.run(chaos.check())
    # An attempt whose call could not be written is run again, while the run has not ended.
    assert counted["second_attempts"] <= (patience < locked)


# -- clients that read or write next to nothing -----------------------------------------------------------------------
SLOW = 48


@in_loop
async def test_slow_readers_hold_nobody_up_and_are_dropped() -> None:
    """Each asks for an answer of a megabyte as a stream, and reads a byte a second of it."""
    engine = ScriptedEngine(quick_tokenizer(), lambda asked: [7] * 3900 if asked.prompt_ids.size < 60 else "four")
    async with serving(engine, limits=Limits(write_seconds=3.0)) as rig:
        slow, quick = await rig.attempt(), await rig.attempt()
        body = json.dumps(
            {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 3900}
        ).encode()
        url = urllib.parse.urlsplit(slow.url())
        head = (
            f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\nauthorization: Bearer {slow.key}\r\n"
        )
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        before, readers = resident(), [drip_reader(url.port) for _ in range(SLOW)]
        for reader in readers:
            reader.sendall(head.encode() + body)
        await until(lambda: len(engine.asked) == SLOW)
        for _ in range(20):
            answer = await quick.chat("go on and on about sums and numbers " * 8)
            assert answer.choices[0].message.content == "four"
            for reader in readers:
                with contextlib.suppress(OSError):
                    reader.recv(1)
            await asyncio.sleep(0.05)
        assert resident() - before < 200 * 2**20
        # Nothing is left of them, although not one has hung up.
        await until(lambda: not slow.access.pending and not engine.running, 120)
        assert not [r for r in readers if r.fileno() < 0]
        assert (await quick.chat("go on and on about sums and numbers " * 8)).choices
        for reader in readers:
            reader.close()
        assert len(await slow.close()) == SLOW


def drip_reader(port: int | None) -> socket.socket:
    """A connection whose small buffer leaves the answer with the server."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", port))
    reader.setblocking(False)
    return reader


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("files", [None, 300], ids=["files enough", "300 files"])
def test_a_flood_of_heads_that_never_end_leaves_a_keyed_server_to_its_clients(
    files: int | None, tmp_path: Path
) -> None:
    """From one host: 500 connections that send a header a byte at a time, and begin anew when they are dropped."""
    port, limit = free_port(), [] if files is None else ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh"]
    with programs(tmp_path, AGL_OPERATOR_KEY=OPERATOR, AGL_RUNNER_KEY=RUNNER) as started:
        server = started.start(
            *limit, *AGL, "store", "--db", tmp_path / "s.db", "--host", "0.0.0.0", "--port", port, log="store.log"
        )
        url = f"http://127.0.0.1:{port}/v1/store/query_rollouts"

        def ask() -> int:
            try:
                return fetch(url, {}, authorization=f"Bearer {OPERATOR}")[0]
            except OSError:
                return 0

        started.until(lambda: ask() == 200, 60, "the store")
        assert fetch(url, {})[0] == 401
        over = threading.Event()
        flood = threading.Thread(target=flooded, args=(port, 500, over), daemon=True)
        flood.start()
        try:
            answers = []
            for _ in range(10):
                # A client of agl's tries again; a few times at most.
                answers.append(next((n for n in range(10) if ask() == 200), 10))
                time.sleep(0.2)
        finally:
            over.set()
            flood.join(60)
        descriptors = len(os.listdir(f"/proc/{server.pid}/fd"))
        assert max(answers) < 10, answers
        assert server.poll() is None
        assert files is None or descriptors < files
        assert started.text("store.log").count("Traceback") == 0, started.text("store.log")[-3000:]
        assert ask() == 200


def flooded(port: int, connections: int, over: threading.Event) -> None:
    """Keep so many requests begun, none of which ever ends."""
    begun: dict[socket.socket, bytes] = {}
    while not over.is_set():
        while len(begun) < connections and not over.is_set():
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            begun[one] = b"POST /v1/store/about HTTP/1.1\r\nhost: h\r\nx: "
        for one, head in [*begun.items()]:
            try:
                one.send(head)
                begun[one] = b"x"
                one.recv(1024)
            except BlockingIOError:
                continue
            except OSError:
                pass
            del begun[one]
            one.close()
        over.wait(0.5)
    for one in begun:
        one.close()

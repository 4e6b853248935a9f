"""The life of rollouts: against a model, from several processes, and with clocks that are set while it runs."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from postgres import Server

from agl.errors import StoreError
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.sql.clock import Clock
from agl.trainer.store.sql.dialect import Dialect
from agl.trainer.store.sql.postgres import Postgres
from agl.trainer.store.sql.sqlite import Sqlite
from agl.trainer.store.sql.store import SqlStore
from agl.trainer.store.types import (
    ATTEMPT_TERMINAL,
    ATTEMPT_TRANSITIONS,
    ROLLOUT_TERMINAL,
    NewRollout,
    RolloutConfig,
    TrainingRun,
)

DATABASES = ["sqlite", "postgresql"]


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return request.getfixturevalue("postgres").new_database()
    return f"sqlite:///{tmp_path / 'store.db'}"


# -- against a model ----------------------------------------------------------------------------------------------
class Lives(RuleBasedStateMachine):
    """Rollouts and attempts as two dictionaries of statuses, and the store that has to agree with them."""

    store: Store
    loop: asyncio.AbstractEventLoop
    runs = 0

    rollouts = Bundle("rollouts")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1
        self.run_id = f"run {self.runs}"
        self.configs: dict[str, tuple[int, RolloutConfig]] = {}
        self.status: dict[str, str] = {}
        self.attempts: dict[str, list[str]] = {}

    def do(self, operation: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(operation)

    @rule(
        target=rollouts,
        priority=st.integers(-1, 1),
        config=st.builds(
            RolloutConfig,
            max_attempts=st.integers(1, 3),
            retry_on=st.lists(st.sampled_from(["failed", "timeout", "unresponsive"]), unique=True).map(tuple),
            timeout_seconds=st.sampled_from([None, 1e6]),
            unresponsive_seconds=st.sampled_from([None, 1e5]),
        ),
    )
    def enqueue(self, priority: int, config: RolloutConfig) -> str:
        rollout_id = f"{self.run_id} {len(self.status)}"
        new = NewRollout("t", run_id=self.run_id, rollout_id=rollout_id, priority=priority, config=config)
        # Twice, since a caller who heard no answer would.
        for _ in range(2):
            (stored,) = self.do(self.store.enqueue_rollouts([new]))
            assert (stored.status, stored.config) == ("queuing", config)
        self.configs[rollout_id] = (priority, config)
        self.status[rollout_id], self.attempts[rollout_id] = "queuing", []
        return rollout_id

    @rule(target=leases)
    def dequeue(self) -> Any:
        queued = [i for i, status in self.status.items() if status == "queuing"]
        leased = self.do(self.store.dequeue_rollout("w", run_id=self.run_id))
        if not queued:
            assert leased is None
            return multiple()
        first = max(queued, key=lambda i: (self.configs[i][0], -list(self.status).index(i)))
        assert leased.rollout.rollout_id == first
        self.status[first] = "preparing"
        self.attempts[first].append("preparing")
        assert leased.attempt.attempt == len(self.attempts[first])
        return first, leased.attempt.attempt

    @rule(lease=leases, to=st.sampled_from(sorted(ATTEMPT_TRANSITIONS)))
    def move(self, lease: tuple[str, int], to: Any) -> None:
        rollout_id, attempt = lease
        was = self.attempts[rollout_id][attempt - 1]
        if to != was and to not in ATTEMPT_TRANSITIONS[was]:
            with pytest.raises(StoreError, match="cannot go from"):
                self.do(self.store.update_attempt(rollout_id, attempt, to))
            return
        self.moved(rollout_id, attempt, to)
        assert self.do(self.store.update_attempt(rollout_id, attempt, to)).status == self.status[rollout_id]

    def moved(self, rollout_id: str, attempt: int, to: str) -> None:
        attempts, status = self.attempts[rollout_id], self.status[rollout_id]
        if to == attempts[attempt - 1]:
            return
        attempts[attempt - 1] = to
        if status in ROLLOUT_TERMINAL or attempt < len(attempts):
            return
        if to in ("running", "succeeded"):
            self.status[rollout_id] = to
        elif status != "queuing":
            _, config = self.configs[rollout_id]
            again = to in config.retry_on and len(attempts) < config.max_attempts
            self.status[rollout_id] = "queuing" if again else "failed"

    @rule(lease=leases)
    def beat(self, lease: tuple[str, int]) -> None:
        self.do(self.store.heartbeat(*lease))

    @rule(after=st.sampled_from([1.0, 2e5, 2e6]))
    def expire(self, after: float) -> None:
        given_up = self.do(self.store.expire_attempts(time.time() + after))
        ours = {(a.rollout_id, a.attempt): a.status for a in given_up if a.rollout_id in self.status}
        expected = {}
        for rollout_id, attempts in self.attempts.items():
            _, config = self.configs[rollout_id]
            for number, status in enumerate(attempts, 1):
                if status in ("preparing", "running"):
                    if config.timeout_seconds is not None and config.timeout_seconds < after:
                        expected[rollout_id, number] = "timeout"
                    elif config.unresponsive_seconds is not None and config.unresponsive_seconds < after:
                        expected[rollout_id, number] = "unresponsive"
        assert ours == expected
        for (rollout_id, attempt), status in ours.items():
            self.moved(rollout_id, attempt, status)

    @rule(rollout_id=consumes(rollouts))
    def cancel(self, rollout_id: str) -> None:
        self.do(self.store.cancel_rollouts([rollout_id, rollout_id]))
        if self.status[rollout_id] not in ROLLOUT_TERMINAL:
            self.status[rollout_id] = "cancelled"
            attempts = self.attempts[rollout_id]
            attempts[:] = [s if s in ATTEMPT_TERMINAL else "failed" for s in attempts]

    @invariant()
    def agrees(self) -> None:
        stored = self.do(self.store.query_rollouts(run_id=self.run_id))
        assert {r.rollout_id: r.status for r in stored} == self.status
        for rollout in stored:
            assert (rollout.ended_at is not None) == (rollout.status in ROLLOUT_TERMINAL)
            attempts = self.do(self.store.query_attempts(rollout.rollout_id))
            assert [a.status for a in attempts] == self.attempts[rollout.rollout_id]
            assert all((a.ended_at is not None) == (a.status in ATTEMPT_TERMINAL) for a in attempts)


def test_the_store_agrees_with_a_model_of_it(url: str) -> None:
    loop = asyncio.new_event_loop()
    store = loop.run_until_complete(open_store(url))
    machine = type("Lives", (Lives,), {"store": store, "loop": loop, "runs": 0})
    checked = settings(
        max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    try:
        run_state_machine_as_test(machine, settings=checked)
    finally:
        loop.run_until_complete(store.close())
        loop.close()


# -- several processes --------------------------------------------------------------------------------------------
WORKER = """
import asyncio, sys
from agl.trainer.store import open_store
async def work(store, n):
    while (leased := await store.dequeue_rollout(f"{sys.argv[2]}-{n}", wait=1)) is not None:
        print(leased.rollout.rollout_id, leased.attempt.attempt, flush=True)
        await store.update_attempt(leased.rollout.rollout_id, leased.attempt.attempt, "running")
        # Every third fails once.
        fails = leased.rollout.task % 3 == 0 and leased.attempt.attempt == 1
        end = "failed" if fails else "succeeded"
        await store.update_attempt(leased.rollout.rollout_id, leased.attempt.attempt, end)
async def main():
    store = await open_store(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(*(work(store, n) for n in range(20)))
    await store.close()
asyncio.run(main())
"""


def test_two_processes_of_many_workers_never_lease_the_same_attempt(url: str) -> None:
    count = 150

    async def fill() -> None:
        store = await open_store(url)
        await store.enqueue_rollouts([NewRollout(n, rollout_id=f"r{n}") for n in range(count)])
        await store.close()

    asyncio.run(fill())
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, url, name], **pipes) for name in "ab"]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    leased = [line for worker in workers for line in worker.communicate(timeout=120)[0].splitlines()]
    again = [f"r{n} 2" for n in range(0, count, 3)]
    assert sorted(leased) == sorted([f"r{n} 1" for n in range(count)] + again)
    assert [worker.returncode for worker in workers] == [0, 0]


# -- clocks that jump ---------------------------------------------------------------------------------------------
class Hands:
    """A clock that can be set: the wall's hands jump, the steady ones only go on."""

    def __init__(self) -> None:
        self.wall, self.steady = 1.7e9, 50.0

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.steady)

    def go_on(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.fixture(params=DATABASES)
def dialect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Dialect]:
    if request.param == "postgresql":
        server: Server = request.getfixturevalue("postgres")
        yield Postgres(server.new_database())
    else:
        yield Sqlite(str(tmp_path / "store.db"))


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_is_set_gives_nothing_up_and_leases_nothing_twice(dialect: Dialect, jump: float) -> None:
    async def scenario() -> None:
        hands = Hands()
        store = await SqlStore.open(dialect, hands.clock())
        limits = RolloutConfig(timeout_seconds=600, unresponsive_seconds=30, max_attempts=3)
        await store.enqueue_rollouts([NewRollout(n, rollout_id=f"r{n}", config=limits) for n in range(2)])
        leased = await store.dequeue_rollout("before")
        assert leased is not None
        assert await store.expire_attempts() == []

        hands.wall += jump
        # A process that starts now has another idea of the time than the one before.
        late = await SqlStore.open(dialect, hands.clock())
        for each in (store, late):
            assert await each.expire_attempts() == []
        hands.go_on(20)
        await late.heartbeat("r0", 1)
        hands.go_on(20)
        for each in (store, late):
            assert await each.expire_attempts() == []
        other = await late.dequeue_rollout("after")
        assert other is not None
        assert other.rollout.rollout_id == "r1"
        assert await store.dequeue_rollout("after") is None

        # True silence, and time that truly runs out, are seen by both all the same.
        assert await store.expire_attempts() == []
        hands.go_on(31)
        assert {(a.rollout_id, a.status) for a in await store.expire_attempts()} == {
            ("r0", "unresponsive"),
            ("r1", "unresponsive"),
        }
        await store.update_attempt("r0", 1, "running")
        for _ in range(60):
            hands.go_on(10)
            await store.heartbeat("r0", 1)
            given_up = await late.expire_attempts()
            if given_up:
                break
        assert [(a.rollout_id, a.status) for a in given_up] == [("r0", "timeout")]
        assert (await store.get_rollout("r0")).status == "queuing"
        for each in (store, late):
            await each.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("jump", [3600.0, -3600.0, -0.5])
def test_a_moment_is_what_the_clock_says_then_and_no_two_are_the_same(jump: float) -> None:
    """`updated_at` said when the process had started, plus the time since: a live run had "no heartbeat"."""
    hands = Hands()
    clock = hands.clock()
    before = [clock.now() for _ in range(1000)]
    hands.wall += jump
    after = [clock.now() for _ in range(1000)]
    for times in (before, after):
        assert all(a < b for a, b in itertools.pairwise(times))
    assert len({*before, *after}) == 2000
    assert before[0] == 1.7e9
    expected = before[-1] if jump == -0.5 else 1.7e9 + jump
    assert abs(after[0] - expected) < 0.01


@pytest.mark.parametrize("jump", [51 * 3600.0, -48 * 3600.0])
@pytest.mark.parametrize("how", ["reported", "expired", "cancelled", "set", "opened again"])
def test_an_end_is_the_beginning_and_the_seconds_since_however_it_comes(
    dialect: Dialect, how: str, jump: float
) -> None:
    """`agl trace ls` said that a rollout of 30 s had taken 183,630 s."""

    async def scenario() -> None:
        hands = Hands()
        clock = hands.clock()
        store = await SqlStore.open(dialect, clock)
        limits = RolloutConfig(timeout_seconds=25, max_attempts=1)
        await store.enqueue_rollouts([NewRollout("x", rollout_id="r", config=limits)])
        hands.go_on(10)
        assert await store.dequeue_rollout("w") is not None
        assert await store.expire_attempts() == []
        if how == "opened again":
            await store.update_attempt("r", 1, "failed")
            hands.go_on(2)
            await store.start_attempt("r", "w")
        if clock._ahead is None:
            hands.wall += jump
        else:  # The time is the database's.
            clock.set(clock.now() + jump)
        hands.go_on(30)
        match how:
            case "reported" | "opened again":
                await store.update_attempt("r", 2 if how == "opened again" else 1, "succeeded")
            case "expired":
                [given_up] = await store.expire_attempts()
                assert given_up.ended_at is not None
                assert abs(given_up.ended_at - given_up.started_at - 30) < 0.01
            case "cancelled":
                await store.cancel_rollouts(["r"])
            case "set":
                await store.update_rollout("r", {"status": "succeeded"})
        rollout, attempt = await store.get_rollout("r"), (await store.query_attempts("r"))[-1]
        assert rollout.ended_at is not None
        assert abs(rollout.ended_at - rollout.created_at - (42 if how == "opened again" else 40)) < 0.01
        if how != "set":  # It leaves the attempt as it is.
            assert attempt.ended_at is not None
            assert abs(attempt.ended_at - attempt.started_at - 30) < 0.01
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("jump", [3600.0 * 6, -3600.0 * 6])
def test_a_clock_that_is_set_between_a_lease_and_its_heartbeat_ends_nothing(dialect: Dialect, jump: float) -> None:
    """The difference of the two was taken for the time that the attempt had run."""
    if isinstance(dialect, Postgres):
        pytest.skip("its clock is the server's")

    async def scenario() -> None:
        hands = Hands()
        store = await SqlStore.open(dialect, hands.clock())
        limits = RolloutConfig(timeout_seconds=600, unresponsive_seconds=30, max_attempts=1)
        await store.enqueue_rollouts([NewRollout("t", rollout_id="r", config=limits)])
        assert await store.dequeue_rollout("w") is not None
        hands.wall += jump
        await store.update_attempt("r", 1, "running")
        late = await SqlStore.open(dialect, hands.clock())
        for each in (store, late):
            assert await each.expire_attempts() == []
            await each.close()

    asyncio.run(scenario())


def test_the_time_of_a_database_is_read_again_and_goes_on_by_itself_meanwhile() -> None:
    hands = Hands()
    clock = hands.clock()
    clock.set(5e8)
    assert not clock.is_stale
    hands.wall += 3600
    hands.steady += 9.0
    assert clock.now() == 5e8 + 9.0, "this machine's clock is none of its business"
    assert not clock.is_stale
    hands.steady += 2.0
    assert clock.is_stale
    clock.set(6e8)
    assert clock.now() == 6e8


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_nothing_ends_before_it_began(dialect: Dialect, jump: float) -> None:
    if isinstance(dialect, Postgres):
        pytest.skip("its clock is the server's")

    async def scenario() -> None:
        hands = Hands()
        store = await SqlStore.open(dialect, hands.clock())
        ways = ("succeeded", "failed", "cancelled", "set", "expired")
        limits = RolloutConfig(timeout_seconds=600, max_attempts=1)
        await store.enqueue_rollouts([NewRollout(way, rollout_id=way, config=limits) for way in ways])
        for _ in ways:
            assert await store.dequeue_rollout("w") is not None
        # Another process ends them, which has not seen them begin.
        began, store = store, await SqlStore.open(dialect, hands.clock())
        assert await store.expire_attempts() == []
        await store.put_run(TrainingRun("run"))
        hands.wall += jump
        hands.go_on(5)
        await store.update_attempt("succeeded", 1, "succeeded")
        await store.update_attempt("failed", 1, "failed")
        await store.cancel_rollouts(["cancelled"])
        await store.update_rollout("set", {"status": "cancelled"})
        hands.go_on(700)
        assert {a.rollout_id for a in await store.expire_attempts()} == {"set", "expired"}
        for rollout in await store.query_rollouts():
            assert rollout.ended_at is not None
            assert rollout.ended_at >= rollout.created_at
            for attempt in await store.query_attempts(rollout.rollout_id):
                assert attempt.ended_at is not None
                assert attempt.ended_at >= attempt.started_at
        await store.add_metrics("run", 1, {"a": 1.0})
        [run] = await store.query_runs()
        assert abs(run.updated_at - hands.wall) < 1, "a live run would have no heartbeat"
        await store.close()
        await began.close()

    asyncio.run(scenario())


# -- a disk that is full ------------------------------------------------------------------------------------------
FULL = """
import asyncio, sys
from pathlib import Path
from agl.errors import StoreError
from agl.mdp.spans import Span
from agl.trainer.store import open_store
folder = Path(sys.argv[1])
def span(n):
    return Span("1" * 32, f"{n:016x}", None, "r", 1, "chat", float(n), 9e9, attributes={"text": "x" * 20000})
async def main():
    store = await open_store(f"sqlite:///{folder / 'store.db'}")
    stored = 0
    try:
        while True:
            await store.add_spans([span(stored)])
            stored += 1
    except StoreError as error:
        print("refused:", error)
    found = await store.query_spans("r")
    assert len(found) == stored, (len(found), stored)
    (folder / "ballast").unlink()
    await store.add_spans([span(stored)])
    await store.close()
    store = await open_store(f"sqlite:///{folder / 'store.db'}")
    assert len(await store.query_spans("r")) == stored + 1
    await store.close()
    import sqlite3
    assert sqlite3.connect(folder / "store.db").execute("PRAGMA integrity_check").fetchone() == ("ok",)
    print("fine")
asyncio.run(main())
"""


def test_a_file_system_that_is_full_is_an_error_and_no_harm(tmp_path: Path) -> None:
    inside = 'mount -t tmpfs -o size=6m none "$0" && head -c 3000000 /dev/zero > "$0/ballast" && exec "$@" "$0"'
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this user may not mount a file system")
    command = ["unshare", "-rm", "sh", "-c", inside, str(tmp_path), sys.executable, "-c", FULL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr
    assert "refused: the disk is full; nothing of this operation was stored" in done.stdout
    assert done.stdout.rstrip().endswith("fine")

"""Attacks on time: clocks that are set, a database that is locked, clients that read or write next to nothing.

Nothing here asserts a speed; bounds on seconds tell a hang from slowness.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from running import attempts, fit, say
from scripted import in_loop

import agl
from agl.trainer.runners.protocol import Lease
from agl.trainer.runners.store_coordinator import StoreCoordinator
from agl.trainer.store import open_store
from agl.trainer.store.base import NewRollout, RolloutConfig, Store

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
        other = asyncio.ensure_future(again.coordinator.lease("another", 5.0))
        for beat in range(25):
            assert await again.coordinator.heartbeat(lease)
            if beat == 5:
                wall.jump(jump)
            await asyncio.sleep(0.2)
        assert await other is None, "the rollout was leased to another worker"
        assert [a.status for a in await store.query_attempts("r")] == ["running"]

"""What every store must do. A new kind of store takes part by adding its factory to `FACTORIES`."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Text
from store_server import served

from agl import semconv
from agl.errors import StoreError
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Event, Span
from agl.mdp.types import Call, Reward, float_array, int_array
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.sql import codec, schema
from agl.trainer.store.types import (
    ATTEMPT_TERMINAL,
    ATTEMPT_TRANSITIONS,
    NO_RUN,
    ROLLOUT_TERMINAL,
    AttemptedRollout,
    MemoryEntry,
    Metric,
    Mode,
    NewRollout,
    Pruned,
    Rollout,
    RolloutConfig,
    RolloutSummary,
    TrainedCall,
    TrainingRun,
)

FACTORIES: dict[str, Callable[[pytest.FixtureRequest], Coroutine[Any, Any, Store]]] = {
    "sqlite": lambda request: open_store(f"sqlite:///{request.getfixturevalue('tmp_path') / 'store.db'}"),
    "memory": lambda request: open_store("memory"),
    "postgresql": lambda request: open_store(request.getfixturevalue("postgres").new_database()),
}

ONE_STORE_FOR_ALL_EXAMPLES = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
fresh = map("unique-{}".format, itertools.count())


@pytest.fixture(params=[*FACTORIES, "http"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with ExitStack() as stack:
        if request.param == "http":
            opened = asyncio.run(open_store(stack.enter_context(served(request.getfixturevalue("tmp_path"))).url))
        else:
            opened = asyncio.run(FACTORIES[request.param](request))
        yield opened
        asyncio.run(opened.close())


async def lease(store: Store, **options: Any) -> AttemptedRollout:
    """A rollout of its own, leased."""
    run_id = next(fresh)
    await store.enqueue_rollouts([NewRollout(task="t", run_id=run_id, config=RolloutConfig(**options))])
    return await again(store, run_id)


async def again(store: Store, run_id: str | None) -> AttemptedRollout:
    leased = await store.dequeue_rollout("worker", run_id=run_id)
    assert leased is not None
    return leased


def call(
    rollout_id: str, index: int, prompt: list[int], response: list[int], parent: str | None = None, **fields: Any
) -> Call:
    return Call(
        id=f"{rollout_id}/{index}",
        rollout_id=rollout_id,
        attempt=fields.pop("attempt", 1),
        index=index,
        agent="writer",
        policy="policy",
        policy_version=3,
        prompt_ids=int_array(prompt),
        response_ids=int_array(response),
        logprobs=float_array([-0.1 * (k + 1) for k in range(len(response))]),
        parent_id=parent,
        **fields,
    )


def span(rollout_id: str, number: int, **fields: Any) -> Span:
    name = fields.pop("name", "chat m")
    return Span(f"{1:032x}", f"{number:016x}", None, rollout_id, fields.pop("attempt", 1), name, **fields)


def assert_same_calls(found: list[Call], expected: list[Call]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for field in dataclasses.fields(Call):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if isinstance(b, np.ndarray):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)
            else:
                assert a == b, field.name


# -- the queue ----------------------------------------------------------------------------------------------------
def test_a_rollout_is_stored_as_given(store: Store) -> None:
    new = NewRollout(
        task={"question": "2+2", "choices": [3, 4.5, None, True, "ü\u2028"]},
        mode="val",
        run_id="run",
        step=7,
        group="g",
        index=2,
        seed=2**62,
        resources_id="r",
        priority=-1,
        config=RolloutConfig(3, ("failed",), 1.5, 2.5),
        metadata={"k": [1]},
        rollout_id="mine",
        created_at=1.5,
    )

    async def scenario() -> None:
        (rollout,) = await store.enqueue_rollouts([new])
        assert await store.get_rollout("mine") == rollout
        assert rollout.status == "queuing"
        assert (rollout.attempts, rollout.ended_at) == (0, None)
        for field in dataclasses.fields(NewRollout):
            assert getattr(rollout, field.name) == getattr(new, field.name), field.name

    asyncio.run(scenario())


@pytest.mark.parametrize("task", [None, "", 0, [], "\ud800", 2**70, -1.5])
def test_any_json_value_can_be_a_task(store: Store, task: Any) -> None:
    (rollout,) = asyncio.run(store.enqueue_rollouts([NewRollout(task)]))
    assert rollout.task == task


def test_enqueueing_the_same_id_again_returns_what_is_there(store: Store) -> None:
    async def scenario() -> None:
        await store.enqueue_rollouts([NewRollout("first", rollout_id="a")])
        await store.dequeue_rollout()
        repeated = await store.enqueue_rollouts(
            [NewRollout("second", rollout_id="a"), NewRollout("b", rollout_id="b"), NewRollout("c", rollout_id="b")]
        )
        assert [(r.task, r.status) for r in repeated] == [("first", "preparing"), ("b", "queuing"), ("b", "queuing")]
        assert len(await store.query_rollouts()) == 2

    asyncio.run(scenario())


def test_enqueueing_is_all_or_nothing(store: Store) -> None:
    async def scenario() -> None:
        with pytest.raises(StoreError, match=r"the task is not a JSON value(.|\n)*-> use only dicts, lists"):
            await store.enqueue_rollouts([NewRollout("good"), NewRollout({"bad": object()})])
        assert await store.query_rollouts() == []

    asyncio.run(scenario())


def test_the_queue_is_ordered_by_priority_then_age(store: Store) -> None:
    async def scenario() -> None:
        await store.enqueue_rollouts([NewRollout(t, priority=p) for t, p in [("a", 0), ("b", 5), ("c", 0), ("d", 5)]])
        assert [(await again(store, None)).rollout.task for _ in range(4)] == ["b", "d", "a", "c"]
        assert await store.dequeue_rollout() is None

    asyncio.run(scenario())


def test_a_worker_can_keep_to_one_run(store: Store) -> None:
    async def scenario() -> None:
        await store.enqueue_rollouts([NewRollout("a", run_id="x"), NewRollout("b", run_id="y")])
        assert (await again(store, "y")).rollout.task == "b"
        assert await store.dequeue_rollout(run_id="y") is None

    asyncio.run(scenario())


def test_concurrent_workers_never_get_the_same_rollout(store: Store) -> None:
    leased: list[str] = []

    async def worker() -> None:
        while (got := await store.dequeue_rollout()) is not None:
            leased.append(got.rollout.rollout_id)

    async def workers() -> None:
        await asyncio.gather(*(worker() for _ in range(5)))

    rollouts = asyncio.run(store.enqueue_rollouts([NewRollout(i) for i in range(60)]))
    threads = [threading.Thread(target=lambda: asyncio.run(workers())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(leased) == sorted(r.rollout_id for r in rollouts)


def test_a_cancelled_dequeue_holds_nothing_back(store: Store) -> None:
    async def scenario() -> None:
        await store.enqueue_rollouts([NewRollout("t")])
        waiting = asyncio.ensure_future(store.dequeue_rollout())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await again(store, None)).attempt.attempt == 1

    asyncio.run(scenario())


def test_a_worker_waits_for_work(store: Store) -> None:
    async def scenario() -> None:
        waiting = asyncio.ensure_future(store.dequeue_rollout("w", run_id="x", wait=60))
        await asyncio.sleep(0.05)
        await store.enqueue_rollouts([NewRollout("not this", run_id="y")])
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await store.enqueue_rollouts([NewRollout("this", run_id="x")])
        leased = await asyncio.wait_for(waiting, 20)
        assert leased is not None
        assert leased.rollout.task == "this"
        # A second try is work too.
        waiting = asyncio.ensure_future(store.dequeue_rollout("w", run_id="x", wait=60))
        await asyncio.sleep(0.05)
        await store.update_attempt(leased.rollout.rollout_id, 1, "failed")
        again = await asyncio.wait_for(waiting, 20)
        assert again is not None
        assert (again.rollout.task, again.attempt.attempt) == ("this", 2)
        assert await store.dequeue_rollout(run_id="x", wait=0.02) is None

    asyncio.run(scenario())


def test_as_many_workers_wake_as_there_is_work_and_a_cancelled_one_loses_none(store: Store) -> None:
    async def scenario() -> None:
        workers = [asyncio.ensure_future(store.dequeue_rollout(f"w{n}", wait=60)) for n in range(12)]
        await asyncio.sleep(0.1)
        enqueued = asyncio.ensure_future(store.enqueue_rollouts([NewRollout(n) for n in range(8)]))
        for worker in workers[:4]:
            worker.cancel()
        await enqueued
        await asyncio.wait(workers[:4])
        served, waiting = set(), set(workers[4:])
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            assert done, "nobody woke the others"
            served |= {leased.rollout.task for worker in done if (leased := worker.result()) is not None}
        assert served == set(range(8))

    asyncio.run(scenario())


# -- transitions --------------------------------------------------------------------------------------------------
def test_only_the_secret_of_a_lease_proves_it(store: Store) -> None:
    async def scenario() -> None:
        first, other = await lease(store), await lease(store)
        rollout_id = first.rollout.rollout_id
        assert first.secret is not None
        assert other.secret is not None
        assert first.secret not in repr(first)
        assert await store.is_leased_with(rollout_id, 1, ["x", first.secret])
        for secrets in ([], [""], ["x"], [other.secret], [first.secret[:-1]], ["\ud800 é"]):
            assert not await store.is_leased_with(rollout_id, 1, secrets)
        assert not await store.is_leased_with(rollout_id, 2, [first.secret])
        assert not await store.is_leased_with("ro-nobody", 1, [first.secret])
        # The next attempt has one of its own, and the one before keeps its.
        await store.update_attempt(rollout_id, 1, "failed")
        second = await again(store, first.rollout.run_id)
        assert second.rollout.rollout_id == rollout_id
        assert second.secret is not None
        assert not await store.is_leased_with(rollout_id, 2, [first.secret])
        assert await store.is_leased_with(rollout_id, 2, [second.secret])
        assert await store.is_leased_with(rollout_id, 1, [first.secret])

    asyncio.run(scenario())


def test_a_repeated_request_gets_a_new_secret_for_its_lease(store: Store) -> None:
    async def scenario() -> None:
        run_id = next(fresh)
        await store.enqueue_rollouts([NewRollout(task="t", run_id=run_id)])
        first, second = [await store.dequeue_rollout("w", run_id=run_id, request_id=run_id) for _ in range(2)]
        assert first is not None
        assert second is not None
        assert first.secret is not None
        assert second.secret is not None
        assert (first.rollout, first.attempt.attempt) == (second.rollout, second.attempt.attempt)
        assert not await store.is_leased_with(first.rollout.rollout_id, 1, [first.secret])
        assert await store.is_leased_with(first.rollout.rollout_id, 1, [second.secret])

    asyncio.run(scenario())


def test_a_successful_life(store: Store) -> None:
    async def scenario() -> None:
        leased = await lease(store)
        rollout_id = leased.rollout.rollout_id
        assert (leased.rollout.status, leased.rollout.attempts) == ("preparing", 1)
        assert (leased.attempt.status, leased.attempt.attempt, leased.attempt.worker_id) == ("preparing", 1, "worker")
        assert (await store.update_attempt(rollout_id, 1, "running")).status == "running"
        ended = await store.update_attempt(rollout_id, 1, "succeeded")
        assert ended.status == "succeeded"
        assert ended.ended_at is not None
        assert ended == await store.get_rollout(rollout_id)
        (attempt,) = await store.query_attempts(rollout_id)
        assert attempt.status == "succeeded"
        assert attempt.started_at <= attempt.last_heartbeat_at <= (attempt.ended_at or 0)

    asyncio.run(scenario())


@ONE_STORE_FOR_ALL_EXAMPLES
@given(path=st.lists(st.sampled_from(sorted(ATTEMPT_TRANSITIONS)), min_size=1, max_size=6))
def test_only_the_table_decides_what_may_follow(store: Store, path: list[Any]) -> None:
    async def scenario() -> None:
        rollout_id = (await lease(store, max_attempts=1)).rollout.rollout_id
        status, ended = "preparing", None
        for to in path:
            if to != status and to not in ATTEMPT_TRANSITIONS[status]:
                with pytest.raises(StoreError, match=f"attempt 1 of rollout {rollout_id}.*from '{status}' to '{to}'"):
                    await store.update_attempt(rollout_id, 1, to)
                continue
            status = to
            rollout = await store.update_attempt(rollout_id, 1, to)
            assert ended is None or rollout.status == ended
            if rollout.status in ROLLOUT_TERMINAL:
                ended = rollout.status
        (attempt,) = await store.query_attempts(rollout_id)
        assert attempt.status == status
        assert (attempt.ended_at is not None) == (status in ATTEMPT_TERMINAL)

    asyncio.run(scenario())


def test_a_failure_is_tried_again_until_attempts_run_out(store: Store) -> None:
    async def scenario() -> None:
        leased = await lease(store, max_attempts=2)
        rollout_id, run_id = leased.rollout.rollout_id, leased.rollout.run_id
        assert (await store.update_attempt(rollout_id, 1, "failed", error="boom")).status == "queuing"
        assert (await again(store, run_id)).attempt.attempt == 2
        assert (await store.update_attempt(rollout_id, 2, "timeout")).status == "failed"
        assert await store.dequeue_rollout(run_id=run_id) is None
        first, second = await store.query_attempts(rollout_id)
        assert (first.status, first.error, second.status) == ("failed", "boom", "timeout")

    asyncio.run(scenario())


def test_only_the_statuses_in_retry_on_are_tried_again(store: Store) -> None:
    async def scenario() -> None:
        rollout_id = (await lease(store, max_attempts=9, retry_on=("timeout",))).rollout.rollout_id
        assert (await store.update_attempt(rollout_id, 1, "failed")).status == "failed"

    asyncio.run(scenario())


def test_a_replaced_attempt_no_longer_moves_its_rollout(store: Store) -> None:
    async def scenario() -> None:
        leased = await lease(store)
        rollout_id = leased.rollout.rollout_id
        await store.update_attempt(rollout_id, 1, "unresponsive")
        await again(store, leased.rollout.run_id)
        assert (await store.update_attempt(rollout_id, 1, "succeeded")).status == "preparing"
        assert (await store.update_attempt(rollout_id, 2, "succeeded")).status == "succeeded"

    asyncio.run(scenario())


def test_a_silent_attempt_that_comes_back_in_time_takes_its_rollout_out_of_the_queue(store: Store) -> None:
    async def scenario() -> None:
        leased = await lease(store)
        rollout_id = leased.rollout.rollout_id
        assert (await store.update_attempt(rollout_id, 1, "unresponsive")).status == "queuing"
        assert (await store.update_attempt(rollout_id, 1, "running")).status == "running"
        assert await store.dequeue_rollout(run_id=leased.rollout.run_id) is None

    asyncio.run(scenario())


def test_attempts_past_their_limits_are_given_up(store: Store) -> None:
    async def scenario() -> None:
        slow = await lease(store, timeout_seconds=100, max_attempts=1)
        silent = await lease(store, unresponsive_seconds=10, max_attempts=2)
        await lease(store)
        start = silent.attempt.started_at
        assert await store.expire_attempts(min(start, slow.attempt.started_at) + 9) == []
        (given_up,) = await store.expire_attempts(start + 11)
        assert given_up.rollout_id == silent.rollout.rollout_id
        assert given_up.status == "unresponsive"
        assert "no heartbeat for 11.0 s (limit 10 s)" in (given_up.error or "")
        assert (await store.get_rollout(given_up.rollout_id)).status == "queuing"
        (given_up,) = await store.expire_attempts(start + 101)
        assert (given_up.rollout_id, given_up.status) == (slow.rollout.rollout_id, "timeout")
        assert [given_up] == await store.query_attempts(given_up.rollout_id)
        assert (await store.get_rollout(given_up.rollout_id)).status == "failed"
        assert await store.expire_attempts(start + 1000) == []

    asyncio.run(scenario())


def test_time_in_which_nobody_watched_gives_nothing_up(store: Store) -> None:
    async def scenario() -> None:
        leased = await lease(store, unresponsive_seconds=0.05, timeout_seconds=50, max_attempts=2)
        rollout_id = leased.rollout.rollout_id
        await asyncio.sleep(0.1)
        assert await store.expire_attempts() == []
        await asyncio.sleep(0.1)
        await store.heartbeat(rollout_id, 1)
        assert await store.expire_attempts() == []
        await asyncio.sleep(0.1)
        (given_up,) = await store.expire_attempts()
        assert (given_up.rollout_id, given_up.status) == (rollout_id, "unresponsive")
        assert await store.expire_attempts() == []

    asyncio.run(scenario())


def test_a_heartbeat_and_running_keep_an_attempt_alive(store: Store) -> None:
    async def scenario() -> None:
        leased = await lease(store, unresponsive_seconds=10)
        rollout_id = leased.rollout.rollout_id
        await store.update_attempt(rollout_id, 1, "running")
        (running,) = await store.query_attempts(rollout_id)
        assert running.last_heartbeat_at >= leased.attempt.started_at
        await store.heartbeat(rollout_id, 1)
        (beaten,) = await store.query_attempts(rollout_id)
        assert beaten.last_heartbeat_at >= running.last_heartbeat_at

    asyncio.run(scenario())


def test_cancelling_ends_what_is_open_and_leaves_the_rest(store: Store) -> None:
    async def scenario() -> None:
        done = (await lease(store)).rollout.rollout_id
        await store.update_attempt(done, 1, "succeeded")
        running = (await lease(store)).rollout.rollout_id
        (queued,) = await store.enqueue_rollouts([NewRollout("q")])
        await store.cancel_rollouts([done, running, queued.rollout_id])
        assert (await store.get_rollout(done)).status == "succeeded"
        for rollout_id in (running, queued.rollout_id):
            cancelled = await store.get_rollout(rollout_id)
            assert cancelled.status == "cancelled"
            assert cancelled.ended_at is not None
        assert (await store.query_attempts(running))[0].status == "failed"
        with pytest.raises(StoreError, match=r"'failed' is final; the rollout was cancelled"):
            await store.update_attempt(running, 1, "succeeded")
        assert await store.dequeue_rollout() is None

    asyncio.run(scenario())


# -- finding and waiting ------------------------------------------------------------------------------------------
def test_a_unique_prefix_finds_a_rollout(store: Store) -> None:
    async def scenario() -> None:
        await store.enqueue_rollouts([NewRollout(i, rollout_id=i) for i in ("abc", "abd", "ab", "x%y")])
        assert (await store.get_rollout("abc")).task == "abc"
        assert (await store.get_rollout("ab")).task == "ab"
        assert (await store.get_rollout("x")).task == "x%y"
        with pytest.raises(StoreError, match="several rollouts begin with 'a'"):
            await store.get_rollout("a")
        for unknown in ("", "%", "A", "abcd"):
            with pytest.raises(StoreError, match=f"there is no rollout '{unknown}'"):
                await store.get_rollout(unknown)

    asyncio.run(scenario())


def test_unknown_ids_are_errors(store: Store) -> None:
    async def scenario() -> None:
        known = (await lease(store)).rollout.rollout_id
        for unknown in (
            store.query_attempts("nobody"),
            store.cancel_rollouts([known, "nobody"]),
            store.wait_for_rollouts([known, "nobody"], timeout=0),
        ):
            with pytest.raises(StoreError, match="there is no rollout 'nobody'"):
                await unknown
        for unknown in (store.heartbeat(known, 2), store.update_attempt(known, 2, "running")):
            with pytest.raises(StoreError, match=f"no such attempt .rollout={known}, attempt=2."):
                await unknown
        assert (await store.get_rollout(known)).status == "preparing"

    asyncio.run(scenario())


def test_rollouts_are_found_by_every_filter(store: Store) -> None:
    async def scenario() -> None:
        await store.enqueue_rollouts(
            [
                NewRollout(0, run_id="x", step=1),
                NewRollout(1, run_id="x", step=2, mode="val"),
                NewRollout(2, run_id="x", step=2),
                NewRollout(3, run_id="y", step=2),
            ]
        )
        await store.dequeue_rollout(run_id="y")

        async def tasks(**filters: Any) -> list[int]:
            return [rollout.task for rollout in await store.query_rollouts(**filters)]

        assert await tasks() == [0, 1, 2, 3]
        assert await tasks(limit=2) == [0, 1]
        assert await tasks(run_id="x", step=2) == [1, 2]
        assert await tasks(mode="val") == [1]
        assert await tasks(status=["preparing"]) == [3]
        assert await tasks(status=["preparing", "queuing"], step=2) == [1, 2, 3]
        assert await tasks(status=[]) == []

    asyncio.run(scenario())


def test_rollouts_are_paged_and_counted_under_every_filter(store: Store) -> None:
    async def scenario() -> None:
        modes: list[Mode] = ["train", "val"]
        for k in range(10):
            await store.enqueue_rollouts([NewRollout(k, run_id="xy"[k % 2], mode=modes[k // 5])])
        everything = await store.query_rollouts()
        since = everything[3].created_at
        for filters, fitting in (
            ({}, range(10)),
            ({"run_id": "y"}, (1, 3, 5, 7, 9)),
            ({"mode": "val", "run_id": "x"}, (6, 8)),
            ({"since": since}, range(3, 10)),
            ({"since": since, "status": ["queuing"], "run_id": "x"}, (4, 6, 8)),
            ({"since": since + 1e6}, ()),
        ):
            seen: list[int] = []
            after = None
            while page := await store.query_rollouts(**filters, after=after, limit=2):
                seen += [rollout.task for rollout in page]
                after = page[-1].rollout_id
                if len(seen) == 2:  # what is queued meanwhile comes last, and is missed by none
                    await store.enqueue_rollouts([NewRollout("late", run_id="z", mode="dev")])
            assert [task for task in seen if task != "late"] == list(fitting)
            assert len(seen) == await store.count_rollouts(**filters)
        with pytest.raises(StoreError, match="there is no rollout 'nobody'"):
            await store.query_rollouts(after="nobody")

    asyncio.run(scenario())


def test_waiting_ends_when_all_have_ended(store: Store) -> None:
    async def scenario() -> None:
        ids = [(await lease(store, max_attempts=1)).rollout.rollout_id for _ in range(3)]
        waiting = asyncio.ensure_future(store.wait_for_rollouts(ids))
        await store.update_attempt(ids[2], 1, "succeeded")
        await store.cancel_rollouts([ids[0]])
        assert not waiting.done()
        await store.update_attempt(ids[1], 1, "failed")
        ended = await asyncio.wait_for(waiting, 30)
        assert [(r.rollout_id, r.status) for r in ended] == list(
            zip(ids, ["cancelled", "failed", "succeeded"], strict=True)
        )

    asyncio.run(scenario())


def test_waiting_returns_those_that_ended_in_time(store: Store) -> None:
    async def scenario() -> None:
        done, still = [(await lease(store)).rollout.rollout_id for _ in range(2)]
        await store.update_attempt(done, 1, "succeeded")
        for timeout in (0, 0.01):
            ended = await store.wait_for_rollouts([still, done], timeout=timeout)
            assert [r.rollout_id for r in ended] == [done]
        assert await store.wait_for_rollouts([]) == []

    asyncio.run(scenario())


def test_a_waiter_in_another_thread_is_woken(store: Store) -> None:
    rollout_id = asyncio.run(lease(store, timeout_seconds=1, max_attempts=1)).rollout.rollout_id
    ended = []
    thread = threading.Thread(target=lambda: ended.extend(asyncio.run(store.wait_for_rollouts([rollout_id], 30))))
    thread.start()
    asyncio.run(store.expire_attempts(2e10))
    thread.join()
    assert [r.status for r in ended] == ["failed"]


# -- calls and spans ----------------------------------------------------------------------------------------------
def test_calls_come_back_exactly(store: Store) -> None:
    first = call("r", 0, [1, 2**31 - 1], [5, 6], temperature=0.7, tool_call_ids=("call_1", "call_2"))
    second = dataclasses.replace(
        call("r", 1, [1, 2**31 - 1, 5, 6, 7], [], parent="r/0"),
        finish_reason="error",
        policy=None,
        fork_cause="history rewritten",
        span_id="0" * 16,
        request={"messages": [{"role": "user", "content": "ü"}], "max_tokens": 3},
        response={"role": "assistant"},
        error="gone",
        started_at=1.25,
        ended_at=2.5,
    )
    other = call("r", 0, [9], [9], attempt=2)
    other = dataclasses.replace(other, id="other")

    async def scenario() -> None:
        await store.add_calls([first, second])
        await store.add_calls([other])
        await store.add_calls([])
        assert_same_calls(await store.query_calls("r"), [first, second, other])
        assert_same_calls(await store.query_calls("r", 2), [other])
        assert await store.query_calls("nobody") == []

    asyncio.run(scenario())


def test_a_call_that_is_there_already_stays_as_it_is(store: Store) -> None:
    async def scenario() -> None:
        await store.add_calls([call("r", 0, [1], [2])])
        await store.add_calls([call("r", 0, [8], [9]), call("r", 1, [8, 9, 3], [4], parent="r/0")])
        assert_same_calls(
            await store.query_calls("r"), [call("r", 0, [1], [2]), call("r", 1, [8, 9, 3], [4], parent="r/0")]
        )

    asyncio.run(scenario())


def test_a_call_whose_answer_was_lost_is_marked_afterwards(store: Store) -> None:
    """Once, and whatever else its record is stays."""
    answered = dataclasses.replace(call("r", 0, [1], [2]), response={"content": "x"})
    calls = [answered, call("r", 1, [1, 2, 3], [4], parent="r/0")]
    lost = dataclasses.replace(calls[0], finish_reason="cancelled", error="lost")

    async def scenario() -> None:
        await store.add_calls(calls)
        await store.add_calls([dataclasses.replace(lost, response={}, agent="another")])
        assert_same_calls(await store.query_calls("r"), [lost, calls[1]])
        await store.add_calls([dataclasses.replace(lost, error="another reason")])
        assert_same_calls(await store.query_calls("r"), [lost, calls[1]])

    asyncio.run(scenario())


token_lists = st.lists(st.integers(0, 3), max_size=4)


@ONE_STORE_FOR_ALL_EXAMPLES
@given(data=st.data())
def test_prompts_come_back_whole_whatever_their_parents(store: Store, data: st.DataObject) -> None:
    rollout_id = next(fresh)
    calls: list[Call] = []
    for index in range(data.draw(st.integers(1, 6))):
        parent = data.draw(st.sampled_from([None, "unknown", *calls]))
        prompt = data.draw(token_lists)
        if isinstance(parent, Call) and data.draw(st.booleans()):
            prompt = [*parent.ids.tolist(), *prompt]
        parent_id = parent.id if isinstance(parent, Call) else parent
        attempt = data.draw(st.integers(1, 2))
        calls.append(call(rollout_id, index, prompt, data.draw(token_lists), parent_id, attempt=attempt))
    cut = data.draw(st.integers(0, len(calls)))
    order = data.draw(st.permutations(calls))

    async def scenario() -> None:
        await store.add_calls(order[:cut])
        await store.add_calls(order[cut:])
        expected = sorted(calls, key=lambda c: (c.attempt, c.index))
        assert_same_calls(await store.query_calls(rollout_id), expected)
        assert_same_calls(await store.query_calls(rollout_id, 2), [c for c in expected if c.attempt == 2])

    asyncio.run(scenario())


def test_spans_come_back_by_start_time(store: Store) -> None:
    late = span("r", 1, start=2.0, end=3.0, attributes={"a": 1, "b": [1.5, 2.5], "c": "x", "d": True})
    failed = Event("exception", 1.5, {"exception.type": "ValueError"})
    early = span("r", 2, start=1.0, end=4.0, status="error", status_message="boom", events=(failed,))
    other = span("r", 3, start=0.0, end=1.0, attempt=2)

    async def scenario() -> None:
        await store.add_spans([late, early])
        await store.add_spans([dataclasses.replace(late, name="changed"), other])
        await store.add_spans([])
        assert await store.query_spans("r", 1) == [early, late]
        assert await store.query_spans("r") == [other, early, late]
        assert await store.query_spans("nobody") == []

    asyncio.run(scenario())


@pytest.mark.parametrize("seconds", [1e20, -1.0, float("inf"), float("nan")])
def test_a_span_of_no_time_is_refused_as_it_is_written(store: Store, seconds: float) -> None:
    rollout_id = next(fresh)

    async def scenario() -> None:
        for start, end in ((seconds, 2.0), (1.0, seconds)):
            with pytest.raises(StoreError, match=r"of a span is|should be a valid number"):
                await store.add_spans([span(rollout_id, 1, start=start, end=end)])
        assert await store.query_spans(rollout_id) == []

    asyncio.run(scenario())


def test_spans_are_moved_to_another_rollout(store: Store) -> None:
    async def scenario() -> None:
        await store.add_spans([span("r", 1, start=1.0, end=2.0), span("other", 2, start=1.0, end=2.0)])
        await store.move_spans("r", "s", 3)
        await store.move_spans("nobody", "s", 3)
        assert await store.query_spans("r") == []
        assert await store.query_spans("s", 3) == [span("s", 1, start=1.0, end=2.0, attempt=3)]
        assert len(await store.query_spans("other")) == 1

    asyncio.run(scenario())


def test_one_bad_write_among_concurrent_ones_fails_alone(store: Store) -> None:
    async def scenario() -> None:
        good = [store.add_spans([span("r", n, start=float(n), end=9.0)]) for n in range(4)]
        bad = store.add_spans(
            [span("r", 8, start=8.0, end=9.0), span("r", 9, start=9.0, end=9.0, attributes={"x": object()})]
        )
        outcomes = await asyncio.gather(*good[:2], bad, *good[2:], return_exceptions=True)
        assert [type(o) for o in outcomes] == [type(None), type(None), StoreError, type(None), type(None)]
        assert len(await store.query_spans("r")) == 4

    asyncio.run(scenario())


# -- resources, policies, training --------------------------------------------------------------------------------
def test_resources_are_versioned(store: Store) -> None:
    async def scenario() -> None:
        assert await store.get_resources() is None
        first = await store.update_resources({"prompt": {"template": "{q}"}})
        second = await store.update_resources({"prompt": 2})
        assert first != second
        assert await store.get_resources() == (second, {"prompt": 2})
        assert await store.get_resources(first) == (first, {"prompt": {"template": "{q}"}})
        assert await store.get_resources("nobody") is None

    asyncio.run(scenario())


def test_versions_of_resources_are_found_by_a_prefix(store: Store) -> None:
    async def run() -> None:
        name = next(fresh)
        for version in ("", "#2", "#1"):
            await store.update_resources({"v": version}, resources_id=f"{name}{version}")
        assert await store.query_resources(f"{name}#") == [(f"{name}#2", {"v": "#2"}), (f"{name}#1", {"v": "#1"})]
        assert [id for id, _ in await store.query_resources(name)] == [name, f"{name}#2", f"{name}#1"]
        assert await store.query_resources(f"{name}#3") == []

    asyncio.run(run())


def test_a_note_replaces_the_one_before(store: Store) -> None:
    async def run() -> None:
        name = next(fresh)
        await store.put_note(f"{name}/a", {"n": 1})
        await store.put_note(f"{name}/b", [None, "\0x"])
        await store.put_note(f"{name}/a", {"n": 2})
        assert await store.query_notes(f"{name}/") == {f"{name}/a": {"n": 2}, f"{name}/b": [None, "\0x"]}
        assert await store.query_notes(f"{name}/c") == {}

    asyncio.run(run())


def test_an_id_that_no_database_can_hold_is_refused(store: Store) -> None:
    async def run() -> None:
        odd = "\ud800"
        for refused in (
            lambda: store.put_note(odd, 1),
            lambda: store.query_notes(odd),
            lambda: store.query_resources(odd),
            lambda: store.query_memories(odd),
            lambda: store.revert_memories(odd, 1),
            lambda: store.query_rollouts(after=odd),
            lambda: store.query_runs(after=odd),
        ):
            with pytest.raises(StoreError, match="surrogates not allowed"):
                await refused()

    asyncio.run(run())


@pytest.mark.parametrize("number", [float("nan"), 1e39])
def test_an_embedding_that_is_not_finite_is_refused(store: Store, number: float) -> None:
    async def run() -> None:
        scope = next(fresh)
        with pytest.raises(StoreError, match="embedding"):
            await store.merge_memories(scope, 1, [MemoryEntry(("a",), "k", 1, embedding=(0.5, number))])
        assert await store.query_memories(scope) == []

    asyncio.run(run())


def test_a_version_of_a_memory_stays_as_it_was(store: Store) -> None:
    async def run() -> None:
        scope = next(fresh)
        tea = MemoryEntry(
            ("a", "\0"), "1", {"drink": "tea"}, "customer C-417 prefers tea", 1.0, "t1", 1, 5.0, 6.0, (0.5, 1.0)
        )
        milk, other = (
            replace(tea, key="2", text="customer C-512 prefers milk", embedding=None),
            replace(tea, key="3", text=""),
        )
        await store.merge_memories(scope, 1, [tea, milk, other])
        await store.merge_memories(f"{scope}-other", 1, [replace(milk, text="C-417 " * 9)])
        better = replace(tea, value={"drink": "coffee"}, text="customer C-417 prefers coffee")
        for _ in range(2):
            await store.merge_memories(scope, 2, [milk, better], [other.id])

        async def seen(version: int | None = None) -> dict[str, Any]:
            return {entry.key: entry.value["drink"] for entry in await store.query_memories(scope, version)}

        assert await seen(0) == {}
        [first, *_] = await store.query_memories(scope, 1)
        assert (first, list(first.embedding or ())) == (replace(tea, embedding=first.embedding), [0.5, 1.0])
        assert await seen(1) == {"1": "tea", "2": "tea", "3": "tea"}
        assert await seen() == await seen(2) == {"2": "tea", "1": "coffee"}

        async def found(query: str, version: int | None) -> list[str]:
            hits = await store.rank_memories(scope, query, version)
            assert [score for _, score in hits] == sorted((score for _, score in hits), reverse=True)
            assert all(score > 0 for _, score in hits)
            return [key for (_, key), _ in hits]

        assert await found("What does customer C-417 prefer?", 1) == ["1", "2"]
        assert await found("coffee", 1) == []
        assert await found("COFFEE", 2) == await found("coffee", None) == ["1"]
        assert await found("417-C", 2) == [], "a word with punctuation is a phrase"
        for syntax in ('"', "* NEAR(", "a:b AND NOT (", "", "-", "'; DROP TABLE memories"):
            assert await found(syntax, 2) == []
        await store.revert_memories(scope, 1)
        assert await seen() == {"1": "tea", "2": "tea", "3": "tea"}
        assert await found("coffee tea", None) == ["1"]

    asyncio.run(run())


def test_the_caller_opens_an_attempt_whatever_the_rollouts_status(store: Store) -> None:
    async def run() -> None:
        run_id = next(fresh)
        [rollout] = await store.enqueue_rollouts([NewRollout("t", run_id=run_id, config=RolloutConfig(max_attempts=1))])
        first = await store.start_attempt(rollout.rollout_id, "w", request_id=f"{run_id}-1")
        assert (first.rollout.status, first.attempt.attempt, first.attempt.worker_id) == ("preparing", 1, "w")
        assert first.secret is not None
        assert await store.is_leased_with(rollout.rollout_id, 1, [first.secret])
        assert await store.dequeue_rollout(run_id=run_id) is None
        again = await store.start_attempt(rollout.rollout_id, "w", request_id=f"{run_id}-1")
        assert again.attempt.attempt == 1
        await store.update_attempt(rollout.rollout_id, 1, "succeeded")
        second = await store.start_attempt(rollout.rollout_id)
        assert (second.attempt.attempt, second.rollout.status, second.rollout.ended_at) == (2, "preparing", None)
        assert [a.status for a in await store.query_attempts(rollout.rollout_id)] == ["succeeded", "preparing"]
        with pytest.raises(StoreError, match="there is no rollout"):
            await store.start_attempt("none")

    asyncio.run(run())


def test_fields_of_a_rollout_are_set(store: Store) -> None:
    async def run() -> None:
        run_id = next(fresh)
        [rollout] = await store.enqueue_rollouts([NewRollout("t", run_id=run_id, metadata={"a": 1})])
        config = RolloutConfig(3, ("failed",), 5.0, None)
        values = {"task": {"q": 2}, "mode": "val", "resources_id": "r", "config": config, "metadata": {"b": 2}}
        changed = await store.update_rollout(rollout.rollout_id, values)
        assert (changed.task, changed.mode, changed.resources_id) == ({"q": 2}, "val", "r")
        assert (changed.config, changed.metadata, changed.status) == (config, {"b": 2}, "queuing")
        assert await store.get_rollout(rollout.rollout_id) == changed
        waiting = asyncio.ensure_future(store.wait_for_rollouts([rollout.rollout_id], 20))
        ended = await store.update_rollout(rollout.rollout_id, {"status": "failed"})
        assert ended.ended_at is not None
        assert [r.status for r in await waiting] == ["failed"]
        assert await store.dequeue_rollout(run_id=run_id) is None
        again = await store.update_rollout(rollout.rollout_id, {"status": "queuing"})
        assert (again.status, again.ended_at) == ("queuing", None)
        assert await store.dequeue_rollout(run_id=run_id) is not None
        for wrong in ({"status": "lost"}, {"mode": "x"}, {"seed": 1}):
            with pytest.raises(StoreError, match="cannot become"):
                await store.update_rollout(rollout.rollout_id, wrong)
        with pytest.raises(StoreError, match="there is no rollout"):
            await store.update_rollout("none", {"status": "failed"})

    asyncio.run(run())


def test_statistics_count_what_there_is(store: Store) -> None:
    async def run() -> None:
        before = await store.statistics()
        [rollout] = await store.enqueue_rollouts([NewRollout("t", run_id=next(fresh))])
        await store.start_attempt(rollout.rollout_id)
        await store.update_resources({})
        after = await store.statistics()
        grown = {name: after[name] - before.get(name, 0) for name in after}
        assert {name: n for name, n in grown.items() if n} == {
            "rollouts": 1, "attempts": 1, "resources": 1, "preparing": 1,
        }  # fmt: skip

    asyncio.run(run())


def test_what_was_trained_replaces_what_the_same_step_said_before(store: Store) -> None:
    row = TrainedCall("c", "r", 1, 2, 0, reward=1.0, return_=1 / 3, advantage=-0.1, tokens=5)
    dropped = dataclasses.replace(row, call_id="d", sequence=None, tokens=0, dropped="group without spread")

    async def scenario() -> None:
        await store.add_trained_calls("run", [dataclasses.replace(row, advantage=9.0)])
        await store.add_trained_calls("run", [row, dropped])
        await store.add_trained_calls("run", [dataclasses.replace(row, step=2)])
        await store.add_policy_version("run", "policy", 2, 1)
        await store.add_policy_version("run", "policy", 2, 1, "folder")
        found = await store.query_trained_calls("r")
        assert sorted(found, key=lambda t: (t.step, t.call_id)) == [row, dropped, dataclasses.replace(row, step=2)]
        assert await store.query_trained_calls("nobody") == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "nasty", ["a\0b\ud800c", "\0", "\ufdd0", "\ufdd00000 \ufdd0d800", "\udc80\ufffd", "ü \U0001f600"]
)
def test_any_text_comes_back_exactly(store: Store, nasty: str) -> None:
    """Texts that agents, tools and tasks bring along: JSON can say them, a database's own text may not."""

    async def scenario() -> None:
        run_id, config = next(fresh), RolloutConfig(max_attempts=1)
        new = NewRollout({"k": nasty}, group=nasty, config=config, metadata={"k": nasty}, run_id=run_id)
        (queued,) = await store.enqueue_rollouts([new])
        assert (queued.group, queued.task, queued.metadata) == (nasty, {"k": nasty}, {"k": nasty})
        assert (await again(store, run_id)).rollout.group == nasty
        rollout_id = queued.rollout_id
        await store.update_attempt(rollout_id, 1, "failed", error=nasty)
        (attempt,) = await store.query_attempts(rollout_id)
        assert attempt.error == nasty
        events = (Event(nasty, 0.5, {"k": nasty}),)
        said = span(
            rollout_id, 1, start=0.0, end=1.0, name=nasty, status_message=nasty, attributes={"k": nasty}, events=events
        )
        await store.add_spans([said])
        assert await store.query_spans(rollout_id) == [said]
        texts = {"agent": nasty, "policy": nasty, "fork_cause": nasty, "error": nasty}
        made = call(rollout_id, 0, [1], [2], request={"k": nasty})
        made = dataclasses.replace(made, response={"k": nasty}, **texts)
        await store.add_calls([made])
        assert_same_calls(await store.query_calls(rollout_id), [made])

    asyncio.run(scenario())


# -- pruning ------------------------------------------------------------------------------------------------------
def test_pruning_empties_what_ended_before_and_leaves_the_rest(store: Store) -> None:
    async def fill(rollout_id: str, run_id: str, end: bool) -> Rollout:
        await store.enqueue_rollouts([NewRollout("t", rollout_id=rollout_id, run_id=run_id)])
        await again(store, run_id)
        await store.add_calls([call(rollout_id, n, [1] * n, [2]) for n in range(3)])
        await store.add_spans(
            [dataclasses.replace(span(rollout_id, n, start=0.0, end=1.0), trace_id=rollout_id) for n in range(2)]
        )
        row = TrainedCall(f"{rollout_id}/0", rollout_id, 1, 1, 0, reward=1.0, return_=1.0, advantage=1.0, tokens=1)
        await store.add_trained_calls(run_id, [row])
        return await store.update_attempt(rollout_id, 1, "succeeded" if end else "running")

    async def scenario() -> None:
        for n in range(150):
            await fill(f"old-{n}", "x", end=True)
        other, still = await fill("other", "y", end=True), await fill("still", "x", end=False)
        assert other.ended_at is not None
        await asyncio.sleep(0.002)
        young = await fill("young", "x", end=True)
        assert young.ended_at is not None
        between = (other.ended_at + young.ended_at) / 2
        assert await store.prune(0.0) == Pruned()
        assert await store.prune(between, run_ids=["x"]) == Pruned(150, 150, 450, 300)
        assert await store.prune(between, run_ids=["x"]) == Pruned()
        for gone in ("old-0", "old-149"):
            assert await store.query_calls(gone) == []
            assert await store.query_spans(gone) == []
            assert await store.query_attempts(gone) == []
            assert (await store.get_rollout(gone)).status == "succeeded"
            assert [t.reward for t in await store.query_trained_calls(gone)] == [1.0]
        for kept in ("other", "young", "still"):
            assert (len(await store.query_calls(kept)), len(await store.query_spans(kept))) == (3, 2)
            assert len(await store.query_attempts(kept)) == 1
        assert (await store.prune(between)).rollouts == 1
        assert (await store.update_attempt(still.rollout_id, 1, "succeeded")).status == "succeeded"

    asyncio.run(scenario())


def test_rollouts_of_no_run_can_be_leased_alone(store: Store) -> None:
    """A server that hands out what programs enqueue must not take what a trainer waits for."""

    async def scenario() -> None:
        await store.enqueue_rollouts([NewRollout(task="t", run_id=next(fresh), priority=9)])
        assert await store.dequeue_rollout("w", run_id=NO_RUN) is None
        waiting = asyncio.ensure_future(store.dequeue_rollout("w", run_id=NO_RUN, wait=20))
        await asyncio.sleep(0.1)
        await store.enqueue_rollouts([NewRollout(task="t", run_id=next(fresh), priority=9)])
        [free] = await store.enqueue_rollouts([NewRollout(task="t")])
        leased = await waiting
        assert leased is not None
        assert leased.rollout.rollout_id == free.rollout_id

    asyncio.run(scenario())


def test_closing_wakes_those_who_wait(store: Store) -> None:
    async def scenario() -> None:
        leased = await lease(store)
        ids = [leased.rollout.rollout_id]
        waits = [asyncio.ensure_future(w) for w in (store.dequeue_rollout(wait=60), store.wait_for_rollouts(ids))]
        await asyncio.sleep(0.05)
        await store.close()
        for waiting in waits:
            with pytest.raises(StoreError, match="the store is closed"):
                await asyncio.wait_for(waiting, 20)

    asyncio.run(scenario())


def test_a_closed_store_says_so(store: Store) -> None:
    async def scenario() -> None:
        await store.close()
        await store.close()
        with pytest.raises(StoreError, match="the store is closed"):
            await store.query_rollouts()

    asyncio.run(scenario())


# -- runs and metrics ---------------------------------------------------------------------------------------------
def test_a_run_is_stored_as_given_and_keeps_its_beginning(store: Store) -> None:
    nasty = "a\0b\ud800"
    begun = TrainingRun(
        next(fresh),
        name=nasty,
        algorithm="GRPO",
        config={"algorithm.lr": 1e-5, "list": [1, None], "text": nasty},
        directory=f"/runs/{nasty}",
        step=0,
        steps=7,
        created_at=100.5,
    )
    ended = dataclasses.replace(begun, status="failed", error=nasty, step=3, steps=None, created_at=9.0, ended_at=200.0)

    async def stored() -> TrainingRun:
        (run,) = await store.query_runs(run_ids=[begun.run_id])
        return run

    async def scenario() -> None:
        await store.put_run(begun)
        first = await stored()
        assert first == dataclasses.replace(begun, updated_at=first.updated_at)
        assert first.updated_at > 1e9, "the store's clock"
        await asyncio.sleep(0.002)
        await store.put_run(ended)
        await store.put_run(ended)
        second = await stored()
        assert second == dataclasses.replace(ended, created_at=100.5, updated_at=second.updated_at)
        assert second.updated_at > first.updated_at
        await store.put_run(TrainingRun(other := next(fresh)))
        (now,) = await store.query_runs(run_ids=[other])
        assert now.created_at == now.updated_at, "one that does not say when it began begins now"

    asyncio.run(scenario())


def test_runs_come_newest_first_and_in_pages(store: Store) -> None:
    """In the order in which they were recorded: the clock may have been set back between them."""
    ids = [next(fresh) for _ in range(7)]
    times = [3.0, 1.0, 1.0, 2.0, 7.0, 2.0, 2.0]

    async def scenario() -> None:
        for run_id, created in zip(ids, times, strict=True):
            await store.put_run(TrainingRun(run_id, created_at=created))
        await store.put_run(TrainingRun(ids[0], created_at=9.0, status="succeeded"))
        newest = ids[::-1]
        assert [run.run_id for run in await store.query_runs(limit=7)] == newest
        pages, after = [], None
        while page := await store.query_runs(run_ids=ids, after=after, limit=3):
            pages.append([run.run_id for run in page])
            after = page[-1].run_id
        assert pages == [newest[:3], newest[3:6], newest[6:]]
        assert [run.run_id for run in await store.query_runs(run_ids=[ids[1], "nobody"])] == [ids[1]]
        assert await store.query_runs(run_ids=[]) == []
        with pytest.raises(StoreError, match="no run 'nobody'"):
            await store.query_runs(after="nobody")

    asyncio.run(scenario())


def test_metrics_are_replaced_and_what_is_not_finite_is_none(store: Store) -> None:
    run_id = next(fresh)

    async def scenario() -> None:
        with pytest.raises(StoreError, match="no run"):
            await store.add_metrics(run_id, 1, {"train/reward": 1.0})
        await store.put_run(TrainingRun(run_id))
        (before,) = await store.query_runs(run_ids=[run_id])
        await asyncio.sleep(0.002)
        values = {"b": 1 / 3, "a": math.nan, "c": math.inf, "d": -math.inf, "e": None, "\0ü": 2}
        await store.add_metrics(run_id, 0, {"a": 5.0})
        await store.add_metrics(run_id, 0, values)
        await store.add_metrics(run_id, 0, values)
        await store.add_metrics(run_id, 1, {})
        (after,) = await store.query_runs(run_ids=[run_id])
        assert after == dataclasses.replace(before, updated_at=after.updated_at)
        assert after.updated_at > before.updated_at
        found = await store.query_metrics([run_id])
        names = sorted(name for name in values if "\0" not in name)
        assert {m.name: m.value for m in found} == {name: None for name in values} | {"b": 1 / 3, "\0ü": 2.0}
        assert [m.name for m in found if m.name in names] == names
        assert {(m.run_id, m.step) for m in found} == {(run_id, 0)}
        with pytest.raises(StoreError):
            await store.add_metrics(run_id, 1, {"text": "much"})  # type: ignore[dict-item]

    asyncio.run(scenario())


def test_metrics_are_found_by_run_name_and_step_and_by_their_ends(store: Store) -> None:
    one, other, empty = (next(fresh) for _ in range(3))

    def rows(found: list[Metric]) -> list[tuple[str, int, str, float | None]]:
        return [("one" if m.run_id == one else "other", m.step, m.name, m.value) for m in found]

    async def scenario() -> None:
        for run_id in (one, other, empty):
            await store.put_run(TrainingRun(run_id))
        for step in range(1, 5):
            await store.add_metrics(one, step, {"train": step / 10, **({"val": float(step)} if step in (2, 3) else {})})
        await store.add_metrics(one, 1, {"once": 1.0})
        await store.add_metrics(other, 3, {"train": None})
        everything = await store.query_metrics([one, other, empty, "nobody"])
        assert [(m.step, m.name) for m in everything] == sorted((m.step, m.name) for m in everything)
        assert len(everything) == 8
        assert rows(await store.query_metrics([one], names=["val", "no such"])) == [
            ("one", 2, "val", 2.0), ("one", 3, "val", 3.0)]  # fmt: skip
        assert rows(await store.query_metrics([one, other], after_step=3)) == [("one", 4, "train", 0.4)]
        assert rows(await store.query_metrics([one], limit=2)) == [("one", 1, "once", 1.0), ("one", 1, "train", 0.1)]
        ends = rows(await store.query_metrics([one, other, empty], ends=True))
        assert sorted(ends) == [
            ("one", 1, "once", 1.0), ("one", 1, "train", 0.1), ("one", 2, "val", 2.0), ("one", 3, "val", 3.0),
            ("one", 4, "train", 0.4), ("other", 3, "train", None),
        ]  # fmt: skip
        assert [end[1] for end in ends] == [1, 1, 2, 3, 3, 4]
        later = await store.query_metrics([one, other], ends=True, names=["val"], after_step=2)
        assert rows(later) == [("one", 3, "val", 3.0)]
        assert await store.query_metrics([], ends=True) == await store.query_metrics([]) == []

    asyncio.run(scenario())


def test_a_run_that_resumes_forgets_the_steps_after_its_checkpoint(store: Store) -> None:
    run_id, other = next(fresh), next(fresh)

    async def scenario() -> None:
        for each in (run_id, other):
            await store.put_run(TrainingRun(each))
            for step in range(4):
                await store.add_metrics(each, step, {"a": float(step), "b": 0.0})
        for _ in range(2):
            await store.delete_metrics(run_id, 1)
        assert [m.step for m in await store.query_metrics([run_id])] == [0, 0, 1, 1]
        assert len(await store.query_metrics([other])) == 8
        await store.delete_metrics("nobody", 0)

    asyncio.run(scenario())


# -- a step's rollouts --------------------------------------------------------------------------------------------
def reward_span(rollout_id: str, number: int, value: float, **facts: Any) -> Span:
    attributes = {
        semconv.OPERATION_NAME: semconv.REWARD,
        semconv.REWARD_NAME: facts.pop("reward", "reward"),
        semconv.REWARD_VALUE: value,
        **facts.pop("attributes", {}),
    }
    made = span(rollout_id, number, name="reward x", start=float(number), end=float(number), attributes=attributes)
    return dataclasses.replace(made, trace_id=rollout_id, parent_id="b" * 16, **facts)


def trained(rollout_id: str, index: int, advantage: float, tokens: int, dropped: str | None = None) -> TrainedCall:
    return TrainedCall(f"{rollout_id}/{index}", rollout_id, 1, 1, 0, 1.0, 1.0, advantage, tokens, dropped)


def test_rollouts_of_all_steps_are_found(store: Store) -> None:
    run_id = next(fresh)

    async def scenario() -> None:
        tasks = ["the 100% of it", {"city": 'Łódź "old"'}, "plain", "other", "last"]
        new = [NewRollout(task, run_id=run_id, step=n, index=0, group="g") for n, task in enumerate(tasks)]
        ids = [r.rollout_id for r in await store.enqueue_rollouts(new)]
        await store.enqueue_rollouts([NewRollout("plain", run_id=run_id, step=0, mode="val")])
        for rollout_id in ids:
            await store.start_attempt(rollout_id)
        answer = {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": "{}"}}]}
        asked = {"messages": [{"role": "user", "content": "Where is the 100_x?"}]}
        await store.add_calls(
            [
                replace(call(ids[2], 0, [1], [2], attempt=1), agent="writer", request=asked),
                replace(call(ids[3], 0, [1], [2], attempt=1), agent="critic", response=answer),
            ]
        )
        await store.add_spans([reward_span(ids[n], 1, value) for n, value in ((0, 0.0), (2, 0.5), (3, 1.0))])
        await store.update_attempt(ids[4], 1, "failed", error="TypeError: no such PLACE")
        await store.update_rollout(ids[4], {"status": "failed"})

        async def found(**conditions: Any) -> list[int]:
            summaries = await store.find_rollouts(run_id, **conditions)
            return [ids.index(s.rollout.rollout_id) for s in summaries]

        assert await found() == [4, 3, 2, 1, 0]
        assert await found(text="100%") == [0]
        assert await found(text="100_X") == [2]
        assert await found(text='Łódź "o') == [1]
        assert await found(text="no such place") == await found(failed=True) == [4]
        assert await found(agent="writer") == await found(text="PLAIN") == [2]
        assert await found(tool="search") == [3]
        assert await found(tool="sear") == await found(agent="writ") == await found(text="100%%") == []
        assert await found(least=0.5) == [3, 2]
        assert await found(most=0.5) == [2, 0]
        assert await found(least=0.1, most=0.9, agent="writer") == [2]
        assert await found(limit=2) == [4, 3]
        assert await found(limit=2, before=ids[3]) == [2, 1]
        assert await found(least=0, limit=1, before=ids[3]) == [2]
        assert await found(before=ids[0]) == []
        assert len(await store.find_rollouts(run_id, mode="val", text="plain")) == 1
        assert await store.find_rollouts("nobody") == []
        with pytest.raises(StoreError, match="no rollout 'nobody'"):
            await found(before="nobody")

    asyncio.run(scenario())


async def enqueued(store: Store, run_id: str, groups: int, size: int, **fields: Any) -> list[Rollout]:
    """A step's rollouts, the last one first, so that the order of their places is not that of their creation."""
    new = [
        NewRollout("t", run_id=run_id, step=3, group=f"group-{n // size}", index=n, **fields)
        for n in reversed(range(groups * size))
    ]
    return (await store.enqueue_rollouts(new))[::-1]


def test_a_steps_rollouts_come_with_their_numbers(store: Store) -> None:
    run_id = next(fresh)

    async def scenario() -> None:
        (rollout,) = await enqueued(store, run_id, 1, 1)
        rollout_id = rollout.rollout_id
        await again(store, run_id)
        await store.add_calls([call(rollout_id, 0, [1, 2], [3, 4, 5]), call(rollout_id, 9, [1], [2], attempt=1)])
        await store.add_spans([reward_span(rollout_id, 1, 9.0)])
        await store.add_trained_calls("another run", [trained(rollout_id, 0, 9.0, 9)])
        (first,) = await store.query_step(run_id, 3)
        assert (first.calls, first.tokens, first.reward, first.rollout.status) == (2, 4, 9.0, "preparing")
        assert (first.advantage, first.trained_tokens, first.dropped) == (None, 0, None)

        await store.update_attempt(rollout_id, 1, "failed", error="broke ✎\0")
        (failed,) = await store.query_step(run_id, 3)
        assert failed.error == "broke ✎\0"
        await again(store, run_id)
        (retried,) = await store.query_step(run_id, 3)
        assert (retried.error, retried.calls, retried.tokens, retried.rewards) == (None, 0, 0, ())

        second = {"attempt": 2}
        calls = [
            call(rollout_id, 10, [1] * 50, [2] * 7, started_at=1.0, **second),
            dataclasses.replace(call(rollout_id, 11, [1, 2], [3], fork_cause="edited", **second), agent="critic ✎\0"),
            call(rollout_id, 12, [1], [], error="the server is gone", finish_reason="error", **second),
            call(rollout_id, 13, [1], [2, 3], fork_cause="edited", **second),
        ]
        await store.add_calls(calls[::-1])
        air = {semconv.REWARD_SOURCE: "air", semconv.REWARD_PRIMARY: False}
        mine = {semconv.REWARD_AGENT: "critic ✎\0"}
        await store.add_spans(
            [
                reward_span(rollout_id, 4, -0.25, attempt=2, reward="tool", attributes=air),
                reward_span(rollout_id, 3, 0.5, attempt=2, attributes=mine),
                reward_span(rollout_id, 5, 1.5, attempt=2),
                reward_span(rollout_id, 6, 7.0, attempt=2, attributes={semconv.OPERATION_NAME: "rewarding"}),
                reward_span(rollout_id, 7, 7.0, attempt=2, attributes={semconv.REWARD_VALUE: "much"}),
                reward_span(rollout_id, 8, 7.0, attempt=2, attributes={semconv.REWARD_VALUE: "inf"}),
            ]
        )
        rows = [
            trained(rollout_id, 10, 1.0, 6),
            trained(rollout_id, 11, -2.0, 1),
            trained(rollout_id, 12, 0.0, 2),
            trained(rollout_id, 13, 8.0, 0, "long"),
        ]
        await store.add_trained_calls(run_id, rows)
        await store.update_attempt(rollout_id, 2, "succeeded")
        (summary,) = await store.query_step(run_id, 3)
        assert summary == RolloutSummary(
            await store.get_rollout(rollout_id),
            error=None,
            rewards=(
                Reward("reward", 0.5, "emit", "b" * 16, True, "critic ✎\0"),
                Reward("tool", -0.25, "air", "b" * 16, False),
                Reward("reward", 1.5, "emit", "b" * 16),
            ),
            agents=("writer", "critic ✎\0"),
            calls=4,
            failed_calls=1,
            forks=2,
            tokens=10,
            trained_tokens=9,
            zero_advantage_tokens=2,
            advantage=4 / 9,
            dropped="long",
        )
        assert summary.reward == 2.0
        built = build_trajectory(
            rollout_id,
            2,
            "g",
            SpanIndex(await store.query_calls(rollout_id, 2), (await store.query_spans(rollout_id, 2))[:-2]),
            select(None),
        )
        assert summary.reward == built.reward, "as training has it"

        ended = summary.rollout.ended_at
        assert ended is not None
        await store.prune(ended + 1, run_ids=[run_id])
        (left,) = await store.query_step(run_id, 3)
        assert left == RolloutSummary(
            summary.rollout, trained_tokens=9, zero_advantage_tokens=2, advantage=4 / 9, dropped="long"
        )
        assert left.reward is None

    asyncio.run(scenario())


def test_a_steps_rollouts_are_in_the_order_of_their_places_and_in_pages(store: Store) -> None:
    run_id = next(fresh)

    async def ids(**options: Any) -> list[str]:
        return [summary.rollout.rollout_id for summary in await store.query_step(run_id, 3, **options)]

    async def scenario() -> None:
        train = [r.rollout_id for r in await enqueued(store, run_id, 11, 3)]
        val = [r.rollout_id for r in await enqueued(store, run_id, 2, 1, mode="val")]
        await enqueued(store, next(fresh), 1, 1)
        assert await ids() == train, "group-10 is after group-2"
        assert await ids(mode="val") == val
        assert await ids(group="group-10") == train[30:]
        assert await ids(group="no such") == await ids(mode="dev") == []
        assert await store.query_step(run_id, 4) == await store.query_step("nobody", 3) == []
        pages: list[str] = []
        while page := await ids(after=pages[-1] if pages else None, limit=10):
            pages += page
        assert pages == train
        assert await ids(after=train[-1]) == []
        assert await ids(group="group-1", after=train[3]) == train[4:6]
        with pytest.raises(StoreError, match="no rollout 'nobody'"):
            await ids(after="nobody")

    asyncio.run(scenario())


def test_what_the_runners_do_is_seen_longest_running_first(store: Store) -> None:
    run_id = next(fresh)

    async def scenario() -> None:
        rollouts = await enqueued(store, run_id, 5, 1)
        leased = [await again(store, run_id) for _ in range(4)]
        ids = [each.rollout.rollout_id for each in leased]
        await store.update_attempt(ids[0], 1, "running")
        await store.update_attempt(ids[1], 1, "succeeded")
        await store.update_attempt(ids[2], 1, "unresponsive")
        mine = {r.rollout_id for r in rollouts}
        found = [a for a in await store.query_open_attempts() if a.rollout_id in mine]
        assert [(a.rollout_id, a.status, a.worker_id) for a in found] == [
            (ids[0], "running", "worker"), (ids[3], "preparing", "worker")]  # fmt: skip
        assert len(await store.query_open_attempts(limit=1)) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("store", FACTORIES, indirect=True)
def test_a_rollout_with_many_spans_takes_turns_with_the_others(store: Store) -> None:
    """Its spans were once written before those of anybody who came later: 500 times as long a wait.

    A server of a store reads a request before anything is written, in the order in which they come.
    """

    async def scenario() -> None:
        greedy, other = await lease(store), await lease(store)
        mine, others = greedy.rollout.rollout_id, other.rollout.rollout_id
        many = [[span(mine, 1000 * k + i, start=0.0, end=1.0) for i in range(500)] for k in range(16)]
        writing = [asyncio.ensure_future(store.add_spans(spans)) for spans in many]
        await asyncio.sleep(0)
        await store.add_spans([span(others, 99_999, start=0.0, end=1.0)])
        written = len(await store.query_spans(mine))
        assert len(await store.query_spans(others)) == 1
        await asyncio.gather(*writing)
        assert len(await store.query_spans(mine)) == 8000
        assert written <= 2000, f"{written} spans of a greedy rollout came first"

    asyncio.run(scenario())


# -- names that are too long ------------------------------------------------------------------------------------------
def long_text(size: int) -> str:
    """Random, since a database may compress what repeats itself before it looks at its size."""
    return random.Random(size).randbytes(size).hex()[:size]


async def _add_trained(store: Store, run_id: str, rollout_id: str, call_id: str) -> None:
    await store.add_trained_calls(run_id, [TrainedCall(call_id, rollout_id, 1, 0, 0, 0.0, 0.0, 0.0, 1)])


async def _add_metric(store: Store, run_id: str, name: str) -> None:
    await store.put_run(TrainingRun(run_id))
    await store.add_metrics(run_id, 1, {name: 1.0})


INDEXED: dict[str, Callable[[Store, str], Coroutine[Any, Any, Any]]] = {
    "rollouts.rollout_id": lambda store, text: store.enqueue_rollouts([NewRollout("t", rollout_id=text)]),
    "rollouts.run_id": lambda store, text: store.enqueue_rollouts([NewRollout("t", run_id=text)]),
    "attempts.rollout_id": lambda store, text: store.enqueue_rollouts([NewRollout("t", rollout_id=text)]),
    "attempts.request_id": lambda store, text: store.dequeue_rollout("w", request_id=text),
    "calls.id": lambda store, text: store.add_calls([replace(call("r", 0, [1], [2]), id=text)]),
    "calls.rollout_id": lambda store, text: store.add_calls([replace(call(text, 1, [1], [2]), id=next(fresh))]),
    "spans.trace_id": lambda store, text: store.add_spans([replace(span("r", 1, start=0.0, end=1.0), trace_id=text)]),
    "spans.span_id": lambda store, text: store.add_spans([replace(span("r", 1, start=0.0, end=1.0), span_id=text)]),
    "spans.rollout_id": lambda store, text: store.add_spans([span(text, 2, start=0.0, end=1.0)]),
    "resources.resources_id": lambda store, text: store.update_resources({}, resources_id=text),
    "notes.key": lambda store, text: store.put_note(text, 1),
    "memories.scope": lambda store, text: store.merge_memories(text, 0, [MemoryEntry((), "k", {}, "text")]),
    "policy_versions.run_id": lambda store, text: store.add_policy_version(text, "policy", 1, 1),
    "policy_versions.policy": lambda store, text: store.add_policy_version(next(fresh), text, 1, 1),
    "trained_calls.run_id": lambda store, text: _add_trained(store, text, "r", "c"),
    "trained_calls.call_id": lambda store, text: _add_trained(store, "run", "r", text),
    "trained_calls.rollout_id": lambda store, text: _add_trained(store, "run", text, "d"),
    "runs.run_id": lambda store, text: store.put_run(TrainingRun(text)),
    "metrics.run_id": lambda store, text: _add_metric(store, text, "m"),
    "metrics.name": lambda store, text: _add_metric(store, "run", text),
}
"""Column -> a write of that text into it."""
SHORT = {"rollouts.status", "attempts.status"}
"""Indexed columns whose values are ours."""


def test_every_indexed_text_is_written_by_a_row_above() -> None:
    found = {
        f"{table.name}.{column.name}"
        for table in schema.metadata.tables.values()
        for columns in (table.primary_key.columns, *(index.columns for index in table.indexes))
        for column in columns
        if isinstance(column.type, Text)
    }
    found |= {
        f"{table.name}.{column.name}"
        for table in schema.metadata.tables.values()
        for column in table.columns
        if column.unique and isinstance(column.type, Text)
    }
    assert found - SHORT == INDEXED.keys()


def test_every_store_takes_names_up_to_one_limit_and_says_what_is_longer(store: Store) -> None:
    async def scenario() -> None:
        await store.enqueue_rollouts([NewRollout("t")])
        for column, write in INDEXED.items():
            await write(store, long_text(codec.KEY_BYTES))
            await write(store, "ü" * (codec.KEY_BYTES // 2))
            for text in (long_text(codec.KEY_BYTES + 1), "ü" * (codec.KEY_BYTES // 2) + "x"):
                with pytest.raises(StoreError) as raised:
                    await write(store, text)
                assert "is 1201 bytes long: " in str(raised.value), column
                assert "it can have at most 1200 bytes" in str(raised.value), column

    asyncio.run(scenario())


def test_two_long_names_fit_into_one_index_of_every_store(store: Store) -> None:
    """An entry of PostgreSQL's index has a limit of its own, for all of its columns together."""
    one, other = long_text(codec.KEY_BYTES), long_text(codec.KEY_BYTES - 2)

    async def scenario() -> None:
        await _add_metric(store, one, other)
        await _add_trained(store, one, "r", other)
        await store.add_policy_version(one, other, 1, 1)
        await store.add_spans([replace(span("r", 1, start=0.0, end=1.0), trace_id=one, span_id=other)])
        assert [m.name for m in await store.query_metrics([one])] == [other]

    asyncio.run(scenario())

"""0.3's store under `agl.compat`: what programs change, page through, and see from another process."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from typing import Any

import pytest
from scripted import in_loop

import agl.compat as al
from agl.compat import types as T
from agl.errors import ConfigError, StoreError
from agl_agentlightning.store import UNSET, MongoLightningStore, is_finished, is_queuing, is_running


@in_loop
async def test_a_rollout_is_changed_after_it_was_enqueued() -> None:
    store = al.InMemoryLightningStore()
    queued = await store.enqueue_rollout({"q": 1}, mode="test", metadata={"a": 1})
    config = al.RolloutConfig(max_attempts=3, retry_condition=["failed"], timeout_seconds=9.0)
    changed = await store.update_rollout(queued.rollout_id, input={"q": 2}, config=config, metadata={"b": 2})
    assert (changed.input, changed.mode, changed.metadata) == ({"q": 2}, "test", {"b": 2})
    assert (changed.config, changed.status) == (config, "queuing")
    assert is_queuing(changed)
    leased = await store.dequeue_rollout("w")
    assert leased is not None
    assert is_running(leased)
    done = await store.update_rollout(queued.rollout_id, mode="val", status="succeeded")
    assert isinstance(done, al.AttemptedRollout)
    assert (done.mode, done.metadata, is_finished(done)) == ("val", {"b": 2}, True)
    assert done.end_time is not None
    again = await store.update_rollout(queued.rollout_id, status="requeuing")
    assert (again.status, again.end_time) == ("requeuing", None)
    with pytest.raises(ValueError, match="not found"):
        await store.update_rollout("ro-none", status="failed")
    with pytest.raises(ValueError, match="config is None"):
        await store.update_rollout(queued.rollout_id, config=None)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="cannot become"):
        await store.update_rollout(queued.rollout_id, status="lost")  # type: ignore[arg-type]
    assert repr(UNSET) == "UNSET"
    await store.close()


@in_loop
async def test_the_caller_opens_attempts_and_notes_what_it_knows_of_them() -> None:
    store = al.InMemoryLightningStore()
    started = await store.start_rollout("mine", worker_id="w1")
    second = await store.start_attempt(started.rollout_id, "w2")
    await store.update_attempt(started.rollout_id, "latest", metadata={"gpu": 3}, last_heartbeat_time=1.0)
    [first, last] = await store.query_attempts(started.rollout_id)
    assert (first.worker_id, first.last_heartbeat_time, last.worker_id) == ("w1", None, "w2")
    assert (last.attempt_id, last.metadata) == (second.attempt.attempt_id, {"gpu": 3})
    assert last.last_heartbeat_time is not None
    # Of an attempt that a later one replaced, the rollout knows nothing more.
    await store.update_attempt(started.rollout_id, first.attempt_id, status="failed")
    found = await store.get_rollout_by_id(started.rollout_id)
    assert isinstance(found, al.AttemptedRollout)
    assert (found.status, found.attempt.sequence_id) == ("preparing", 2)
    # An attempt that has ended stays as it ended.
    ended = await store.update_attempt(started.rollout_id, first.attempt_id, status="succeeded")
    assert ended.status == "failed"
    with pytest.raises(ValueError, match="No attempts found"):
        await store.update_attempt((await store.enqueue_rollout("x")).rollout_id, "latest", status="failed")
    with pytest.raises(ValueError, match="not found"):
        await store.start_attempt("ro-none")
    await store.close()


@in_loop
async def test_workers_are_those_that_report_or_have_an_attempt() -> None:
    store = al.InMemoryLightningStore()
    first = await store.update_worker("w1", {"cpu": 0.5})
    assert (first.status, first.heartbeat_stats) == ("unknown", {"cpu": 0.5})
    await store.enqueue_rollout("x")
    leased = await store.dequeue_rollout("w1")
    assert leased is not None
    busy = await store.get_worker_by_id("w1")
    assert busy is not None
    assert (busy.status, busy.current_attempt_id) == ("busy", leased.attempt.attempt_id)
    await store.update_attempt(leased.rollout_id, "latest", status="succeeded")
    [idle] = await store.query_workers(status_in=["idle"], worker_id_contains="w")
    assert (idle.current_rollout_id, idle.heartbeat_stats) == (None, {"cpu": 0.5})
    await store.agl_store.enqueue_rollouts([])
    await store.start_rollout("y")
    agls = await store.enqueue_rollout("z")
    await store.agl_store.dequeue_rollout("local-0")  # one of agl's own runners
    workers = await store.query_workers(sort_by="worker_id")
    assert [(w.worker_id, w.status, w.current_rollout_id) for w in workers] == [
        ("local-0", "busy", agls.rollout_id),
        ("w1", "idle", None),
    ]
    await store.close()


@in_loop
async def test_resources_have_a_version_each_and_rollouts_keep_theirs() -> None:
    store = al.InMemoryLightningStore()
    first = await store.update_resources("prompts", {"p": al.PromptTemplate("one {x}")})
    old = await store.enqueue_rollout("a")
    second = await store.update_resources("prompts", {"p": al.PromptTemplate("two {x}")})
    other = await store.add_resources({"q": al.PromptTemplate("q")})
    assert (first.version, second.version, second.create_time, other.version) == (1, 2, first.create_time, 1)
    assert old.resources_id == "prompts"
    kept = await store.resources_of(await store.agl_store.get_rollout(old.rollout_id))
    assert kept is not None
    assert kept.resources["p"] == al.PromptTemplate("one {x}")
    page = await store.query_resources(sort_by="resources_id", limit=1)
    assert [(r.resources_id, r.version) for r in page] == [("prompts", 2)]
    assert (page.total, page.limit, page.offset, page.items) == (2, 1, 0, [*page])
    assert await store.query_resources(resources_id="prompt") == []
    await store.close()


@in_loop
async def test_spans_are_numbered_within_their_rollout_also_for_another_process() -> None:
    store = al.InMemoryLightningStore()
    mine = await store.start_rollout("a")
    span = T.Span.from_attributes(
        attributes={}, rollout_id=mine.rollout_id, attempt_id=mine.attempt.attempt_id, sequence_id=7
    )
    assert await store.add_span(span) is span
    assert await store.add_span(span) is None
    other = al.LightningStore(store.agl_store)
    pair = (mine.rollout_id, mine.attempt.attempt_id)
    assert await other.get_many_span_sequence_ids([pair, pair]) == [8, 9]
    with pytest.raises(ValueError, match="Attempt at-none not found"):
        await store.add_span(span.model_copy(update={"attempt_id": "at-none"}))
    await store.close()


@in_loop
async def test_attempts_past_their_limits_are_given_up_when_the_store_is_used() -> None:
    store = al.InMemoryLightningStore(scan_debounce_seconds=0)
    config = al.RolloutConfig(timeout_seconds=0.05, max_attempts=2, retry_condition=["timeout"])
    queued = await store.enqueue_rollout("slow", config=config)
    await store.dequeue_rollout("w")
    await store.query_rollouts()
    await asyncio.sleep(0.1)
    [attempt] = await store.query_attempts(queued.rollout_id)
    again = await store.get_rollout_by_id(queued.rollout_id)
    assert again is not None
    assert (attempt.status, again.status) == ("timeout", "requeuing")
    await store.close()


def test_a_store_of_ones_own_runs_one_method_at_a_time() -> None:
    class Counting(al.LightningStore):
        running = most = 0

        async def update_worker(self, worker_id: str, heartbeat_stats: Any = UNSET) -> T.Worker:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.005)
            self.running -= 1
            return T.Worker(worker_id=worker_id)

    own = Counting()
    shared = al.LightningStoreThreaded(own)

    async def two() -> None:
        await asyncio.gather(shared.update_worker("a"), shared.update_worker("b"))

    threads = [threading.Thread(target=lambda: asyncio.run(two())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert own.most == 1


def _enqueue(server: Any) -> None:
    asyncio.run(server.enqueue_rollout({"from": "child"}))


@in_loop
async def test_a_server_is_the_store_here_and_in_its_children() -> None:
    store = al.InMemoryLightningStore()
    server = al.LightningStoreServer(store, launch_mode="asyncio")
    await server.start()
    client = al.LightningStoreClient(server.endpoint)
    await server.enqueue_rollout({"from": "parent"})
    child = multiprocessing.get_context("spawn").Process(target=_enqueue, args=(server,))
    child.start()
    await asyncio.to_thread(child.join, 50)
    assert [r.input["from"] for r in await client.query_rollouts()] == ["parent", "child"]
    started = await client.start_rollout("mine", worker_id="w")
    await client.update_attempt(started.rollout_id, "latest", metadata={"a": 1})
    [attempt] = await store.query_attempts(started.rollout_id)
    assert (attempt.worker_id, attempt.metadata) == ("w", {"a": 1})
    served, seen = await server.statistics(), await client.statistics()
    assert {**seen, "uptime": 0} == {**served, "uptime": 0}
    assert (seen.get("name"), seen.get("total_rollouts"), seen.get("total_workers")) == ("InMemoryLightningStore", 3, 1)
    assert client.otlp_traces_endpoint() == f"{server.endpoint}/v1/traces"
    taken = al.LightningStoreServer(store, port=server.launcher_args.port)
    with pytest.raises(RuntimeError, match="did not start up within"):
        await taken.start()
    await client.close()
    await server.stop()
    await store.close()


def test_what_a_server_or_a_store_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="zero-copy"):
        al.LightningStoreServer(al.InMemoryLightningStore(), launch_mode="mp")
    with pytest.raises(ValueError, match="not below"):
        al.InMemoryLightningStore(eviction_memory_threshold=1, safe_memory_threshold=2)
    with pytest.raises(ConfigError, match="postgresql"):
        MongoLightningStore()

"""A run that is taken up again: what had ended counts, what had not is settled, what was lost says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from scripted import ScriptedEngine, in_loop, quick_tokenizer, rendering_of

import agl
from agl.agents.agent import as_agent
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.report.progress import Progress
from agl.trainer.run.config import RunConfig
from agl.trainer.run.run import Run
from agl.trainer.run.workplace import Workplace
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import NewRollout, TrainedCall

TASKS = [{"q": f"{i}+{i}"} for i in range(3)]


@agl.rollout
async def asks(task: Any, llm: agl.LLM) -> float:
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)
    await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task["q"]}])
    return float(task["q"][0])


class Process:
    """A trainer's process: a run on a store that outlives it."""

    def __init__(self, store: Store, directory: Path, *, resume: bool = False) -> None:
        self.engine = ScriptedEngine(quick_tokenizer(), ["four"])
        self.run = Run(
            RunConfig(max_attempts=1), run_id="run-1", seed=3, directory=directory,
            agent=as_agent(asks), train=TASKS, val=[], store=store, progress=Progress(False), resume=resume,
        )  # fmt: skip
        self.workplace = Workplace(self.run)

    def register(self, gateway: Gateway) -> None:
        gateway.serve("policy", self.engine, rendering_of(quick_tokenizer()))

    async def start(self) -> None:
        await self.workplace.start(lambda mode: SamplingRules(max_tokens=8), "policy", register=self.register)

    async def rollouts(
        self, tasks: list[Any], step: int, taken_up: int | None = None, *, started_first: bool = False, **resumed: Any
    ) -> list[RolloutResult]:
        if started_first:
            await self.start()
            # Workers that find something to do begin at once.
            await asyncio.sleep(0.2)
        if taken_up is not None:
            await self.workplace.resume_from(taken_up, {"policy": self.engine.version}, **resumed)
        if not started_first:
            await self.start()
        try:
            return await self.workplace.rollouts([*enumerate(tasks)], mode="train", step=step, group_size=2)
        finally:
            await self.workplace.stop()


@in_loop
async def test_what_had_ended_is_not_run_again(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    before = await Process(store, tmp_path).rollouts(TASKS[:2], step=4)
    [unfinished] = await store.enqueue_rollouts([NewRollout(TASKS[2], run_id="run-1", step=4, index=4)])
    again = Process(store, tmp_path, resume=True)
    after = await again.rollouts(TASKS, step=4, taken_up=4)
    assert len(again.engine.asked) == 2, "only the third task's rollouts were run"
    assert [r.rollout.rollout_id for r in after[:4]] == [r.rollout.rollout_id for r in before]
    for old, new in zip(before, after[:4], strict=True):
        assert old.attempt_trajectory is not None
        assert new.attempt_trajectory is not None
        assert new.attempt_trajectory.reward == old.attempt_trajectory.reward
        [a], [b] = old.attempt_trajectory.trajectory.transitions, new.attempt_trajectory.trajectory.transitions
        assert a.call.prompt_ids.tolist() == b.call.prompt_ids.tolist()
        assert a.call.logprobs.tolist() == b.call.logprobs.tolist()
    assert (await store.get_rollout(unfinished.rollout_id)).status == "cancelled"
    rollouts = await store.query_rollouts(run_id="run-1", status=["succeeded"])
    assert len({(r.step, r.index) for r in rollouts}) == len(rollouts) == 6
    await store.close()


@pytest.mark.parametrize("started_first", [False, True], ids=["taken up first", "started first"])
@in_loop
async def test_workers_lease_nothing_that_was_left_whatever_comes_first(started_first: bool, tmp_path: Path) -> None:
    """`agl eval --resume` started its workers first: they leased what was cancelled a moment later."""
    store = await open_store(str(tmp_path / "s.db"))
    left = await store.enqueue_rollouts([NewRollout(TASKS[i % 3], run_id="run-1", step=0, index=i) for i in range(12)])
    await store.dequeue_rollout("killed", run_id="run-1")
    again = Process(store, tmp_path, resume=True)
    results = await again.rollouts(TASKS, step=0, taken_up=0, started_first=started_first)
    assert [r.error for r in results] == [None] * 6
    assert len(again.engine.asked) == 6, "what was left was run, too"
    assert {(await store.get_rollout(r.rollout_id)).status for r in left} == {"cancelled"}
    await store.close()


@in_loop
async def test_what_other_weights_sampled_is_run_again(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    await Process(store, tmp_path).rollouts(TASKS, step=4)
    again = Process(store, tmp_path, resume=True)
    again.engine.version = 7
    await again.rollouts(TASKS, step=4, taken_up=4)
    assert len(again.engine.asked) == 6
    later = Process(store, tmp_path, resume=True)
    await later.rollouts(TASKS, step=4, taken_up=2)
    assert len(later.engine.asked) == 6, "of a later step, the weights may differ"
    await store.close()


@in_loop
async def test_what_ran_ahead_counts_once(tmp_path: Path) -> None:
    """Two tasks of step 4: one was trained in it, one in step 6, which is lost; and one of step 7 had ended."""
    store = await open_store(str(tmp_path / "s.db"))
    ended = await Process(store, tmp_path).rollouts(TASKS[:2], step=4)
    early = await Process(store, tmp_path).rollouts(TASKS[:1], step=7)
    for i, result in enumerate(ended):
        [call] = await store.query_calls(result.rollout.rollout_id)
        step = 5 if i < 2 else 7
        await store.add_trained_calls("run-1", [TrainedCall(call.id, call.rollout_id, step, step, 0, 1.0, 1.0, 0.5, 4)])
    again = Process(store, tmp_path, resume=True)
    after = await again.rollouts(TASKS[:2], step=4, taken_up=6, max_staleness=4, first=4)
    assert [r.rollout.rollout_id for r in after[2:]] == [r.rollout.rollout_id for r in ended[2:]]
    assert len(again.engine.asked) == 2, "those of the task that was trained; a run would not have them again"
    for result in ended[2:]:
        [row] = await store.query_trained_calls(result.rollout.rollout_id)
        assert "resumes from step 6" in str(row.dropped)
    later = Process(store, tmp_path, resume=True)
    after = await later.rollouts(TASKS[:1], step=7, taken_up=6, max_staleness=4, first=4)
    assert [r.rollout.rollout_id for r in after] == [r.rollout.rollout_id for r in early]
    assert not later.engine.asked
    await store.close()


@in_loop
async def test_training_that_was_lost_is_not_said_to_have_happened(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "s.db"))
    for step in (1, 2):
        for result in await Process(store, tmp_path).rollouts(TASKS[:1], step=step):
            [call] = await store.query_calls(result.rollout.rollout_id)
            row = TrainedCall(call.id, call.rollout_id, step + 1, step + 1, 0, 1.0, 1.0, 0.5, 4)
            await store.add_trained_calls("run-1", [row])
    await Process(store, tmp_path, resume=True).workplace.resume_from(2, {"policy": 2})
    for rollout in await store.query_rollouts(run_id="run-1"):
        [row] = await store.query_trained_calls(rollout.rollout_id)
        if rollout.step == 1:
            assert (row.tokens, row.dropped) == (4, None)
        else:
            assert row.tokens == 0
            assert "resumes from step 2" in str(row.dropped)
    await store.close()

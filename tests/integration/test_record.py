"""A run's record in the store: its row and its metrics, however the run ends."""

from __future__ import annotations

import asyncio
import math
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from recorded import found, metrics_of, record

import agl
from agl.errors import AglError, StoreError
from agl.trainer.report.progress import Progress
from agl.trainer.run.recorder import Recorder, json_settings
from agl.trainer.store import open_store
from agl.trainer.store.types import TrainingRun

ARCHIVE = Path(__file__).parents[1] / "data" / "run-0.1.tar.xz"
TASKS = [{"n": n} for n in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45,000 parameters that nobody trained."""
    folder = tmp_path_factory.mktemp("model")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, [m for m in archive if m.name.startswith("model")], filter="data")
    return folder / "model"


async def talk(task: dict[str, int], llm: agl.LLM) -> float:
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        reply = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": f"count to {task['n']}"}]
        )
    agl.emit_reward({"vowels": 0.5}, primary="vowels")
    return len(reply.choices[0].message.content or "") / 50


async def measured(task: dict[str, int]) -> float:
    return task["n"] / 2


class Breaks(agl.Hook):
    """The rollouts of a step fail, or wait for ever once they have set `waiting`."""

    def __init__(self, waiting: asyncio.Event | None = None, mode: str = "train", step: int = 3) -> None:
        self.waiting, self.place = waiting, (mode, step)

    async def on_rollout_start(self, **facts: Any) -> None:
        rollout = facts["rollout"].rollout
        if (rollout.mode, rollout.step) != self.place:
            return
        if self.waiting is None:
            raise ValueError("the tool is broken")
        self.waiting.set()
        await asyncio.Event().wait()


def trainer(model: Path, directory: Path, *hooks: agl.Hook) -> agl.Trainer:
    algorithm = agl.GRPO(
        model=str(model), group_size=4, batch_size=2, learning_rate=5e-4, max_response_tokens=8, max_context=64,
        dtype="float32", device="cpu", threads=1, steps=5, val_every=2, checkpoint_every=2,
    )  # fmt: skip
    return agl.Trainer(algorithm, directory=directory, progress=False, max_attempts=1, hooks=hooks)


@pytest.mark.slow
@pytest.mark.night
def test_a_training_that_fails_and_resumes_leaves_its_history_and_its_rollouts(model: Path, tmp_path: Path) -> None:
    with pytest.raises(AglError, match="all 8 rollouts"):
        trainer(model, tmp_path, Breaks()).fit(talk, TASKS, TASKS[:2])
    url = f"sqlite:///{tmp_path / 'run.db'}"
    failed, metrics, rollouts = asyncio.run(record(url))
    assert (failed.algorithm, failed.status, failed.step, failed.steps) == ("GRPO", "failed", 3, 5)
    assert "all 8 rollouts of step 4 failed; the first: " in (failed.error or "")
    assert failed.ended_at is not None
    assert failed.created_at < failed.ended_at <= failed.updated_at
    assert (failed.config["algorithm.learning_rate"], failed.config["train_tasks"]) == (5e-4, 8)
    assert failed.directory == str(tmp_path)
    assert {m.step for m in metrics} == {0, 1, 2, 3}
    rewards = [m.value for m in metrics if (m.step, m.name) == (1, "train/reward")]

    assert [s.rollout.index for s in rollouts] == list(range(8))
    assert [math.fsum(s.reward or 0.0 for s in rollouts) / 8] == pytest.approx(rewards)
    assert {r.name for r in rollouts[0].rewards} == {"vowels", "reward"}
    assert {(s.calls, s.failed_calls, s.forks) for s in rollouts} == {(1, 0, 0)}
    assert sum(s.trained_tokens for s in rollouts) == sum(s.tokens for s in rollouts if s.dropped is None) > 0
    assert sum(s.advantage or 0.0 for s in rollouts[:4]) == pytest.approx(0.0, abs=1e-6)

    result = trainer(model, tmp_path).fit(talk, TASKS, TASKS[:2], resume=True)
    run, metrics, _ = asyncio.run(record(url))
    assert (run.run_id, run.created_at) == (result.run_id, failed.created_at)
    assert run.run_id == failed.run_id
    assert (run.status, run.error, run.step) == ("succeeded", None, 5)
    assert [entry["step"] for entry in result.history] == [0, 1, 2, 3, 4, 5]
    assert found(metrics) == metrics_of(result.history), "the third step was repeated, and is there once"


def test_a_run_that_was_stopped_says_so(tmp_path: Path) -> None:
    async def scenario() -> tuple[TrainingRun, TrainingRun]:
        waiting = asyncio.Event()
        store = await open_store("memory")
        stopping = agl.Trainer(
            agl.Baseline(), store=store, directory=tmp_path, progress=False, hooks=[Breaks(waiting, "dev", 0)]
        )
        training = asyncio.ensure_future(stopping.fit_async(measured, TASKS))
        await asyncio.wait_for(waiting.wait(), 60)
        (live,) = await store.query_runs()
        assert {a.status for a in await store.query_open_attempts()} <= {"preparing", "running"}
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        (stopped,) = await store.query_runs()
        assert await store.query_open_attempts() == []
        await store.close()
        return live, stopped

    live, stopped = asyncio.run(scenario())
    assert (live.status, live.ended_at) == ("running", None)
    assert (stopped.status, stopped.error) == ("stopped", None)
    assert stopped.ended_at is not None


def test_an_evaluation_and_a_dry_run_are_runs_without_steps(tmp_path: Path) -> None:
    result = agl.Trainer(agl.Baseline(), directory=tmp_path, progress=False).fit(measured, TASKS[:2])
    run, metrics, rollouts = asyncio.run(record(result.store))
    assert found(metrics) == metrics_of(result.history)
    assert (run.algorithm, run.status, run.step, run.steps) == ("Baseline", "succeeded", 0, 0)
    assert "dry_run" not in run.config
    assert rollouts == [], "they are of mode dev"

    dry = agl.Trainer(agl.Baseline(), directory=tmp_path / "dry", progress=False).dev(measured, TASKS)
    run, metrics, _ = asyncio.run(record(dry.store))
    assert (run.config["dry_run"], run.status) == (True, "succeeded")
    assert found(metrics) == metrics_of(dry.history)


def test_no_secret_is_among_the_settings() -> None:
    class Client:
        key = "sk-1"

    settings = {
        "runner_key": "sk-1",
        "initial_resources": {"OPENAI_API_KEY": "sk-1", "db_password": "sk-1", "max_tokens": 8, "prompt": "Hi"},
        "engine": Client(),
        "betas": (0.9, 0.95),
        "list": [{"Token": "sk-1"}, None, True],
    }
    assert json_settings(settings) == {
        "initial_resources": {"max_tokens": 8, "prompt": "Hi"},
        "engine": "Client",
        "betas": [0.9, 0.95],
        "list": [{}, None, True],
    }


def test_only_finite_numbers_are_recorded() -> None:
    async def scenario() -> None:
        store = await open_store("memory")
        recorder = Recorder(store, Progress(enabled=False), TrainingRun("run"))
        entry = {"step": 2, "train/reward": math.nan, "a": np.float32(0.5), "b": 3, "c": True, "d": "text"}
        await recorder.add(entry)
        assert recorder.history == [entry]
        metrics = await store.query_metrics(["run"])
        assert found(metrics) == {(2, "train/reward", None), (2, "a", 0.5), (2, "b", 3.0)}
        (run,) = await store.query_runs()
        assert run.step == 2
        await store.close()

    asyncio.run(scenario())


def test_a_run_that_cannot_resume_stays_as_far_as_it_was() -> None:
    async def scenario() -> None:
        store = await open_store("memory")
        run = TrainingRun("run", algorithm="GRPO", step=7, steps=9, created_at=5.0)
        await store.put_run(run)
        recorder = Recorder(store, Progress(enabled=False), TrainingRun("run", algorithm="GRPO", created_at=6.0))
        await recorder.start()
        await recorder.end("failed", ValueError("the checkpoint cannot be read"))
        (failed,) = await store.query_runs()
        assert (failed.step, failed.steps, failed.created_at, failed.status) == (7, 9, 5.0, "failed")
        assert failed.error == "ValueError: the checkpoint cannot be read"
        await store.close()

    asyncio.run(scenario())


def test_a_store_that_breaks_at_the_end_does_not_hide_why_a_run_failed() -> None:
    async def scenario() -> None:
        store = await open_store("memory")
        recorder = Recorder(store, Progress(enabled=False), TrainingRun("run"))
        await recorder.start()
        await store.close()
        await recorder.end("failed", ValueError("the reason"))
        await recorder.end("stopped")
        with pytest.raises(StoreError):
            await recorder.end("succeeded")

    asyncio.run(scenario())

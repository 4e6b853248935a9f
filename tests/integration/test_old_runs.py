"""What agl 0.1 wrote before its modules were moved is still read: a store, and a checkpoint that is resumed.

`tests/data/run-0.1.tar.xz` holds a model of 45,000 untrained parameters and a run on it (GRPO, 3 steps, seed 3) that
was stopped after step 2.
"""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path

import pytest

import agl
from agl.trainer.dashboard.sources import find_sources
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import arithmetic_tasks
from agl.trainer.run.history import import_history
from agl.trainer.store import open_store
from agl.trainer.store.types import Metric, TrainingRun

ARCHIVE = Path(__file__).parents[1] / "data" / "run-0.1.tar.xz"
HISTORY = [
    {"step": 0, "val/reward": 1.095},
    {"step": 1, "train/reward": 0.92, "train/tokens": 431, "learner/grad_norm": 0.52783203125},
    {"step": 2, "train/reward": 0.885, "train/tokens": 440, "learner/grad_norm": 0.5260299444198608},
]
"""As the old version reported it."""
STEP_3 = {"train/reward": 0.9225, "val/reward": 1.005, "learner/grad_norm": 0.5217887759208679}
"""What the old version came to in its third step."""


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)  # the run names its model by a relative path
    return tmp_path / "run"


def test_its_store_opens(old_run: Path) -> None:
    url = f"sqlite:///{old_run / 'run.db'}"

    async def read() -> str:
        store = await open_store(url)
        try:
            rollouts = await store.query_rollouts()
            assert len(rollouts) == 32
            trained = next(r for r in rollouts if r.mode == "train" and r.status == "succeeded")
            assert "invoke_agent solver" in {span.name for span in await store.query_spans(trained.rollout_id)}
            calls = await store.query_calls(trained.rollout_id)
            assert calls
            assert all(call.prompt_ids.size and call.logprobs.size == call.response_ids.size for call in calls)
            return trained.rollout_id
        finally:
            await store.close()

    report = agl.explain(asyncio.run(read()), store=url)
    assert report.calls
    assert report.rows


def test_its_run_is_seen_and_its_history_imported(old_run: Path) -> None:
    """The old store has rollouts only, the checkpoint has the curve; only that of the first two steps was saved."""

    async def scenario() -> None:
        store = await open_store(f"sqlite:///{old_run / 'run.db'}")
        (run,) = await store.query_runs()
        rollouts = await store.query_rollouts(run_id=run.run_id)
        ended = [r.ended_at for r in rollouts if r.ended_at is not None]
        assert run == TrainingRun(
            rollouts[0].run_id or "", status="stopped", step=2, created_at=rollouts[0].created_at,
            updated_at=max(ended + [r.created_at for r in rollouts]), ended_at=max(ended),
        )  # fmt: skip
        assert len(await store.query_step(run.run_id, 0)) == 8
        assert await store.query_metrics([run.run_id]) == []

        await import_history(store, old_run)
        metrics = await store.query_metrics([run.run_id])
        assert entries(metrics) == HISTORY
        (known,) = await store.query_runs()
        assert (known.status, known.created_at, known.ended_at) == ("stopped", run.created_at, run.ended_at)
        assert (known.algorithm, known.step, known.steps, known.directory) == ("GRPO", 2, 3, str(old_run))
        assert known.config["algorithm.learning_rate"] == 5e-4
        await import_history(store, old_run)
        assert await store.query_metrics([run.run_id]) == metrics
        assert await store.query_runs() == [known]
        await store.delete_metrics(run.run_id, 1)
        await import_history(store, old_run)
        assert await store.query_metrics([run.run_id]) == metrics, "an import that was interrupted is completed"
        await store.close()

        other = await open_store("memory")
        await import_history(other, old_run)
        (found,) = await other.query_runs()
        assert (found.run_id, found.status, found.step) == (run.run_id, "stopped", 2)
        assert found.created_at == found.ended_at == (old_run / "checkpoints/step-000002/run.json").stat().st_mtime
        assert await other.query_metrics([run.run_id]) == metrics
        await import_history(other, old_run / "no such run")
        await other.close()

    asyncio.run(scenario())


def test_a_dashboard_on_its_directory_has_its_curve(old_run: Path) -> None:
    async def scenario() -> None:
        (source,) = find_sources([str(old_run)])
        store = await source.store()
        (run,) = await store.query_runs()
        assert entries(await store.query_metrics([run.run_id])) == HISTORY
        await source.close()

    asyncio.run(scenario())


def entries(metrics: list[Metric]) -> list[dict[str, float | None]]:
    """The numbers that `HISTORY` has, too."""
    return [
        {"step": step} | {m.name: m.value for m in metrics if m.step == step and m.name in expected}
        for step, expected in enumerate(HISTORY)
    ]


def test_its_checkpoint_is_resumed(old_run: Path) -> None:
    trainer = agl.Trainer(
        agl.GRPO(
            model="model",
            group_size=4,
            batch_size=2,
            steps=3,
            learning_rate=5e-4,
            max_response_tokens=24,
            max_context=256,
            val_every=2,
            dtype="float32",
            device="cpu",
            threads=1,
        ),
        n_workers=1,
        directory=old_run,
        seed=3,
        progress=False,
    )
    agent = agl.wrap(build_agent(), reward=lambda task, output: len(str(output)) / 50)
    train, val = arithmetic_tasks(16, seed=0, split="train"), arithmetic_tasks(4, seed=0, split="heldout")
    result = trainer.fit(agent, train, val, resume=True)
    *before, last = result.history
    assert [{k: entry[k] for k in expected} for entry, expected in zip(before, HISTORY, strict=True)] == HISTORY
    assert {k: last[k] for k in STEP_3} == pytest.approx(STEP_3, rel=1e-4)

    async def record() -> tuple[TrainingRun, list[Metric]]:
        store = await open_store(result.store)
        (run,) = await store.query_runs()
        metrics = await store.query_metrics([run.run_id])
        await store.close()
        return run, metrics

    run, metrics = asyncio.run(record())
    assert (run.status, run.step, run.steps) == ("succeeded", 3, 3)
    assert entries(metrics) == HISTORY, "the old steps are in the store, too"
    assert len(metrics) == sum(len(entry) - 1 for entry in result.history)

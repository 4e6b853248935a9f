"""`epochs=`: each task or recorded rollout is trained once in each, counted in the run's own database."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import agl

TASKS = [f"task {i}" for i in range(5)]
SMALL: dict[str, Any] = {
    "batch_size": 4, "epochs": 3, "learning_rate": 1e-4, "max_response_tokens": 24, "max_context": 256, "device": "cpu",
}  # fmt: skip
SIZES = [4, 4, 4, 3]
"""Tasks of each step: 3 epochs of 5 are 15."""


def length_of_answer(task: str, llm: agl.LLM) -> float:
    """Answers end soon, as one that was cut off is not imitated."""
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answer = client.chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": task}], stop=["e", "a", "t", " "]
    )
    return float(len(answer.choices[0].message.content or ""))


agent = agl.rollout(length_of_answer)


def fit(algorithm: Any, directory: Path, tasks: Any = TASKS, **options: Any) -> agl.Result:
    trainer = agl.Trainer(algorithm, n_workers=4, directory=directory, progress=False, **options)
    return trainer.fit(agent if tasks else None, tasks)


def query(directory: Path, statement: str) -> list[Any]:
    with sqlite3.connect(directory / "run.db") as database:
        return database.execute(statement).fetchall()


@pytest.fixture(scope="module")
def recorded(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with six rollouts of each task."""
    directory = tmp_path_factory.mktemp("recorded")
    fit(agl.Baseline(model=str(untrained_model), repeats=6, max_response_tokens=24), directory)
    return directory


def times_trained(directory: Path) -> list[int]:
    """How often each call was trained, by the database."""
    trained = query(directory, "SELECT count(*) FROM trained_calls WHERE tokens > 0 GROUP BY call_id")
    return [times for (times,) in trained]


def test_each_recorded_rollout_is_imitated_once_an_epoch(untrained_model: Path, recorded: Path, tmp_path: Path) -> None:
    data = agl.traces(recorded, mode="dev", per_task=1)
    result = fit(agl.SFT(model=str(untrained_model), data=data, **SMALL), tmp_path, ())
    assert [h["train/trained_rollouts"] for h in result.history] == SIZES
    assert times_trained(tmp_path) == [3] * 5


def test_each_pair_is_compared_once_an_epoch(untrained_model: Path, recorded: Path, tmp_path: Path) -> None:
    data = agl.traces(recorded, mode="dev", per_task=1)
    result = fit(agl.DPO(model=str(untrained_model), data=data, **SMALL), tmp_path, ())
    assert [h["train/trained_rollouts"] for h in result.history] == [2 * size for size in SIZES]
    assert times_trained(tmp_path) == [3] * 10


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_each_task_is_sampled_once_an_epoch(untrained_model: Path, tmp_path: Path, staleness: int) -> None:
    grpo = agl.GRPO(model=str(untrained_model), group_size=2, max_staleness=staleness, **SMALL)
    result = fit(grpo, tmp_path)
    assert [h["train/groups"] for h in result.history] == SIZES
    assert [h["train/rollouts"] for h in result.history] == [2 * size for size in SIZES]
    sampled = query(tmp_path, "SELECT task, count(*) FROM rollouts GROUP BY task")
    assert [times for _, times in sampled] == [2 * 3] * 5


def test_dynamic_sampling_replaces_no_more_tasks_than_the_last_step_has(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def alike(task: str, llm: agl.LLM) -> float:
        length_of_answer(task, llm)
        return 1.0

    dapo = agl.DAPO(model=str(untrained_model), group_size=2, max_gen_batches=2, **SMALL)
    trainer = agl.Trainer(dapo, n_workers=4, directory=tmp_path, progress=False)
    result = trainer.fit(alike, TASKS)
    assert [h["train/groups"] for h in result.history] == [2 * size for size in SIZES]
    assert [h["train/resampled_tasks"] for h in result.history] == SIZES


def test_a_batch_larger_than_the_dataset_is_an_epoch(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grpo = agl.GRPO(model=str(untrained_model), group_size=2, **SMALL | {"batch_size": 16})
    trainer = agl.Trainer(grpo, n_workers=4, directory=tmp_path)
    result = trainer.fit(agent, TASKS)
    assert [h["train/groups"] for h in result.history] == [5, 5, 5]
    assert "batch_size=16 is more than the 5 tasks: a step has each of them once" in capsys.readouterr().err
    sampled = query(tmp_path, "SELECT step, task FROM rollouts")
    assert set(Counter(sampled).values()) == {2}

"""SFT and RFT on a tiny policy: what is trained, recorded, copied, resumed and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import say
from safetensors.torch import load_file

import agl
from agl.errors import ConfigError, NoTrainableDataError
from agl.trainer.http.aio import run_in_thread
from agl.trainer.store import open_store

TASKS = [{"question": f"What is {i + 2} * {i + 3}?", "value": i % 2} for i in range(6)]
SMALL: dict[str, Any] = {"max_response_tokens": 48, "max_context": 256, "device": "cpu"}


@agl.rollout
def agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Answers once; every other task succeeds."""
    say(llm, task["question"])
    return float(task["value"])


@pytest.fixture(scope="module")
def recorded(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two rollouts of each task, sampled by the policy that will imitate them."""
    directory = tmp_path_factory.mktemp("recorded")
    baseline = agl.Baseline(model=str(tiny_policy), repeats=2, temperature=1.5, max_response_tokens=48)
    _trainer(baseline, directory).fit(agent, TASKS)
    return directory


def _trainer(algorithm: Any, directory: Path, **options: Any) -> agl.Trainer:
    return agl.Trainer(algorithm, n_workers=4, directory=directory, progress=False, **options)


def _sft(model: Path, recorded: Path, **options: Any) -> agl.SFT:
    data = agl.traces(recorded, where=agl.reward() >= 1, mode="dev")
    return agl.SFT(
        **{"model": str(model), "data": data, "epochs": 3, "batch_size": 2, "learning_rate": 1e-3, **SMALL, **options}
    )


def test_the_chosen_calls_become_likelier_and_can_be_explained(
    tiny_policy: Path, recorded: Path, tmp_path: Path
) -> None:
    result = _trainer(_sft(tiny_policy, recorded), tmp_path).fit(None)
    # Three tasks of two rollouts each, in batches of two, three times.
    assert [h["step"] for h in result.history] == list(range(1, 10))
    assert [h["train/trained_rollouts"] for h in result.history] == [2] * 9
    nll = [h["learner/nll"] for h in result.history]
    assert sum(nll[-3:]) < 0.9 * sum(nll[:3])
    assert "learner/clip_fraction" not in result.history[0]
    assert result.policy is not None
    before, after = (load_file(path / "model.safetensors") for path in (tiny_policy, result.policy))
    assert any(not torch.equal(before[name], after[name]) for name in after)

    rollouts = run_in_thread(_rollouts(tmp_path))
    assert len(rollouts) == 6
    assert {r.task["value"] for r in rollouts} == {1}
    report = agl.explain(rollouts[0].rollout_id, tmp_path)
    (call,) = report.calls
    assert call.trained is not None
    assert call.trained.tokens == call.call.response_ids.size > 0
    assert call.trained.dropped is None


class _Saved(agl.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_checkpoint(self, run: Any, path: Path, step: int) -> None:
        self.steps.append(step)


def test_a_small_model_is_saved_every_tenth_step_as_it_imitates(
    tiny_policy: Path, recorded: Path, tmp_path: Path
) -> None:
    saved = _Saved()
    _trainer(_sft(tiny_policy, recorded, epochs=4), tmp_path, callbacks=saved).fit(None)
    assert saved.steps == [10, 12]


async def _rollouts(directory: Path) -> list[Any]:
    store = await open_store(str(directory / "run.db"))
    try:
        return list(await store.query_rollouts(mode="collect"))
    finally:
        await store.close()


def test_a_run_that_is_resumed_equals_one_never_stopped(tiny_policy: Path, recorded: Path, tmp_path: Path) -> None:
    whole = _trainer(_sft(tiny_policy, recorded), tmp_path / "whole").fit(None)

    class Stop(agl.Callback):
        def on_step(self, run: Any, entry: Any) -> None:
            if entry["step"] == 4:
                run.stop("enough")

    stopped = _trainer(_sft(tiny_policy, recorded), tmp_path / "stopped", callbacks=Stop()).fit(None)
    assert stopped.history[-1]["step"] == 4
    resumed = _trainer(_sft(tiny_policy, recorded), tmp_path / "stopped").fit(None, resume=True)
    assert [h["learner/nll"] for h in resumed.history] == [h["learner/nll"] for h in whole.history]
    assert whole.policy is not None
    assert resumed.policy is not None
    expected, got = (load_file(p / "model.safetensors") for p in (whole.policy, resumed.policy))
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_rounds_of_rejection_fine_tuning(tiny_policy: Path, tmp_path: Path) -> None:
    rft = agl.RFT(model=str(tiny_policy), rounds=2, samples=2, minibatches=2, learning_rate=1e-3, **SMALL)
    result = _trainer(rft, tmp_path).fit(agent, TASKS, TASKS[:2])
    assert [h["step"] for h in result.history] == [0, 1, 2]
    assert [h["train/rollouts"] for h in result.history[1:]] == [12, 12]
    assert all(0 < h["train/trained_rollouts"] <= 6 for h in result.history[1:])
    assert all(h["train/reward"] == pytest.approx(0.5) for h in result.history[1:])
    assert [h["learner/optimizer_steps"] for h in result.history[1:]] == [4, 4]
    assert "val/reward" in result.history[-1]


def test_a_condition_that_keeps_nothing_says_what_was_seen(tiny_policy: Path, recorded: Path, tmp_path: Path) -> None:
    rft = agl.RFT(model=str(tiny_policy), samples=2, where="reward >= 2", **SMALL)
    with pytest.raises(NoTrainableDataError, match=r"nothing is left of 12 rollouts .*reward: 0 to 1, mean 0\.5"):
        _trainer(rft, tmp_path / "rft").fit(agent, TASKS)
    data = agl.traces(recorded, where="reward >= 2", mode="dev")
    with pytest.raises(NoTrainableDataError, match=r"nothing is left of 12 rollouts .*reward: 0 to 1, mean 0\.5"):
        _trainer(_sft(tiny_policy, recorded, data=data), tmp_path / "sft").fit(None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "runs/a"}, "data is 'runs/a'"),
        ({"epochs": None}, "needs either steps= or epochs="),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_settings_are_checked_where_they_are_written(settings: dict[str, Any], message: str, recorded: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        _sft(Path("model"), recorded, **settings)


def test_a_keep_that_is_no_condition_is_refused() -> None:
    with pytest.raises(ConfigError, match="where= is 1, not a condition"):
        agl.RFT(model="model", where=1)  # type: ignore[arg-type]

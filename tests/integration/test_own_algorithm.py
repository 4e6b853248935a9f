"""Functions of the user's as advantage and loss: the same numbers as the built-in of the same formula, in the policy's
process too; and a mistake in one is found before a model is loaded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import documents
import numpy as np
import pytest
import torch
from tiny_run import TRAIN, VAL, StopAfter, agent

import agl
from agl.errors import CheckpointError, ConfigError, TrainingError
from agl.trainer.store.location import read_store

SMALL: dict[str, Any] = {
    "group_size": 2, "batch_size": 2, "learning_rate": 1e-3, "max_response_tokens": 6, "max_context": 128,
    "minibatches": 2, "update_epochs": 2,
}  # fmt: skip


def fit(algorithm: Any, directory: Path) -> agl.Result:
    return agl.Trainer(algorithm, n_workers=1, directory=directory, progress=False).fit(agent, TRAIN, VAL)


def test_the_same_formula_gives_the_same_run(untrained_model: Path, tmp_path: Path) -> None:
    """Two epochs of two mini-batches, so that ratios leave 1; each is clipped somewhere."""

    def standardised(returns: np.ndarray, groups: np.ndarray, rollouts: np.ndarray) -> np.ndarray:
        # One call per rollout here, so a call's return is its rollout's.
        cells = [returns[groups == g] for g in groups.tolist()]
        return np.array([(r - c.mean()) / (c.std(ddof=1) + 1e-6) for r, c in zip(returns, cells, strict=True)])

    def clipped(logprobs: Any, old: Any, advantages: Any, answers: Any) -> Any:
        ratio = (logprobs - old).exp()
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.999, 1.001))

    options = {**SMALL, "model": str(untrained_model), "steps": 2}
    own = fit(agl.GRPO(**options, adv_estimator=standardised, policy_loss=clipped), tmp_path / "own")
    named = fit(agl.GRPO(**options, clip_low=0.001, clip_high=0.001), tmp_path / "named")
    assert any(entry.get("learner/clip_fraction", 0) > 0 for entry in named.history)
    (run,) = read_store(own.store, lambda store: store.query_runs())
    assert str(run.config["algorithm.policy_loss"]).endswith(
        "test_the_same_formula_gives_the_same_run.<locals>.clipped"
    )
    for mine, theirs in zip(own.history, named.history, strict=True):
        for name in ("train/reward", "learner/loss", "learner/grad_norm", "learner/approx_kl", "val/reward"):
            assert mine.get(name) == pytest.approx(theirs.get(name), abs=1e-6), name


def test_the_page_trains(untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").symlink_to(untrained_model)
    blocks = [b for b in documents.blocks() if b.page == "docs/own-algorithm.md" and b.language == "python"]
    space: dict[str, Any] = {"agl": agl, "agent": agent, "tasks": TRAIN}
    for block in blocks:
        exec(compile(block.text.split("\nagl.Trainer(")[0], str(block), "exec"), space)
    options = {**SMALL, "model": "small", "steps": 1}
    own = fit(agl.GRPO(**options, adv_estimator=space["best_of_group"], policy_loss=space["one_sided"]), tmp_path / "a")
    assert own.history[-1]["learner/tokens"] > 0
    whole, half = (fit(kind(**options), tmp_path / kind.__name__) for kind in (agl.GRPO, space["ShortFirst"]))
    assert half.history[-1]["learner/rows"] < whole.history[-1]["learner/rows"]


def test_a_resumed_run_needs_the_same_function(untrained_model: Path, tmp_path: Path) -> None:
    def plain(logprobs: Any, old: Any, advantages: Any, answers: Any) -> Any:
        return -advantages * (logprobs - old).exp()

    def other(logprobs: Any, old: Any, advantages: Any, answers: Any) -> Any:
        return plain(logprobs, old, advantages, answers)

    def run(function: Any, steps: int, resume: bool) -> agl.Result:
        algorithm = agl.GRPO(**SMALL, model=str(untrained_model), steps=2, policy_loss=function)
        callbacks = StopAfter(1) if steps == 1 else None
        trainer = agl.Trainer(algorithm, n_workers=4, directory=tmp_path, progress=False, callbacks=callbacks)
        return trainer.fit(agent, TRAIN, resume=resume)

    run(plain, 1, resume=False)
    with pytest.raises(CheckpointError, match="other"):
        run(other, 2, resume=True)
    assert run(plain, 2, resume=True).history[-1]["step"] == 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a, b, c, d: a.sum(), r"returned a tensor \[\] for 5 tokens"),
        (lambda a, b, c, d: (-a * c).detach(), r"returned a tensor \[5\] without a gradient"),
        (lambda a, b, c, d: 1.0, "returned float for 5 tokens"),
        (lambda a, b, c: a, "raised TypeError"),
        (lambda a, b, c, d: a[d == 7].max(), "raised RuntimeError"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_before_loading(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agl.GRPO(model="nowhere", steps=1, policy_loss=function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda r, g, i: r[:2], r"returned an array \[2\] of 5 calls"),
        (lambda r, g, i: r / 0.0, "returned inf for a return of 1"),
        (lambda r, g: r, "raised TypeError"),
        (lambda r, g, i: "good", "raised ValueError"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_an_estimator_that_cannot_be_used_is_refused_before_loading(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agl.GRPO(model="nowhere", steps=1, adv_estimator=function)


def test_a_loss_that_cannot_be_sent_is_refused_before_loading(untrained_model: Path, tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(logprobs: Any, old: Any, advantages: Any, answers: Any) -> Any:
        with lock:
            return -advantages * logprobs

    with pytest.raises(ConfigError, match=r"locked cannot be sent to the policy's process: .*lock"):
        fit(agl.GRPO(**SMALL, model=str(untrained_model), steps=1, policy_loss=locked), tmp_path)


def test_a_loss_that_fails_in_training_says_so(untrained_model: Path, tmp_path: Path) -> None:
    """With the five tokens it is tried on it works."""

    def fragile(logprobs: Any, old: Any, advantages: Any, answers: Any) -> Any:
        if logprobs.numel() != 5:
            raise ValueError("more than I can take")
        return -advantages * logprobs

    with pytest.raises(TrainingError, match="fragile raised ValueError: more than I can take"):
        fit(agl.GRPO(**SMALL, model=str(untrained_model), steps=1, policy_loss=fragile), tmp_path)

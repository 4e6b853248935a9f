"""Imitating what succeeded helps, and imitating everything that was sampled does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from miniature import GAIN, gain

import agl
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer

pytestmark = pytest.mark.slow

SAMPLES = 6
POLICY: dict[str, Any] = {"max_response_tokens": 48, "max_context": 256, "learning_rate": 3e-4, "betas": (0.9, 0.95)}


def fit(algorithm: Any, directory: Path, *, tasks: int) -> agl.Result:
    return agl.Trainer(algorithm, n_workers=16, directory=directory, progress=False).fit(
        agl.wrap(build_agent(), reward=exact_answer),
        arithmetic_tasks(256, seed=0, split="train")[:tasks],
        arithmetic_tasks(96, seed=0, split="heldout"),
    )


@pytest.mark.night
def test_a_round_of_rejection_fine_tuning(tiny_policy: Path, tmp_path: Path) -> None:
    rft = agl.RFT(model=str(tiny_policy), rounds=1, samples=SAMPLES, max_batch=64, **POLICY)
    assert gain(fit(rft, tmp_path, tasks=96)) >= GAIN


@pytest.mark.night
@pytest.mark.parametrize(
    ("where", "low", "high"),
    [(agl.reward() >= 1, GAIN, 1.0), (None, -0.15, 0.15)],
    ids=["what succeeded", "everything"],
)
def test_fine_tuning_on_recorded_rollouts(
    where: Any, low: float, high: float, tiny_policy: Path, tmp_path: Path
) -> None:
    sampled = agl.Baseline(model=str(tiny_policy), repeats=SAMPLES, temperature=1.0, max_response_tokens=48)
    agl.Trainer(sampled, n_workers=16, directory=tmp_path / "sampled", progress=False).fit(
        agl.wrap(build_agent(), reward=exact_answer), arithmetic_tasks(256, seed=0, split="train")[:96]
    )
    data = agl.traces(tmp_path / "sampled", where=where, mode="dev")
    sft = agl.SFT(model=str(tiny_policy), data=data, epochs=2, batch_size=16, val_every=1000, **POLICY)
    assert low <= gain(fit(sft, tmp_path / "tuned", tasks=0)) <= high

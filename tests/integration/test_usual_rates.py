"""A run whose learning rate nobody has chosen prints the one that it takes, and learns with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import TRAIN, agent

import agl
from agl.trainer.run.hub import model_card

SMALL: dict[str, Any] = {
    "group_size": 2, "batch_size": 2, "steps": 1, "max_response_tokens": 6, "max_context": 128, "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "rate", "said"),
    [
        ({}, 1e-4, "learning_rate=0.0001: the usual one for all weights of"),
        ({"lora": agl.LoraSpec(rank=2)}, 1e-3, "learning_rate=0.001: the usual one for a LoRA adapter of"),
        ({"learning_rate": 3e-5}, 3e-5, ""),
    ],
)
def test_the_rate_is_that_of_the_table(
    untrained_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    rate: float,
    said: str,
) -> None:
    algorithm = agl.GRPO(model=str(untrained_model), **SMALL | options)
    result = agl.Trainer(algorithm, n_workers=2, directory=tmp_path).fit(agent, TRAIN)
    assert result.history[-1]["learner/learning_rate"] == pytest.approx(rate)
    assert result.policy is not None
    assert f"| learning rate | {rate:g} |" in model_card("me/policy", result.policy, tmp_path)
    shown = " ".join(capsys.readouterr().err.split())
    assert (said in shown) if said else ("usual one" not in shown)


def test_policies_of_one_run_have_their_own(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm = agl.GRPO(model=str(untrained_model), **SMALL)
    trainer = agl.Trainer(
        algorithm, n_workers=2, directory=tmp_path, agents={"agent": "a", "other*": "b"},
        policies={"b": agl.Policy(lr=3e-5)},
    )  # fmt: skip
    with pytest.raises(agl.errors.AglError, match="'b' was never updated"):
        trainer.fit(agent, TRAIN)
    shown = " ".join(capsys.readouterr().err.split())
    assert "learning_rate=0.0001 of policy 'a': the usual one" in shown
    assert "of policy 'b': the usual one" not in shown

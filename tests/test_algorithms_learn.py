"""Every algorithm, and every option of the objective, learns: a real agent's held-out success rises in a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agl
from agl.errors import ConfigError
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer

GAIN = 0.2
"""Held-out success must rise by this much."""

LEARNERS: dict[str, tuple[type, dict[str, Any]]] = {
    "DrGRPO": (agl.DrGRPO, {"learning_rate": 5e-4}),
    "RLOO": (agl.RLOO, {}),
    "REINFORCE++": (agl.REINFORCEPlusPlus, {"group_size": 1, "batch_size": 64}),
    "REINFORCE++ with baseline": (agl.REINFORCEPlusPlus, {"adv_estimator": "reinforce_plus_plus_baseline"}),
    "PPO": (agl.PPO, {"group_size": 1, "batch_size": 64, "value_learning_rate": 5e-3}),
    "GSPO": (agl.GSPO, {"clip_low": 0.1, "clip_high": 0.1, "minibatches": 1}),
    "DAPO": (agl.DAPO, {"overlong": agl.Overlong(buffer=8), "batch_size": 6}),
    "GRPO, everything on": (
        agl.GRPO,
        {"rollout_is": "sequence", "kl_coef": 0.01, "kl_kind": "k2", "entropy_coef": 1e-3, "update_epochs": 2},
    ),
}


def train(algorithm: Any, directory: Path) -> agl.Result:
    return agl.Trainer(algorithm, n_workers=16, directory=directory, progress=False).fit(
        agl.wrap(build_agent(), reward=exact_answer),
        arithmetic_tasks(256, seed=0, split="train"),
        arithmetic_tasks(96, seed=0, split="heldout"),
    )


def settings(policy: Path, steps: int = 6, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(policy), "group_size": 8, "batch_size": 8, "steps": steps, "learning_rate": 5e-4,
        "betas": (0.9, 0.95), "max_response_tokens": 48, "max_context": 256, "val_every": steps, "max_batch": 64,
    } | changes  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_it_learns(name: str, tiny_policy: Path, tmp_path: Path) -> None:
    kind, options = LEARNERS[name]
    result = train(kind(**settings(tiny_policy, **options)), tmp_path)
    validations = [h["val/reward"] for h in result.history if "val/reward" in h]
    assert validations[-1] - validations[0] >= GAIN
    trained = result.history[1:]
    assert all(h["train/rollouts"] - h["train/failed_rollouts"] > 0 for h in trained)
    if name == "PPO":
        # A head that had learnt nothing would be off by the mean return.
        assert trained[-1]["learner/value_error"] < 0.9 * trained[-1]["train/reward"]
    if name == "DAPO":
        assert all(h["train/rows"] >= 8 for h in trained)
        assert any(h["train/resampled_tasks"] for h in trained), "no group was level: the test shows nothing"


def test_settings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigError, match="group_size is 1"):
        agl.RLOO(model="m", group_size=1, steps=1)
    with pytest.raises(ConfigError, match="group_size is 1"):
        agl.PPO(model="m", steps=1, dynamic_sampling=True)
    with pytest.raises(ConfigError, match="adv_estimator='gea' is not known") as refused:
        agl.GRPO(model="m", steps=1, adv_estimator="gea")  # type: ignore[arg-type]
    assert "gae" in str(refused.value.hint)
    with pytest.raises(ConfigError, match="longer than max_response_tokens"):
        agl.DAPO(model="m", steps=1, max_response_tokens=8, overlong=agl.Overlong(buffer=9))
    with pytest.raises(ConfigError, match="DrGRPO needs either steps= or epochs="):
        agl.DrGRPO(model="m")
    with pytest.raises(ConfigError, match="policy_los"):
        agl.GSPO(model="m", steps=1, policy_los="gspo")  # type: ignore[call-arg]

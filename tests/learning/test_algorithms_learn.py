"""Every algorithm, and every option of the objective, learns: a real agent's held-out success rises in a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import agl
from agl.errors import ConfigError
from agl.mdp.types import Call, FinishReason, Reward, Trajectory, Transition
from agl.trainer.objectives.advantages import FLAT, compute_advantages
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer
from agl.trainer.report.explain import render
from agl.trainer.report.rollout_report import RolloutReport, describe
from agl.trainer.store.base import Store
from agl.trainer.store.location import read_store

GAIN = 0.2
"""Held-out success must rise by this much."""

LEARNERS: dict[str, tuple[type, dict[str, Any]]] = {
    "DrGRPO": (agl.DrGRPO, {"learning_rate": 5e-4}),
    "RLOO": (agl.RLOO, {}),
    "REINFORCE": (agl.REINFORCE, {"group_size": 1, "batch_size": 64}),
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


ALWAYS = ("GRPO, everything on",)
"""It uses nearly every part. The others differ by formulas that are compared with verl's, and learn at
night."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.night) for name in LEARNERS]
)
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


@agl.rollout
async def one_call(task: Any, llm: agl.LLM) -> float:
    client = openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    return 1.0


@pytest.mark.parametrize("kind", [agl.DAPO, agl.GRPO])
def test_steps_whose_rewards_are_all_the_same_go_by_without_an_update(
    kind: type, untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"group_size": 2, "batch_size": 1, "steps": 2, "max_response_tokens": 4}
    resampled = 3 if kind is agl.DAPO else 0
    result = agl.Trainer(kind(model=str(untrained_model), **options), directory=tmp_path).fit(one_call, ["one", "two"])
    for step, entry in enumerate(result.history, 1):
        assert (entry["step"], entry["train/updated_policies"], entry["policy_version"]) == (step, 0, 0)
        assert (entry["train/reward"], entry["train/resampled_tasks"]) == (1.0, resampled)
        assert (entry["train/zero_variance_groups"], entry["train/trained_rollouts"]) == (1 + resampled, 0)
    printed = capsys.readouterr().err
    assert [f"step {n}: no update" in printed for n in (1, 2, 3)] == [True, True, False]

    async def reports(store: Store) -> list[RolloutReport]:
        return [await describe(store, r.rollout_id) for r in await store.query_rollouts()]

    found = read_store(result.store, reports)
    assert len(found) == 4 * (1 + resampled)
    for report in found:
        [call] = report.calls
        assert call.trained is not None
        assert (call.trained.tokens, any(token.trained for token in call.tokens)) == (0, False)
        assert [row.trained for row in report.rows] == [0]
        why = FLAT if kind is agl.DAPO else "the step made no update"
        assert f"not trained in step {call.trained.step}: {why}" in " ".join(render(report).split())


def test_answers_that_were_all_cut_off_are_not_taken_for_equal_ones() -> None:
    """What was left out because it came to the same is told from what could not be trained anyway."""
    ids = np.arange(3, dtype=np.int32)

    def rollout(i: int, finish_reason: FinishReason) -> Trajectory:
        call = Call(f"c{i}", f"r{i}", 1, 0, "a", "p", 0, ids, ids, ids.astype(np.float32), finish_reason=finish_reason)
        return Trajectory(f"r{i}", 1, "p", "g", (Transition(call),), (Reward("reward", 1.0),))

    cases: list[tuple[FinishReason, str]] = [("stop", FLAT), ("cancelled", "its answer was cancelled")]
    for reason, told in cases:
        scored = compute_advantages([rollout(i, reason) for i in range(2)], agl.credit.Uniform()).without_flat()
        assert (scored.trajectories, {c.dropped for c in scored.calls}) == ((), {told})


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

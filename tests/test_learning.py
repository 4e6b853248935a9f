"""A real LangChain agent gets better; the same run with the training broken in one place does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agl
from agl.errors import StalePolicyError
from agl.mdp.sequence import TrainingRow
from agl.trainer.local import policy as local_policy
from agl.trainer.local.policy import LocalPolicy
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer

pytestmark = pytest.mark.slow

GAIN = 0.25
"""Held-out success must rise by this much in the miniature; each broken form below stays under it."""


def _train(policy: Path, directory: Path, *, steps: int = 6, learning_rate: float = 5e-4, **options: Any) -> agl.Result:
    trainer = agl.Trainer(
        agl.GRPO(
            model=str(policy), group_size=8, batch_size=8, steps=steps, learning_rate=learning_rate, betas=(0.9, 0.95),
            max_response_tokens=48, max_context=256, val_every=steps, max_batch=64, **options,
        ),
        n_workers=16,
        directory=directory,
        progress=False,
    )  # fmt: skip
    return trainer.fit(
        agl.wrap(build_agent(), reward=exact_answer),
        arithmetic_tasks(256, seed=0, split="train"),
        arithmetic_tasks(96, seed=0, split="heldout"),
    )


def _gain(result: agl.Result) -> float:
    validations = [h["val/reward"] for h in result.history if "val/reward" in h]
    return validations[-1] - validations[0]


def test_heldout_reward_rises(tiny_policy: Path, tmp_path: Path, no_process_left: None) -> None:
    result = _train(tiny_policy, tmp_path)
    assert _gain(result) >= GAIN
    assert all(h["train/forks"] == 0 for h in result.history if "train/forks" in h)
    first = next(h for h in result.history if h["step"] == 1)
    assert first["learner/max_abs_log_ratio"] < 1e-3, "what is trained is what was sampled"
    assert first["train/tokens"] < first["train/tokens_unmerged"]


def test_lora_learns_too(tiny_policy: Path, tmp_path: Path) -> None:
    result = _train(tiny_policy, tmp_path, steps=10, learning_rate=3e-3, lora=agl.LoraSpec(rank=8, alpha=16))
    assert _gain(result) >= GAIN


def _no_gradient(rows: list[TrainingRow]) -> list[TrainingRow]:
    return [replace(r, advantages=np.where(r.action_mask, np.float32(1e-12), np.float32(0))) for r in rows]


def _shifted_mask(rows: list[TrainingRow]) -> list[TrainingRow]:
    """Every per-token array one to the right, as an off-by-one in the mask would do it."""

    def shifted(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(values[:1]), values[:-1]])

    return [
        replace(
            r,
            **{
                name: shifted(getattr(r, name))
                for name in ("action_mask", "calls", "logprobs", "advantages", "weights")
            },
        )
        for r in rows
    ]


def _swapped_rewards(rows: list[TrainingRow]) -> list[TrainingRow]:
    """Each rollout gets the advantage of another one."""
    values = [float(r.advantages[r.action_mask][0]) if r.n_actions else 0.0 for r in rows]
    order = np.random.default_rng(0).permutation(len(rows))
    return [
        replace(r, advantages=np.where(r.action_mask, np.float32(values[k]), np.float32(0)))
        for r, k in zip(rows, order, strict=True)
    ]


@pytest.mark.parametrize("broken", [_no_gradient, _shifted_mask, _swapped_rewards], ids=lambda f: f.__name__)
def test_broken_training_does_not_pass(
    broken: Any, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(LocalPolicy):
        async def train(self, sequences: list[TrainingRow], *, lr_scale: float = 1.0) -> dict[str, float]:
            return await super().train(broken(sequences), lr_scale=lr_scale)

    monkeypatch.setattr(local_policy, "LocalPolicy", Broken)
    assert _gain(_train(tiny_policy, tmp_path)) < GAIN


def test_a_stale_policy_does_not_pass(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on serving the weights that training began with, and says that they are the new ones."""

    class Stale(LocalPolicy):
        async def train(self, sequences: list[TrainingRow], *, lr_scale: float = 1.0) -> dict[str, float]:
            before = tmp_path / "before.pt"
            if not before.exists():
                await self.save_state(before)
            metrics = await super().train(sequences, lr_scale=lr_scale)
            version = self.version
            await self.load_state(before)
            self.version = version
            return metrics

        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            return replace(await super().generate(*args, **kwargs), policy_version=self.version)

    monkeypatch.setattr(local_policy, "LocalPolicy", Stale)
    assert _gain(_train(tiny_policy, tmp_path)) < GAIN


def test_the_probe_finds_a_stale_engine(untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(LocalPolicy):
        async def engine_logprobs(self, token_ids: Any, *, temperature: float = 1.0) -> Any:
            return await super().engine_logprobs(token_ids, temperature=temperature) - 0.01

    monkeypatch.setattr(local_policy, "LocalPolicy", Stale)

    @agl.rollout
    async def any_text(task: Any, llm: agl.LLM) -> float:
        import openai

        client = openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
        answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
        return float(len(answer.choices[0].message.content or "") % 2)

    trainer = agl.Trainer(
        agl.GRPO(model=str(untrained_model), group_size=4, batch_size=1, steps=1, max_response_tokens=8),
        directory=tmp_path,
        progress=False,
    )
    with pytest.raises(StalePolicyError, match=r"the engine's log-probs differ from the learner's by 0\.01"):
        trainer.fit(any_text, ["one", "two"])

"""The miniature of `tests/unit/test_miniature.py` with LoRA learns, and broken in one place it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miniature import GAIN, gain, train

import agl
from agl.errors import StalePolicyError
from agl.mdp.sequence import TrainingRow
from agl.trainer.local import policy as local_policy
from agl.trainer.local.policy import LocalPolicy

pytestmark = pytest.mark.slow


@pytest.mark.night
def test_lora_learns_too(tiny_policy: Path, tmp_path: Path) -> None:
    result = train(tiny_policy, tmp_path, steps=10, learning_rate=3e-3, lora=agl.LoraSpec(rank=8, alpha=16))
    assert gain(result) >= GAIN


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


@pytest.mark.night
@pytest.mark.parametrize(
    "broken",
    [_shifted_mask, _no_gradient, _swapped_rewards],
    ids=lambda f: f.__name__,
)
def test_broken_training_does_not_pass(
    broken: Any, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(LocalPolicy):
        async def train(self, sequences: list[TrainingRow], **options: Any) -> dict[str, float]:
            return await super().train(broken(sequences), **options)

    monkeypatch.setattr(local_policy, "LocalPolicy", Broken)
    assert gain(train(tiny_policy, tmp_path)) < GAIN


@pytest.mark.night
def test_a_stale_policy_does_not_pass(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on serving the weights that training began with, and says that they are the new ones."""

    class Stale(LocalPolicy):
        async def train(self, sequences: list[TrainingRow], **options: Any) -> dict[str, float]:
            before = tmp_path / "before.pt"
            if not before.exists():
                await self.save_state(before)
            metrics = await super().train(sequences, **options)
            version = self.version
            await self.load_state(before)
            self.version = version
            return metrics

        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            return replace(await super().generate(*args, **kwargs), policy_version=self.version)

    monkeypatch.setattr(local_policy, "LocalPolicy", Stale)
    assert gain(train(tiny_policy, tmp_path)) < GAIN


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

"""Training in miniature: a real LangChain agent on the quickstart's task, in six steps of 64 rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import agl
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer

GAIN = 0.25
"""Held-out success must rise by this much; with the training broken in one place it stays under it."""


def train(
    policy: Path,
    directory: Path,
    *,
    steps: int = 6,
    learning_rate: float = 5e-4,
    group_reward: Any = None,
    **options: Any,
) -> agl.Result:
    """Train the policy; it is validated before the first step and after the last. Exact answers are rewarded, unless
    something else compares the rollouts."""
    from agl.trainer.quickstart.agent import build_agent

    trainer = agl.Trainer(
        agl.GRPO(
            model=str(policy), group_size=8, batch_size=8, steps=steps, learning_rate=learning_rate, betas=(0.9, 0.95),
            max_response_tokens=48, max_context=256, val_every=steps, max_batch=64, **options,
        ),
        n_workers=16,
        directory=directory,
        progress=False,
        group_reward=group_reward,
    )  # fmt: skip
    return trainer.fit(
        agl.wrap(build_agent(), reward=exact_answer if group_reward is None else None),
        arithmetic_tasks(256, seed=0, split="train"),
        arithmetic_tasks(96, seed=0, split="heldout"),
    )


def gain(result: agl.Result) -> float:
    """By how much held-out success rose."""
    validations = [h["val/reward"] for h in result.history if "val/reward" in h]
    return validations[-1] - validations[0]

"""Training rows of answers that a policy samples."""

from __future__ import annotations

from collections.abc import Sequence

from agl.mdp.sequence import TrainingRow, merge
from agl.mdp.types import Call, IntArray, Trajectory, Transition
from agl.trainer.engines.base import Request, Sampling
from agl.trainer.local.policy import LocalPolicy


async def sampled_rows(
    policy: LocalPolicy, prompt: IntArray, advantages: Sequence[float], first_seed: int = 0
) -> list[TrainingRow]:
    """One sampled answer to the prompt per advantage, each in a rollout of its own; seeds count from `first_seed`."""
    made: list[TrainingRow] = []
    for seed, advantage in enumerate(advantages, first_seed):
        answer = await policy.generate(Request(prompt, Sampling(max_tokens=6, seed=seed)))
        call = Call(
            f"c{seed}", f"r{seed}", 1, 0, "writer", policy.spec.name, answer.policy_version, prompt, answer.token_ids,
            answer.logprobs,
        )  # fmt: skip
        trajectory = Trajectory(f"r{seed}", 1, policy.spec.name, "g", (Transition(call),))
        made += merge(trajectory, {call.id: advantage})
    return made

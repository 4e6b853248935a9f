"""GRPO in one file, from agl's own parts and without `agl.Trainer`: tasks, rollouts, credit, merge, update.

    pip install -c constraints.txt ".[local,openai]" && python examples/rl_loop.py

On two CPU cores it makes a tiny policy (half a minute) and teaches it to use a calculator (another minute).
`agl.Trainer` adds what a real run needs: retries, limits, several policies, validation, checkpoints and resume.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from transformers import AutoTokenizer

import agl
from agl import tracing
from agl.adapters.openai import OpenAITracer
from agl.mdp import Trajectory
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.sequence import merge
from agl.mdp.span_index import SpanIndex
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.objectives.advantages import compute_advantages
from agl.trainer.quickstart.policy import make_policy
from agl.trainer.quickstart.tasks import arithmetic_tasks, calculate, exact_answer
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.store import open_store

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculate `a op b`, where a and b are integers and op is one of + - * /.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@dataclass(frozen=True)
class Config:
    model: str | None = None  # a Hugging Face directory; None makes the tiny policy
    steps: int = 8
    batch_size: int = 8  # tasks per step
    group_size: int = 8  # rollouts per task
    learning_rate: float = 5e-4
    max_response_tokens: int = 48
    seed: int = 0


async def solve(task: dict[str, Any], client: AsyncOpenAI) -> str:
    """The agent, as anybody would write it. It knows nothing of training."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the calculator."},
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(3):
        response = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])  # type: ignore
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculate(str(json.loads(call.function.arguments).get("expression", "")))  # type: ignore
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def rollout(
    gateway: Gateway, client: AsyncOpenAI, task: dict[str, Any], group: str, seed: int, max_tokens: int
) -> Trajectory:
    """Run the agent once. Its calls go to the gateway, which samples the policy and records the exact tokens."""
    rollout_id, selection = f"{group}-{seed}", select(None)
    rules = SamplingRules(temperature=1.0, top_p=1.0, top_k=0, max_tokens=max_tokens)
    _, key = gateway.open_attempt(rollout_id, 1, selection=selection, seed=seed, rules=rules)
    context = tracing.RolloutContext(rollout_id, 1, "solver", selection, gateway.base_url, key)
    with tracing.running(context):  # within it, SDK requests of selected agents are routed to the gateway
        agl.emit_reward(exact_answer(task, await solve(task, client)))
    calls = await gateway.close_attempt(rollout_id, 1)
    return build_trajectory(rollout_id, 1, group, SpanIndex(calls, context.spans), selection).trajectory


async def main(config: Config) -> list[float]:
    """Train, and return each step's mean reward."""
    with tempfile.TemporaryDirectory() as folder:
        model = config.model or str(make_policy(folder, seed=config.seed).directory)
        tasks = arithmetic_tasks(512, seed=config.seed, split="train")
        learner = LearnerConfig(learning_rate=config.learning_rate)
        policy = await LocalPolicy.start(PolicySpec(model, seed=config.seed, max_context=256, learner=learner))
        store = await open_store()
        gateway = Gateway(store)
        gateway.serve("policy", policy, Rendering(AutoTokenizer.from_pretrained(model)), policy.info.stop_token_ids)
        server = GatewayServer(gateway)
        await server.start()
        order = random.Random(config.seed)
        rewards: list[float] = []
        try:
            with OpenAITracer():
                client = AsyncOpenAI(api_key="unused")
                for step in range(config.steps):
                    # 1. Rollouts: every task of the batch several times.
                    batch = order.sample(tasks, config.batch_size)
                    trajectories_R = await asyncio.gather(
                        *(
                            rollout(
                                gateway, client, task, f"{step}-{i}", order.getrandbits(31), config.max_response_tokens
                            )
                            for i, task in enumerate(batch)
                            for _ in range(config.group_size)
                        )
                    )
                    # 2. Credit: rewards become returns of calls, returns become advantages within each task's group.
                    step_advantages = compute_advantages(trajectories_R, agl.credit.Uniform(), estimator="grpo")
                    # 3. Merge: calls that share a prefix become one row; each sampled token is trained once.
                    rows = [row for t in step_advantages.trajectories for row in merge(t, step_advantages.advantages)]
                    # 4. Update: one optimiser step; the engine serves the new weights from here on.
                    async with gateway.hold():
                        metrics = await policy.train(rows)
                    rewards.append(sum(t.total_reward for t in trajectories_R) / len(trajectories_R))
                    print(f"step {step + 1}  reward {rewards[-1]:.3f}  rows {len(rows)}  loss {metrics['loss']:+.4f}")
        finally:
            await server.stop()
            await store.close()
            await policy.close()
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face directory; the tiny policy is made if left out")
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--seed", type=int, default=Config.seed)
    asyncio.run(main(Config(**vars(parser.parse_args()))))

"""Agents whose tools now and then take long: seconds of a training, and what it learned, by `max_staleness`.

    python benchmarks/waiting.py [--staleness 0 1 2 4] [--steps 12] [--seeds 3] [--share 0.02] [--seconds 5]

The quickstart's agent and policy, with a calculator that waits: 0.05 s, and `--seconds` in a `--share` of its calls.
Every step learns from 64 rollouts. Success is measured afterwards, together, on tasks that none has seen, with a
calculator that does not wait.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

import agl
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.demos import SYSTEM_PROMPT
from agl.trainer.quickstart.run import make
from agl.trainer.quickstart.tasks import arithmetic_tasks, calculate, exact_answer


def slow_agent(share: float, seconds: float, seed: int) -> Any:
    """The quickstart's agent, with the tool that waits."""
    waits = random.Random(seed)

    @tool
    async def calculator(expression: str) -> str:
        """Calculate `a op b`, where a and b are integers and op is one of + - * /."""
        await asyncio.sleep(seconds if waits.random() < share else 0.05)
        return calculate(expression)

    model = ChatOpenAI(model="policy", api_key=SecretStr("unused"), max_completion_tokens=48)
    return create_agent(model, [calculator], system_prompt=SYSTEM_PROMPT, name="solver")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--held-out", type=int, default=256)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="agl-waiting-"))
    start = root / "start"
    make(start, seed=0)
    policies = {"start": str(start)}
    took: dict[int, list[float]] = {k: [] for k in args.staleness}
    lags: dict[int, list[float]] = {k: [] for k in args.staleness}
    most: dict[int, float] = dict.fromkeys(args.staleness, 0.0)
    for seed in range(args.seeds):
        for k in args.staleness:
            grpo = agl.GRPO(
                model=str(start), steps=args.steps, group_size=8, batch_size=8, learning_rate=5e-4, betas=(0.9, 0.95),
                max_response_tokens=48, max_context=256, max_batch=192, max_staleness=k,
            )  # fmt: skip
            trainer = agl.Trainer(grpo, n_workers=192, directory=root / f"{k}-{seed}", seed=seed, progress=False)
            agent = agl.wrap(slow_agent(args.share, args.seconds, seed), reward=exact_answer)
            result = trainer.fit(agent, arithmetic_tasks(512, seed=seed, split="train"))
            # Without loading, which is the same for all.
            took[k].append(sum(entry["seconds"] for entry in result.history))
            lags[k] += [entry["train/staleness"] for entry in result.history]
            most[k] = max(most[k], *(entry["train/staleness_max"] for entry in result.history))
            policies[f"{k}, seed {seed}"] = str(result.policy)
            print(f"max_staleness={k}, seed {seed}: {took[k][-1]:.1f} s", flush=True)
    evaluation = agl.evaluate(
        agl.wrap(build_agent(), reward=exact_answer), arithmetic_tasks(args.held_out, seed=0, split="heldout"),
        policies, directory=root / "evaluation", n_workers=32, max_response_tokens=48,
    )  # fmt: skip
    solved = {name: 100 * of.success.value for name, of in evaluation.policies.items()}
    first = args.staleness[0]
    print(
        f"\n| `max_staleness` | seconds of {args.steps} steps | to {first}'s | updates late: mean, most | success, % |"
    )
    print("|---|---|---|---|---|")
    print(f"| start | | | | {solved['start']:.1f} |")
    for k in args.staleness:
        seeds = [solved[f"{k}, seed {seed}"] for seed in range(args.seeds)]
        print(
            f"| {k} | {listed(took[k])} | {sum(took[k]) / sum(took[first]):.2f} | {mean(lags[k]):.2f}, {most[k]:.0f} "
            f"| {mean(seeds):.1f} ({listed(seeds)}) |"
        )


def listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


if __name__ == "__main__":
    main()

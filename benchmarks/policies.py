"""Several policies on one base model, or several processes of one policy: seconds a step for the same calls.

    python benchmarks/policies.py                                      # a policy of 0.5M parameters
    python benchmarks/policies.py --model MODEL --threads 2            # a real model
    python benchmarks/policies.py --policies 1 --data-parallel 1 2 --whole --threads 2

Four agents of the OpenAI Agents SDK answer once in each rollout. They train one LoRA adapter together, or each trains
its own, or some share one: the calls, tokens and rewards of a step are the same, only who learns from them differs.
Each side is a new run, whose first step does not count. `--whole` trains all weights instead, in a process for each
policy; with `--data-parallel` the threads are divided among a policy's processes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from agents import Agent, OpenAIProvider, Runner

import agl
from agl.trainer.local.prepared import model_directory
from agl.trainer.quickstart.run import make

AGENTS = 4
BATCH, GROUP = 4, 4
WARM = 1
"""Steps at the start of a run that do not count."""


def team() -> Any:
    """A rollout in which each agent answers once, as others do not hear of it."""
    provider = OpenAIProvider(base_url="http://provider.invalid/v1", api_key="sk-nobody", use_responses=False)
    members = [
        Agent(name=f"agent{k}", instructions="Continue the text.", model=provider.get_model("m")) for k in range(AGENTS)
    ]

    @agl.rollout
    async def work(task: str) -> float:
        texts = [(await Runner.run(member, task)).final_output for member in members]
        return sum(text.count("e") for text in texts) / max(1, sum(map(len, texts)))

    return work


def seconds(model: str, n: int, processes: int, args: argparse.Namespace) -> dict[str, float]:
    """The median step of a run in which the agents train `n` policies, in seconds, by what it does."""
    algorithm = agl.GRPO(
        model=model,
        steps=args.steps + WARM,
        batch_size=BATCH,
        group_size=GROUP,
        max_response_tokens=args.tokens,
        learning_rate=1e-5,
        threads=max(1, args.threads // processes),
        data_parallel=processes,
        lora=None if args.whole else agl.LoraSpec(rank=8),
    )
    with tempfile.TemporaryDirectory() as directory:
        trainer = agl.Trainer(
            algorithm,
            directory=directory,
            agents={f"agent{k}": f"policy{k % n}" for k in range(AGENTS)},
            n_workers=BATCH * GROUP,
            progress=False,
        )
        steps = trainer.fit(team(), [f"Once upon a time there were {k} sheep" for k in range(64)]).history[WARM:]
    parts = ("sampling", "learning", "publishing")
    taken = {part: median(step[f"seconds/{part}"] for step in steps) for part in parts}
    return {**taken, "step": median(sum(step[f"seconds/{part}"] for part in parts) for step in steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, GGUF file or Hub id; without it the quickstart's policy")
    parser.add_argument("--policies", type=int, nargs="+", default=[1, 2, AGENTS], help=f"of {AGENTS} agents")
    parser.add_argument("--data-parallel", type=int, nargs="+", default=[1], help="processes of a policy")
    parser.add_argument("--steps", type=int, default=4, help="that count")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="all weights in place of adapters")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        model = model_directory(args.model, "hermes") if args.model else str(Path(made, "policy"))
        if not args.model:
            make(Path(model), seed=0)
        sides = [(n, processes) for n in args.policies for processes in args.data_parallel]
        results = {(n, processes): seconds(model, n, processes, args) for n, processes in sides}
    first = results[sides[0]]["step"]
    print("| policies | processes each | s/step | sampling | learning | publishing | x the first |")
    print("|---|---|---|---|---|---|---|")
    for (n, processes), facts in results.items():
        parts = " | ".join(f"{facts[part]:.2f}" for part in ("step", "sampling", "learning", "publishing"))
        print(f"| {n} | {processes} | {parts} | {facts['step'] / first:.2f} |")


if __name__ == "__main__":
    main()

"""A dataset in which most tasks teach nothing: what is learned from equal numbers of rollouts, by how tasks are drawn.

    python benchmarks/task_sampling.py [--steps 16] [--seeds 3] [--share 0.25] [--held-out 256]

The quickstart's agent and policy. A `--share` of the training tasks are the quickstart's; of the others the right
answer is one that no answer equals, so their rollouts always earn 0. Success is measured on the quickstart's tasks.
`dynamic_sampling` samples further tasks in place of those, within a step, so its rollouts are more; it makes as many
steps as the same number of rollouts allows.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import agl
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.run import make
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer

GROUP, BATCH = 8, 8


class Budget(agl.Callback):
    """Ends a run after so many rollouts."""

    def __init__(self, rollouts: int) -> None:
        self.left = rollouts

    def on_step(self, run: Any, entry: Any) -> None:
        self.left -= entry["train/rollouts"]
        if self.left <= 0:
            run.stop("that many rollouts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--tasks", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=256)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="agl-task-sampling-"))
    make(root / "start", seed=0)
    policies = {"start": str(root / "start")}
    ways: dict[str, dict[str, Any]] = {
        "uniform": {},
        "learnability": {"task_sampling": "learnability"},
        "dynamic sampling": {"dynamic_sampling": True},
        "both": {"task_sampling": "learnability", "dynamic_sampling": True},
    }
    flat: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(args.seeds):
        tasks = arithmetic_tasks(args.tasks, seed=seed, split="train")
        hopeless = range(int(args.share * args.tasks), args.tasks)
        tasks = [{**task, "answer": "never"} if i in hopeless else task for i, task in enumerate(tasks)]
        for name, options in ways.items():
            grpo = agl.GRPO(
                model=policies["start"], steps=args.steps, group_size=GROUP, batch_size=BATCH, learning_rate=5e-4,
                betas=(0.9, 0.95), max_response_tokens=48, max_context=256, max_batch=64, **options,
            )  # fmt: skip
            trainer = agl.Trainer(
                grpo, n_workers=32, directory=root / f"{name}-{seed}", seed=seed, progress=False,
                callbacks=Budget(args.steps * GROUP * BATCH),
            )  # fmt: skip
            result = trainer.fit(agl.wrap(build_agent(), reward=exact_answer), tasks)
            policies[f"{name}, seed {seed}"] = str(result.policy)
            entries = [entry for entry in result.history if "train/groups" in entry]
            flat[name].append(
                sum(e["train/zero_variance_groups"] for e in entries) / sum(e["train/groups"] for e in entries)
            )
            print(f"{name}, seed {seed}: {len(entries)} steps", flush=True)
    evaluation = agl.evaluate(
        agl.wrap(build_agent(), reward=exact_answer), arithmetic_tasks(args.held_out, seed=0, split="heldout"),
        policies, directory=root / "evaluation", n_workers=32, max_response_tokens=48,
    )  # fmt: skip
    solved = {name: 100 * of.success.value for name, of in evaluation.policies.items()}
    rollouts = args.steps * GROUP * BATCH
    print(f"\n| tasks drawn | groups without a difference, % | held-out success after {rollouts} rollouts, % |")
    print("|---|---|---|")
    print(f"| start | | {solved['start']:.1f} |")
    for name in ways:
        seeds = [solved[f"{name}, seed {seed}"] for seed in range(args.seeds)]
        listed = ", ".join(f"{value:.1f}" for value in seeds)
        print(f"| {name} | {100 * mean(flat[name]):.0f} | {mean(seeds):.1f} ({listed}) |")


if __name__ == "__main__":
    main()

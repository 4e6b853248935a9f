"""Ways to learn from the same rollouts, at equal numbers of them: held-out success of the quickstart's agent.

    python benchmarks/ways_to_learn.py [--rounds 3] [--tasks 160] [--held-out 256] [--out DIR]

A round is 8 rollouts of each of `--tasks` tasks; GRPO gets as many rollouts as `--rounds` rounds have, distillation
half of them. All begin with the same policy and the same tasks, and are measured once, together, by `agl.evaluate` on
tasks that none has seen: success with its 95 % interval. Fine-tuning on everything that the policy sampled is the
control: it must not help.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import agl
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.run import make
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer

SAMPLES = 8
POLICY = {"max_response_tokens": 48, "max_context": 256, "max_batch": 128, "betas": (0.9, 0.95)}
RATE = 3e-4


class KeepRounds(agl.Callback):
    """Copies the policy of every round, of which checkpoints keep the last two."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_checkpoint(self, run: Any, path: Path, step: int) -> None:
        shutil.copytree(path / "policy", self.root / f"round-{step}", dirs_exist_ok=True)


class Ways:
    """Trains each way in a directory of its own.

    Attributes:
        rollouts: way -> rollouts that its policy has learned from. seconds: that its training took.
    """

    def __init__(self, root: Path, tasks: int, rounds: int, seed: int) -> None:
        self.root, self.rounds, self.seed = root, rounds, seed
        self.tasks = arithmetic_tasks(tasks, seed=seed, split="train")
        self.per_round = tasks * SAMPLES
        self.start = root / "start"
        if not (self.start / "config.json").exists():
            make(self.start, seed=seed)
        self.policies: dict[str, str] = {"start": str(self.start)}
        self.rollouts: dict[str, int] = {"start": 0}
        self.seconds: dict[str, float] = {"start": 0.0}

    def train(self, name: str, algorithm: Any, rollouts: int, tasks: Any = None, **options: Any) -> Path:
        began = time.monotonic()
        directory = self.root / name.replace(" ", "-")
        shutil.rmtree(directory, ignore_errors=True)
        trainer = agl.Trainer(algorithm, n_workers=32, directory=directory, seed=self.seed, **options)
        result = trainer.fit(agl.wrap(build_agent(), reward=exact_answer), self.tasks if tasks is None else tasks)
        assert result.policy is not None
        self.policies[name] = str(result.policy)
        self.rollouts[name], self.seconds[name] = rollouts, time.monotonic() - began
        return directory

    def all(self) -> None:
        model, n = str(self.start), self.per_round
        rft = agl.RFT(model=model, rounds=self.rounds, samples=SAMPLES, learning_rate=RATE, **POLICY)
        kept = self.root / "rounds"
        directory = self.train("RFT", rft, self.rounds * n, callbacks=KeepRounds(kept))
        for k in range(1, self.rounds + 1):
            name = f"RFT, round {k}"
            self.policies[name], self.rollouts[name] = str(kept / f"round-{k}"), k * n
            self.seconds[name] = self.seconds["RFT"] * k / self.rounds
        for table in (self.policies, self.rollouts, self.seconds):
            table.pop("RFT")

        first = self.first_round(directory)
        sft = {"model": model, "epochs": 2, "batch_size": 32, "learning_rate": RATE, **POLICY}
        self.train("SFT on everything", agl.SFT(data=agl.traces(first, mode="dev"), **sft), n, ())
        good = agl.traces(first, where=agl.reward() >= 1, mode="dev")
        self.train("SFT on what succeeded", agl.SFT(data=good, **sft), n, ())

        grpo = {"group_size": SAMPLES, "batch_size": 16, "learning_rate": RATE, "minibatches": 4, **POLICY}
        steps = self.rounds * n // (16 * SAMPLES)
        self.train("GRPO", agl.GRPO(model=model, steps=steps, schedule="linear", **grpo), self.rounds * n)
        after = steps - n // (16 * SAMPLES)
        begun = self.policies["RFT, round 1"]
        self.train("RFT, then GRPO", agl.GRPO(model=begun, steps=after, schedule="linear", **grpo), self.rounds * n)
        half, teacher = steps // 2, self.policies["GRPO"]
        distill = agl.Distill(model=model, teacher=teacher, steps=half, schedule="linear", **grpo)
        self.train("distilled from GRPO's", distill, half * 16 * SAMPLES)

    def first_round(self, rft: Path) -> Path:
        """A store with the rollouts of the first round alone: those of the policy that all begin with."""
        directory = self.root / "first-round"
        shutil.rmtree(directory, ignore_errors=True)
        baseline = agl.Baseline(
            model=str(self.start), repeats=SAMPLES, temperature=1.0, max_response_tokens=POLICY["max_response_tokens"]
        )
        agl.Trainer(baseline, n_workers=32, directory=directory, seed=self.seed).fit(
            agl.wrap(build_agent(), reward=exact_answer), self.tasks
        )
        return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=160)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds: at least 2, for GRPO goes on from the policy of the first")
    root = args.out or Path(tempfile.mkdtemp(prefix="agl-ways-"))
    ways = Ways(root, args.tasks, args.rounds, args.seed)
    ways.all()
    shutil.rmtree(root / "evaluation", ignore_errors=True)
    evaluation = agl.evaluate(
        agl.wrap(build_agent(), reward=exact_answer),
        arithmetic_tasks(args.held_out, seed=args.seed, split="heldout"),
        ways.policies,
        directory=root / "evaluation",
        n_workers=32,
        max_response_tokens=POLICY["max_response_tokens"],
    )
    print("| policy | rollouts | held-out success, % | 95 % | seconds of training |")
    print("|---|---|---|---|---|")
    for name, report in evaluation.policies.items():
        success, low, high = (100 * x for x in (report.success.value, report.success.low, report.success.high))
        print(
            f"| {name} | {ways.rollouts[name]:,} | {success:.1f} | {low:.1f} to {high:.1f} | {ways.seconds[name]:.0f} |"
        )


if __name__ == "__main__":
    main()

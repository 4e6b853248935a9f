"""What trackers and a callback cost a step: the same recorded steps with and without them, side by side.

    python benchmarks/loggers.py [MODEL] [--steps 12] [--rounds 3] [--log tensorboard ...] [--json FILE]

MODEL is a policy of `agl make-policy`; without it one is made, hardly trained. Each round trains it twice from the same
seed, once with all trackers that are installed (wandb offline, MLflow in a database) and a callback, once with the
callback alone, in turns. The first steps, in which trackers open their files, are left out; a step's time is that
between two callbacks. Their median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import agl
from agl.trainer.loggers.choose import TRACKERS
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.policy import Recipe, make_policy
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer

WARM_UP = 3
"""Steps that are not counted."""


class Clock(agl.Callback):
    """The times between steps."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step(self, run: Any, entry: Any) -> None:
        self.at.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Of each counted step."""
        return [b - a for a, b in zip(self.at[WARM_UP - 1 :], self.at[WARM_UP:], strict=False)]


def train(model: str, steps: int, folder: Path, log: list[str]) -> list[float]:
    """Seconds of each step."""
    clock = Clock()
    algorithm = agl.GRPO(
        model=model, group_size=8, batch_size=8, steps=steps + WARM_UP, learning_rate=5e-4, max_response_tokens=48,
        max_context=256, max_batch=64, checkpoint_every=1000, val_every=1000,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=16, directory=folder, progress=False, callbacks=clock, log=log)
    trainer.fit(agl.wrap(build_agent(), reward=exact_answer), arithmetic_tasks(256, seed=0, split="train"))
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--log", nargs="*", default=[n for n, t in TRACKERS.items() if find_spec(t.module.partition(".")[0])]
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ |= {"WANDB_MODE": "offline"}
    times: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = f"{folder}/policy"
            make_policy(model, threads=1, recipe=Recipe(capability_steps=0, mixed_steps=1))
        os.environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TRACKIO_DIR": f"{folder}/trackio"}
        for i in range(options.rounds):
            for which in ("without", "with") if i % 2 == 0 else ("with", "without"):
                log = options.log if which == "with" else []
                times[which] += train(model, options.steps, Path(folder) / f"{i}-{which}", log)
    medians = {which: statistics.median(seconds) for which, seconds in times.items()}
    ratio = medians["with"] / medians["without"]
    print(f"trackers       {', '.join(options.log)}; {len(times['with'])} steps each")
    for which, seconds in medians.items():
        print(f"{which:14} {seconds * 1e3:8.1f} ms a step")
    print(f"ratio          {ratio:8.4f}")
    if options.json:
        options.json.write_text(json.dumps({"trackers": options.log, "seconds": medians, "ratio": ratio}))


if __name__ == "__main__":
    main()

"""A real training in seconds: two tasks a step, two short answers to each, by an untrained policy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from running import say

import agl

SECRET = "marmalade-4711"
"""Stands in every task's text, and nowhere else."""
TRAIN = [{"question": f"{SECRET} {i}"} for i in range(4)]
VAL = [{"question": f"{SECRET} held out"}]


@agl.rollout
def agent(task: dict[str, str], llm: agl.LLM) -> float:
    """Answers once; the reward depends on what is sampled."""
    return len(say(llm, task["question"])) % 5 / 4


def train(
    policy: Path,
    directory: Path,
    *,
    steps: int = 4,
    every: int = 1,
    resume: bool = False,
    val: Sequence[Any] = VAL,
    **options: Any,
) -> agl.Result:
    """GRPO, validated before the first step and after each; a checkpoint after every `every` steps and at the end."""
    algorithm = agl.GRPO(
        model=str(policy), group_size=2, batch_size=2, steps=steps, learning_rate=1e-3, max_response_tokens=6,
        max_context=128, val_every=1, checkpoint_every=every,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, **{"n_workers": 4, "directory": directory, "progress": False, **options})
    return trainer.fit(agent, TRAIN, val, resume=resume)


class StopAfter(agl.Callback):
    """Ends a run after so many steps, as a person might."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Any, entry: Any) -> None:
        if entry["step"] >= self.step:
            run.stop("the test has seen enough")


def train_killed(policy: Path, directory: Path, *, after: int, options: str, **settings: Any) -> None:
    """Train in another process, which is killed when so many steps are logged.

    Args:
        options: of the trainer, as source text.
    """
    program = f"""
import gc, os, sys, time
sys.path[:0] = {sys.path!r}
from pathlib import Path
import agl, tiny_run
from agl.trainer.loggers.threads import LoggerThread

class Kill(agl.Callback):
    def on_validation(self, run, entry):
        if entry["step"] >= {after}:
            loggers = [x for x in gc.get_objects() if isinstance(x, LoggerThread)]
            while any(x._calls or x._began for x in loggers):
                time.sleep(0.1)
            time.sleep(3)  # trackers with threads or processes of their own write what they got
            os.kill(os.getpid(), 9)

tiny_run.train(Path({str(policy)!r}), Path({str(directory)!r}), callbacks=Kill(), **{settings!r}, {options})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == -9, done.stderr

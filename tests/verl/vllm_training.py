"""GRPO with `engine="vllm"`, two steps. As a program it is killed when the first one's checkpoint is written.

python vllm_training.py MODEL DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

import agl
from agl.adapters.langchain import wrap
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer


def train(
    model: Path, directory: Path, *callbacks: agl.Callback, resume: bool = False, max_staleness: int = 0
) -> agl.Result:
    algorithm = agl.GRPO(
        model=str(model), engine="vllm", device="cpu", threads=1, group_size=4, batch_size=4, steps=2,
        learning_rate=1e-3, max_response_tokens=32, max_context=256, max_staleness=max_staleness,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=16, directory=directory, progress=False, callbacks=callbacks)
    agent = wrap(build_agent(), reward=exact_answer)
    return trainer.fit(agent, arithmetic_tasks(64, seed=0, split="train"), resume=resume)


class Kill(agl.Callback):
    """Names the run's other processes and where vLLM's files are, and ends this one."""

    def on_checkpoint(self, run: Any, path: Path, step: int) -> None:
        children = psutil.Process().children(recursive=True)
        (server,) = (c for c in children if "agl.trainer.local.vllm_main" in c.cmdline())
        socket = server.cmdline()[server.cmdline().index("--uds") + 1]
        print(Path(socket).parent, *(child.pid for child in children), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), Kill())

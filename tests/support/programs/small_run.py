"""A training run of bare OpenAI calls with one worker: DIRECTORY MODEL [--resume] [--steps N].

RLIMIT_NOFILE and RLIMIT_AS in the environment limit it.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from pathlib import Path
from typing import Any

import openai

import agl


@agl.rollout
def speaker(task: Any, llm: agl.LLM) -> float:
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    answer = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": str(task)}])
    return float(len(answer.choices[0].message.content or "") % 3)


def train(directory: Path, model: Path, *, resume: bool = False, steps: int = 2) -> agl.Result:
    algorithm = agl.GRPO(
        model=str(model), group_size=2, batch_size=2, steps=steps, max_response_tokens=8, max_context=256
    )
    trainer = agl.Trainer(algorithm, directory=directory, n_workers=1, seed=3, progress=False)
    return trainer.fit(speaker, list(range(16)), resume=resume)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    for name in ("RLIMIT_NOFILE", "RLIMIT_AS"):
        if value := os.environ.get(name):
            resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    try:
        result = train(options.directory, options.model, resume=options.resume, steps=options.steps)
    except agl.errors.AglError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"trained {len(result.history)} steps")


if __name__ == "__main__":
    main()

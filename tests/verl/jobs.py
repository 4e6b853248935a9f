"""The quickstart's agent and its tasks, for verl: the same as on one machine but for the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_cpu import settings

import agl
from agl.adapters.langchain import wrap
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import arithmetic_tasks, exact_answer
from agl.trainer.run.trainer import Result

TASKS, HELDOUT = 400, 64
SMALL = {
    "actor_rollout_ref.rollout.max_num_seqs": 64,
    "trainer.logger": ["console"],
}
"""What a tiny model on two cores needs; verl's own keys."""


def algorithm(model: Path, config: Mapping[str, Any] | None = None, **common: Any) -> agl.VERL:
    """The quickstart's numbers, sampled at temperature 1 in validation too; on the CPU."""
    options = dict(
        model=str(model), group_size=8, batch_size=16, learning_rate=5e-4, max_prompt_tokens=208,
        max_response_tokens=48, val_temperature=1.0,
    ) | common  # fmt: skip
    cpu = settings.config(
        common.get("gpus", 1) + common.get("rollout_gpus", 0), separate=common.get("mode") == "separate_async",
        critic=common.get("adv_estimator") == "gae",
    )  # fmt: skip
    return agl.VERL({**cpu, **SMALL, **(config or {})}, backend="cluster", **options)


def train(agent: Any, algorithm: agl.VERL, directory: Path, *, resume: bool = False, heldout: int = HELDOUT,
          **options: Any) -> Result:  # fmt: skip
    """A run on the quickstart's tasks."""
    trainer = agl.Trainer(algorithm, **{"n_workers": 32, "seed": 0, "directory": directory, **options})
    tasks = arithmetic_tasks(TASKS, seed=0, split="train")
    return trainer.fit(agent, tasks, arithmetic_tasks(heldout, seed=1, split="heldout"), resume=resume)


def quickstart() -> Any:
    """The agent."""
    return wrap(build_agent(), reward=exact_answer)

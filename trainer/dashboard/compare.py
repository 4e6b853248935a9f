"""Two validations on the same held-out tasks: the paired difference, and the tasks whose reward changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from agl.errors import DatasetError, NotStoredError
from agl.trainer.evaluation.policy_report import RolloutQuery
from agl.trainer.report.statistics import mean_interval, sign_flip_test
from agl.trainer.store.base import Store
from agl.trainer.store.types import RolloutSummary, TrainingRun

MOST_ROLLOUTS = 10_000
"""Of one validation; larger ones are for `agl eval`."""
_MOST_CHANGED = 200
_MOST_LINKS = 8


@dataclass(frozen=True, slots=True)
class Validation:
    """A run after a number of completed steps; the last of its validations if that is None."""

    store: Store
    run: TrainingRun
    step: int | None = None


@dataclass(frozen=True, slots=True)
class _Task:
    """A task of one validation: its rollouts that have a reward, and their mean reward."""

    task: Any
    rollouts: list[str]
    reward: float


async def compare(first: Validation, second: Validation) -> dict[str, Any]:
    """Compare two validations.

    Tasks are the same where their JSON is: two runs may have had their tasks in another order.

    Returns:
        `sides`: of both, the run, the step, the steps after which it was validated, its tasks, its mean reward.
        `paired`: the number of common tasks, the mean difference of their rewards (second - first), its 95 % interval
        (`statistics.mean_interval`) and the p-value of `statistics.sign_flip_test`. `better`, `worse`: how many tasks
        changed. `changed`: these, by the size of the change, with the rollouts.

    Raises:
        NotStoredError: a run was not validated then.
        DatasetError: it has no rollouts, or too many.
    """
    sides = []
    tasks = []
    for validation in (first, second):
        run = validation.run
        store = validation.store
        steps = [m.step for m in await store.query_metrics([run.run_id], names=["val/reward"])]
        step = steps[-1] if validation.step is None and steps else validation.step
        if step is None or step not in steps:
            known = ", ".join(map(str, steps[-20:]))
            hint = f"it was after steps {known}" if known else "give the training held-out tasks (val_dataset=, --val)"
            raise NotStoredError("there was no such validation", hint=hint, run=run.run_id, step=step)
        if await store.count_rollouts(run_id=run.run_id, step=step, mode="val") > MOST_ROLLOUTS:
            hint = "compare them in a program: agl.trainer.evaluation"
            raise DatasetError(f"the validation has more than {MOST_ROLLOUTS:,} rollouts", hint=hint, run=run.run_id)
        of_task = _tasks(await RolloutQuery(run.run_id, step).read(store))
        rewards = [task.reward for task in of_task.values()]
        sides.append(
            {
                "run_id": run.run_id,
                "step": step,
                "steps": steps,
                "tasks": len(of_task),
                "reward": float(np.mean(rewards)) if rewards else None,
            }
        )
        tasks.append(of_task)
    common = [(task, tasks[1][key]) for key, task in tasks[0].items() if key in tasks[1]]
    differences = np.array([b.reward - a.reward for a, b in common])
    order = [i for i in np.argsort(-np.abs(differences), kind="stable") if differences[i] != 0]
    return {
        "sides": sides,
        "paired": _paired(differences),
        "better": int((differences > 0).sum()),
        "worse": int((differences < 0).sum()),
        "changed": [
            {
                "task": a.task,
                "rewards": [a.reward, b.reward],
                "rollouts": [a.rollouts[:_MOST_LINKS], b.rollouts[:_MOST_LINKS]],
            }
            for a, b in (common[i] for i in order[:_MOST_CHANGED])
        ],
    }


def _paired(differences_T: np.ndarray) -> dict[str, Any]:
    if differences_T.size == 0:
        return {"tasks": 0, "difference": None, "interval": None, "p": None}
    low, high = map(float, mean_interval(differences_T))
    return {
        "tasks": differences_T.size,
        "difference": float(differences_T.mean()),
        "interval": [low, high] if np.isfinite(low) else None,
        "p": sign_flip_test(differences_T),
    }


def _tasks(summaries: list[RolloutSummary]) -> dict[str, _Task]:
    several: dict[str, list[RolloutSummary]] = {}
    for summary in summaries:
        if summary.reward is not None:
            key = json.dumps(summary.rollout.task, sort_keys=True, default=str)
            several.setdefault(key, []).append(summary)
    return {
        key: _Task(
            rows[0].rollout.task,
            [row.rollout.rollout_id for row in rows],
            float(np.mean([row.reward or 0.0 for row in rows])),
        )
        for key, rows in several.items()
    }

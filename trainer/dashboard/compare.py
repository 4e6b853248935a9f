"""Two validations on the same held-out tasks: the paired difference, and the tasks whose reward changed."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

from agl.errors import NotStoredError
from agl.trainer.store.base import RolloutSummary, Store, TrainingRun

MOST_ROLLOUTS = 4_000
"""Of one validation; further ones are not compared, and the answer says so."""
_PAGE = 500
_MOST_CHANGED = 200
_Z = 1.959964


@dataclass(frozen=True, slots=True)
class _Task:
    """A task of one validation: its rollouts that have a reward, and their mean reward."""

    task: Any
    rollouts: list[str]
    reward: float


async def compare(
    first: tuple[Store, TrainingRun, int | None], second: tuple[Store, TrainingRun, int | None]
) -> dict[str, Any]:
    """Compare validations, each of a run and a number of completed steps; of the last one if that is None.

    Returns:
        `sides`: of both, run, step, the steps at which it was validated, tasks, mean reward. `paired`: the number of
        common tasks, the mean difference of their rewards (second - first) with its 95 % interval (normal
        approximation over tasks). `changed`: common tasks whose reward changed, by the size of the change.

    Raises:
        NotStoredError: a run was not validated, or not at that step.
    """
    sides, tasks = [], []
    for store, run, step in (first, second):
        metrics = await store.query_metrics([run.run_id], names=["val/reward"])
        steps = [m.step for m in metrics]
        chosen = step if step is not None else steps[-1] if steps else None
        if chosen is None or chosen not in steps:
            done = ", ".join(map(str, steps[-20:])) or "never"
            raise NotStoredError("the run was not validated there", hint=f"it was validated at {done}", run=run.run_id)
        of_task, complete = await _tasks(store, run.run_id, chosen)
        rewards = [t.reward for t in of_task.values()]
        sides.append(
            {
                "run_id": run.run_id,
                "name": run.name,
                "step": chosen,
                "steps": steps,
                "tasks": len(of_task),
                "reward": statistics.fmean(rewards) if rewards else None,
                "complete": complete,
            }
        )
        tasks.append(of_task)
    common = [(tasks[0][key], tasks[1][key]) for key in tasks[0] if key in tasks[1]]
    differences = [b.reward - a.reward for a, b in common]
    changed = sorted((pair for pair in common if pair[0].reward != pair[1].reward), key=lambda p: -_size(p))
    return {
        "sides": sides,
        "paired": _paired(differences),
        "better": sum(d > 0 for d in differences),
        "worse": sum(d < 0 for d in differences),
        "changed": [
            {
                "task": a.task,
                "rewards": [a.reward, b.reward],
                "rollouts": [a.rollouts[:8], b.rollouts[:8]],
            }
            for a, b in changed[:_MOST_CHANGED]
        ],
    }


def _size(pair: tuple[_Task, _Task]) -> float:
    return abs(pair[1].reward - pair[0].reward)


def _paired(differences: list[float]) -> dict[str, Any]:
    n = len(differences)
    mean = statistics.fmean(differences) if n else None
    half = _Z * statistics.stdev(differences) / n**0.5 if n > 1 else None
    interval = None if mean is None or half is None else [mean - half, mean + half]
    return {"tasks": n, "difference": mean, "interval": interval}


async def _tasks(store: Store, run_id: str, step: int) -> tuple[dict[str, _Task], bool]:
    """A validation's tasks by their JSON, and whether all of its rollouts were read."""
    several: dict[str, list[RolloutSummary]] = {}
    after, read = None, 0
    while True:
        page = await store.query_step(run_id, step, mode="val", after=after, limit=_PAGE)
        for summary in page:
            if summary.reward is not None:
                key = json.dumps(summary.rollout.task, sort_keys=True, default=str)
                several.setdefault(key, []).append(summary)
        read += len(page)
        if len(page) < _PAGE or read >= MOST_ROLLOUTS:
            break
        after = page[-1].rollout.rollout_id
    of_task = {
        key: _Task(
            summaries[0].rollout.task,
            [s.rollout.rollout_id for s in summaries],
            statistics.fmean(s.reward for s in summaries if s.reward is not None),
        )
        for key, summaries in several.items()
    }
    return of_task, len(page) < _PAGE

"""Policies on the same tasks: each one's numbers with their error, and how two of them differ.

Invariant: an `Evaluation` is a function of stored rollouts, whether `agl.evaluate` ran them or a training's validation.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agl._version import __version__
from agl.errors import ConfigError, DatasetError, nearest
from agl.trainer.evaluation import views
from agl.trainer.evaluation.comparison import Comparison, compare
from agl.trainer.evaluation.policy_report import (
    EvaluatedRollout,
    IsSuccess,
    PolicyReport,
    RolloutQuery,
    evaluated_rollouts,
    policy_report,
    task_index,
)
from agl.trainer.report.export.json_files import to_json
from agl.trainer.run.trainer import Result
from agl.trainer.store.base import Store
from agl.trainer.store.location import read_store
from agl.trainer.store.types import RolloutSummary

Success = float | IsSuccess
"""The total reward that makes a rollout a success, or a function of the rollout."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Evaluation:
    """Policies on the same tasks.

    Attributes:
        tasks: index in the dataset -> the task.
        policies: by name, in order.
        success: what counts as one.
        store: the URL of the store with the rollouts, for `agl explain`.
    """

    tasks: Mapping[int, Any]
    policies: Mapping[str, PolicyReport]
    success: str
    store: str

    @classmethod
    async def of_runs(
        cls, store: Store, url: str, queries: Mapping[str, RolloutQuery], *, success: Success = 1.0
    ) -> Evaluation:
        """Read from a store.

        Args:
            url: of the store.
            queries: name -> which rollouts.

        Raises:
            DatasetError: one of them has no rollout.
        """
        if isinstance(success, int | float):
            what = f"total reward >= {success:g}"
            is_success = functools.partial(_reaches, success)
        else:
            what = getattr(success, "__name__", type(success).__name__)
            is_success = success
        tasks: dict[int, Any] = {}
        policies = {}
        for name, query in queries.items():
            summaries = await query.read(store)
            for summary in summaries:
                tasks.setdefault(task_index(summary), summary.rollout.task)
            policies[name] = policy_report(name, query, await evaluated_rollouts(store, summaries, is_success))
        return cls(dict(sorted(tasks.items())), policies, what, url)

    @classmethod
    async def of_run(
        cls, store: Store, url: str, run_id: str, *, steps: Sequence[int], success: Success = 1.0
    ) -> Evaluation:
        """The validations of a training run after these numbers of steps, as policies "step 0", "step 50", ..."""
        queries = {f"step {step}": RolloutQuery(run_id, step) for step in steps}
        return await cls.of_runs(store, url, queries, success=success)

    @classmethod
    def of_result(cls, result: Result, *, success: Success = 1.0) -> Evaluation:
        """A training's first and last validation, from its store; nothing is run again. Call it outside an event loop.

        Raises:
            DatasetError: there was no validation.
            StoreError: the store cannot be opened by its URL.
        """
        steps = [h["step"] for h in result.history if "val/reward" in h]
        if not steps:
            raise DatasetError("the run has no validation", hint="give fit a val_dataset", run=result.run_id)
        ends = list(dict.fromkeys((steps[0], steps[-1])))
        return read_store(
            result.store, lambda store: cls.of_run(store, result.store, result.run_id, steps=ends, success=success)
        )

    def compare(self, before: str, after: str) -> Comparison:
        """The paired comparison of two policies.

        Raises:
            ConfigError: a name that is none of the policies'.
            DatasetError: no task has rollouts of both that ended.
        """
        return compare(self._policy(before), self._policy(after))

    def comparisons(self) -> list[Comparison]:
        """The first policy with each other one."""
        first, *others = self.policies
        return [self.compare(first, other) for other in others]

    def _policy(self, name: str) -> PolicyReport:
        if name not in self.policies:
            raise ConfigError(f"no policy {name!r} was evaluated", hint=nearest(name, self.policies))
        return self.policies[name]

    def rollout(self, rollout_id: str) -> EvaluatedRollout:
        """One of the rollouts, by its whole id."""
        return next(r for p in self.policies.values() for r in p.rollouts if r.rollout_id == rollout_id)

    def to_json(self, *, rollouts: bool = True) -> dict[str, Any]:
        """Everything except transcripts as JSON values; non-finite numbers are null.

        Args:
            rollouts: False leaves tasks and rollouts out, too.
        """
        policies = {}
        for name, policy in self.policies.items():
            rows = [{k: v for k, v in asdict(r).items() if k != "transcript"} for r in policy.rollouts]
            policies[name] = asdict(policy) | {"rollouts": rows if rollouts else []}
        facts = {
            "agl": __version__,
            "store": self.store,
            "success": self.success,
            "tasks": self.tasks if rollouts else {},
            "policies": policies,
            "comparisons": [asdict(c) | {"significant": c.significant} for c in self.comparisons()],
        }
        return json.loads(to_json(facts))

    def table(self) -> None:
        """Print the numbers of all policies, and the first one's comparison with the others."""
        views.print_table(self)

    def save(self, path: str | Path) -> Path:
        """Write a report: `.html` (one file that loads nothing), `.json` or `.md`, by the name's ending.

        Raises:
            ConfigError: another ending.
        """
        path = Path(path)
        write: dict[str, Callable[[], str]] = {
            ".html": lambda: views.page(self),
            ".json": lambda: json.dumps(self.to_json(), indent=2) + "\n",
            ".md": lambda: views.markdown(self),
        }
        if path.suffix not in write:
            raise ConfigError(f"a report cannot be written as {path.name!r}", hint="end it with .html, .json or .md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write[path.suffix](), encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"<Evaluation of {', '.join(self.policies)} on {len(self.tasks)} tasks; print() shows it>"

    def __str__(self) -> str:
        return views.markdown(self)

    def _repr_html_(self) -> str:
        return views.fragment(self)


def _reaches(least: float, rollout: RolloutSummary) -> bool:
    # Sums of rewards such as 0.1 + 0.2 + 0.7 are not exact.
    return (rollout.reward or 0.0) >= least - 1e-9

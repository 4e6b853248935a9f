"""What is kept of a training step: what it made of each call, for the store, and its entry in the run's history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agl.mdp.sequence import TrainingRow, merge_report
from agl.mdp.types import Trajectory
from agl.trainer.objectives.advantages import CallAdvantage, StepAdvantages
from agl.trainer.policies.policies import Policies
from agl.trainer.run.faults import fault_counts
from agl.trainer.run.run import Run, mean_rewards
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import TrainedCall

Rows = Mapping[str, list[TrainingRow]]
"""A step's training rows by policy."""

BASELINE = "train/baseline/"
"""Before an agent's name: its running baseline after the step."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A step's rollouts and the advantages of their calls.

    Attributes:
        results: all rollouts. succeeded: those of them that did.
        resampled: how many tasks were sampled in place of groups that had nothing to learn from.
        seconds: that sampling took. prompt_tokens: of its calls, "computed" and "reused" (`Policies.prompt_tokens`).
    """

    results: Seq[RolloutResult]
    succeeded: Seq[RolloutResult]
    advantages: StepAdvantages
    resampled: int = 0
    seconds: float = 0.0
    prompt_tokens: Mapping[str, int] = field(default_factory=Counter)


async def record(run: Run, policies: Policies, calls: Seq[CallAdvantage], rows: Rows, step: int) -> None:
    """Write to the store what the step made of every call: its row, return, advantage and trained tokens."""
    row_of: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for policy_rows in rows.values():
        for i, row in enumerate(policy_rows):
            trained_C = np.bincount(row.calls[row.action_mask], minlength=len(row.call_ids))
            row_of |= dict.fromkeys(row.call_ids, i)
            tokens |= zip(row.call_ids, trained_C.tolist(), strict=True)
    versions = policies.versions
    await run.store.add_trained_calls(
        run.run_id,
        [
            TrainedCall(
                call_id=c.call_id,
                rollout_id=c.rollout_id,
                step=step + 1,
                policy_version=versions[c.policy],
                sequence=row_of.get(c.call_id),
                reward=c.reward,
                return_=c.return_,
                advantage=c.advantage,
                tokens=tokens.get(c.call_id, 0),
                dropped=c.dropped,
            )
            for c in calls
            if c.policy is not None and c.policy in versions
        ],
    )


def facts(sample: Sample, policies: Policies, rows: Rows, metrics: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """What a step that sampled adds to `run.history`; `rows` and `metrics` as in `learned`."""
    advantages = sample.advantages
    return {
        **mean_rewards(sample.succeeded, "train"),
        "train/rollouts": len(sample.results),
        "train/failed_rollouts": len(sample.results) - len(sample.succeeded),
        **fault_counts(sample.succeeded, "train"),
        "train/dropped_groups": advantages.dropped_groups,
        "train/zero_variance_groups": advantages.zero_variance_groups,
        "train/resampled_tasks": sample.resampled,
        **{BASELINE + agent: value for agent, value in advantages.baselines.items()},
        **learned(advantages.trajectories, policies, rows, metrics),
    }


def recorded_baselines(history: Seq[Mapping[str, Any]]) -> dict[str, float]:
    """The running baselines that the last step of a history left, by agent; none before the first step."""
    entry = history[-1] if history else {}
    return {name.removeprefix(BASELINE): value for name, value in entry.items() if name.startswith(BASELINE)}


def learned(
    trajectories: Seq[Trajectory], policies: Policies, rows: Rows, metrics: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """What the update of a step adds to `run.history`.

    Args:
        trajectories: those that were trained. rows: made of them.
        metrics: the learner's, by policy; only of those that were updated.
    """
    merged = merge_report(trajectories, [row for policy_rows in rows.values() for row in policy_rows])
    entry: dict[str, Any] = {
        "train/updated_policies": len(metrics),
        "train/trained_rollouts": len({t.rollout_id for t in trajectories}),
        "train/calls": merged.calls,
        "train/rows": merged.rows,
        "train/tokens": merged.tokens,
        "train/tokens_unmerged": merged.tokens_unmerged,
        "train/forks": sum(merged.forks.values()),
    }
    for name, version in policies.versions.items():
        prefix = "" if len(policies) == 1 else f"{name}/"
        entry[f"{prefix}policy_version"] = version
        entry |= {f"{prefix}learner/{k}": v for k, v in metrics.get(name, {}).items()}
    return entry

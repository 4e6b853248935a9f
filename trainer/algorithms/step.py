"""The parts of a training step: which rows it trains, the update of one policy and its proof, and the step's record."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from agl.errors import NoTrainableDataError, StalePolicyError
from agl.mdp.sequence import TrainingRow, merge, merge_report
from agl.trainer.local.policy import LocalPolicy
from agl.trainer.objectives.advantages import FLAT, StepAdvantages
from agl.trainer.run.policies import Policies
from agl.trainer.run.run import Run, mean_rewards
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import TrainedCall

PROBE_TOKENS = 64
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of log-probs, in nats, that rounding explains, by the dtype of the weights: the probe computes
without autocast."""

Rows = Mapping[str, list[TrainingRow]]
"""A step's training rows by policy."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A step's rollouts and the advantages of their calls.

    Attributes:
        results: all rollouts. succeeded: those of them that did.
        resampled: how many tasks were sampled in place of groups that had nothing to learn from.
    """

    results: Seq[RolloutResult]
    succeeded: Seq[RolloutResult]
    advantages: StepAdvantages
    resampled: int = 0


def make_rows(sample: Sample, policies: Policies, step: int) -> Rows:
    """Merge each policy's calls into training rows.

    Raises:
        NoTrainableDataError: no row of any policy holds a token to train, although no group was left out as flat.
        StalePolicyError: a call was sampled by other weights than those in training.
    """
    advantages = sample.advantages
    trajectories = {name: advantages.of(name) for name in policies.names}
    rows = {name: [row for t in ts for row in merge(t, advantages.advantages)] for name, ts in trajectories.items()}
    flat = any(c.dropped == FLAT and c.policy in rows for c in advantages.calls)
    if not flat and not any(row.n_actions for policy_rows in rows.values() for row in policy_rows):
        if advantages.dropped_groups:
            why = f"{advantages.dropped_groups} group(s) kept no two to compare"
        else:
            why = "none of their answers is whole" if advantages.calls else "they made no call"
        raise NoTrainableDataError(
            f"step {step + 1} has nothing to train on: {len(sample.succeeded)} of {len(sample.results)} rollouts "
            f"succeeded, and {why}",
            hint="see why rollouts fail with agl explain, or raise max_attempts",
            step=step + 1,
        )
    for name, version in policies.versions.items():
        for call in (transition.call for t in trajectories[name] for transition in t.transitions):
            if call.policy_version != version:
                raise StalePolicyError(
                    f"call {call.id} was sampled by version {call.policy_version} of policy {call.policy!r}, but "
                    f"version {version} is being trained",
                    rollout=call.rollout_id,
                    attempt=call.attempt,
                    agent=call.agent,
                    step=step + 1,
                )
    return rows


def has_signal(rows: Seq[TrainingRow], flat_learns: bool) -> bool:
    """Whether an update on these rows would change the policy.

    Args:
        flat_learns: whether it does even where all advantages are 0 (a penalty, a value head).
    """
    if not any(row.n_actions for row in rows):
        return False
    return flat_learns or any(np.any(row.advantages) for row in rows)


async def update(policy: LocalPolicy, rows: list[TrainingRow], step: int) -> dict[str, float]:
    """Train a policy on its rows, and prove that the engine serves what was trained: learner and engine agree on the
    log-probs of one fixed sequence.

    Raises:
        StalePolicyError: they do not.
        TrainingError: an update that is not finite.
    """
    metrics = await policy.train(rows)
    row = next(r for r in rows if len(r) > 1)
    path = row.token_ids if row.is_chain else row.token_ids[row.positions == np.arange(len(row))]
    ids = path[:PROBE_TOKENS]
    trained = await policy.logprobs(ids)
    served = await policy.engine_logprobs(ids)
    difference = float(np.max(np.abs(trained - served))) if ids.size > 1 else 0.0
    if not difference <= PROBE_TOLERANCE[policy.info.dtype]:
        raise StalePolicyError(
            f"after the update of step {step + 1} the engine's log-probs differ from the learner's by {difference:.3g}",
            hint="the engine does not serve the policy just trained; please report this with your model's config",
            step=step + 1,
            policy=policy.spec.name,
            policy_version=policy.version,
        )
    return metrics


async def record(run: Run, policies: Policies, calls: StepAdvantages, rows: Rows, step: int) -> None:
    """Write to the store what the step made of every call: its row, return, advantage and trained tokens."""
    row_of: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for policy_rows in rows.values():
        for i, row in enumerate(policy_rows):
            for k, call_id in enumerate(row.call_ids):
                row_of[call_id] = i
                tokens[call_id] = int(np.sum(row.action_mask & (row.calls == k)))
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
            for c in calls.calls
            if c.policy is not None and c.policy in versions
        ],
    )


def facts(
    sample: Sample, policies: Policies, rows: Rows, metrics: Mapping[str, Mapping[str, float]], step: int
) -> dict[str, Any]:
    """The step's entry for `run.history`.

    Args:
        metrics: the learner's, by policy; only of those that were updated.
    """
    advantages = sample.advantages
    merged = merge_report(advantages.trajectories, [row for policy_rows in rows.values() for row in policy_rows])
    entry: dict[str, Any] = {
        "step": step + 1,
        **mean_rewards(sample.succeeded, "train"),
        "train/rollouts": len(sample.results),
        "train/failed_rollouts": len(sample.results) - len(sample.succeeded),
        "train/dropped_groups": advantages.dropped_groups,
        "train/zero_variance_groups": advantages.zero_variance_groups,
        "train/resampled_tasks": sample.resampled,
        "train/updated_policies": len(metrics),
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

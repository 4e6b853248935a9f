"""One step of learning: rollouts -> advantages -> rows -> one update of every policy, and the record of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from agl.errors import NoTrainableDataError, StalePolicyError
from agl.mdp.sequence import TrainingRow, merge, merge_report
from agl.mdp.types import Trajectory
from agl.trainer.local.policy import LocalPolicy
from agl.trainer.objectives.advantages import FLAT, Scored
from agl.trainer.run.policies import Policies
from agl.trainer.run.run import Run, mean_rewards
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import TrainedCall

PROBE_TOKENS = 64
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of log-probs, in nats, that rounding explains, by the dtype that is computed in."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A step's rollouts.

    Attributes:
        results: of all of them. good: those that succeeded. scored: their calls' advantages.
        resampled: how many tasks were sampled in place of groups that had nothing to learn from.
    """

    results: Seq[RolloutResult]
    good: Seq[RolloutResult]
    scored: Scored
    resampled: int = 0


async def learn(run: Run, policies: Policies, sampled: Sampled, step: int, *, always: bool) -> dict[str, Any]:
    """Update every policy that this step gives something to learn, each on its own calls alone. A step whose rollouts
    all came to the same updates none, and says so.

    Args:
        step: from 0.
        always: whether a policy learns something even where all advantages are 0 (a penalty, a value head).

    Returns:
        The step's facts, for `run.history`.

    Raises:
        NoTrainableDataError: no policy has anything to train on.
        StalePolicyError: calls of other weights than those in training, or an engine that does not serve the new ones.
        TrainingError: an update that is not finite.
    """
    assert run.gateway is not None
    scored = sampled.scored
    rows = {name: [row for t in scored.of(name) for row in merge(t, scored.advantages)] for name in policies.names}
    left_out = any(c.dropped == FLAT and c.policy in rows for c in scored.calls)
    if not left_out and not any(row.n_actions for of_policy in rows.values() for row in of_policy):
        raise NoTrainableDataError(
            f"step {step + 1} has nothing to train on: {len(sampled.good)} of {len(sampled.results)} rollouts "
            f"succeeded, and {_why(scored)}",
            hint="see why rollouts fail with agl explain, or raise max_attempts",
            step=step + 1,
        )
    for name, policy in policies:
        _check_versions(scored.of(name), policy.version, step)
    before = policies.versions
    due = {name: r for name, r in rows.items() if _teaches(r, always)}
    metrics: dict[str, Mapping[str, float]] = {}
    if due:
        async with run.gateway.hold():
            trained = await asyncio.gather(*(_update(policies[name], r, step) for name, r in due.items()))
        metrics = dict(zip(due, trained, strict=True))
    else:
        run.progress.note(f"step {step + 1}: no update, since the rollouts of every task came to the same")
    await _record(run, scored, rows, step, policies.versions)
    for name, policy in policies:
        if policy.version != before[name]:
            await run.store.add_policy_version(run.run_id, name, policy.version, step + 1)
    return _facts(sampled, policies, rows, metrics, step)


def _why(scored: Scored) -> str:
    if scored.dropped_groups:
        return f"{scored.dropped_groups} group(s) kept no two to compare"
    return "none of their answers is whole" if scored.calls else "they made no call"


def _teaches(rows: Seq[TrainingRow], always: bool) -> bool:
    if not any(row.n_actions for row in rows):
        return False
    return always or any(np.any(row.advantages) for row in rows)


async def _update(policy: LocalPolicy, rows: list[TrainingRow], step: int) -> dict[str, float]:
    metrics = await policy.train(rows)
    await _probe(policy, rows, step)
    return metrics


async def _probe(policy: LocalPolicy, rows: Seq[TrainingRow], step: int) -> None:
    """The engine must serve what was just trained: both sides' log-probs of one fixed sequence agree."""
    row = next(r for r in rows if len(r) > 1)
    path = row.token_ids[:PROBE_TOKENS] if row.is_chain else row.token_ids[row.positions == np.arange(len(row))]
    ids = path[:PROBE_TOKENS]
    trained = await policy.logprobs(ids)
    served = await policy.engine_logprobs(ids)
    worst = float(np.max(np.abs(trained - served))) if ids.size > 1 else 0.0
    if not worst <= PROBE_TOLERANCE[policy.info.dtype]:
        raise StalePolicyError(
            f"after the update of step {step + 1} the engine's log-probs differ from the learner's by {worst:.3g}",
            hint="the engine does not serve the policy just trained; please report this with your model's config",
            step=step + 1,
            policy=policy.spec.name,
            policy_version=policy.version,
        )


async def _record(
    run: Run, scored: Scored, rows: Mapping[str, Seq[TrainingRow]], step: int, versions: Mapping[str, int]
) -> None:
    row_of = {c: i for of_policy in rows.values() for i, row in enumerate(of_policy) for c in row.call_ids}
    tokens = {
        call_id: int(np.sum(row.action_mask & (row.calls == k)))
        for of_policy in rows.values()
        for row in of_policy
        for k, call_id in enumerate(row.call_ids)
    }
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
            for c in scored.calls
            if c.policy is not None and c.policy in versions
        ],
    )


def _facts(
    sampled: Sampled,
    policies: Policies,
    rows: Mapping[str, Seq[TrainingRow]],
    metrics: Mapping[str, Mapping[str, float]],
    step: int,
) -> dict[str, Any]:
    scored = sampled.scored
    merged = merge_report(scored.kept, [row for of_policy in rows.values() for row in of_policy])
    facts: dict[str, Any] = {
        "step": step + 1,
        **mean_rewards(sampled.good, "train"),
        "train/rollouts": len(sampled.results),
        "train/failed_rollouts": len(sampled.results) - len(sampled.good),
        "train/dropped_groups": scored.dropped_groups,
        "train/zero_variance_groups": scored.zero_variance_groups,
        "train/resampled_tasks": sampled.resampled,
        "train/updated_policies": len(metrics),
        "train/calls": merged.calls,
        "train/rows": merged.rows,
        "train/tokens": merged.tokens,
        "train/tokens_unmerged": merged.tokens_unmerged,
        "train/forks": sum(merged.forks.values()),
    }
    for name, version in policies.versions.items():
        prefix = "" if len(policies) == 1 else f"{name}/"
        facts[f"{prefix}policy_version"] = version
        facts |= {f"{prefix}learner/{k}": v for k, v in metrics.get(name, {}).items()}
    return facts


def _check_versions(trajectories: Seq[Trajectory], version: int, step: int) -> None:
    for trajectory in trajectories:
        for transition in trajectory.transitions:
            call = transition.call
            if call.policy_version != version:
                raise StalePolicyError(
                    f"call {call.id} was sampled by version {call.policy_version} of policy {call.policy!r}, but "
                    f"version {version} is being trained",
                    rollout=call.rollout_id,
                    attempt=call.attempt,
                    agent=call.agent,
                    step=step + 1,
                )

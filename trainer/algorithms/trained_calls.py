"""What is kept of a training step: what it made of each call, for the store, and its entry in the run's history."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from agl.mdp.sequence import TrainingRow, merge_report
from agl.trainer.algorithms.source import Rows, Sample
from agl.trainer.objectives.advantages import CallAdvantage, StepAdvantages
from agl.trainer.policies.policies import Policies
from agl.trainer.run.failures import failure_counts
from agl.trainer.run.faults import fault_counts, hopeless_groups
from agl.trainer.run.results import costs, group_counts, mean_rewards, merge_counts, rollout_seconds
from agl.trainer.run.run import Run
from agl.trainer.store.types import TrainedCall

BASELINE = "train/baseline/"
"""Before an agent's name: its running baseline after the step."""


async def record(
    run: Run,
    policies: Policies,
    calls: Seq[CallAdvantage],
    rows: Rows,
    metrics: Mapping[str, Mapping[str, float]],
    step: int,
) -> None:
    """Write to the store what the step made of every call: its row, return, advantage and trained tokens; and the new
    versions of the policies that were updated, which are those with `metrics`: calls of others were not trained."""
    row_of: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for name in metrics:
        for i, row in enumerate(rows[name]):
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
                dropped=c.dropped or (None if c.policy in metrics else "the step made no update"),
            )
            for c in calls
            if c.policy is not None and c.policy in versions
        ],
    )
    for name in metrics:
        await run.store.add_policy_version(run.run_id, name, versions[name], step + 1)


def note_useless(run: Run, sample: Sample, worth: StepAdvantages, step: int) -> None:
    """Note for people which policies no agent called, and which groups the policy itself has ended."""
    # A policy without a call: its pattern matches no agent's name, or its agent is seldom called.
    attempts = (r.attempt_trajectory for r in sample.results if r.attempt_trajectory is not None)
    agents = dict.fromkeys(agent for attempt in attempts for agent in attempt.agents)
    for name in run.config.selection.policies:
        if all(c.policy != name for c in worth.calls):
            run.progress.note(
                f"step {step + 1}: no agent of policy {name!r} was called; agents seen: {', '.join(agents)}"
            )
    skipped = {g: faults for g, faults in hopeless_groups(sample.results).items() if g in worth.flat_groups}
    if skipped:
        causes = Counter(fault.cause for faults in skipped.values() for fault in faults.values())
        rollout, fault = next(iter(next(iter(skipped.values())).items()))
        run.progress.note(
            f"step {step + 1}: {len(skipped)} group(s) skipped, as the policy itself ended every rollout "
            f"({', '.join(f'{n} {cause}' for cause, n in causes.items())}); the first, {rollout}: {fault}"
        )


def note_rates(run: Run, policies: Policies) -> None:
    """Note for people which learning rates nobody has chosen, and what they are."""
    for name, policy in policies:
        if policy.spec.usual_rate:
            of_policy = f" of policy {name!r}" if len(policies) > 1 else ""
            trained = "all weights" if policy.spec.lora is None else "a LoRA adapter"
            info = policy.info
            run.progress.note(
                f"learning_rate={info.learning_rate:g}{of_policy}: the usual one for {trained} of "
                f"{info.parameters / 1e6:.3g}M parameters, {info.trainable_parameters / 1e6:.3g}M of them trained"
            )


def note_shortened(run: Run, metrics: Mapping[str, Mapping[str, float]], step: int) -> None:
    """Note for people which policies `max_kl` held back."""
    for name, of_policy in metrics.items():
        taken = of_policy.get("step_taken", 1.0)
        if taken < 1:
            policy = f" of policy {name!r}" if len(metrics) > 1 else ""
            run.progress.note(
                f"step {step + 1}: the update{policy} went too far (KL {of_policy['step_kl']:.2g} nats per token); "
                f"{taken:.1%} of it was taken (max_kl). If this goes on, lower the learning rate"
            )


def facts(
    sample: Sample,
    worth: StepAdvantages,
    policies: Policies,
    rows: Rows,
    metrics: Mapping[str, Mapping[str, float]],
    learns: Callable[[Seq[TrainingRow]], bool],
) -> dict[str, Any]:
    """What a step adds to `run.history`.

    Args:
        rows: made of the trajectories of `worth`.
        metrics: the learner's, by policy; only of those that were updated.
        learns: whether an update on some rows changes a policy.
    """
    trained = {row.rollout_id for name in metrics for row in rows[name] if learns([row])}
    merged = merge_report(worth.trajectories, [row for policy_rows in rows.values() for row in policy_rows])
    entry: dict[str, Any] = {}
    if sample.results:
        before = {name: version - (name in metrics) for name, version in policies.versions.items()}
        entry = _of_rollouts(sample, worth) | _staleness(worth, before)
    entry |= {
        "train/updated_policies": len(metrics),
        "train/trained_rollouts": len(trained),
        **merge_counts(merged),
    }
    for name, version in policies.versions.items():
        prefix = "" if len(policies) == 1 else f"{name}/"
        entry[f"{prefix}policy_version"] = version
        entry |= {f"{prefix}learner/{k}": v for k, v in metrics.get(name, {}).items()}
    return {**entry, **worth.facts}


def _of_rollouts(sample: Sample, worth: StepAdvantages) -> dict[str, Any]:
    succeeded = [r for r in sample.results if r.error is None]
    rewards = mean_rewards(succeeded, "train")
    trajectories = [r.attempt_trajectory.trajectory for r in succeeded if r.attempt_trajectory is not None]
    tokens = sum(t.call.response_ids.size for trajectory in trajectories for t in trajectory.transitions)
    return {
        **{name: reward for name, reward in rewards.items() if not math.isnan(reward)},  # no rollout need have one
        "train/rollouts": len(sample.results),
        "train/failed_rollouts": len(sample.results) - len(succeeded),
        **failure_counts(sample.results, "train"),
        **fault_counts(succeeded, "train"),
        **costs(succeeded, "train"),
        **group_counts(sample.results, worth),
        "train/resampled_tasks": sample.resampled,
        **{BASELINE + agent: value for agent, value in worth.baselines.items()},
        **rollout_seconds(succeeded, "train"),
        "rollouts_per_second": len(sample.results) / max(1e-9, sample.seconds),
        "tokens_per_second": tokens / max(1e-9, sample.seconds),
        "engine/prompt_tokens_computed": sample.prompt_tokens["computed"],
        "engine/prompt_tokens_reused": sample.prompt_tokens["reused"],
    }


def _staleness(worth: StepAdvantages, versions: Mapping[str, int]) -> dict[str, float]:
    """By how many updates the weights that sampled were older than those that learned, which had `versions`."""
    lags = [0]
    tokens = [0]
    for trajectory in worth.trajectories:
        for call in (transition.call for transition in trajectory.transitions if transition.call.policy in versions):
            ends = [*(first for first, _ in call.versions[1:]), call.response_ids.size]
            lags += [versions[call.policy or ""] - version for _, version in call.versions]
            tokens += [end - first for end, (first, _) in zip(ends, call.versions, strict=True)]
    mean = float(np.dot(lags, tokens)) / max(1, sum(tokens))
    return {"train/staleness": mean, "train/staleness_max": float(max(lags))}


def recorded_baselines(history: Seq[Mapping[str, Any]]) -> dict[str, float]:
    """The running baselines that the last step of a history left, by agent; none before the first step."""
    entry = history[-1] if history else {}
    return {name.removeprefix(BASELINE): value for name, value in entry.items() if name.startswith(BASELINE)}

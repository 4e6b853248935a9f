"""What the results of rollouts say: which succeeded, and their rewards."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from agl.errors import AglError, DatasetError
from agl.mdp.sequence import MergeReport
from agl.mdp.types import Reward
from agl.trainer.objectives.advantages import StepAdvantages
from agl.trainer.report import prices
from agl.trainer.report.statistics import reward_interval
from agl.trainer.run.failures import failure_counts, selecting_fault
from agl.trainer.run.faults import fault_counts
from agl.trainer.runners.protocol import RolloutResult

log = logging.getLogger("agl")

SUSPICIOUS = 100
"""How many times as large as all others a reward is that nobody meant."""


def require_some(results: Sequence[RolloutResult], what: str) -> list[RolloutResult]:
    """The rollouts that succeeded.

    Raises:
        AglError: none did; the error is that of the first one, since they rarely differ.
    """
    succeeded = [r for r in results if r.error is None]
    if succeeded or not results:
        return succeeded
    first = results[0].error
    assert first is not None
    if isinstance(first, AglError):
        raise type(first)(
            f"all {len(results)} rollouts of {what} failed; the first: {first.message}", hint=first.hint, **first.where
        ) from first
    raise first


def mean_rewards(results: Sequence[RolloutResult], mode: str) -> dict[str, float]:
    """The mean rewards of rollouts, for `run.history`.

    Returns:
        "<mode>/reward", the sum of all that counts, and "<mode>/reward/<name>" for each (0 where a rollout did not
        earn it), an agent's own under the agent's name.
    """
    rewarded = [
        r.attempt_trajectory
        for r in results
        if r.attempt_trajectory is not None and r.attempt_trajectory.reward is not None
    ]
    if not rewarded:
        return {f"{mode}/reward": math.nan}
    total = math.fsum(trajectory.reward or 0.0 for trajectory in rewarded)
    *others, largest = sorted(rewarded, key=lambda trajectory: abs(trajectory.reward or 0.0))
    if others and abs(largest.reward or 0.0) > SUSPICIOUS * abs(others[-1].reward or 0.0) > 0:
        log.warning(
            "rollout %s has a reward of %g, all others of its step at most %g: is that meant? "
            "Trainer(reward_range=(low, high)) refuses what is not",
            largest.trajectory.rollout_id,
            largest.reward,
            abs(others[-1].reward or 0.0),
        )
    by_name: dict[str, list[float]] = defaultdict(list)
    for reward in (reward for trajectory in rewarded for reward, _ in trajectory.credited):
        by_name[reward_label(reward)].append(reward.value)
    means = {f"{mode}/reward/{name}": math.fsum(v) / len(rewarded) for name, v in sorted(by_name.items())}
    return {f"{mode}/reward": total / len(rewarded), **means}


def costs(results: Sequence[RolloutResult], mode: str) -> dict[str, float]:
    """What the calls of other models in these rollouts cost, judges' included, as "<mode>/cost_usd": as far as prices
    are known (`agl.trainer.report.prices`), nothing where that is none. Failed attempts are not in it."""
    total = prices.total(s for r in results if r.attempt_trajectory is not None for s in r.attempt_trajectory.elsewhere)
    return {} if total is None else {f"{mode}/cost_usd": total}


def rollout_seconds(results: Sequence[RolloutResult], mode: str) -> dict[str, float]:
    """Where the time of these rollouts went, on average: "<mode>/rollout_seconds/models" and the other parts of
    `SpanIndex.seconds`."""
    attempts = [r.attempt_trajectory.seconds for r in results if r.attempt_trajectory is not None]
    known = [seconds for seconds in attempts if seconds]
    parts = known[0] if known else ()
    return {f"{mode}/rollout_seconds/{part}": sum(s[part] for s in known) / len(known) for part in parts}


def measurement(results: Sequence[RolloutResult], mode: str, what: str) -> dict[str, float]:
    """What a validation, or another measurement, adds to the history.

    Returns:
        `mean_rewards`; "<mode>/reward_low" and "<mode>/reward_high", the 95 % interval of the mean over two tasks or
        more (`statistics.reward_interval`);
        "<mode>/failed_rollouts"; `failure_counts`; `fault_counts`; `costs`.

    Raises:
        AglError: all of them failed; the error is that of the first one.
        UserCodeError: one fault of the reward function has selected those that are left (`selecting_fault`). One of
            the agent is logged: that it fails so often is a result, and evaluations have bounds with all rollouts.
    """
    succeeded = require_some(results, what)
    if (fault := selecting_fault(results, what, kinds=("reward",))) is not None:
        raise fault
    if (fault := selecting_fault(results, what, kinds=("agent",))) is not None:
        log.warning("%s", fault)
    by_task: dict[str, list[float]] = defaultdict(list)
    for result in succeeded:
        if result.attempt_trajectory is not None and result.attempt_trajectory.reward is not None:
            by_task[result.rollout.group].append(result.attempt_trajectory.reward)
    facts = mean_rewards(succeeded, mode)
    if len(by_task) > 1:
        low, high = reward_interval([*by_task.values()])
        facts |= {f"{mode}/reward_low": low, f"{mode}/reward_high": high}
    return (
        facts
        | {f"{mode}/failed_rollouts": len(results) - len(succeeded)}
        | {**failure_counts(results, mode), **fault_counts(succeeded, mode)}
        | costs(succeeded, mode)
    )


def group_counts(results: Sequence[RolloutResult], worth: StepAdvantages) -> dict[str, int]:
    """How many groups a step has, for `run.history`: all of them, those of which no two rollouts are left to compare
    (failed ones included), and those whose returns are all equal.

    A group is that of a task, whichever agents and policies are compared in it.

    Args:
        results: of all rollouts of these groups.
        worth: of those that succeeded.
    """
    groups = {r.rollout.group for r in results}
    succeeded = {r.rollout.group for r in results if r.attempt_trajectory is not None}
    return {
        "train/groups": len(groups),
        "train/dropped_groups": len((groups - succeeded) | worth.dropped_groups),
        "train/zero_variance_groups": len(worth.zero_variance_groups),
    }


def reward_label(reward: Reward) -> str:
    """The name under which a reward is reported: an agent's own has the agent's."""
    if reward.agent is None:
        return reward.name
    return reward.agent if reward.name in ("reward", reward.agent) else f"{reward.agent}/{reward.name}"


def require_tasks(tasks: Sequence[Any], name: str) -> None:
    """Raise `DatasetError` for an empty dataset."""
    if len(tasks) == 0:
        raise DatasetError(f"{name} is empty", hint="give at least one task: any JSON value, usually a dict")


def merge_counts(merged: MergeReport) -> dict[str, int]:
    """What merging saved, for `run.history`: "train/forks", and by cause below it."""
    return {
        "train/calls": merged.calls,
        "train/rows": merged.rows,
        "train/tokens": merged.tokens,
        "train/tokens_unmerged": merged.tokens_unmerged,
        "train/forks": sum(merged.forks.values()),
        **{f"train/forks/{cause}": n for cause, n in sorted(merged.forks.items())},
    }

"""How two policies differ on the same tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from agl.errors import DatasetError
from agl.trainer.evaluation.policy_report import Estimate, EvaluatedRollout, PolicyReport, estimate, mean_of
from agl.trainer.report import statistics


@dataclass(frozen=True, slots=True)
class Flip:
    """A task that more than half of the rollouts solve under one policy, and at most half under the other.

    Attributes:
        task: its index.
        before: success rate of the one policy.
        after: success rate of the other.
        rollouts: the ids of a rollout of either policy that shows it.
    """

    task: int
    before: float
    after: float
    rollouts: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How `after` differs from `before`, task by task.

    Attributes:
        before: the name of the one policy.
        after: the name of the other.
        tasks: how many have rollouts of both that ended.
        success: difference of the success rates, after - before, with its interval.
        success_p: its p-value, of `statistics.sign_flip_test`.
        reward: difference of the mean rewards, with its interval.
        reward_p: its p-value.
        smallest_difference: in success; a smaller one would mostly not have been seen (alpha 0.05, power 0.8).
        gained: tasks that `after` solves and `before` does not.
        lost: tasks that `before` solves and `after` does not.
    """

    before: str
    after: str
    tasks: int
    success: Estimate
    success_p: float
    reward: Estimate
    reward_p: float
    smallest_difference: float
    gained: Sequence[Flip]
    lost: Sequence[Flip]

    @property
    def significant(self) -> bool:
        """Whether the difference in success is larger than chance explains, at 5 %."""
        return self.success_p < 1 - statistics.CONFIDENCE


def compare(before: PolicyReport, after: PolicyReport) -> Comparison:
    """The paired comparison of two policies.

    Raises:
        DatasetError: no task has rollouts of both that ended.
    """
    rows_before = before.by_task()
    rows_after = after.by_task()
    rates: dict[int, tuple[float, float]] = {}
    for task, rollouts in rows_before.items():
        rate_before = mean_of(r.success for r in rollouts)
        rate_after = mean_of(r.success for r in rows_after.get(task, ()))
        if rate_before is not None and rate_after is not None:
            rates[task] = (rate_before, rate_after)
    if not rates:
        raise DatasetError(f"no task has rollouts of both {before.name!r} and {after.name!r} that ended")
    success = np.array([b - a for a, b in rates.values()])
    reward = np.array([_reward(rows_after[task]) - _reward(rows_before[task]) for task in rates])
    unit = 1 / min(before.samples, after.samples)
    low, high = statistics.mean_interval(success, unit)
    if len(rates) > 1:  # of one task it is infinite
        low = max(low, -1.0)
        high = min(high, 1.0)

    def flips(gained: bool) -> list[Flip]:
        found = []
        for task, (a, b) in rates.items():
            if (a > 0.5, b > 0.5) == (not gained, gained):
                shown = (_showing(rows_before[task], not gained), _showing(rows_after[task], gained))
                found.append(Flip(task, a, b, shown))
        return found

    return Comparison(
        before.name,
        after.name,
        len(rates),
        estimate(success, (low, high)),
        statistics.sign_flip_test(success),
        estimate(reward, statistics.mean_interval(reward)),
        statistics.sign_flip_test(reward),
        statistics.smallest_difference(success, unit),
        flips(gained=True),
        flips(gained=False),
    )


def _reward(rollouts: Iterable[EvaluatedRollout]) -> float:
    return mean_of(r.reward for r in rollouts) or 0.0


def _showing(rollouts: Sequence[EvaluatedRollout], success: bool) -> str:
    """The id of a rollout that succeeds, or does not."""
    return next((r.rollout_id for r in rollouts if r.success is success), rollouts[0].rollout_id)

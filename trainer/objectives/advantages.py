"""From trajectories to advantages: returns by the credit rule, compared within the task's group or over the batch.

Invariant: a rollout counts once in its group's statistics, however many calls it made, and statistics are computed
before anything is dropped; what is dropped is a whole group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agl.credit import Credit, Level, Leveled, levels
from agl.errors import ConfigError
from agl.mdp.types import Trajectory, Transition
from agl.trainer.objectives import Estimator
from agl.trainer.objectives.estimators import group_statistics, leave_one_out, relative, whiten

GROUPED = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that compare the rollouts of a task with each other, so that one alone says nothing."""

Shaping = Callable[[Transition], float]
"""What is added to a call's return, such as a penalty for its length."""

FLAT = "its group came to the same in every rollout (dynamic sampling)"
"""Why a call that could be trained was left out of its step."""


@dataclass(frozen=True, slots=True)
class ScoredCall:
    """A call's numbers, as `TrainedCall` records them."""

    call_id: str
    rollout_id: str
    policy: str | None
    reward: float
    return_: float
    advantage: float
    dropped: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A step's trajectories with their advantages.

    Attributes:
        kept: trajectories to train, one per rollout and policy, without the calls that were dropped.
        advantages: call id -> advantage, for all calls; with "gae", their returns, which the learner takes from there.
        calls: every call's numbers, dropped ones included.
        dropped_groups: comparisons of a task, policy and agent with fewer than two rollouts left.
        zero_variance_groups: those in which every rollout came to the same.
        flat: the tasks' groups in which no call has anything to learn from.
    """

    kept: tuple[Trajectory, ...]
    advantages: Mapping[str, float]
    calls: tuple[ScoredCall, ...]
    dropped_groups: int
    zero_variance_groups: int
    flat: frozenset[str]

    def of(self, policy: str) -> tuple[Trajectory, ...]:
        """The trajectories that train one policy."""
        return tuple(t for t in self.kept if t.policy == policy)

    def without_flat(self) -> Scored:
        """Without the groups that have nothing to learn from."""
        groups = {t.rollout_id: t.group for t in self.kept}
        calls = tuple(
            replace(c, dropped=c.dropped or FLAT) if groups.get(c.rollout_id) in self.flat else c for c in self.calls
        )
        return replace(self, kept=tuple(t for t in self.kept if t.group not in self.flat), calls=calls)


@dataclass(slots=True, eq=False)
class _Entry:
    """A call on its way to an advantage."""

    rollout: int
    transition: Transition
    key: Hashable
    value: float
    advantage: float = 0.0
    alone: bool = False
    level: bool = False


def score(
    trajectories: Sequence[Trajectory],
    credit: Credit,
    *,
    estimator: Estimator = "grpo",
    normalize_std: bool = True,
    shaping: Shaping | None = None,
) -> Scored:
    """Advantages of every call of a step.

    With r a call's return, and its group the calls of the same task, policy and agent, in whose statistics a rollout
    enters once, with the mean of its calls:

    - "grpo": (r - mean of the group) / standard deviation of the group.
    - "rloo": r - mean of the group's other rollouts.
    - "reinforce_plus_plus": r, whitened over the trained tokens of the policy.
    - "reinforce_plus_plus_baseline": r - mean of the group, whitened likewise.
    - "gae": r itself; the learner's value head turns it into advantages token by token.

    Args:
        trajectories: of one step, each with the transitions of every policy.
        credit: trajectory -> one return per call.
        normalize_std: False leaves out the division of "grpo".
        shaping: added to the returns.

    Raises:
        RewardError: a return that is not finite, or not one per call.
        ConfigError: a credit rule with comparisons of its own, and an estimator that makes none.
    """
    if isinstance(credit, Leveled) and estimator not in ("grpo", "rloo"):
        raise ConfigError(
            f"credit {credit!r} compares calls with each other, but {estimator!r} does not",
            hint="use it with GRPO or RLOO",
        )
    by_level = [levels(credit, t) for t in trajectories]
    shaped = [[shaping(x) if shaping else 0.0 for x in t.transitions] for t in trajectories]
    total: dict[str, float] = defaultdict(float)
    first: list[_Entry] = []
    for n in range(len(by_level[0]) if by_level else 0):
        entries = [
            _Entry(i, x, (t.group, x.call.policy, by_level[i][n].keys[k]), by_level[i][n].returns[k] + shaped[i][k])
            for i, t in enumerate(trajectories)
            for k, x in enumerate(t.transitions)
        ]
        _compare(entries, estimator, normalize_std)
        for entry in entries:
            total[entry.transition.call.id] += by_level[entry.rollout][n].weight * entry.advantage
        first = first or entries
    by_call = {e.transition.call.id: e for e in first}
    return _report(trajectories, _returned(trajectories, credit, by_level, shaped), total, by_call, estimator)


def _compare(entries: Sequence[_Entry], estimator: Estimator, normalize_std: bool) -> None:
    """Set the advantages of one comparison."""
    cells: dict[tuple[Hashable, int], list[_Entry]] = defaultdict(list)
    for entry in entries:
        cells[entry.key, entry.rollout].append(entry)
    keys = [key for key, _ in cells]
    own = [_mean([e.value for e in members]) for members in cells.values()]
    means, deviations = group_statistics(own, keys)
    sizes: dict[Hashable, int] = defaultdict(int)
    for key in keys:
        sizes[key] += 1
    for (key, _), members, mine, mean, deviation in zip(cells, cells.values(), own, means, deviations, strict=True):
        values, size = [e.value for e in members], sizes[key]
        alone = size < 2 and estimator in GROUPED
        if alone:
            advantages = np.zeros(len(values), dtype=np.float32)
        elif estimator == "grpo":
            # Rollouts that came to the same still differ call by call under some credit rules: nothing to divide by.
            advantages = relative(values, mean, deviation, normalize_std=normalize_std and deviation > 0)
        elif estimator == "rloo":
            advantages = leave_one_out(values, mine, mean, size)
        elif estimator == "reinforce_plus_plus_baseline":
            advantages = relative(values, mean, deviation, normalize_std=False)
        else:
            advantages = np.asarray(values, dtype=np.float64)
        for entry, advantage in zip(members, advantages.tolist(), strict=True):
            entry.advantage, entry.alone, entry.level = advantage, alone, bool(deviation == 0)
    if estimator.startswith("reinforce"):
        for policy in {e.transition.call.policy for e in entries}:
            trained = [e for e in entries if e.transition.call.policy == policy and e.transition.trainable]
            tokens = [e.transition.call.response_ids.size for e in trained]
            for entry, advantage in zip(trained, whiten([e.advantage for e in trained], tokens).tolist(), strict=True):
                entry.advantage = advantage


def _returned(
    trajectories: Sequence[Trajectory],
    credit: Credit,
    by_level: Sequence[Sequence[Level]],
    shaped: Sequence[Sequence[float]],
) -> list[list[float]]:
    """What is shown as each call's return: with several comparisons, that of the rule itself."""
    if isinstance(credit, Leveled):
        return [list(credit(t)) for t in trajectories]
    return [
        [r + s for r, s in zip(x[0].returns, extra, strict=True)] for x, extra in zip(by_level, shaped, strict=True)
    ]


def _report(
    trajectories: Sequence[Trajectory],
    returned: Sequence[Sequence[float]],
    advantages: Mapping[str, float],
    by_call: Mapping[str, _Entry],
    estimator: Estimator,
) -> Scored:
    kept: list[Trajectory] = []
    calls: list[ScoredCall] = []
    final: dict[str, float] = {}
    for trajectory, own in zip(trajectories, returned, strict=True):
        for transition, value in zip(trajectory.transitions, own, strict=True):
            call = transition.call
            reason = None if transition.trainable else f"its answer was {call.finish_reason}"
            if by_call[call.id].alone:
                reason = "its group has no other rollout to compare with"
            final[call.id] = 0.0 if by_call[call.id].alone else float(np.float32(advantages[call.id]))
            calls.append(
                ScoredCall(
                    call.id, trajectory.rollout_id, call.policy, transition.reward, value, final[call.id], reason
                )
            )
        for policy in trajectory.policies:
            mine = trajectory.of(policy)
            left = tuple(t for t in mine.transitions if not by_call[t.call.id].alone)
            if left:
                kept.append(replace(mine, transitions=left))
    groups: dict[Hashable, _Entry] = {e.key: e for e in by_call.values()}
    dropped = sum(e.alone for e in groups.values())
    level = sum(e.level and not e.alone for e in groups.values()) if estimator in GROUPED else 0
    learns = {t.group for t in trajectories if any(final[x.call.id] for x in t.transitions if x.trainable)}
    return Scored(tuple(kept), final, tuple(calls), dropped, level, frozenset({t.group for t in trajectories} - learns))


def _mean(values: Sequence[float]) -> float:
    """The mean, exactly their value where all are equal: a rollout's number of calls must not show in its rounding."""
    return float(np.clip(np.mean(values), min(values), max(values)))

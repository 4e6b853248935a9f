"""From trajectories to advantages: returns by the credit rule, compared within the task's group or over the batch.

Invariant: a rollout counts once in its group's statistics, however many calls it made, and statistics are computed
before anything is dropped; what is dropped is a whole group.

Shapes in names: R rollouts, G rollouts of one group, C calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from agl.credit import Credit, Leveled, levels
from agl.errors import ConfigError, RewardError
from agl.mdp.types import FloatArray, Trajectory, Transition
from agl.trainer.objectives import Estimator, EstimatorFunction
from agl.trainer.processes.functions import function_name

FloatArray64 = npt.NDArray[np.float64]

GROUPED = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that compare the rollouts of a task with each other, which needs at least two."""

Shaping = Callable[[Transition], float]
"""What is added to a call's return, such as a penalty for its length."""

FLAT = "every rollout of its group had the same return (dynamic sampling)"
"""Why a trainable call was left out of its step."""


@dataclass(frozen=True, slots=True)
class CallAdvantage:
    """A call's reward, return and advantage, as `TrainedCall` records them; `dropped` says why it is not trained."""

    call_id: str
    rollout_id: str
    policy: str | None
    reward: float
    return_: float
    advantage: float
    dropped: str | None


@dataclass(frozen=True, slots=True, eq=False)
class StepAdvantages:
    """A step's trajectories with their advantages.

    Attributes:
        trajectories: those to train, one per rollout and policy, without the calls that were dropped.
        advantages: call id -> advantage, for all calls; with "gae", their returns, from which the learner's value head
            makes the advantages.
        calls: the numbers of every call, dropped ones included.
        dropped_groups: the tasks' groups of which no call has a call of another rollout to be compared with.
        zero_variance_groups: those in which all calls that are compared with each other have the same return.
        flat_groups: those in which no call has anything to learn from, for these reasons or others.
        baselines: of "running_baseline", agent -> mean of its returns as it is after this step, for the next one.
        pairs: of DPO, the better rollout's id -> the worse one's.
        facts: others of the step, for its history.
    """

    trajectories: tuple[Trajectory, ...]
    advantages: Mapping[str, float]
    calls: tuple[CallAdvantage, ...]
    dropped_groups: frozenset[str]
    zero_variance_groups: frozenset[str]
    flat_groups: frozenset[str]
    baselines: Mapping[str, float] = field(default_factory=dict)
    pairs: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)

    def of(self, policy: str) -> tuple[Trajectory, ...]:
        """The trajectories that train one policy."""
        return tuple(t for t in self.trajectories if t.policy == policy)

    def without_flat(self) -> StepAdvantages:
        """Without the groups that have nothing to learn from."""
        flat = {t.rollout_id for t in self.trajectories if t.group in self.flat_groups}
        return replace(
            self,
            trajectories=tuple(t for t in self.trajectories if t.rollout_id not in flat),
            calls=tuple(replace(c, dropped=c.dropped or FLAT) if c.rollout_id in flat else c for c in self.calls),
        )


@dataclass(slots=True, eq=False)
class _Entry:
    """A call in one comparison.

    Attributes:
        rollout: index of its trajectory.
        key: the group that it is compared in.
        value: its return.
        alone: whether its group has no other rollout.
        differs: whether its return is another than its group's.
    """

    rollout: int
    transition: Transition
    key: Hashable
    value: float
    advantage: float = 0.0
    alone: bool = False
    differs: bool = False


def compute_advantages(
    trajectories: Sequence[Trajectory],
    credit: Credit,
    *,
    estimator: Estimator | EstimatorFunction = "grpo",
    normalize_std: bool = True,
    shaping: Shaping | None = None,
    baselines: Mapping[str, float] | None = None,
    baseline_decay: float = 0.9,
) -> StepAdvantages:
    """Advantages of every call of a step.

    With r a call's return, and its group the calls of the same task, policy and agent, in whose statistics a rollout
    enters once, with the mean of its calls:

    - "grpo": (r - mean of the group) / standard deviation of the group.
    - "rloo": r - mean of the group's other rollouts.
    - "reinforce_plus_plus": r, whitened over the trained tokens of the policy.
    - "reinforce_plus_plus_baseline": r - mean of the group, whitened the same way.
    - "running_baseline": r - a running mean of the agent's returns over the steps before this one, of all tasks; in the
      first step that the agent is in, r - mean of that step. So a game's roles are each compared with themselves, and
      the baseline does not depend on what it is subtracted from. Source: role-conditioned advantage estimation, SPIRAL,
      arXiv 2506.24119, which updates the mean after each game where this does after each step.
    - "gae": r itself; the learner's value head turns it into advantages token by token.
    - a function: what it returns for the r, groups and rollouts of all calls, trainable or not.

    Args:
        trajectories: of one step, each with the transitions of every policy.
        credit: trajectory -> one return per call.
        normalize_std: False leaves out the division of "grpo".
        shaping: added to the returns.
        baselines: of "running_baseline", those that the step before left (`StepAdvantages.baselines`); None at first.
        baseline_decay: the share of its old value that a baseline keeps in a step, in [0, 1).

    Raises:
        RewardError: a return that is not finite, or not one per call.
        ConfigError: a credit rule that makes its own comparisons, and an estimator that makes none; or the estimator is
            a function, and raised or returned something else than a finite number for each call.
    """
    if isinstance(credit, Leveled) and not callable(estimator) and estimator not in ("grpo", "rloo"):
        raise ConfigError(
            f"credit {credit!r} compares calls with each other, but {estimator!r} does not",
            hint="use it with GRPO or RLOO",
        )
    credit_levels = [levels(credit, t) for t in trajectories]
    shaped = [[shaping(x) if shaping else 0.0 for x in t.transitions] for t in trajectories]
    total: dict[str, float] = defaultdict(float)
    first: list[_Entry] = []
    differing: set[str] = set()
    after = dict(baselines or {})
    for n in range(len(credit_levels[0]) if credit_levels else 0):
        entries = [
            _Entry(
                i,
                x,
                level.keys[k] if estimator == "running_baseline" else (t.group, x.call.policy, level.keys[k]),
                level.returns[k] + shaped[i][k],
            )
            for i, t in enumerate(trajectories)
            for level in [credit_levels[i][n]]
            for k, x in enumerate(t.transitions)
        ]
        _compare(entries, estimator, normalize_std)
        if estimator == "running_baseline":
            after |= _subtract_baselines(entries, after, baseline_decay)
        for entry in entries:
            total[entry.transition.call.id] += credit_levels[entry.rollout][n].weight * entry.advantage
        differing |= {trajectories[entry.rollout].group for entry in entries if entry.differs}
        first = first or entries
    if isinstance(credit, Leveled):
        # With several comparisons, a call's return is that of the rule itself.
        returns = [list(credit(t)) for t in trajectories]
    else:
        returns = [
            [r + s for r, s in zip(rule[0].returns, shape, strict=True)]
            for rule, shape in zip(credit_levels, shaped, strict=True)
        ]
    by_call = {e.transition.call.id: e for e in first}
    unequal = differing if estimator in GROUPED else {t.group for t in trajectories}
    return replace(_summarise(trajectories, returns, total, by_call, unequal), baselines=after)


def _compare(entries: Sequence[_Entry], estimator: Estimator | EstimatorFunction, normalize_std: bool) -> None:
    """Set the advantages of one comparison."""
    cells: dict[tuple[Hashable, int], list[_Entry]] = defaultdict(list)
    for entry in entries:
        cells[entry.key, entry.rollout].append(entry)
    keys = [key for key, _ in cells]
    rollout_returns = [_mean([e.value for e in members]) for members in cells.values()]
    means, deviations = group_statistics(rollout_returns, keys)
    sizes: dict[Hashable, int] = defaultdict(int)
    for key in keys:
        sizes[key] += 1
    for key, members, rollout_mean, mean, deviation in zip(
        keys, cells.values(), rollout_returns, means, deviations, strict=True
    ):
        values = [e.value for e in members]
        size = sizes[key]
        alone = size < 2 and estimator in GROUPED
        if alone:
            advantages = np.zeros(len(values), dtype=np.float32)
        elif estimator == "grpo":
            # Rollouts with the same return still differ call by call under some credit rules: nothing to divide by.
            advantages = relative(values, mean, deviation, normalize_std=normalize_std and deviation > 0)
        elif estimator == "rloo":
            advantages = leave_one_out(values, rollout_mean, mean, size)
        elif estimator == "reinforce_plus_plus_baseline":
            advantages = relative(values, mean, deviation, normalize_std=False)
        else:
            advantages = np.asarray(values, dtype=np.float64)
        for entry, advantage in zip(members, advantages.tolist(), strict=True):
            entry.advantage = advantage
            entry.alone = alone
            entry.differs = advantage != 0
    if callable(estimator):
        number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        groups_C = np.array([number[e.key] for e in entries], dtype=np.int64)
        rollouts_C = np.array([e.rollout for e in entries], dtype=np.int64)
        returns_C = np.array([e.value for e in entries], dtype=np.float64)
        for entry, advantage in zip(entries, estimate(estimator, returns_C, groups_C, rollouts_C), strict=True):
            entry.advantage = advantage
    elif estimator.startswith("reinforce"):
        for policy in {e.transition.call.policy for e in entries}:
            trained = [e for e in entries if e.transition.call.policy == policy and e.transition.trainable]
            tokens = [e.transition.call.response_ids.size for e in trained]
            for entry, advantage in zip(trained, whiten([e.advantage for e in trained], tokens).tolist(), strict=True):
                entry.advantage = advantage


def _subtract_baselines(entries: Sequence[_Entry], baselines: Mapping[str, float], decay: float) -> dict[str, float]:
    """Take each role's baseline off its advantages; returns the baselines after this step.

    A role is an entry's key: with a credit rule that has no comparisons of its own, the agent.
    """
    cells: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        cells[str(entry.key)][entry.rollout].append(entry.value)
    means = {role: _mean([_mean(values) for values in rollouts.values()]) for role, rollouts in cells.items()}
    for entry in entries:
        role = str(entry.key)
        entry.advantage = entry.value - baselines.get(role, means[role])
    return {role: decay * baselines.get(role, mean) + (1 - decay) * mean for role, mean in means.items()}


def _summarise(
    trajectories: Sequence[Trajectory],
    returns: Sequence[Sequence[float]],
    totals: Mapping[str, float],
    by_call: Mapping[str, _Entry],
    unequal: Set[str],
) -> StepAdvantages:
    """Args: unequal: the groups whose returns are not all equal."""
    to_train: list[Trajectory] = []
    calls: list[CallAdvantage] = []
    advantages: dict[str, float] = {}
    for trajectory, call_returns in zip(trajectories, returns, strict=True):
        for transition, return_ in zip(trajectory.transitions, call_returns, strict=True):
            call = transition.call
            dropped = None if transition.trainable else f"its answer was {call.finish_reason}"
            advantage = float(np.float32(totals[call.id]))
            if by_call[call.id].alone:
                dropped = "its group has no other rollout to compare with"
                advantage = 0.0
            advantages[call.id] = advantage
            calls.append(
                CallAdvantage(
                    call.id, trajectory.rollout_id, call.policy, transition.reward, return_, advantage, dropped
                )
            )
        for policy in trajectory.policies:
            part = trajectory.of(policy)
            compared = tuple(t for t in part.transitions if not by_call[t.call.id].alone)
            if compared:
                to_train.append(replace(part, transitions=compared))
    groups = {t.group for t in trajectories}
    compared_groups = {t.group for t in to_train}
    learns = {t.group for t in trajectories if any(advantages[x.call.id] for x in t.transitions if x.trainable)}
    return StepAdvantages(
        tuple(to_train),
        advantages,
        tuple(calls),
        dropped_groups=frozenset(groups - compared_groups),
        zero_variance_groups=frozenset(compared_groups - unequal),
        flat_groups=frozenset(groups - learns),
    )


def _mean(values: Sequence[float]) -> float:
    """The mean, exactly their value where all are equal: a rollout's number of calls must not show in its rounding."""
    return float(np.clip(np.mean(values), min(values), max(values)))


# -- estimators ------------------------------------------------------------------------------------------------------


def estimate(
    function: EstimatorFunction,
    returns_C: FloatArray64,
    groups_C: npt.NDArray[np.int64],
    rollouts_C: npt.NDArray[np.int64],
) -> list[float]:
    """The advantages of a user's function.

    Raises:
        ConfigError: it raised, or returned something else than a finite number for each call.
    """
    name = function_name(function)
    try:
        advantages = np.asarray(function(returns_C, groups_C, rollouts_C), dtype=np.float64)
    except Exception as error:
        raise ConfigError(
            f"adv_estimator {name} raised {type(error).__name__}: {error}",
            hint="it is called with returns, groups' numbers and rollouts' numbers, an array [calls] each",
        ) from error
    fault = None
    if advantages.shape != returns_C.shape:
        fault = f"an array {list(advantages.shape)}"
    elif not np.isfinite(advantages).all():
        bad = int(np.flatnonzero(~np.isfinite(advantages))[0])
        fault = f"{advantages[bad]} for a return of {returns_C[bad]:g} (call {bad})"
    if fault:
        raise ConfigError(
            f"adv_estimator {name} returned {fault} of {returns_C.size} calls", hint="return a finite number for each"
        )
    return advantages.tolist()


def try_estimator(function: EstimatorFunction) -> None:
    """Call a user's estimator with five calls of two groups, so that a mistake in it is found before a model is loaded.

    Raises:
        ConfigError: what `estimate` raises.
    """
    returns_C = np.array([1.0, 0.0, 0.0, 0.5, 0.5])
    estimate(function, returns_C, np.array([0, 0, 0, 1, 1]), np.array([0, 1, 1, 2, 3]))


def group_statistics(
    returns_R: FloatArray64 | Sequence[float], groups_R: Sequence[Hashable]
) -> tuple[FloatArray64, FloatArray64]:
    """Mean and sample standard deviation (R - 1) of each rollout's group.

    A group of one has nothing to compare with; its mean is taken as 0 and its deviation as 1, as in verl. Where all
    returns of a group are equal, its mean is that return and its deviation 0, free of rounding.

    Args:
        returns_R: float64, one per rollout.
        groups_R: the group of each.

    Returns:
        (mean, deviation), float64 [R] each.

    Raises:
        RewardError: a return is not finite.
        ValueError: not one group per return.
    """
    values_R = np.asarray(returns_R, dtype=np.float64)
    if values_R.ndim != 1 or values_R.size != len(groups_R):
        raise ValueError(f"returns of shape {values_R.shape} but {len(groups_R)} groups")
    if not np.isfinite(values_R).all():
        bad = int(np.flatnonzero(~np.isfinite(values_R))[0])
        raise RewardError(
            f"the return of rollout {bad} of {values_R.size} is {values_R[bad]}",
            hint="rewards must be finite numbers: check the reward function for this group's task",
            group=groups_R[bad],
        )
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups_R):
        members.setdefault(group, []).append(i)
    means_R = np.zeros_like(values_R)
    deviations_R = np.ones_like(values_R)
    for rollouts in members.values():
        values_G = values_R[rollouts]
        if len(rollouts) > 1:
            equal = (values_G == values_G[0]).all()
            means_R[rollouts] = values_G[0] if equal else values_G.mean()
            deviations_R[rollouts] = 0.0 if equal else values_G.std(ddof=1)
    return means_R, deviations_R


def relative(
    values: FloatArray64 | Sequence[float],
    mean: FloatArray64 | float,
    deviation: FloatArray64 | float,
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> FloatArray:
    """(value - mean) / (deviation + epsilon), float32 of the shape of `values`; without the division where
    `normalize_std` is False (Dr. GRPO, arXiv 2503.20783).

    Source: GRPO, arXiv 2402.03300, eq. 4, with the sample standard deviation of `group_statistics`, as verl's
    `compute_grpo_outcome_advantage`.
    """
    centred = np.asarray(values, dtype=np.float64) - mean
    return np.asarray(centred / (deviation + epsilon) if normalize_std else centred, dtype=np.float32)


def leave_one_out(
    values: FloatArray64 | Sequence[float], rollout_mean: float, mean: FloatArray64 | float, size: int
) -> FloatArray:
    """value - the mean of the group's other rollouts, float32 of the shape of `values`.

    Args:
        values: returns of one rollout's calls.
        rollout_mean: their mean, with which the rollout counts in its group.
        mean: of the group.
        size: rollouts in the group, at least 2.

    Source: RLOO, arXiv 2402.14740, eq. 5; with one call per rollout, verl's `compute_rloo_outcome_advantage`.
    """
    others = (size * np.asarray(mean, dtype=np.float64) - rollout_mean) / (size - 1)
    return np.asarray(np.asarray(values, dtype=np.float64) - others, dtype=np.float32)


def whiten(values_C: FloatArray64 | Sequence[float], tokens_C: Sequence[int] | npt.NDArray[np.int64]) -> FloatArray:
    """(value - mean) / sqrt(variance + 1e-8), float32 [C], over the tokens of a batch.

    Args:
        values_C: one per call, which all of its tokens share.
        tokens_C: how many tokens the call has.

    Source: REINFORCE++, arXiv 2501.03262, eq. 3; verl's `masked_whiten` (sample variance, N - 1).
    """
    x_C = np.asarray(values_C, dtype=np.float64)
    n_C = np.asarray(tokens_C, dtype=np.float64)
    total = n_C.sum()
    if total <= 1:
        return np.zeros(x_C.shape, dtype=np.float32)
    mean = (n_C * x_C).sum() / total
    variance = (n_C * (x_C - mean) ** 2).sum() / (total - 1)
    return np.asarray((x_C - mean) / np.sqrt(variance + 1e-8), dtype=np.float32)

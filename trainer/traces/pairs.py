"""Preference pairs: two rollouts of one task, one better than the other; a pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from agl.errors import ConfigError, NoTrainableDataError
from agl.mdp.builder import AttemptTrajectory
from agl.mdp.conditions import Where, condition, reward
from agl.mdp.selection import AgentFilter, select
from agl.mdp.types import Trajectory, Transition
from agl.trainer.traces.choice import Candidate, call_digest, check_per_task, task_key, unfit


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two rollouts of one task, as one policy's trajectories.

    Attributes:
        policy: whose calls they are.
        task: of both; their key in `task_key`.
        chosen, rejected: the better and the worse one, with the calls to train. A call that both made, with the same
            prompt and answer, is in both: what it adds to one side of DPO's difference it takes from the other.
        margin: difference of their rewards, > 0.
        candidates: the better and the worse rollout, whole.
    """

    policy: str
    task: str
    chosen: Trajectory
    rejected: Trajectory
    margin: float
    candidates: tuple[Candidate, Candidate]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs, in the order in which their tasks appeared, the widest margin of a task first.

    Attributes:
        pairs: one per two rollouts and policy.
        counts: "rollouts", "rollouts_paired", "rollouts_left_out/<reason>", "tasks", "pairs".
    """

    pairs: tuple[Pair, ...]
    counts: Mapping[str, int]

    def __str__(self) -> str:
        counts = self.counts
        return (
            f"{counts['pairs']} pairs of {counts['rollouts_paired']} of {counts['rollouts']} rollouts of "
            f"{counts['tasks']} tasks"
        )

    def require(self) -> Pairs:
        """Itself, if there is a pair.

        Raises:
            NoTrainableDataError: there is none; says what was seen.
        """
        if self.pairs:
            return self
        reasons = ", ".join(f"{n} {k.rpartition('/')[2]}" for k, n in self.counts.items() if "left_out/" in k)
        raise NoTrainableDataError(
            f"no two of {self.counts['rollouts']} rollouts of {self.counts['tasks']} tasks make a pair ({reasons})",
            hint="a pair is two rollouts of one task with different rewards; sample each task several times, or "
            "choose a smaller margin",
        )


def pairs(
    candidates: Iterable[Candidate],
    *,
    where: Where = None,
    agents: AgentFilter = None,
    per_task: int | None = None,
    margin: float = 0.0,
    by: Callable[[AttemptTrajectory], float | None] | None = None,
) -> Pairs:
    """Pairs of rollouts of the same task: the best with the worst, the second best with the second worst, and so on.

    Each rollout is in one pair at most, each pair's rewards differ, by at least `margin`. Of equal rewards the older
    rollout counts as the better one. Rollouts of a task that made the same calls count once. Calls that were cut,
    cancelled or failed, or have a bad reward of their own, are not trained on the better side; on the worse side only
    those without tokens are left out.

    Args:
        candidates: in order of creation. From results of rollouts in memory: `Candidate(result.attempt_trajectory,
            result.rollout.task, result.rollout.created_at)` for each that succeeded.
        where: which rollouts may be the better one; never one that a policy itself has ended.
        agents: whose calls.
        per_task: maximum number of pairs of a task; None for all.
        margin: smallest difference of the rewards.
        by: the reward that is compared; the total, `agl.reward()`, if None. Rollouts without it are in no pair.

    Raises:
        ConfigError: an option has an impossible value.
        NoAgentMatchedError: some of `agents` made calls, and others are nobody's name.
    """
    check_per_task(per_task)
    if not isinstance(margin, int | float) or isinstance(margin, bool) or not margin >= 0:
        raise ConfigError(f"margin= is {margin!r}", hint="the smallest difference of two rewards, from 0 on")
    if by is not None and not callable(by):
        raise ConfigError(f"by= is {by!r}", hint='the reward that is compared, such as agl.reward("correct")')
    fulfils = condition(where)
    compared = by or reward()
    selection = None if agents is None else select(agents)
    counts: Counter[str] = Counter(rollouts=0, rollouts_paired=0, tasks=0, pairs=0)
    tasks: dict[str, dict[tuple[bytes, ...], _Side]] = {}
    candidates = list(candidates)
    if selection is not None:
        agents = [agent for candidate in candidates for agent in candidate.attempt.agents]
        selection = selection.knowing(agents)
        if any(map(selection.policy_for, agents)):
            selection.require_matched(agents, f"in {len(candidates)} rollouts")
    for number, candidate in enumerate(candidates):
        counts["rollouts"] += 1
        value = compared(candidate.attempt)
        if value is None:
            counts["rollouts_left_out/without this reward"] += 1
            continue
        transitions = tuple(
            t
            for t in candidate.attempt.trajectory.transitions
            if t.trainable and (selection is None or selection.policy_for(t.call.agent) is not None)
        )
        if not transitions:
            counts["rollouts_left_out/without a call to train"] += 1
            continue
        side = _Side(value, candidate.created_at, number, candidate, transitions)
        rollouts = tasks.setdefault(task_key(candidate.task), {})
        same = rollouts.get(side.digest)
        if same is not None:
            counts["rollouts_left_out/duplicate"] += 1
        if same is None or side.rank < same.rank:
            rollouts[side.digest] = side

    found: list[Pair] = []
    for task, rollouts in tasks.items():
        counts["tasks"] += 1
        ranked = sorted(rollouts.values(), key=lambda side: side.rank)
        attempts = [(side, side.candidate.attempt) for side in ranked]
        better = [side for side, of in attempts if of.fault is None and (fulfils is None or fulfils(of))]
        used: set[int] = set()
        n_pairs = 0
        for high in better:
            low = next((side for side in reversed(ranked) if side.number not in used), None)
            full = per_task is not None and n_pairs >= per_task
            if full or low is None or high.number in used:
                break
            if high.value <= low.value or high.value - low.value < margin:
                break
            made = _made(task, high, low)
            used |= {high.number, low.number}
            if made:
                n_pairs += 1
                found += made
        counts["rollouts_paired"] += 2 * n_pairs
        counts["rollouts_left_out/without a partner"] += len(rollouts) - 2 * n_pairs
    counts["pairs"] = len(found)
    return Pairs(tuple(found), {name: n for name, n in counts.items() if n or "left_out/" not in name})


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    value: float
    created_at: float
    number: int
    candidate: Candidate
    transitions: tuple[Transition, ...]

    @property
    def rank(self) -> tuple[float, float, int]:
        """The least is the best."""
        return -self.value, self.created_at, self.number

    @property
    def digest(self) -> tuple[bytes, ...]:
        return tuple(call_digest(t.call) for t in self.transitions)


def _made(task: str, high: _Side, low: _Side) -> list[Pair]:
    """One pair per policy that has calls on both sides."""
    calls = [t.call for t in high.transitions]
    fit = tuple(t for t in high.transitions if unfit(t, calls) is None)
    chosen = replace(high.candidate.attempt.trajectory, transitions=fit)
    rejected = replace(low.candidate.attempt.trajectory, transitions=low.transitions)
    return [
        Pair(
            policy,
            task,
            chosen.of(policy),
            rejected.of(policy),
            high.value - low.value,
            (high.candidate, low.candidate),
        )
        for policy in chosen.policies
        if policy in rejected.policies
    ]

"""Chooses the rollouts and calls to imitate, by rewards, agents, tasks and completeness; pure functions.

Invariant: every call that was seen is either trained or counted under the reason why not. A call that is left out stays
in the prompts of the calls that continue it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agl.errors import ConfigError, NoTrainableDataError
from agl.mdp.builder import AttemptTrajectory
from agl.mdp.conditions import Where, condition
from agl.mdp.selection import AgentFilter, Selection, select
from agl.mdp.types import Call, Trajectory, Transition

_OTHERS = "of rollouts left out"

Weight = Callable[[AttemptTrajectory], "float | None"]
"""The weight of a rollout's calls in the loss, >= 0; `agl.reward("score")` is one."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A rollout that may be imitated.

    Attributes:
        attempt: its last attempt, which succeeded.
        task: of the rollout; tasks are the same if their JSON is.
        created_at: when it was enqueued, seconds since the epoch.
        retokenised: ids of the calls whose tokens were made from texts.
        refused: reason -> number of calls for which no tokens could be made; they are not in `attempt`.
    """

    attempt: AttemptTrajectory
    task: Any
    created_at: float = 0.0
    retokenised: frozenset[str] = frozenset()
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def n_calls(self) -> int:
        """Number of calls, failed and refused ones included."""
        return self.attempt.n_calls + len(self.attempt.failed_calls) + sum(self.refused.values())


@dataclass(frozen=True, slots=True)
class RewardRange:
    """The rewards of one name: how many rollouts have one, the lowest, mean and highest of them."""

    n: int
    lowest: float
    mean: float
    highest: float

    def add(self, value: float) -> RewardRange:
        """The range with one more reward."""
        n = self.n + 1
        return RewardRange(n, min(self.lowest, value), self.mean + (value - self.mean) / n, max(self.highest, value))

    def __str__(self) -> str:
        return f"{self.lowest:g} to {self.highest:g}, mean {self.mean:.4g}, of {self.n}"


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What is imitated.

    Attributes:
        trajectories: one per rollout and policy, with the calls to train alone, in the order of the candidates;
            `agl.mdp.sequence.merge` takes them. Their policy is that of the calls.
        weights: call id -> weight of its tokens in the loss, > 0.
        counts: "rollouts", "rollouts_kept" and "rollouts_left_out/<reason>"; "calls", "calls_kept",
            "calls_left_out/<reason>"; "calls_retokenised", those of the kept calls whose tokens were made from texts.
        rewards: name -> range of all rollouts that were seen; "reward" is the total.
        where: the condition, as text.
    """

    trajectories: tuple[Trajectory, ...]
    weights: Mapping[str, float]
    counts: Mapping[str, int]
    rewards: Mapping[str, RewardRange]
    where: str = ""

    def require(self) -> Chosen:
        """Itself, if there is a call to train.

        Raises:
            NoTrainableDataError: there is none; says how many rollouts were seen, their rewards, and the reasons.
        """
        if self.trajectories:
            return self
        seen = self.counts["rollouts"]
        if not seen:
            raise NoTrainableDataError("there is no rollout to choose from", hint="agl trace ls shows those of a store")
        reasons = ", ".join(
            f"{n} {name.rpartition('left_out/')[2]}"
            for name, n in self.counts.items()
            if "left_out/" in name and not name.endswith(_OTHERS)
        )
        rewards = "; ".join(f"{name}: {values}" for name, values in self.rewards.items()) or "none has any"
        raise NoTrainableDataError(
            f"nothing is left of {seen} rollouts to train on ({reasons}). Their rewards: {rewards}",
            hint=f"where= is {self.where or 'not set'}; choose what some of them fulfil, or record more rollouts",
        )


def choose(
    candidates: Iterable[Candidate],
    *,
    where: Where = None,
    agents: AgentFilter = None,
    per_task: int | None = None,
    weight: Weight | None = None,
) -> Chosen:
    """The rollouts and calls to imitate.

    A rollout is left out if it does not fulfil `where`, if the same calls were made in another rollout of its task, or
    if its task has `per_task` better ones (by total reward, then the oldest). Of a rollout that is kept, a call is left
    out if it is another agent's, was cut at its limit, cancelled or failed, has rewards of its own that sum to less
    than 0, was cut by the client, which continued with only the beginning of the answer, or equals a call that is
    trained already.

    Args:
        candidates: in order of creation; read once, and only those that are kept stay in memory.
        where: which rollouts. agents: whose calls; their policies stay what they are.
        per_task: maximum number of rollouts of a task; None for all.
        weight: of a rollout's calls in the loss; 1 if None.

    Raises:
        ConfigError: an option has an impossible value, or `weight` gives one.
    """
    fulfils = condition(where)
    selection = None if agents is None else select(agents)
    check_per_task(per_task)
    counts: Counter[str] = Counter(rollouts=0, rollouts_kept=0, calls=0, calls_kept=0, calls_retokenised=0)
    rewards: dict[str, RewardRange] = {}
    tasks: dict[bytes, _Task] = {}
    for number, candidate in enumerate(candidates):
        counts.update(rollouts=1, calls=candidate.n_calls)
        _add_rewards(rewards, candidate.attempt)
        if fulfils is not None and not fulfils(candidate.attempt):
            _leave_out(counts, candidate, "not where")
            continue
        entry = _Entry.of(number, candidate, selection)
        if entry.n_trained == 0:
            counts.update(entry.reasons)
            counts["rollouts_left_out/without a call to train"] += 1
            continue
        task = tasks.setdefault(_digest(task_key(candidate.task).encode()), _Task())
        for other, reason in task.add(entry, per_task):
            _leave_out(counts, other.candidate, reason)

    trajectories: list[Trajectory] = []
    weights: dict[str, float] = {}
    trained: set[bytes] = set()
    for entry in sorted((e for task in tasks.values() for e in task.entries.values()), key=lambda e: e.number):
        counts.update(entry.reasons)
        rollout_weight = _weight(weight, entry.candidate.attempt)
        transitions: list[Transition] = []
        for transition in entry.transitions:
            digest = call_digest(transition.call)
            if digest in trained or rollout_weight == 0:
                counts[f"calls_left_out/{'duplicate' if digest in trained else 'weight 0'}"] += 1
                continue
            trained.add(digest)
            transitions.append(transition)
            weights[transition.call.id] = rollout_weight
            counts["calls_retokenised"] += transition.call.id in entry.candidate.retokenised
        counts["calls_kept"] += len(transitions)
        counts["rollouts_kept" if transitions else "rollouts_left_out/without a call to train"] += 1
        whole = replace(entry.candidate.attempt.trajectory, transitions=tuple(transitions))
        trajectories += [whole.of(policy) for policy in whole.policies]
    return Chosen(
        tuple(trajectories),
        weights,
        {name: n for name, n in counts.items() if n or "left_out/" not in name},
        rewards,
        "" if where is None else str(getattr(where, "__name__", where)),
    )


def task_key(task: Any) -> str:
    """A text that is the same for equal tasks: their JSON with sorted keys."""
    return json.dumps(task, sort_keys=True, default=str)


def call_digest(call: Call) -> bytes:
    """The same for calls of one policy with the same prompt and answer."""
    head = f"{call.policy}\n{call.prompt_ids.size}\n".encode()
    return _digest(head + np.ascontiguousarray(call.ids).tobytes())


def check_per_task(per_task: Any) -> None:
    """Refuse a `per_task` that is no positive number.

    Raises:
        ConfigError: it is not.
    """
    if per_task is not None and (not isinstance(per_task, int) or isinstance(per_task, bool) or per_task < 1):
        raise ConfigError(f"per_task= is {per_task!r}", hint="a whole number from 1, or None for all rollouts")


def unfit(transition: Transition, others: Iterable[Call]) -> str | None:
    """Why a call should not be imitated, whatever its rollout is worth; None if it may be.

    Args:
        transition: the call with its rewards. others: the calls of its attempt.
    """
    call = transition.call
    if call.finish_reason == "length":
        return "cut at its limit"
    if not transition.trainable:
        return "cancelled" if call.finish_reason == "cancelled" else "failed" if call.error else "empty"
    if transition.reward < 0:
        return "own reward below 0"
    if any(_continues_cut(other, call) for other in others):
        return "cut by the client"
    return None


def _continues_cut(later: Call, call: Call) -> bool:
    """Whether a later request has only the beginning of the call's answer in its history, as a whole turn.

    That is: it shares the prompt and a part of the answer, after which comes the token that ended the whole answer.
    """
    n_prompt, n = call.prompt_ids.size, call.prompt_ids.size + call.response_ids.size
    if later.fork_cause is None or later.index <= call.index or later.prompt_ids.size <= n_prompt + 1:
        return False
    if not np.array_equal(later.prompt_ids[:n_prompt], call.prompt_ids):
        return False
    rest = later.prompt_ids[n_prompt:n]
    equal = rest == call.response_ids[: rest.size]
    shared = int(equal.argmin()) if not equal.all() else rest.size
    return 0 < shared < min(call.response_ids.size - 1, rest.size) and bool(rest[shared] == call.response_ids[-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A candidate, divided into the calls that can be trained and the counts of those that cannot."""

    number: int
    reward: float
    digest: bytes
    candidate: Candidate
    transitions: tuple[Transition, ...]
    reasons: Mapping[str, int]

    @classmethod
    def of(cls, number: int, candidate: Candidate, selection: Selection | None) -> _Entry:
        attempt = candidate.attempt
        calls = [t.call for t in attempt.trajectory.transitions]
        reasons = Counter(candidate.refused)
        reasons["failed"] += len(attempt.failed_calls)
        transitions: list[Transition] = []
        for transition in attempt.trajectory.transitions:
            if selection is not None and selection.policy_for(transition.call.agent) is None:
                reasons["other agent"] += 1
            elif reason := unfit(transition, calls):
                reasons[reason] += 1
            else:
                transitions.append(transition)
        return cls(
            number,
            -math.inf if attempt.reward is None else attempt.reward,
            _digest(b"".join(call_digest(t.call) for t in transitions)),
            candidate,
            tuple(transitions),
            {f"calls_left_out/{reason}": n for reason, n in reasons.items()},
        )

    @property
    def n_trained(self) -> int:
        return len(self.transitions)

    @property
    def rank(self) -> tuple[float, float, int]:
        """The greatest is the best: by reward, then the oldest."""
        return self.reward, -self.candidate.created_at, -self.number


@dataclass(slots=True)
class _Task:
    """The rollouts of one task that are kept so far, by the digest of their calls."""

    entries: dict[bytes, _Entry] = field(default_factory=dict)
    ranks: list[tuple[tuple[float, float, int], bytes]] = field(default_factory=list)
    """A heap, the worst first; entries that were replaced since are still in it."""

    def add(self, entry: _Entry, most: int | None) -> list[tuple[_Entry, str]]:
        """Keep the entry if it is among the best; returns what is out for that, with the reason."""
        same = self.entries.get(entry.digest)
        if same is not None and same.rank >= entry.rank:
            return [(entry, "duplicate")]
        self.entries[entry.digest] = entry
        heapq.heappush(self.ranks, (entry.rank, entry.digest))
        if same is not None:
            return [(same, "duplicate")]
        out: list[tuple[_Entry, str]] = []
        while most is not None and len(self.entries) > most:
            rank, digest = heapq.heappop(self.ranks)
            worst = self.entries.get(digest)
            if worst is not None and worst.rank == rank:
                out.append((self.entries.pop(digest), "more than per_task"))
        return out


def _leave_out(counts: Counter[str], candidate: Candidate, reason: str) -> None:
    counts[f"rollouts_left_out/{reason}"] += 1
    counts[f"calls_left_out/{_OTHERS}"] += candidate.n_calls


def _add_rewards(rewards: dict[str, RewardRange], attempt: AttemptTrajectory) -> None:
    names: dict[str, float] = {}
    if attempt.reward is not None:
        names["reward"] = attempt.reward
    for reward, _ in attempt.credited:
        # A reward without a name of its own is called "reward", too.
        if reward.name != "reward":
            names[reward.name] = names.get(reward.name, 0.0) + reward.value
    for name, value in names.items():
        known = rewards.get(name)
        rewards[name] = RewardRange(1, value, value, value) if known is None else known.add(value)


def _weight(weight: Weight | None, attempt: AttemptTrajectory) -> float:
    if weight is None:
        return 1.0
    value = weight(attempt)
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(
            f"weight= gives {value!r} for a rollout",
            hint="a number from 0 on; choose with where= only rollouts that have one, and shift negative rewards",
            rollout=attempt.trajectory.rollout_id,
        )
    return float(value)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()

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
from agl.trainer.traces.conversations import Conversation

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
        conversations: call id -> its texts, for exports; empty otherwise.
    """

    attempt: AttemptTrajectory
    task: Any
    created_at: float = 0.0
    retokenised: frozenset[str] = frozenset()
    refused: Mapping[str, int] = field(default_factory=dict)
    conversations: Mapping[str, Conversation] = field(default_factory=dict)

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
        candidates: the rollouts that are kept, in their order.
    """

    trajectories: tuple[Trajectory, ...]
    weights: Mapping[str, float]
    counts: Mapping[str, int]
    rewards: Mapping[str, RewardRange]
    where: str = ""
    candidates: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        counts = self.counts
        made = counts["calls_retokenised"]
        lines = [
            f"rollouts trained  {counts['rollouts_kept']} of {counts['rollouts']}",
            f"calls trained     {counts['calls_kept']} of {counts['calls']}{f', {made} re-tokenised' if made else ''}",
        ]
        for name, n in counts.items():
            if name.startswith("calls_left_out/"):
                lines.append(f"  left out        {n}  {name.partition('/')[2]}")
        return "\n".join(lines)

    def require(self) -> Chosen:
        """Itself, if there is a call to train.

        Raises:
            NoTrainableDataError: there is none; says how many rollouts were seen, their rewards, and the reasons.
        """
        if self.trajectories:
            return self
        seen = self.counts["rollouts"]
        if not seen:
            raise NoTrainableDataError("no rollout was found", hint="agl trace ls lists the rollouts of a store")
        reasons = ", ".join(
            f"{n} {name.rpartition('left_out/')[2]}"
            for name, n in self.counts.items()
            if "left_out/" in name and not name.endswith(_OTHERS)
        )
        rewards = "; ".join(f"{name}: {values}" for name, values in self.rewards.items()) or "none has any"
        raise NoTrainableDataError(
            f"nothing is left of {seen} rollouts to train on ({reasons}). Their rewards: {rewards}",
            hint=f"where= is {self.where or 'not set'}; choose one that some fulfil, or record more",
        )


def choose(
    candidates: Iterable[Candidate],
    **options: Any,
) -> Chosen:
    """The rollouts and calls to imitate.

    Args:
        candidates: in order of creation; read once, and only those that are kept stay in memory.
        options: of `Choice`.

    Raises:
        ConfigError: an option has an impossible value, or `weight` gives one.
    """
    choice = Choice(**options)
    for candidate in candidates:
        choice.add(candidate)
    return choice.chosen()


class Choice:
    """The rollouts and calls to imitate, of those that were added so far.

    A rollout is left out if it does not fulfil `where`, if another rollout of its task made the same calls, or if its
    task has `per_task` better ones (by total reward, then the oldest). Of a rollout that is kept, a call is left out if
    it is another agent's, was cut at its limit, cancelled or failed, has own rewards that sum to less than 0, was cut
    by the client, which continued with only the beginning of the answer, or equals a call of its task that is trained
    already. What an expert does alike in every task counts in each: that is how often it does it.

    Args:
        where: which rollouts.
        agents: whose calls; their policies stay what they are.
        per_task: maximum number of rollouts of a task; None for all.
        weight: of a rollout's calls in the loss; 1 if None.

    Raises:
        ConfigError: an option has an impossible value.
    """

    def __init__(
        self,
        *,
        where: Where = None,
        agents: AgentFilter = None,
        per_task: int | None = None,
        weight: Weight | None = None,
    ) -> None:
        check_per_task(per_task)
        self._where, self._fulfils = where, condition(where)
        self._selection = None if agents is None else select(agents)
        self._per_task = per_task
        self._weight = weight
        self._counts: Counter[str] = Counter(rollouts=0, rollouts_kept=0, calls=0, calls_kept=0, calls_retokenised=0)
        self._rewards: dict[str, RewardRange] = {}
        self._tasks: dict[bytes, _Task] = {}
        self._agents: dict[str, None] = {}

    def refusal(self, candidate: Candidate) -> str | None:
        """Why a rollout is out, whatever its calls are; None if that depends on them."""
        self._know(candidate.attempt.agents)
        if candidate.attempt.fault is not None:
            return "ended by the policy itself"
        if self._fulfils is not None and not self._fulfils(candidate.attempt):
            return "condition not met"
        task = self._tasks.get(_task_digest(candidate))
        worst = None if task is None or self._per_task is None else task.worst(self._per_task)
        rank = _rank(candidate, self._counts["rollouts"])
        return "more than per_task" if worst is not None and rank < worst else None

    def leave_out(self, candidate: Candidate, reason: str) -> None:
        """Count a rollout that is not kept, and its rewards."""
        self._add_rewards(candidate.attempt)
        self.skip(candidate.n_calls, reason)

    def skip(self, n_calls: int, reason: str) -> None:
        """Count a rollout that is no candidate."""
        self._counts.update(rollouts=1, calls=n_calls)
        self._out(n_calls, reason)

    def add(self, candidate: Candidate) -> None:
        """Keep a rollout if it is among the best of its task; it is younger than those added before."""
        if reason := self.refusal(candidate):
            self.leave_out(candidate, reason)
            return
        entry = _Entry.of(self._counts["rollouts"], candidate, self._selection)
        self._add_rewards(candidate.attempt)
        self._counts.update(rollouts=1, calls=candidate.n_calls)
        if not entry.transitions:
            self._counts.update(entry.reasons)
            self._counts["rollouts_left_out/without a call to train"] += 1
            return
        task = self._tasks.setdefault(_task_digest(candidate), _Task())
        for other, reason in task.add(entry, self._per_task):
            self._out(other.candidate.n_calls, reason)

    def chosen(self) -> Chosen:
        """The result.

        Raises:
            ConfigError: `weight` gives an impossible value.
            NoAgentMatchedError: some of `agents` made calls, and others are nobody's name.
        """
        selected = self._selection is not None and any(map(self._selection.policy_for, self._agents))
        if self._selection is not None and selected:
            self._selection.require_matched(self._agents, f"in {self._counts['rollouts']} rollouts")
        counts = Counter(self._counts)
        trajectories: list[Trajectory] = []
        weights: dict[str, float] = {}
        kept: list[Candidate] = []
        trained: set[tuple[bytes, bytes]] = set()
        entries = ((task, entry) for task, of in self._tasks.items() for entry in of.entries.values())
        for task, entry in sorted(entries, key=lambda e: e[1].number):
            counts.update(entry.reasons)
            weight = _weight(self._weight, entry.candidate.attempt)
            transitions: list[Transition] = []
            for transition in entry.transitions:
                if not self._is_selected(transition.call):
                    counts["calls_left_out/other agent"] += 1
                    continue
                digest = task, call_digest(transition.call)
                if digest in trained or weight == 0:
                    counts[f"calls_left_out/{'duplicate' if digest in trained else 'weight 0'}"] += 1
                    continue
                trained.add(digest)
                transitions.append(transition)
                weights[transition.call.id] = weight
                counts["calls_retokenised"] += transition.call.id in entry.candidate.retokenised
            counts["calls_kept"] += len(transitions)
            counts["rollouts_kept" if transitions else "rollouts_left_out/without a call to train"] += 1
            if transitions:
                kept.append(entry.candidate)
            whole = replace(entry.candidate.attempt.trajectory, transitions=tuple(transitions))
            trajectories += [whole.of(policy) for policy in whole.policies]
        known = {name: n for name, n in counts.items() if n or "left_out/" not in name}
        where = "" if self._where is None else str(getattr(self._where, "__name__", self._where))
        return Chosen(tuple(trajectories), weights, known, dict(self._rewards), where, tuple(kept))

    def _know(self, agents: Iterable[str]) -> None:
        """Know these agents' names, which may show that what was kept is of agents that are not selected."""
        self._agents |= dict.fromkeys(agents)
        if self._selection is None:
            return
        before = self._selection
        self._selection = self._selection.knowing(self._agents)
        if self._selection is before:
            return
        for task in self._tasks.values():
            for digest, entry in list(task.entries.items()):
                if not any(self._is_selected(transition.call) for transition in entry.transitions):
                    del task.entries[digest]
                    self._counts.update(entry.reasons)
                    self._counts["calls_left_out/other agent"] += len(entry.transitions)
                    self._counts["rollouts_left_out/without a call to train"] += 1

    def _is_selected(self, call: Call) -> bool:
        """Whether its agent is selected, as far as the agents' names are known now."""
        return self._selection is None or self._selection.policy_for(call.agent) is not None

    def _out(self, n_calls: int, reason: str) -> None:
        self._counts[f"rollouts_left_out/{reason}"] += 1
        self._counts[f"calls_left_out/{_OTHERS}"] += n_calls

    def _add_rewards(self, attempt: AttemptTrajectory) -> None:
        values = {} if attempt.reward is None else {"reward": attempt.reward}
        for one, _ in attempt.credited:
            # A reward without a name of its own is called "reward", too.
            if one.name != "reward":
                values[one.name] = values.get(one.name, 0.0) + one.value
        for name, value in values.items():
            known = self._rewards.get(name)
            self._rewards[name] = RewardRange(1, value, value, value) if known is None else known.add(value)


def task_key(task: Any) -> str:
    """A text that is the same for equal tasks: their JSON with sorted keys."""
    return json.dumps(task, sort_keys=True, default=str)


def _task_digest(candidate: Candidate) -> bytes:
    return _digest(task_key(candidate.task).encode())


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
        transition: the call with its rewards.
        others: the calls of its attempt.
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
    n_prompt = call.prompt_ids.size
    n = call.prompt_ids.size + call.response_ids.size
    if later.fork_cause is None or later.index <= call.index or later.prompt_ids.size <= n_prompt + 1:
        return False
    if not np.array_equal(later.prompt_ids[:n_prompt], call.prompt_ids):
        return False
    rest = later.prompt_ids[n_prompt:n]
    equal = rest == call.response_ids[: rest.size]
    shared = int(equal.argmin()) if not equal.all() else rest.size
    return 0 < shared < min(call.response_ids.size - 1, rest.size) and bool(rest[shared] == call.response_ids[-1])


_Rank = tuple[float, float, int]
"""The greatest is the best: by reward, then the oldest."""


def _rank(candidate: Candidate, number: int) -> _Rank:
    reward = candidate.attempt.reward
    return -math.inf if reward is None else reward, -candidate.created_at, -number


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A candidate, divided into the calls that can be trained and the counts of those that cannot."""

    number: int
    rank: _Rank
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
            _rank(candidate, number),
            _digest(b"".join(call_digest(t.call) for t in transitions)),
            candidate,
            tuple(transitions),
            {f"calls_left_out/{reason}": n for reason, n in reasons.items()},
        )


@dataclass(slots=True)
class _Task:
    """The rollouts of one task that are kept so far, by the digest of their calls."""

    entries: dict[bytes, _Entry] = field(default_factory=dict)
    ranks: list[tuple[_Rank, bytes]] = field(default_factory=list)
    """A heap, the worst first; entries that were replaced since are still in it."""

    def worst(self, most: int) -> _Rank | None:
        """The rank that a rollout must exceed; None while there is room."""
        if len(self.entries) < most:
            return None
        while (worst := self.entries.get(self.ranks[0][1])) is None or worst.rank != self.ranks[0][0]:
            heapq.heappop(self.ranks)
        return worst.rank

    def add(self, entry: _Entry, most: int | None) -> list[tuple[_Entry, str]]:
        """Keep the entry if it is among the best; returns what is out for that, with the reason."""
        same = self.entries.get(entry.digest)
        if same is not None and same.rank >= entry.rank:
            return [(entry, "duplicate")]
        self.entries[entry.digest] = entry
        heapq.heappush(self.ranks, (entry.rank, entry.digest))
        if same is not None:
            return [(same, "duplicate")]
        if most is None or len(self.entries) <= most:
            return []
        self.worst(most)
        return [(self.entries.pop(heapq.heappop(self.ranks)[1]), "more than per_task")]


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

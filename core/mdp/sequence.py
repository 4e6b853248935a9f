"""Merge a trajectory's calls into training rows: each sampled token is trained once, each shared token forwarded once.

A row is a prefix tree written out flat. A call whose prompt repeats tokens that the row already holds reuses them and
appends the rest; its sampled tokens are always new, so two samples from one prompt stay two decisions. In the common
case, a conversation that only grows, the tree is a chain and the row is the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agl.mdp.types import FloatArray, IntArray, Trajectory, Transition

BoolArray = npt.NDArray[np.bool_]

MIN_SHARED = 16
"""A call joins a row when it shares at least this many tokens with it, or extends one of its calls whole: below that,
the longer row costs more attention than the shared tokens save."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """A merged training row of T tokens.

    Attributes:
        rollout_id, policy: whose.
        call_ids: the C calls in it, in order of arrival.
        token_ids: int32 [T].
        parents: int32 [T]: the row index of the token before it in its own context, -1 for a first token. The model's
            output at `parents[t]` predicts `token_ids[t]`; a token sees its ancestors alone. Always `parents[t] < t`.
        positions: int32 [T]: depth in the tree, the position id for the model.
        action_mask: bool [T]: True where the token was sampled and is trained.
        calls: int32 [T]: index into `call_ids` of the call that sampled the token, -1 for tokens nobody sampled.
        logprobs: float32 [T]: behaviour log-probs; 0 where `action_mask` is False and never read there.
        advantages: float32 [T]: the call's advantage; 0 where `action_mask` is False.
        temperatures: float32 [T]: of the distribution that the token was drawn from; 1 where nothing was sampled.
        weights: float32 [T]: the token's share in the loss, set by the loss reduction; 0 where not trained.
    """

    rollout_id: str
    policy: str
    call_ids: tuple[str, ...]
    token_ids: IntArray
    parents: IntArray
    positions: IntArray
    action_mask: BoolArray
    calls: IntArray
    logprobs: FloatArray
    advantages: FloatArray
    temperatures: FloatArray
    weights: FloatArray

    def __len__(self) -> int:
        return int(self.token_ids.size)

    @property
    def is_chain(self) -> bool:
        """Whether every token simply follows the one before it."""
        return bool(np.array_equal(self.parents, np.arange(len(self), dtype=np.int32) - 1))

    @property
    def n_actions(self) -> int:
        """How many tokens are trained."""
        return int(self.action_mask.sum())


class _Row:
    """A row under construction."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.positions: list[int] = []
        self.mask: list[bool] = []
        self.owner: list[int] = []
        self.logprobs: list[float] = []
        self.advantages: list[float] = []
        self.temperatures: list[float] = []
        self.members: list[Transition] = []
        self.paths: list[npt.NDArray[np.int64]] = []

    def longest_shared(self, prompt: IntArray) -> tuple[int, int, bool]:
        """(tokens shared, index of the member that shares them, whether any member is extended whole)."""
        best, who, whole = 0, -1, False
        for k, member in enumerate(self.members):
            ids = member.call.ids
            n = min(ids.size, prompt.size)
            differ = np.flatnonzero(ids[:n] != prompt[:n])
            shared = int(differ[0]) if differ.size else n
            whole = whole or shared == ids.size
            if shared > best:
                best, who = shared, k
        return best, who, whole

    def add(self, transition: Transition, advantage: float, shared: int, who: int) -> None:
        call = transition.call
        path = np.empty(call.prompt_ids.size + call.response_ids.size, dtype=np.int64)
        if shared:
            path[:shared] = self.paths[who][:shared]
        me = len(self.members)
        parent = int(path[shared - 1]) if shared else -1
        n_prompt = call.prompt_ids.size
        trained = transition.trainable
        rest = np.concatenate([call.prompt_ids[shared:], call.response_ids]).tolist()
        for depth, token in enumerate(rest, start=shared):
            here = len(self.tokens)
            sampled = depth >= n_prompt
            self.tokens.append(token)
            self.parents.append(parent)
            self.positions.append(depth)
            self.mask.append(sampled and trained)
            self.owner.append(me if sampled else -1)
            self.logprobs.append(float(call.logprobs[depth - n_prompt]) if sampled and trained else 0.0)
            self.advantages.append(advantage if sampled and trained else 0.0)
            self.temperatures.append(call.temperature if sampled else 1.0)
            path[depth] = here
            parent = here
        self.members.append(transition)
        self.paths.append(path)

    def freeze(self, trajectory: Trajectory) -> Sequence:
        mask = np.asarray(self.mask, dtype=np.bool_)
        return Sequence(
            rollout_id=trajectory.rollout_id,
            policy=trajectory.policy or "",
            call_ids=tuple(t.call.id for t in self.members),
            token_ids=np.asarray(self.tokens, dtype=np.int32),
            parents=np.asarray(self.parents, dtype=np.int32),
            positions=np.asarray(self.positions, dtype=np.int32),
            action_mask=mask,
            calls=np.asarray(self.owner, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            advantages=np.asarray(self.advantages, dtype=np.float32),
            temperatures=np.asarray(self.temperatures, dtype=np.float32),
            weights=mask.astype(np.float32),
        )


def merge(trajectory: Trajectory, advantages: Mapping[str, float]) -> list[Sequence]:
    """The rows of a trajectory, merged.

    Args:
        trajectory: of one policy; its transitions are in order of arrival.
        advantages: call id -> advantage, one entry per transition.

    Returns:
        One `Sequence` per tree. The trained tokens of all rows are exactly the sampled tokens of all trainable calls.

    Raises:
        KeyError: a transition has no advantage.
    """
    rows: list[_Row] = []
    for transition in trajectory.transitions:
        call = transition.call
        best, home, who = 0, None, -1
        for row in rows:
            shared, member, whole = row.longest_shared(call.prompt_ids)
            if shared > best and (whole or shared >= MIN_SHARED):
                best, home, who = shared, row, member
        if home is None:
            home = _Row()
            rows.append(home)
        home.add(transition, float(advantages[call.id]), best, who)
    return [row.freeze(trajectory) for row in rows]


def unmerged(trajectory: Trajectory, advantages: Mapping[str, float]) -> list[Sequence]:
    """One row per call, every prompt repeated: the form that `merge` must agree with and is measured against."""
    rows = []
    for transition in trajectory.transitions:
        row = _Row()
        row.add(transition, float(advantages[transition.call.id]), 0, -1)
        rows.append(row.freeze(trajectory))
    return rows


@dataclass(frozen=True, slots=True)
class MergeReport:
    """How well a set of calls merged.

    Attributes:
        calls: how many. rows: into how many rows.
        tokens_unmerged: tokens a trainer would forward with one row per call. tokens: what it forwards merged.
        forks: cause -> how often a conversation that went on could not be continued.
    """

    calls: int
    rows: int
    tokens_unmerged: int
    tokens: int
    forks: Mapping[str, int]


def merge_report(trajectories: Seq[Trajectory], rows: Seq[Sequence]) -> MergeReport:
    """Count what merging saved and what broke it."""
    forks: dict[str, int] = {}
    calls = unmerged_tokens = 0
    for trajectory in trajectories:
        for transition in trajectory.transitions:
            calls += 1
            unmerged_tokens += transition.call.ids.size
            if cause := transition.call.fork_cause:
                forks[cause] = forks.get(cause, 0) + 1
    return MergeReport(calls, len(rows), unmerged_tokens, sum(len(r) for r in rows), forks)

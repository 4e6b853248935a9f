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
class TrainingRow:
    """A merged training row of T tokens; `Sequence` is its public name.

    Attributes:
        rollout_id, policy: identify the trajectory that it was merged from.
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
        """Number of trained tokens."""
        return int(self.action_mask.sum())


Sequence = TrainingRow


def merge(trajectory: Trajectory, advantages: Mapping[str, float]) -> list[TrainingRow]:
    """The rows of a trajectory, merged.

    Args:
        trajectory: of one policy; its transitions are in order of arrival.
        advantages: call id -> advantage, one entry per transition.

    Returns:
        One row per tree. The trained tokens of all rows are exactly the sampled tokens of all trainable calls.

    Raises:
        KeyError: a transition has no advantage.
    """
    rows: list[_RowBuilder] = []
    for transition in trajectory.transitions:
        call = transition.call
        n_shared, home, member = 0, None, -1
        for row in rows:
            n, k, extends = row.longest_shared(call.prompt_ids)
            if n > n_shared and (extends or n >= MIN_SHARED):
                n_shared, home, member = n, row, k
        if home is None:
            home = _RowBuilder()
            rows.append(home)
        home.add(transition, float(advantages[call.id]), n_shared, member)
    return [row.build(trajectory) for row in rows]


def unmerged(trajectory: Trajectory, advantages: Mapping[str, float]) -> list[TrainingRow]:
    """One row per call, every prompt repeated: the form that `merge` must agree with and is measured against."""
    rows = []
    for transition in trajectory.transitions:
        row = _RowBuilder()
        row.add(transition, float(advantages[transition.call.id]), 0, -1)
        rows.append(row.build(trajectory))
    return rows


@dataclass(frozen=True, slots=True)
class MergeReport:
    """How well a set of calls merged.

    Attributes:
        calls: number of calls.
        rows: number of rows that they were merged into.
        tokens_unmerged: tokens that a trainer would forward with one row per call.
        tokens: tokens that it forwards merged.
        forks: cause -> number of conversations that went on but could not be continued.
    """

    calls: int
    rows: int
    tokens_unmerged: int
    tokens: int
    forks: Mapping[str, int]


def merge_report(trajectories: Seq[Trajectory], rows: Seq[TrainingRow]) -> MergeReport:
    """Count what merging saved, and the forks that kept conversations apart."""
    forks: dict[str, int] = {}
    calls = unmerged_tokens = 0
    for trajectory in trajectories:
        for transition in trajectory.transitions:
            calls += 1
            unmerged_tokens += transition.call.ids.size
            if cause := transition.call.fork_cause:
                forks[cause] = forks.get(cause, 0) + 1
    return MergeReport(calls, len(rows), unmerged_tokens, sum(len(r) for r in rows), forks)


class _RowBuilder:
    """A row under construction.

    Attributes:
        tokens_T, parents_T, positions_T, mask_T, calls_T, logprobs_T, advantages_T, temperatures_T: see `TrainingRow`.
        members_C: the calls in it so far.
        paths_C: for each call, int64 [P + R], the row index of each of its tokens.
    """

    def __init__(self) -> None:
        self.tokens_T: list[int] = []
        self.parents_T: list[int] = []
        self.positions_T: list[int] = []
        self.mask_T: list[bool] = []
        self.calls_T: list[int] = []
        self.logprobs_T: list[float] = []
        self.advantages_T: list[float] = []
        self.temperatures_T: list[float] = []
        self.members_C: list[Transition] = []
        self.paths_C: list[npt.NDArray[np.int64]] = []

    def longest_shared(self, prompt_P: IntArray) -> tuple[int, int, bool]:
        """(tokens shared, index of the member that shares them, whether any member is extended whole)."""
        n_shared, member, extends = 0, -1, False
        for k, transition in enumerate(self.members_C):
            ids = transition.call.ids
            n = min(ids.size, prompt_P.size)
            differences = np.flatnonzero(ids[:n] != prompt_P[:n])
            n = int(differences[0]) if differences.size else n
            extends = extends or n == ids.size
            if n > n_shared:
                n_shared, member = n, k
        return n_shared, member, extends

    def add(self, transition: Transition, advantage: float, n_shared: int, member: int) -> None:
        """Append a call whose first `n_shared` tokens are those of `member`."""
        call, trained, c = transition.call, transition.trainable, len(self.members_C)
        ids, n_prompt = call.ids, call.prompt_ids.size
        path = np.empty(ids.size, dtype=np.int64)
        if n_shared:
            path[:n_shared] = self.paths_C[member][:n_shared]
        parent = int(path[n_shared - 1]) if n_shared else -1
        for depth, token in enumerate(ids[n_shared:].tolist(), start=n_shared):
            sampled = depth >= n_prompt
            action = sampled and trained
            self.tokens_T.append(token)
            self.parents_T.append(parent)
            self.positions_T.append(depth)
            self.mask_T.append(action)
            self.calls_T.append(c if sampled else -1)
            self.logprobs_T.append(float(call.logprobs[depth - n_prompt]) if action else 0.0)
            self.advantages_T.append(advantage if action else 0.0)
            self.temperatures_T.append(call.temperature if sampled else 1.0)
            path[depth] = parent = len(self.tokens_T) - 1
        self.members_C.append(transition)
        self.paths_C.append(path)

    def build(self, trajectory: Trajectory) -> TrainingRow:
        mask_T = np.asarray(self.mask_T, dtype=np.bool_)
        return TrainingRow(
            rollout_id=trajectory.rollout_id,
            policy=trajectory.policy or "",
            call_ids=tuple(t.call.id for t in self.members_C),
            token_ids=np.asarray(self.tokens_T, dtype=np.int32),
            parents=np.asarray(self.parents_T, dtype=np.int32),
            positions=np.asarray(self.positions_T, dtype=np.int32),
            action_mask=mask_T,
            calls=np.asarray(self.calls_T, dtype=np.int32),
            logprobs=np.asarray(self.logprobs_T, dtype=np.float32),
            advantages=np.asarray(self.advantages_T, dtype=np.float32),
            temperatures=np.asarray(self.temperatures_T, dtype=np.float32),
            weights=mask_T.astype(np.float32),
        )

"""Merge a trajectory's calls into training rows: each sampled token is trained once, each shared token forwarded once.

A row is a prefix tree written out flat. A call whose prompt repeats tokens that the row already holds reuses them and
appends the rest; its sampled tokens are always new, so two samples from one prompt stay two decisions. In the common
case, a conversation that only grows, the tree is a chain and the row is the conversation.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agl.mdp.types import FloatArray, IntArray, Trajectory, Transition

BoolArray = npt.NDArray[np.bool_]

MIN_SHARED = 16
"""A call joins a row when it shares at least this many tokens with it, or extends one of its calls whole: below that,
the longer row costs more attention than the shared tokens save."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """A merged training row of T tokens.

    Attributes:
        rollout_id, policy: identify the trajectory that it was merged from.
        call_ids: the C calls in it, in order of arrival.
        token_ids: int32 [T].
        parents: int32 [T]: the row index of the token before it in its own context, -1 for a first token. The model's
            output at `parents[t]` predicts `token_ids[t]`; a token sees its ancestors alone. Always `parents[t] < t`.
        positions: int32 [T]: depth in the tree, the position id for the model.
        action_mask: bool [T]: True where the token was sampled and is trained.
        calls: int32 [T]: index into `call_ids` of the call that sampled the token, -1 for tokens that were not sampled.
        logprobs: float32 [T]: behaviour log-probs; 0 where `action_mask` is False and never read there.
        advantages: float32 [T]: the call's advantage; 0 where `action_mask` is False.
        temperatures: float32 [T]: of the distribution that the token was drawn from; 1 where nothing was sampled.
        weights: float32 [T]: the token's share in the loss, set by the loss reduction; 0 where not trained.
        grammars: of each call, what its answer was held to, "" for nothing; empty if that holds for all.
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
    grammars: tuple[str, ...] = ()

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
    # All calls of a row begin like its first: with its first tokens, or with all of them.
    by_begin: dict[bytes, list[int]] = defaultdict(list)
    for transition in trajectory.transitions:
        call = transition.call
        home = None
        place = None
        begins = (call.prompt_ids[:n].tobytes() for n in range(1, min(MIN_SHARED, call.prompt_ids.size) + 1))
        for number in sorted(number for begin in begins for number in by_begin.get(begin, ())):
            there = rows[number].longest_shared(call.prompt_ids)
            shares_more = there.depth > (place.depth if place else 0)
            if shares_more and (there.extends or there.depth >= MIN_SHARED):
                home = rows[number]
                place = there
        if home is None:
            home = _RowBuilder()
            by_begin[call.ids[:MIN_SHARED].tobytes()].append(len(rows))
            rows.append(home)
        home.add(transition, float(advantages[call.id]), place)
    return [row.build(trajectory) for row in rows]


def unmerged(trajectory: Trajectory, advantages: Mapping[str, float]) -> list[TrainingRow]:
    """One row per call, every prompt repeated: the form that `merge` must agree with and is measured against."""
    rows = []
    for transition in trajectory.transitions:
        row = _RowBuilder()
        row.add(transition, float(advantages[transition.call.id]))
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
        forks: cause -> number of conversations that could not be continued token for token.
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


class _Segment:
    """Consecutive tokens of a row: of one call, or of several that each continue the one before.

    Attributes:
        begins, starts: per call how many of the tokens come before its own, and the row index of its first.
        first_end: how many of them the call has that ends first.
        children: number of tokens before it -> its first token -> the segment that continues there.
        buffer: the tokens, `size` of them, and room for more.
    """

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.starts: list[int] = []
        self.first_end = sys.maxsize
        self.children: dict[int, dict[int, _Segment]] = {}
        self.size = 0
        self.buffer = np.empty(0, np.int32)

    def append(self, tokens_N: IntArray, start: int) -> None:
        self.begins.append(self.size)
        self.starts.append(start)
        end = self.size + tokens_N.size
        if end > self.buffer.size:
            self.buffer = np.concatenate([self.buffer[: self.size], np.empty(end, np.int32)])
        self.buffer[self.size : end] = tokens_N
        self.size = end

    def index(self, offset: int) -> int:
        """Row index of the token at `offset`."""
        k = bisect_right(self.begins, offset) - 1
        return self.starts[k] + offset - self.begins[k]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A place in a row: `depth` tokens lead to it, the last `offset` of them those of `segment`. `extends`: whether a
    whole call of the row is among them."""

    segment: _Segment
    offset: int = 0
    depth: int = 0
    extends: bool = False

    def follow(self, tokens_N: IntArray) -> _Place:
        """Where these tokens, which continue from here, leave the row. Linear in the tokens that are compared."""
        segment = self.segment
        offset = self.offset
        n = 0
        extends = self.extends
        while True:
            room = min(segment.size - offset, tokens_N.size - n)
            different_R = segment.buffer[offset : offset + room] != tokens_N[n : n + room]
            equal = int(different_R.argmax()) if different_R.any() else room
            offset = offset + equal
            n = n + equal
            extends = extends or offset >= segment.first_end
            following = segment.children.get(offset, {}).get(int(tokens_N[n])) if n < tokens_N.size else None
            if following is None:
                return _Place(segment, offset, self.depth + n, extends)
            segment = following
            offset = 0


class _RowBuilder:
    """A row under construction.

    Attributes:
        members_C: the calls in it so far.
        root: an empty segment in which every row begins; of what several calls
            have in common, the tree below has the first call's tokens alone. arrays: per field of `TrainingRow`, one
            per call.
    """

    def __init__(self) -> None:
        self.members_C: list[Transition] = []
        self.root = _Segment()
        self.arrays: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)
        self._size = 0

    def longest_shared(self, prompt_P: IntArray) -> _Place:
        """Where the prompt shares the most tokens with the row, with the earliest call if several share them."""
        return _Place(self.root).follow(prompt_P)

    def add(self, transition: Transition, advantage: float, place: _Place | None = None) -> None:
        """Append a call, whose prompt leaves the row at `place`."""
        place = place or _Place(self.root)
        call = transition.call
        c = len(self.members_C)
        n_shared = place.depth
        tokens_N = np.concatenate([call.prompt_ids[n_shared:], call.response_ids])
        n = tokens_N.size
        n_prompt = call.prompt_ids.size - n_shared
        parents_N = np.arange(self._size - 1, self._size - 1 + n, dtype=np.int32)
        parents_N[:1] = place.segment.index(place.offset - 1) if place.offset else -1
        # An answer that begins like an earlier one is in the row again, but found by what is new in it.
        end = place.follow(tokens_N)
        segment = end.segment
        known = end.depth - n_shared
        if known < n:
            # One comparison for a conversation that only grows, however many calls it has.
            if segment is self.root or end.offset < segment.size:
                segment = _Segment()
                end.segment.children.setdefault(end.offset, {})[int(tokens_N[known])] = segment
            segment.append(tokens_N[known:], self._size + known)
        segment.first_end = min(segment.first_end, segment.size if known < n else end.offset)
        sampled_N = np.arange(n) >= n_prompt
        mask_N = sampled_N & transition.trainable
        logprobs_N = np.zeros(n, np.float32)
        if transition.trainable:
            logprobs_N[n_prompt:] = call.logprobs
        for name, array in {
            "token_ids": tokens_N,
            "parents": parents_N,
            "positions": np.arange(n_shared, n_shared + n, dtype=np.int32),
            "action_mask": mask_N,
            "calls": np.where(sampled_N, np.int32(c), np.int32(-1)),
            "logprobs": logprobs_N,
            "advantages": np.where(mask_N, np.float32(advantage), np.float32(0)),
            "temperatures": np.where(sampled_N, np.float32(call.temperature), np.float32(1)),
            "weights": mask_N.astype(np.float32),
        }.items():
            self.arrays[name].append(array)
        self.members_C.append(transition)
        self._size += n

    def build(self, trajectory: Trajectory) -> TrainingRow:
        return TrainingRow(
            rollout_id=trajectory.rollout_id,
            policy=trajectory.policy or "",
            call_ids=tuple(t.call.id for t in self.members_C),
            grammars=grammars if any(grammars := tuple(t.call.grammar for t in self.members_C)) else (),
            **{name: np.concatenate(arrays) for name, arrays in self.arrays.items()},
        )

"""Rows of a micro-batch as prefix trees: tokens that several rows begin with are in it once.

Invariant: trees stand depth-first, each token directly before all that follow it in any row, so that what a token is
seen by is one range, and what a stretch of tokens sees is a few. This is about what is computed: rows keep their own
calls, advantages and weights, and a token that two rows sampled alike is computed once and trained twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from agl.mdp.sequence import TrainingRow
from agl.mdp.types import IntArray, int_array

Int64Array = npt.NDArray[np.int64]
NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTrees:
    """The tokens of B rows in U places, as few as there are different prefixes.

    Attributes:
        token_ids, positions: int32 [U].
        places: per row int64 [T]: where each of its tokens is.
        blocks: int64 [K, 4], the attention: the queries from `block[0]` before `block[1]` see the keys from `block[2]`
            before `block[3]`. Equal ranges see themselves causally and come first: they hold every token once.
            Other queries see all of the keys, which come before them.
        kept: places computed by an earlier pass, which as keys come after the U and their padding.
    """

    token_ids: IntArray
    positions: IntArray
    places: tuple[Int64Array, ...]
    blocks: Int64Array
    kept: int = 0

    def __len__(self) -> int:
        return int(self.token_ids.size)

    def part(self, rows: Seq[int], own_N: Int64Array, kept_K: Int64Array = NONE, block: int = 1) -> PrefixTrees:
        """Some of the rows for a pass over the places `own_N`, after one over `kept_K`; both padded to `block`s."""
        size = -(-own_N.size // block) * block
        kept = -(-kept_K.size // block) * block
        rank_U = np.zeros(len(self), np.int64)
        rank_U[own_N], rank_U[kept_K] = np.arange(own_N.size), size + np.arange(kept_K.size)
        query, key = np.split(np.searchsorted(own_N, self.blocks), 2, axis=1)
        blocks = np.block([[query, key], [query, size + np.searchsorted(kept_K, self.blocks[:, 2:])]])
        blocks = blocks[(blocks[:, 0] < blocks[:, 1]) & (blocks[:, 2] < blocks[:, 3])]
        places = tuple(rank_U[self.places[i]] for i in rows)
        return PrefixTrees(self.token_ids[own_N], self.positions[own_N], places, blocks, kept)

    def seen_by(self, size: int) -> Int64Array:
        """int64 [2, size + kept]: the queries that see each key, from the first place on and before the second.

        Places after the trees are padding, which sees itself.
        """
        starts, ends = seen = np.arange(size + self.kept) + np.array([[0], [1]])
        ends[size:] = 0
        for first, last, first_key, last_key in self.blocks.tolist():
            keys = slice(first_key, last_key)
            ends[keys] = np.maximum(ends[keys], last)
            if first_key >= size:
                starts[keys] = np.minimum(starts[keys], first)
        return seen


def prefix_trees(rows: Seq[TrainingRow]) -> PrefixTrees:
    """Rows written into each other; takes time linear in their tokens."""
    builder = _Builder()
    places = [builder.add(row) for row in rows]
    starts, blocks = _depth_first(builder.segments)
    sizes = [s.tokens_N.size for s in builder.segments]
    rank_U = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, sizes, strict=True)])
    token_ids, positions = np.empty((2, rank_U.size), np.int32)
    token_ids[rank_U] = np.concatenate([s.tokens_N for s in builder.segments])
    positions[rank_U] = np.concatenate([np.arange(s.depth, s.depth + s.tokens_N.size) for s in builder.segments])
    return PrefixTrees(token_ids, positions, tuple(rank_U[places_T] for places_T in places), blocks)


def divide(trees: PrefixTrees, max_tokens: int) -> list[list[int]]:
    """Divide rows into micro-batches that each compute at most `max_tokens` tokens, or hold a single longer row.

    Rows go in the order in which they stand in `trees`, in which neighbours share the most, and are cut where the
    fewest tokens are computed again, in as few micro-batches as that takes.

    Returns:
        Indices of the rows of each micro-batch.
    """
    order = sorted(range(len(trees.places)), key=lambda i: int(trees.places[i][-1]))
    sizes = []
    shared = []
    row_U = np.full(len(trees), -1)
    for k, i in enumerate(order):
        places_T = np.unique(trees.places[i])
        sizes.append(places_T.size)
        shared.append(int((row_U[places_T] == k - 1).sum()) if k else 0)
        row_U[places_T] = k
    # By dynamic programming: the cheapest division of the first k rows.
    best: list[tuple[int, list[list[int]]]] = [(0, [])]
    for last in range(len(order)):
        tokens = 0
        options = []
        for first in range(last, -1, -1):
            tokens += sizes[first] - (shared[first + 1] if first < last else 0)
            if tokens > max_tokens and first < last:
                break
            options.append((best[first][0] + shared[first] + 1, first))
        cost, first = min(options)
        best.append((cost, [*best[first][1], order[first : last + 1]]))
    return best[-1][1]


def begin_once(
    trees: PrefixTrees, batches: Seq[list[int]], worth: float, block: int
) -> Iterator[tuple[PrefixTrees, list[tuple[list[int], PrefixTrees]]]]:
    """The trees of what micro-batches in a row all begin with, to be computed once if it is above `worth` tokens, and
    of the rest of each, which is never empty, with its rows. `block`: as of `part`."""
    places = [np.unique(np.concatenate([trees.places[i] for i in batch])) for batch in batches]
    # By dynamic programming: the most tokens saved in the first k micro-batches, and how. Longer runs save little more.
    best: list[tuple[float, list[tuple[range, Int64Array]]]] = [(0, [])]
    for last in range(len(batches)):
        common = places[last][:-1]
        options = [(best[last][0], last, NONE)]
        for first in range(last - 1, max(last - 64, -1), -1):
            common = common[np.isin(common, places[first][:-1], kind="table")]
            if common.size <= worth:
                break
            options.append((best[first][0] + (last - first) * common.size - worth, first, common))
        saved, first, common = max(options, key=lambda option: option[0])
        best.append((saved, [*best[first][1], (range(first, last + 1), common)]))
    for numbers, common in best[-1][1]:
        own = {k: np.setdiff1d(places[k], common, assume_unique=True) for k in numbers}
        yield trees.part([], common), [(batches[k], trees.part(batches[k], own[k], common, block)) for k in numbers]


def chain(token_ids: IntArray, temperature: float = 1.0) -> TrainingRow:
    """A row of tokens that simply follow each other, none of them trained; int32 [T]."""
    ids = int_array(token_ids)
    n = ids.size
    zeros = np.zeros(n, dtype=np.float32)
    return TrainingRow(
        rollout_id="",
        policy="",
        call_ids=(),
        token_ids=ids,
        parents=np.arange(-1, n - 1, dtype=np.int32),
        positions=np.arange(n, dtype=np.int32),
        action_mask=np.zeros(n, dtype=np.bool_),
        calls=np.full(n, -1, dtype=np.int32),
        logprobs=zeros,
        advantages=zeros,
        temperatures=np.full(n, temperature, dtype=np.float32),
        weights=zeros,
    )


@dataclass(slots=True, eq=False)
class _Segment:
    """Tokens that follow each other.

    Attributes:
        start: how many tokens were there before it.
        depth: position of its first token.
        children: (how many of its tokens come before it, its first token) -> the segment that goes on there.
        total: tokens of it and of all that follows it.
        place: where it stands, depth-first.
    """

    start: int
    depth: int
    tokens_N: IntArray
    children: dict[tuple[int, int], _Segment] = field(default_factory=dict)
    total: int = 0
    place: int = 0


class _Builder:
    """Prefix trees under construction. `segments` is in order of arrival; the first is empty and begins every row."""

    def __init__(self) -> None:
        self.segments = [_Segment(0, 0, np.empty(0, np.int32))]
        self._starts = [-1]
        self._size = 0

    def add(self, row: TrainingRow) -> Int64Array:
        """int64 [T]: where the row's tokens are, in order of arrival."""
        places_T = np.empty(len(row), np.int64)
        breaks = [0, *np.flatnonzero(row.parents != np.arange(len(row)) - 1).tolist()]
        for start, end in pairwise([*breaks, len(row)]):
            parent = int(row.parents[start]) if end > start else -1
            segment = self.segments[0]
            offset = 0
            if parent >= 0:
                place = int(places_T[parent])
                segment = self.segments[bisect_right(self._starts, place) - 1]
                offset = place - segment.start + 1
            self._write(row.token_ids[start:end], segment, offset, places_T[start:end])
        return places_T

    def _write(self, tokens_N: IntArray, segment: _Segment, offset: int, places_N: Int64Array) -> None:
        """Follow `tokens_N` as far as they are there, after `offset` tokens of `segment`, and append the others."""
        while tokens_N.size:
            n = min(segment.tokens_N.size - offset, tokens_N.size)
            different_n = segment.tokens_N[offset : offset + n] != tokens_N[:n]
            equal = int(different_n.argmax()) if different_n.any() else n
            places_N[:equal] = np.arange(segment.start + offset, segment.start + offset + equal)
            tokens_N = tokens_N[equal:]
            places_N = places_N[equal:]
            offset = offset + equal
            if tokens_N.size:
                key = (offset, int(tokens_N[0]))
                if key not in segment.children:
                    new = segment.children[key] = _Segment(self._size, segment.depth + offset, tokens_N)
                    self.segments.append(new)
                    self._starts.append(new.start)
                    self._size += tokens_N.size
                segment = segment.children[key]
                offset = 0


def _depth_first(segments: Seq[_Segment]) -> tuple[list[int], Int64Array]:
    """Where each segment stands, and `PrefixTrees.blocks`."""
    # Children are younger than their parents.
    for segment in reversed(segments):
        segment.total += segment.tokens_N.size + sum(child.total for child in segment.children.values())
    own = []
    above = []
    for segment in segments:
        end = segment.place + segment.tokens_N.size
        if segment.tokens_N.size:
            own.append((segment.place, end, segment.place, end))
        # Those that leave it late come first, so that each of its tokens stands right before all that see it.
        for offset, siblings in groupby(sorted(segment.children.items(), key=lambda c: -c[0][0]), lambda c: c[0][0]):
            first = end
            for _, child in siblings:
                child.place = end
                end += child.total
            if offset:
                above.append((first, end, segment.place, segment.place + offset))
    return [segment.place for segment in segments], np.array(own + above, dtype=np.int64).reshape(-1, 4)

"""Which entries of a memory's version a search finds and which are kept, as pure functions of the entries."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from agl.errors import ConfigError
from agl.trainer.store.base import Memories
from agl.trainer.store.types import MemoryEntry, MemoryId

Embed = Callable[[Sequence[str]], Any]
"""n texts -> n vectors of d floats, as lists or an array [n, d]."""


class Rank(Protocol):
    """What an entry is worth: higher is found first, and kept longer."""

    def __call__(self, relevance: float, reward: float, recency: float) -> float:
        """Of an entry: its relevance to the query in [0, 1] (0 where entries are only kept), the reward of the rollout
        that wrote it, and its age in (0, 1], 1 for the newest."""
        ...


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A weighted sum. Without relevance it decides which entries a memory keeps.

    Attributes:
        relevance: weight of how well the text fits the query, in [0, 1]: its full-text rank as a share of the best
            one's; with `embed=` the mean of that and of the cosine.
        reward: weight of the reward of the rollout that wrote the entry.
        recency: weight of its age, as a share of the entries that are older.
    """

    relevance: float = 1.0
    reward: float = 0.3
    recency: float = 0.1

    def __call__(self, relevance: float, reward: float, recency: float) -> float:
        return self.relevance * relevance + self.reward * reward + self.recency * recency


@dataclass(frozen=True, slots=True)
class Query:
    """What is looked for; as `agl.agents.memory.search` takes it.

    Attributes:
        hidden: the source of entries that may not be found.
    """

    text: str | None = None
    namespace: tuple[str, ...] = ()
    filter: Mapping[str, Any] | None = None
    limit: int = 10
    offset: int = 0
    key: str | None = None
    hidden: str | None = None

    def admits(self, entry: MemoryEntry) -> bool:
        """Whether an entry may be found at all."""
        return (
            entry.namespace[: len(self.namespace)] == self.namespace
            and (self.key is None or entry.key == self.key)
            and (self.hidden is None or entry.source != self.hidden)
            and all(_fits(entry.value, name, wanted) for name, wanted in (self.filter or {}).items())
        )


async def find(
    store: Memories,
    scope: str,
    version: int | None,
    entries: Sequence[MemoryEntry],
    query: Query,
    rank: Rank,
    embedded: Any,
) -> list[tuple[MemoryEntry, float | None]]:
    """The entries that a query finds in a version, best first, with their scores.

    Args:
        entries: of that version, in order of writing.
        embedded: the query's text as floats [d]; None without `embed=`.
    """
    relevance: Mapping[MemoryId, float] = {}
    if query.text is not None:
        relevance = dict(await store.rank_memories(scope, query.text, version))
        relevance = _with_cosines(relevance, entries, embedded)
    admitted = [(i, e) for i, e in enumerate(entries) if query.admits(e)]
    # Shares of the best that may be found, whatever else there is.
    best = max((relevance.get(e.id, 0.0) for _, e in admitted), default=0.0) or 1.0
    ranked = [
        (rank(relevance.get(e.id, 0.0) / best, e.reward or 0.0, (i + 1) / len(entries)), i, e)
        for i, e in admitted
        if query.text is None or e.id in relevance
    ]
    ranked.sort(key=lambda hit: (-hit[0], -hit[1]))
    page = ranked[query.offset : query.offset + query.limit]
    return [(entry, None if query.text is None else score) for score, _, entry in page]


def _with_cosines(
    relevance: Mapping[MemoryId, float], entries: Sequence[MemoryEntry], embedded: Any
) -> Mapping[MemoryId, float]:
    """The mean of each entry's text rank, as a share of the best, and its cosine with the query."""
    if embedded is None:
        return relevance
    best = max(relevance.values(), default=1.0)
    having = [e for e in entries if e.embedding is not None]
    wanted_D = np.asarray(embedded, np.float32)
    vectors_ED = np.array([e.embedding for e in having], np.float32).reshape(len(having), wanted_D.size)
    norms_E = np.linalg.norm(vectors_ED, axis=1) * np.linalg.norm(wanted_D)
    cosines_E = np.maximum(vectors_ED @ wanted_D / np.where(norms_E > 0, norms_E, 1.0), 0.0)
    cosines = dict(zip((e.id for e in having), cosines_E.tolist(), strict=True))
    both = {e.id: (relevance.get(e.id, 0.0) / best + cosines.get(e.id, 0.0)) / 2 for e in entries}
    return {key: value for key, value in both.items() if value > 0}


def surplus(entries: Sequence[MemoryEntry], keep: int, rank: Rank) -> list[MemoryId]:
    """The entries beyond the `keep` that matter most, in order of writing; what no rollout wrote goes last."""
    excess = len(entries) - keep
    if excess <= 0:
        return []
    n = len(entries)
    worth = [
        (math.inf if entry.reward is None else rank(0.0, entry.reward, (i + 1) / n), i)
        for i, entry in enumerate(entries)
    ]
    return [entries[i].id for _, i in sorted(sorted(worth)[:excess], key=lambda pair: pair[1])]


def embeddings(embed: Embed, texts: Sequence[str]) -> list[list[float]]:
    """The vectors of texts.

    Raises:
        ConfigError: `embed` returned something else.
    """
    if not texts:
        return []
    vectors = np.asarray(embed(list(texts)), np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise ConfigError(
            f"embed= returned an array of shape {list(vectors.shape)} for {len(texts)} texts",
            hint="return one vector of finite floats for each text",
        )
    return vectors.tolist()


def text_of(value: Any, index: Collection[str] | bool | None = None) -> str:
    """What a search reads of a value: all texts and numbers in it, or those under the fields of `index`; "" for
    `index=False`."""
    if index is False:
        return ""
    if isinstance(value, Mapping):
        chosen = value.items() if index in (None, True) else ((k, v) for k, v in value.items() if k in index)  # type: ignore[operator]
        return " ".join(filter(None, (text_of(part) for _, part in chosen)))
    if isinstance(value, list | tuple):
        return " ".join(filter(None, (text_of(part) for part in value)))
    return "" if value is None or isinstance(value, bool) else str(value)


_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


def _fits(value: Any, name: str, wanted: Any) -> bool:
    """Whether a field of a value equals what is wanted, or compares so: {"$gt": 1}."""
    own = value.get(name) if isinstance(value, Mapping) else None
    if not (isinstance(wanted, Mapping) and wanted and all(str(key).startswith("$") for key in wanted)):
        return own == wanted
    for sign, bound in wanted.items():
        if sign not in _COMPARISONS:
            raise ConfigError(f"filter= has {sign!r}", hint=f"it may have {', '.join(_COMPARISONS)}")
        try:
            if not _COMPARISONS[sign](own, bound):
                return False
        except TypeError:
            return False
    return True

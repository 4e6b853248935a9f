"""Memories as functions of a connection: versions of a scope's entries, and full-text ranks within one version."""

from __future__ import annotations

import re
import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, tuple_, update

from agl.errors import StoreError
from agl.trainer.store.sql import codec
from agl.trainer.store.sql.rollouts import chunks
from agl.trainer.store.sql.schema import memories as M
from agl.trainer.store.types import MemoryEntry, MemoryId

_EMBEDDING = np.dtype("<f4")
_WORDS = re.compile(r"\w+")
_KEPT_INDEXES = 4


def merge(
    connection: Connection, scope: str, version: int, entries: Sequence[MemoryEntry], removed: Sequence[MemoryId]
) -> None:
    """End the rows that are replaced or removed, and insert the new ones, as old as those that they replace."""
    codec.key(scope, "the scope of a memory")
    # Of the same key the last one counts.
    new = {entry.id: _row(scope, version, entry) for entry in entries}
    ended = [_id(*key) for key in dict.fromkeys([*removed, *new])]
    for ids in chunks(ended):
        these = and_(M.c.scope == scope, tuple_(M.c.namespace, M.c.key).in_(ids))
        there = select(M.c.namespace, M.c.key, M.c.created_at).where(these, M.c.until.is_(None))
        for namespace, key, created_at in connection.execute(there):
            if (row := new.get(_key(namespace, key))) is not None:
                row["created_at"] = min(created_at, row["created_at"])
        # What began at this version was never seen before it.
        connection.execute(delete(M).where(these, M.c.since >= version))
        connection.execute(update(M).where(these, M.c.until.is_(None)).values(until=version))
    if new:
        connection.execute(insert(M), list(new.values()))


def query(connection: Connection, scope: str, version: int | None) -> list[MemoryEntry]:
    """The entries of a version, in order of writing."""
    rows = connection.execute(select(M).where(_seen(scope, version)).order_by(M.c.since, M.c.seq)).mappings()
    return [_entry(row) for row in rows]


def revert(connection: Connection, scope: str, version: int) -> None:
    """Delete the rows that are newer, and continue those that ended later."""
    connection.execute(delete(M).where(M.c.scope == scope, M.c.since > version))
    connection.execute(update(M).where(M.c.scope == scope, M.c.until > version).values(until=None))


class Indexes:
    """Full-text indexes of SQLite's versions, of the last few that were searched. For one thread at a time.

    Each is over the entries of its version alone: one over the table would count other scopes and versions in BM25.
    """

    def __init__(self) -> None:
        self._indexes: OrderedDict[tuple[str, int], sqlite3.Connection] = OrderedDict()

    def of(self, connection: Connection, scope: str, version: int | None) -> sqlite3.Connection:
        """The index of a version; some milliseconds for 1,000 entries if it was not searched before."""
        if version is not None and (scope, version) in self._indexes:
            return self._indexes[scope, version]
        index = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        index.execute("CREATE VIRTUAL TABLE entries USING fts5(namespace UNINDEXED, key UNINDEXED, text)")
        index.execute("BEGIN")
        rows = connection.execute(_texts(scope, version))
        index.executemany("INSERT INTO entries VALUES (?, ?, ?)", (tuple(row) for row in rows))
        if version is not None:
            self._indexes[scope, version] = index
            while len(self._indexes) > _KEPT_INDEXES:
                self._indexes.popitem(last=False)
        return index

    def forget(self, scope: str) -> None:
        """Drop the indexes of a scope that has changed."""
        for key in [key for key in list(self._indexes) if key[0] == scope]:
            self._indexes.pop(key, None)


def rank(
    connection: Connection, indexes: Indexes, scope: str, text: str, version: int | None
) -> list[tuple[MemoryId, float]]:
    """The entries of a version that have a word of `text`, with their relevance; best first, ties in order of
    writing."""
    phrases = list(dict.fromkeys(" ".join(_WORDS.findall(word.lower())) for word in text.split()))
    phrases = [phrase for phrase in phrases if phrase]
    if not phrases:
        return []
    if connection.dialect.name == "postgresql":
        # \W+ becomes a space, as in the phrases: PostgreSQL's parser would read "-417" as a number.
        words = func.to_tsvector("simple", func.regexp_replace(M.c.text, r"\W+", " ", "g"))
        wanted = func.websearch_to_tsquery("simple", " or ".join(f'"{phrase}"' for phrase in phrases))
        score = func.ts_rank_cd(words, wanted).label("score")
        matching = _texts(scope, version).with_only_columns(M.c.namespace, M.c.key, score)
        best_first = matching.where(words.op("@@")(wanted)).order_by(None).order_by(score.desc(), M.c.since, M.c.seq)
        found: Iterable[Any] = connection.execute(best_first)
    else:
        # FTS5's bm25 is negative, the best one the least.
        found = indexes.of(connection, scope, version).execute(
            "SELECT namespace, key, -bm25(entries) AS score FROM entries WHERE entries MATCH ? "
            "ORDER BY score DESC, rowid",
            (" OR ".join(f'"{phrase}"' for phrase in phrases),),
        )
    return [(_key(namespace, key), float(value)) for namespace, key, value in found]


def _texts(scope: str, version: int | None) -> Any:
    texts = select(M.c.namespace, M.c.key, M.c.text).where(_seen(scope, version), M.c.text != "")
    return texts.order_by(M.c.since, M.c.seq)


def _seen(scope: str, version: int | None) -> ColumnElement[bool]:
    if version is None:
        return and_(M.c.scope == scope, M.c.until.is_(None))
    return and_(M.c.scope == scope, M.c.since <= version, or_(M.c.until.is_(None), M.c.until > version))


def _id(namespace: Sequence[str], key: str) -> tuple[str, str | None]:
    return codec.dumps(list(namespace), "the namespace"), codec.pack_text(key)


def _key(namespace: str, key: str) -> MemoryId:
    return codec.strings(namespace), codec.unpack_text(key) or ""


def _row(scope: str, version: int, entry: MemoryEntry) -> dict[str, Any]:
    namespace, key = _id(*entry.id)
    return {
        "scope": scope,
        "namespace": namespace,
        "key": key,
        "since": version,
        "value": codec.dumps(entry.value, "the value", key=entry.key),
        "text": codec.pack_text(entry.text),
        "reward": entry.reward,
        "source": entry.source,
        "embedding": None if entry.embedding is None else _packed(entry),
        "created_at": entry.created_at,
        "updated_at": entry.updated_at,
    }


def _packed(entry: MemoryEntry) -> bytes:
    """Its embedding [d] as float32 bytes. Raises StoreError: a number is not finite in float32."""
    with np.errstate(over="ignore"):
        embedding_D = np.asarray(entry.embedding, _EMBEDDING)
    if not np.isfinite(embedding_D).all():
        raise StoreError(
            f"the embedding of {entry.key!r} has values that are not finite in float32",
            hint="what embed= returns has to be finite and below 3.4e38",
            namespace=list(entry.namespace),
            key=entry.key,
        )
    return embedding_D.tobytes()


def _entry(row: Mapping[Any, Any]) -> MemoryEntry:
    embedding = row["embedding"]
    return MemoryEntry(
        *_key(row["namespace"], row["key"]),
        codec.loads(row["value"]),
        codec.unpack_text(row["text"]) or "",
        row["reward"],
        row["source"],
        row["since"],
        row["created_at"],
        row["updated_at"],
        None if embedding is None else np.frombuffer(embedding, _EMBEDDING).tolist(),
    )

"""`agl.Memory`: what agents remember for later rollouts, as entries with namespace, key and searchable text.

Invariant: inside a rollout it reads the version that was there when the step began, and changes nothing at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace as _with
from pathlib import Path
from typing import Any, Literal, TypeVar

from agl import tracing
from agl.agents import memory as rollout_memory
from agl.agents.memory import Hit, MemoryUse
from agl.errors import ConfigError
from agl.options import checked_options
from agl.trainer.http.aio import LoopThread
from agl.trainer.memory.ranking import Embed, Hybrid, Query, Rank, embeddings, find, surplus, text_of
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import MemoryEntry

T = TypeVar("T")

_VERSION = 0
"""A memory itself has one version; those of a run's are its steps."""


@checked_options
class Memory:
    """A memory, with the words of LangGraph's `BaseStore`: put, get, delete, search, list_namespaces.

    `agl.wrap(agent, memory=memory.per("agent"))` gives it to an agent. A run begins with a copy of it in the run's own
    store, and when the run ends, what that has become replaces what was here. Inside a rollout the same methods read
    the run's copy as the step began with it, and what is put is added after the step. docs/memory.md says more.

    Args:
        store: where it is kept: a path or a URL, as `agl.Trainer(store=)` takes it; None: in this process. A run's
            store with `name=` its id is what that run remembers.
        name: of the memory in its store.
        keep: how many entries, those of the highest rank without relevance; entries that no rollout wrote go last.
        rank: what an entry is worth to a search, and to be kept.
        embed: n texts -> n vectors, called once for each text that is put; None searches words alone.
        redact: text -> text, applied to every text before it is put; None changes nothing.

    Raises:
        ConfigError: `keep` is not positive.
    """

    def __init__(
        self,
        store: str | Path | None = None,
        *,
        name: str = "memory",
        keep: int = 1000,
        rank: Rank | None = None,
        embed: Embed | None = None,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep}", hint="a memory keeps at least one entry")
        self.store = None if store is None else str(store)
        self.name = name
        self.keep = keep
        self.rank: Rank = rank or Hybrid()
        self.embed = embed
        self.redact = redact
        self._unpruned = 0
        self._open: tuple[LoopThread, Store] | None = None
        # In this process alone nobody else writes: the index of a version is kept until the next write.
        self._version = None if store is not None else _VERSION

    def per(self, by: str) -> MemoryUse:
        """This memory, separated by "agent" or by a field of the task: none finds what another one has written."""
        return MemoryUse(self, by)

    # -- BaseStore's words ----------------------------------------------------------------------------------------
    def put(
        self,
        namespace: Iterable[str],
        key: str,
        value: Any,
        index: Collection[str] | Literal[False] | None = None,
        *,
        reward: float | None = None,
    ) -> None:
        """Store a value under a key, replacing an earlier one.

        Args:
            value: any JSON value, often a dict.
            index: the fields whose texts are searched; None = all, False = none.
            reward: how good what it tells was; decides what is kept. None: it goes last. Inside a rollout it is the
                rollout's.
        """
        self.put_all([(namespace, key, value, index, reward)])

    def put_all(self, puts: Iterable[tuple[Iterable[str], str, Any, Any, float | None]]) -> None:
        """Several `put`s at once: (namespace, key, value, index, reward)."""
        rows = [
            (tuple(map(str, names)), str(key), value, text_of(value, index), r) for names, key, value, index, r in puts
        ]
        if self._in_rollout():
            for namespace, key, value, text, _ in rows:
                rollout_memory.put(value, namespace=namespace, key=key, text=text)
            return
        now = time.time()
        entries = self.prepared(
            [
                MemoryEntry(namespace, key, value, text, reward, created_at=now, updated_at=now)
                for namespace, key, value, text, reward in rows
            ]
        )
        self._run(lambda store: store.merge_memories(self.name, _VERSION, entries))
        self._unpruned += len(entries)
        if self._unpruned > self.keep:
            self._prune()

    def get(self, namespace: Iterable[str], key: str) -> Hit | None:
        """The entry with this key; None if there is none."""
        hits = self._find(Query(namespace=tuple(namespace), key=key))
        return next((hit for hit in hits if hit.namespace == tuple(namespace)), None)

    def delete(self, namespace: Iterable[str], key: str) -> None:
        """Forget an entry; no effect if there is none."""
        identity = tuple(namespace), key
        if self._in_rollout():
            rollout_memory.put(None, namespace=identity[0], key=key)
        else:
            self._run(lambda store: store.merge_memories(self.name, _VERSION, (), [identity]))

    def search(
        self,
        namespace_prefix: Iterable[str] = (),
        /,
        *,
        query: str | None = None,
        filter: Mapping[str, Any] | None = None,
        limit: int = 10,
        offset: int = 0,
    ) -> list[Hit]:
        """The entries below a namespace, best first: those with a word of the query (or that `embed=` finds alike), or
        without one all of them, by what they are worth.

        Args:
            filter: only values with these fields; a field may be compared, {"n": {"$gt": 1}}, by $eq, $ne, $gt, $gte,
                $lt or $lte.
        """
        return self._find(Query(query, tuple(namespace_prefix), filter, limit, offset))

    def list_namespaces(
        self,
        *,
        prefix: Iterable[str] = (),
        suffix: Iterable[str] = (),
        max_depth: int | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> list[tuple[str, ...]]:
        """The namespaces that have entries, in order; cut to `max_depth` names. "*" stands for any name."""
        begin = tuple(prefix)
        end = tuple(suffix)
        hits = self._find(Query(limit=self.keep * 2))
        fitting = {
            hit.namespace[:max_depth]
            for hit in hits
            if _matches(hit.namespace[: len(begin)], begin) and _matches(hit.namespace[-len(end) :] if end else (), end)
        }
        return sorted(fitting)[offset : offset + limit]

    def as_langgraph_store(self) -> Any:
        """This memory as a `BaseStore` of LangGraph: `create_agent(..., store=memory.as_langgraph_store())`."""
        from agl.adapters.langgraph.store import MemoryStore

        return MemoryStore(self)

    def __len__(self) -> int:
        return len(self.entries())

    def close(self) -> None:
        """Close its store; what was kept in this process alone is lost. It opens again when it is used."""
        if self._open is not None:
            (loop, store), self._open = self._open, None
            loop.submit(store.close()).result()
            loop.stop()

    # -- for runs -------------------------------------------------------------------------------------------------
    def entries(self) -> list[MemoryEntry]:
        """All of it, in order of writing."""
        self._prune()
        return self._run(lambda store: store.query_memories(self.name))

    def replace(self, entries: Sequence[MemoryEntry]) -> None:
        """Hold these entries alone."""
        gone = {entry.id for entry in self.entries()} - {entry.id for entry in entries}
        self._run(lambda store: store.merge_memories(self.name, _VERSION, entries, sorted(gone)))

    def prepared(self, entries: Sequence[MemoryEntry]) -> list[MemoryEntry]:
        """Entries as they are stored: redacted, and with the vectors of their texts."""
        if self.redact is not None:
            entries = [_redacted(entry, self.redact) for entry in entries]
        if self.embed is None:
            return list(entries)
        found = [entry for entry in entries if entry.text]
        vectors = dict(zip([e.id for e in found], embeddings(self.embed, [e.text for e in found]), strict=True))
        return [_with(entry, embedding=vectors.get(entry.id)) for entry in entries]

    # -- inside -----------------------------------------------------------------------------------------------------
    def _find(self, query: Query) -> list[Hit]:
        if self._in_rollout():
            return rollout_memory.search(
                query.text,
                query.limit,
                namespace=query.namespace,
                filter=query.filter,
                offset=query.offset,
                key=query.key,
            )
        entries = self.entries()
        embedded = None
        if query.text is not None and self.embed is not None:
            [embedded] = embeddings(self.embed, [query.text])
        found = self._run(lambda store: find(store, self.name, self._version, entries, query, self.rank, embedded))
        return [hit_of(entry, score) for entry, score in found]

    def _in_rollout(self) -> bool:
        """Whether a rollout runs here.

        Raises:
            ConfigError: its agent has no memory, so that the rollouts of a step would not read the same.
        """
        if tracing.current() is None:
            return False
        if rollout_memory.reader() is None:
            raise ConfigError(
                "an agl.Memory is used in a rollout of an agent that has none",
                hint='give it to the agent: agl.wrap(agent, ..., memory=memory.per("agent"))',
            )
        return True

    def _prune(self) -> None:
        if not self._unpruned:
            return
        self._unpruned = 0
        removed = surplus(self._run(lambda store: store.query_memories(self.name)), self.keep, self.rank)
        if removed:
            self._run(lambda store: store.merge_memories(self.name, _VERSION, (), removed))

    def _run(self, operation: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        if self._open is None:
            loop = LoopThread("agl-memory")
            try:
                self._open = loop, loop.submit(open_store(self.store)).result()
            except BaseException:
                loop.stop()
                raise
        loop, store = self._open
        return loop.submit(operation(store)).result()

    def __getstate__(self) -> dict[str, Any]:
        # In another process it is opened again; there a rollout's reader answers for the run's copy.
        return {**self.__dict__, "_open": None}

    def __repr__(self) -> str:
        return f"Memory({self.store!r}, name={self.name!r}, keep={self.keep})"


def hit_of(entry: MemoryEntry, score: float | None) -> Hit:
    """An entry as a search returns it."""
    return Hit(entry.namespace, entry.key, entry.value, entry.text, score, entry.created_at, entry.updated_at)


def _redacted(entry: MemoryEntry, redact: Callable[[str], str]) -> MemoryEntry:
    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value)
        if isinstance(value, Mapping):
            return {redact(str(key)): clean(part) for key, part in value.items()}
        return [clean(part) for part in value] if isinstance(value, list | tuple) else value

    return _with(entry, value=clean(entry.value), text=redact(entry.text))


def _matches(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    return len(names) == len(pattern) and all(p in ("*", name) for name, p in zip(names, pattern, strict=True))

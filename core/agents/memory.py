"""A rollout's memory: reads what earlier rollouts left, as of the start of the step, and notes what should stay.

Nothing here changes a memory. What a rollout writes is part of its trace; the run adds it once the step's rewards are
known, so rollouts of one step see the same entries. Outside a rollout nothing is found and nothing is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from agl import semconv, tracing
from agl.errors import ConfigError

MemoryMode = Literal["on", "off", "shuffled"]
MEMORY_MODES: Final[tuple[MemoryMode, ...]] = get_args(MemoryMode)

PIECES = re.compile(r"\w+|[^\w\s]")
"""Words and punctuation marks, which stand for tokens where no tokenizer is known."""


@dataclass(frozen=True, slots=True)
class Hit:
    """An entry that a search has found.

    Attributes:
        namespace, key: identify it.
        value: a JSON value.
        text: what the search has read.
        score: what it is ranked by, higher is better; None without a query.
        created_at, updated_at: seconds since the epoch.
    """

    namespace: tuple[str, ...]
    key: str
    value: Any
    text: str
    score: float | None
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """How an agent uses a memory: what `agl.wrap(memory=)` takes.

    Attributes:
        memory: an `agl.Memory`.
        by: what entries are separated by: "agent", a field of the task, or None for nothing.
        mode: "on"; "off" finds nothing and keeps nothing; "shuffled" finds as many entries as "on" would, but others.
    """

    memory: Any
    by: str | None = None
    mode: MemoryMode = "on"

    @classmethod
    def of(cls, value: Any) -> MemoryUse | None:
        """What was passed as `memory=`.

        Raises:
            ConfigError: it is no memory.
        """
        if value is None or isinstance(value, cls):
            return value
        if not hasattr(value, "list_namespaces") or not hasattr(value, "per"):
            raise ConfigError(f"memory= is {value!r}", hint='for example agl.Memory().per("agent")')
        return cls(value)

    def namespace(self, task: Any, agent: str) -> tuple[str, ...]:
        """Where an agent's entries are, on a task."""
        if self.by is None:
            return ("shared",)
        if self.by == "agent":
            return (agent,)
        try:
            return (str(task[self.by]),)
        except (KeyError, TypeError, IndexError):
            raise ConfigError(
                f"a task has no field {self.by!r}, by which its memory is separated",
                hint='name a field that every task has, or use memory.per("agent")',
            ) from None


def reader() -> Callable[[Mapping[str, Any]], Mapping[str, Any]] | None:
    """What searches the memory of the rollout that runs here; None outside a rollout and for agents without one."""
    scope = tracing.current()
    return None if scope is None else scope.rollout.memory


def search(
    query: str | None = None,
    k: int = 3,
    *,
    namespace: Sequence[str] | None = None,
    filter: Mapping[str, Any] | None = None,
    offset: int = 0,
    key: str | None = None,
) -> list[Hit]:
    """Search the memory of the rollout that runs here; nothing is found outside one. Traced as a span.

    Found is what was there when the step began, without what rollouts of the same task have written.

    Args:
        query: what to look for; None for what matters most.
        k: how many entries at most.
        namespace: where to look, and below; None for the agent's own.
        filter: only entries whose values have these fields; a field may be compared: {"n": {"$gt": 1}}.
        offset: how many of the best to leave out.
        key: only the entry with this key.

    Raises:
        RolloutError: the memory cannot be read.
    """
    scope = tracing.current()
    read = reader()
    if scope is None or read is None:
        return []
    asked = {} if query is None else {semconv.MEMORY_QUERY: query}
    with tracing.span(semconv.MEMORY, "search", attributes=asked) as here:
        answer = read(
            {
                "agent": scope.agent,
                "namespace": None if namespace is None else list(namespace),
                "query": query,
                "filter": None if filter is None else dict(filter),
                "limit": k,
                "offset": offset,
                "key": key,
            }
        )
        hits = [Hit(**{**hit, "namespace": tuple(hit["namespace"])}) for hit in answer["hits"]]
        if here is not None:
            found = {
                semconv.MEMORY_SNAPSHOT: answer["snapshot"],
                semconv.MEMORY_KEYS: ["/".join((*hit.namespace, hit.key)) for hit in hits],
                semconv.MEMORY_SCORES: [hit.score or 0.0 for hit in hits],
            }
            here.span.set_attributes(found)
    return hits


def put(value: Any, *, namespace: Sequence[str] | None = None, key: str | None = None, text: str | None = None) -> bool:
    """Keep a JSON value for later steps, if this rollout succeeds; a value of None deletes the key.

    Args:
        namespace: where; None for the agent's own.
        key: replaces the entry with this key; None = one made of the text.
        text: what searches read; None for all texts in the value.

    Returns:
        Whether a rollout with a memory runs here.

    Raises:
        TypeError: the value is not JSON.
    """
    if reader() is None:
        return False
    facts: dict[str, Any] = {semconv.VALUE: json.dumps(value)}
    facts |= {} if namespace is None else {semconv.MEMORY_NAMESPACE: json.dumps(list(namespace))}
    facts |= {} if key is None else {semconv.MEMORY_KEYS: [key]}
    facts |= {} if text is None else {semconv.MEMORY_TEXT: text}
    with tracing.span(semconv.MEMORY, "put", attributes=facts):
        return True


def quoted(hits: Sequence[Hit], max_tokens: int = 200) -> str:
    """The texts of hits as a model may read them: one line each, quoted as JSON, so that none can pass for another
    part of the conversation.

    Args:
        max_tokens: of all together, words and punctuation marks counted; the last text is cut, others are left out.
    """
    lines: list[str] = []
    for hit in hits:
        pieces = list(PIECES.finditer(hit.text))[:max_tokens]
        max_tokens -= len(pieces)
        if pieces:
            lines.append(f"- {json.dumps(hit.text[: pieces[-1].end()], ensure_ascii=False)}")
    return "\n".join(lines) or "nothing found"


def tools(memory: Any = None, *, k: int = 3, max_tokens: int = 200) -> list[Callable[[str], str]]:
    """`recall(query)` and `remember(text)`: plain functions, which every framework takes as tools of an agent.

    A policy that has them learns when to call them and what to write, as with any tool.

    Args:
        memory: an `agl.Memory`, used outside of rollouts; None: there they find and keep nothing.
        k: entries per search.
        max_tokens: of a search's result (`quoted`).
    """

    def recall(query: str) -> str:
        """Search the notes of earlier tasks."""
        if memory is not None and tracing.current() is None:
            return quoted(memory.search((), query=query, limit=k), max_tokens)
        return quoted(search(query, k), max_tokens)

    def remember(text: str) -> str:
        """Keep a note for later tasks."""
        if memory is not None and tracing.current() is None:
            memory.put(("notes",), text, {"text": text})
        else:
            put({"text": text})
        return "noted"

    return [recall, remember]

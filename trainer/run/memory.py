"""A run's memory: its rollouts read the version that was there when their step began, and write the next one.

Version v is what the rollouts of step v (from 0) read; it holds what those of the steps before have written. The run
keeps all versions in its own store, so a resumed run reads what the stopped one has read.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl import semconv
from agl.agents.memory import MemoryUse
from agl.errors import AglError, ConfigError
from agl.mdp.order import in_order, numbers_of_calls
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.trainer.memory.memory import hit_of
from agl.trainer.memory.ranking import Query, embeddings, find, surplus, text_of
from agl.trainer.runners.protocol import RolloutResult
from agl.trainer.store.base import Store
from agl.trainer.store.types import MemoryEntry, MemoryId, Rollout
from agl.trainer.traces.conversations import Conversation, NoConversationError, of_calls, of_span

KEPT_VERSIONS = 4


class RunMemory:
    """The memory of one run's agent.

    Args:
        store: of the run.
        run_id: of the run.
        use: how the agent uses which memory.
    """

    def __init__(self, store: Store, run_id: str, use: MemoryUse) -> None:
        self.store = store
        self.run_id = run_id
        self.use = use
        self._versions: dict[int, list[MemoryEntry]] = {}
        self._grew = False

    async def begin(self) -> None:
        """Copy the memory into the run's store, once in the life of the run."""
        note = f"memory/{self.run_id}"
        if await self.store.query_notes(note):
            return
        entries = await asyncio.to_thread(self.use.memory.entries)
        await self.store.merge_memories(self.run_id, 0, entries)
        await self.store.put_note(note, {"entries": len(entries)})

    async def end(self) -> None:
        """Replace the memory by what it has become in this run, if rollouts have written to it."""
        if self._grew:
            entries = await self.store.query_memories(self.run_id)
            await asyncio.to_thread(self.use.memory.replace, entries)

    async def revert(self, step: int) -> None:
        """Forget what was written in steps that a resumed run does again, after `step` steps."""
        self._versions.clear()
        await self.store.revert_memories(self.run_id, step)

    def metadata(self, step: int) -> dict[str, Any]:
        """Of a rollout of this step: which version it reads, and how."""
        return {"memory": {"snapshot": f"{self.run_id}@{step}", "mode": self.use.mode}}

    async def answer(self, rollout: Rollout, request: Mapping[str, Any]) -> dict[str, Any]:
        """What a rollout finds: {"snapshot", "hits"}; {"error"} where it cannot be read."""
        memory = self.use.memory
        step = rollout.step or 0
        snapshot = f"{self.run_id}@{step}"
        if self.use.mode == "off":
            return {"snapshot": snapshot, "hits": []}
        try:
            own = request["namespace"] is None
            namespace = self.use.namespace(rollout.task, request["agent"]) if own else tuple(request["namespace"])
            hidden = task_digest(rollout.task)
            named = {name: request[name] for name in ("filter", "limit", "offset", "key")}
            query = Query(request["query"], namespace, hidden=hidden, **named)
            entries = await self._version(step)
            embedded = None
            if query.text is not None and memory.embed is not None:
                [embedded] = await asyncio.to_thread(embeddings, memory.embed, [query.text])
            hits = await find(self.store, self.run_id, step, entries, query, memory.rank, embedded)
        except AglError as error:
            return {"snapshot": snapshot, "error": str(error)}
        except Exception as error:  # of the user's `embed` or `rank`; a worker would repeat the request
            return {"snapshot": snapshot, "error": f"{type(error).__name__}: {error}"}
        if self.use.mode == "shuffled":
            hits = _others(hits, [e for e in entries if query.admits(e)], f"{rollout.seed}/{query.text}")
        return {
            "snapshot": snapshot,
            "hits": [
                {name: getattr(hit, name) for name in hit.__slots__} | {"namespace": list(hit.namespace)}
                for hit in (hit_of(entry, score) for entry, score in hits)
            ],
        }

    async def merge(self, results: Sequence[RolloutResult], step: int) -> None:
        """Add what the successful rollouts of a training step have written, in their order, and what they did, for the
        steps after `step` (from 0). Of one task an agent's best episode is kept; of two equal ones the later."""
        if self.use.mode == "off":
            return
        before = await self.store.query_memories(self.run_id, step + 1)
        known: dict[MemoryId, MemoryEntry] = {entry.id: entry for entry in before}
        changed: dict[MemoryId, MemoryEntry | None] = {}
        now = time.time()
        for writes in await asyncio.gather(*(self._writes(result, now) for result in results)):
            for entry, episode in writes:
                last = changed.get(entry.id, known.get(entry.id))
                if episode and last is not None and (last.reward or 0.0) > (entry.reward or 0.0):
                    continue
                if entry.value is None:
                    changed.pop(entry.id, None)
                    if entry.id in known:
                        changed[entry.id] = None
                    continue
                # The newest entry is the last one.
                changed.pop(entry.id, None)
                changed[entry.id] = entry
        new = await asyncio.to_thread(self.use.memory.prepared, [e for e in changed.values() if e is not None])
        after = [entry for entry in before if entry.id not in changed] + new
        removed = [key for key, entry in changed.items() if entry is None]
        removed += surplus(after, self.use.memory.keep, self.use.memory.rank)
        gone = set(removed)
        new = [entry for entry in new if entry.id not in gone]
        if new or removed:
            self._grew = True
            self._versions.pop(step + 1, None)
            await self.store.merge_memories(self.run_id, step + 1, new, removed)

    async def _version(self, version: int) -> list[MemoryEntry]:
        if version not in self._versions:
            self._versions[version] = await self.store.query_memories(self.run_id, version)
            while len(self._versions) > KEPT_VERSIONS:
                self._versions.pop(next(iter(self._versions)))
        return self._versions[version]

    async def _writes(self, result: RolloutResult, now: float) -> list[tuple[MemoryEntry, bool]]:
        """What a rollout leaves, in order, and whether each is an episode; nothing if it has failed."""
        rollout = result.rollout
        if result.error is not None or result.attempt_trajectory is None:
            return []
        reward = result.attempt_trajectory.reward or 0.0
        source = task_digest(rollout.task)
        spans = await self.store.query_spans(rollout.rollout_id, result.attempt)
        calls = await self.store.query_calls(rollout.rollout_id, result.attempt)
        facts: dict[str, Any] = {"reward": reward, "source": source, "created_at": now, "updated_at": now}
        written: list[tuple[MemoryEntry, bool]] = []
        for span in spans:
            if span.operation == semconv.MEMORY and semconv.VALUE in span.attributes:
                written.append((self._put(rollout, span, facts), False))
        for agent, conversation in _episodes(calls, spans):
            asked, answered = conversation
            text = f"{asked}\n{answered}"
            value = {"input": asked, "output": answered, "reward": reward}
            namespace = self.use.namespace(rollout.task, agent)
            written.append((MemoryEntry(namespace, f"{agent}:{source}", value, text, **facts), True))
        return written

    def _put(self, rollout: Rollout, span: Span, facts: Mapping[str, Any]) -> MemoryEntry:
        attributes = span.attributes
        value = json.loads(str(attributes[semconv.VALUE]))
        own = attributes.get(semconv.MEMORY_NAMESPACE)
        namespace = self.use.namespace(rollout.task, span.agent or "") if own is None else tuple(json.loads(str(own)))
        text = str(attributes.get(semconv.MEMORY_TEXT, text_of(value)))
        [key] = attributes.get(semconv.MEMORY_KEYS) or [_digest(text)]
        return MemoryEntry(namespace, str(key), value, text, **facts)


def task_digest(task: Any) -> str:
    """What identifies a task among all others."""
    return _digest(json.dumps(task, sort_keys=True, default=str))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _others(
    hits: Sequence[tuple[MemoryEntry, float | None]], entries: Sequence[MemoryEntry], seed: str
) -> list[tuple[MemoryEntry, float | None]]:
    """As many entries as were found, with their scores, but drawn from those that were not."""
    found = {entry.id for entry, _ in hits}
    rest = [entry for entry in entries if entry.id not in found]
    drawn = random.Random(seed).sample(rest, min(len(hits), len(rest)))
    return [(entry, score) for entry, (_, score) in zip(drawn, hits, strict=False)]


def _episodes(calls: Sequence[Call], spans: Sequence[Span]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each agent with the last thing that its first request asked, and its last answer."""
    conversations: list[tuple[int, str, Conversation | NoConversationError]] = []
    numbers = numbers_of_calls(calls, spans)
    recorded = of_calls(calls)
    answered = {call.span_id for call in calls}
    conversations += [(numbers[call.id], call.agent, recorded[call.id]) for call in calls if call.error is None]
    for span in in_order(spans):
        other = span.operation == semconv.CHAT and span.span_id not in answered and span.status != "error"
        if other and span.agent is not None and not span.attributes.get(semconv.UNTRAINED):
            try:
                conversations.append((span.sequence or 0, span.agent, of_span(span)))
            except NoConversationError as error:
                conversations.append((span.sequence or 0, span.agent, error))
    whole = [(agent, c) for _, agent, c in sorted(conversations, key=lambda c: c[0]) if isinstance(c, Conversation)]
    for agent in dict.fromkeys(agent for agent, _ in whole):
        own = [conversation for name, conversation in whole if name == agent]
        asked = [_text(m) for m in own[0].messages if m.get("role") == "user"]
        yield agent, (asked[-1] if asked else "", _text(own[-1].answer))


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return str(content or "")


def require_content(use: MemoryUse | None, capture_content: bool) -> None:
    """Raise `ConfigError` for a memory in a run that records no texts."""
    if use is not None and not capture_content:
        raise ConfigError(
            "memory= needs the texts of the rollouts, and capture_content=False records none",
            hint="leave capture_content on; agl.Memory(redact=) changes what is remembered",
        )

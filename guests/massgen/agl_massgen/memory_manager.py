"""The founding guide's `MemoryManager`: its names on an `agl.Memory`, with what its code does wrong mended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from agl.agents.memory import Hit
from agl.trainer.memory.memory import Memory
from agl.trainer.memory.ranking import Embed, Hybrid, text_of

EPISODES = "episodic"
KNOWLEDGE = "semantic"
RECENCY = 0.1
UNIQUENESS = 0.2
"""The guide's bonuses. Recency is a share of the older episodes here; there every episode got all of it."""
SAME = 0.9
"""From which share of common words on two episodes are the same."""
COMPARED = 10
"""How many of the last episodes a new one is compared with."""


class MemoryManager:
    """Episodes, knowledge and a working memory.

    The guide's class with its faults mended. Nothing is encoded twice: searches are full-text, or by `embed=`, once
    for each text. The bonus for recency decays. An episode's importance counts its reward, which may come later
    (`set_reward`). A stored state does not hold what was retrieved for it. A value that is stored again
    raises its frequency.

    Args:
        max_memory_size: how many episodes are kept, the most important ones.
        embed: as of `agl.Memory`.
        memory: where they are kept; None: in this process.

    Attributes:
        working_memory: a dict for the current task; never stored.
    """

    def __init__(
        self, max_memory_size: int = 1000, *, embed: Embed | None = None, memory: Memory | None = None
    ) -> None:
        self.max_size = max_memory_size
        rank = Hybrid(relevance=1.0, reward=1.0, recency=RECENCY)
        self.memory = memory or Memory(keep=max_memory_size, embed=embed, rank=rank)
        self.working_memory: dict[str, Any] = {}
        self._recent: list[frozenset[str]] = []
        self._stored = 0

    def store_episode(self, episode: Mapping[str, Any], reward: float | None = None) -> str:
        """Store an episode, and return its key.

        Args:
            episode: JSON values, without what was retrieved: "memory_context" is left out wherever it is.
            reward: what it earned; None: its "reward", or 0 until `set_reward`.
        """
        own = _without_context(episode)
        words = frozenset(text_of(own).split())
        unique = not any(_overlap(words, other) > SAME for other in self._recent)
        self._recent = [*self._recent, words][-COMPARED:]
        self._stored += 1
        key = f"{time.time_ns():020d}-{self._stored}"
        self._put(key, own, float(own.get("reward", 0.0) if reward is None else reward), unique, time.time())
        return key

    def set_reward(self, key: str, reward: float) -> None:
        """Set what a stored episode has earned; no effect if it is not kept any more."""
        hit = self.memory.get((EPISODES,), key)
        if hit is not None:
            self._put(key, hit.value["episode"], reward, hit.value["unique"], hit.value["timestamp"])

    def _put(self, key: str, episode: Any, reward: float, unique: bool, timestamp: float) -> None:
        importance = reward + (UNIQUENESS if unique else 0.0)
        value = {"timestamp": timestamp, "episode": episode, "importance": importance, "unique": unique}
        self.memory.put_all([((EPISODES,), key, value, ["episode"], importance)])

    def retrieve_relevant_context(self, query: str, k: int = 5) -> list[dict[str, Any]]:
        """The `k` most relevant episodes, best first: "timestamp", "episode", "importance"."""
        return [_shown(hit) for hit in self.memory.search((EPISODES,), query=query, limit=k)]

    def update_semantic_knowledge(self, key: str, value: Any) -> None:
        """Add a value to what is known of a key; one that is known already is counted once more."""
        facts = self.semantic_memory.get(key, [])
        same = [
            fact for fact in facts if json.dumps(fact["value"], sort_keys=True) == json.dumps(value, sort_keys=True)
        ]
        if same:
            same[0]["frequency"] += 1
            same[0]["timestamp"] = time.time()
        else:
            facts = [*facts, {"value": value, "timestamp": time.time(), "frequency": 1}]
        self.memory.put((KNOWLEDGE,), key, facts, False)

    @property
    def episodic_memory(self) -> list[dict[str, Any]]:
        """The episodes that are kept, the oldest first: "timestamp", "episode", "importance"."""
        hits = self.memory.search((EPISODES,), limit=self.max_size)
        return [_shown(hit) for hit in sorted(hits, key=lambda hit: hit.key)]

    @property
    def semantic_memory(self) -> dict[str, list[dict[str, Any]]]:
        """Key -> what is known of it: "value", "timestamp" of the last time, "frequency"."""
        return {hit.key: hit.value for hit in self.memory.search((KNOWLEDGE,), limit=self.max_size)}


def _shown(hit: Hit) -> dict[str, Any]:
    return {name: hit.value[name] for name in ("timestamp", "episode", "importance")}


def _without_context(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_context(part) for key, part in value.items() if key != "memory_context"}
    return [_without_context(part) for part in value] if isinstance(value, list | tuple) else value


def _overlap(words: frozenset[str], others: frozenset[str]) -> float:
    return len(words & others) / max(len(words), len(others), 1)

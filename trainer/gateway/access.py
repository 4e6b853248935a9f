"""An attempt's way in: a URL and a key that are good for this attempt alone and die with it."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agl.mdp.selection import Selection
from agl.mdp.types import Call
from agl.trainer.gateway.sessions import Sessions
from agl.trainer.http.auth import key_hash, key_of, matches

if TYPE_CHECKING:
    from agl.trainer.gateway.calls import PendingRequest


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """What the trainer decides about sampling, whatever the agent asks for.

    Attributes:
        temperature, top_p, top_k: override the agent's; None leaves its own.
        max_tokens: an upper bound on the agent's own; None leaves it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None


@dataclass(eq=False)
class Access:
    """An open attempt.

    Attributes:
        rollout_id, attempt: which. selection: which agents are trained, by which policy.
        seed: of the rollout; with the attempt and the call's index it fixes each request's sampling.
        rules: the trainer's sampling rules. url: the attempt's base URL, without the agent.
        sessions: its conversations. arrived: how many requests came in. unsettled: those not recorded yet.
        finished: recorded calls. writes: of these to the store. closed: whether the attempt has ended.
    """

    rollout_id: str
    attempt: int
    selection: Selection
    seed: int
    rules: SamplingRules
    url: str
    key_hash: bytes
    sessions: Sessions = field(default_factory=Sessions)
    arrived: int = 0
    unsettled: set[PendingRequest] = field(default_factory=set)
    finished: list[Call] = field(default_factory=list)
    writes: list[asyncio.Task[None]] = field(default_factory=list)
    closed: bool = False

    def request_seed(self, index: int, choice: int, asked: int = 0) -> int:
        """The seed of one answer: 63 bits, fixed by the rollout's seed, the attempt, the call, the choice, and the seed
        that the agent asked for."""
        text = f"{self.seed}/{self.attempt}/{index}/{choice}/{asked}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def tool_call_id(self, index: int, choice: int, k: int) -> str:
        """Nine letters and digits, which every template accepts; the same in a run that is resumed."""
        text = f"{self.seed}/{self.attempt}/{index}/{choice}/{k}/tool".encode()
        n = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        alphabet = "0123456789abcdefghijklmnopqrstuvwxyz"
        letters = []
        for _ in range(9):
            n, rest = divmod(n, 36)
            letters.append(alphabet[rest])
        return "".join(letters)


class AccessTable:
    """Open attempts by rollout and attempt; keys are kept hashed and compared in constant time."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], Access] = {}

    def __iter__(self) -> Iterator[Access]:
        return iter(list(self._open.values()))

    def open(
        self, rollout_id: str, attempt: int, selection: Selection, seed: int, rules: SamplingRules, base_url: str
    ) -> tuple[Access, str]:
        """Let an attempt in; returns its access and its key, which is not kept."""
        key = f"agl-{secrets.token_urlsafe(24)}"
        url = f"{base_url}/rollouts/{rollout_id}/attempts/{attempt}"
        access = Access(rollout_id, attempt, selection, seed, rules, url, key_hash(key))
        self._open[rollout_id, attempt] = access
        return access, key

    def find(self, rollout_id: str, attempt: int, headers: Mapping[str, str]) -> Access | None:
        """The open attempt, if the request carries its key; None otherwise."""
        access = self._open.get((rollout_id, attempt))
        # Compare before looking at the result, so that an unknown attempt takes as long as a wrong key.
        good = matches(key_of(headers), access.key_hash if access is not None else b"")
        return access if good else None

    def close(self, rollout_id: str, attempt: int) -> Access | None:
        """End an attempt's access."""
        access = self._open.pop((rollout_id, attempt), None)
        if access is not None:
            access.closed = True
        return access

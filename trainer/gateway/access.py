"""An open attempt: its URL, its key that dies with it, and the requests that it has made."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from agl.mdp.selection import Selection
from agl.mdp.types import Call
from agl.tracing.system_prompts import SystemPrompts
from agl.trainer.gateway.calls import ChatRequest
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.sessions import Sessions
from agl.trainer.gateway.stored_responses import StoredResponses
from agl.trainer.http.auth import key_hash
from agl.trainer.http.turns import Turns

ANSWERS_AT_ONCE = 64
"""Answers of one attempt that are sampled at the same time, however many choices its requests want."""


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """The trainer's sampling parameters, which take precedence over the agent's.

    Attributes:
        temperature, top_p, top_k: replace the agent's; None keeps the agent's.
        max_tokens: an upper bound on the agent's; None sets none.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None


@dataclass(eq=False)
class Access:
    """An open attempt.

    Attributes:
        rollout_id, attempt: identify the attempt.
        selection: which agents are trained, by which policy.
        seed: of the rollout; with the attempt and the call's index it fixes each request's sampling.
        rules: the trainer's sampling parameters.
        url: the attempt's base URL, without the agent.
        key_hash: of the attempt's key.
        system_prompts: what replaces the agents' own; None when nothing is replaced.
        sessions: its conversations.
        responses: its stored responses, which a request of the Responses API can continue.
        turns: of its large requests.
        answers: of those that are sampled at once. Answers that begin or end together are handled in one burst, for
            which the requests of other attempts wait.
        request_count: requests received so far.
        pending: requests that are not recorded yet.
        calls: recorded calls.
        writes: the tasks that write them to the store.
        port: of the process that serves it, if that is not the one that opened it.
        admitted: done once that process admits its requests.
    """

    rollout_id: str
    attempt: int
    selection: Selection
    seed: int
    rules: SamplingRules
    url: str
    key_hash: bytes
    system_prompts: SystemPrompts | None = None
    sessions: Sessions = field(default_factory=Sessions)
    responses: StoredResponses = field(default_factory=StoredResponses)
    turns: Turns = field(default_factory=Turns)
    answers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ANSWERS_AT_ONCE))
    request_count: int = 0
    pending: set[PendingRequest] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    writes: list[asyncio.Task[None]] = field(default_factory=list)
    port: int | None = None
    admitted: Awaitable[None] | None = None

    @classmethod
    def opened(
        cls,
        rollout_id: str,
        attempt: int,
        selection: Selection,
        seed: int,
        rules: SamplingRules,
        base_url: str,
        system_prompts: SystemPrompts | None = None,
    ) -> tuple[Access, str]:
        """A new one at the gateway of this address, and its key, which is stored as a hash alone."""
        key = f"agl-{secrets.token_urlsafe(24)}"
        url = f"{base_url}/rollouts/{rollout_id}/attempts/{attempt}"
        return cls(rollout_id, attempt, selection, seed, rules, url, key_hash(key), system_prompts), key

    @property
    def base_url(self) -> str:
        """The address of the gateway that serves it."""
        return self.url.removesuffix(f"/rollouts/{self.rollout_id}/attempts/{self.attempt}")

    def for_process(self) -> tuple[Any, ...]:
        """What another process needs to serve it: the arguments of `Access`."""
        identity = self.rollout_id, self.attempt, self.selection, self.seed, self.rules, self.url, self.key_hash
        return *identity, self.system_prompts

    def request_seed(self, index: int, choice: int, agent_seed: int = 0) -> int:
        """The seed of one answer: 63 bits, fixed by the rollout's seed, attempt, call, choice and the agent's seed."""
        text = f"{self.seed}/{self.attempt}/{index}/{choice}/{agent_seed}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def tool_call_id(self, index: int, choice: int, k: int) -> str:
        """Nine letters and digits, which every template accepts; the same in a resumed run."""
        text = f"{self.seed}/{self.attempt}/{index}/{choice}/{k}/tool".encode()
        n = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        alphabet = "0123456789abcdefghijklmnopqrstuvwxyz"
        letters = []
        for _ in range(9):
            n, rest = divmod(n, 36)
            letters.append(alphabet[rest])
        return "".join(letters)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request from its arrival to its record.

    Attributes:
        access, agent: identify who sent it.
        policy: what answers it; None when the agent is not selected.
        index: its number in the attempt, from 0.
        response_id: of the answer, and of the call recorded for its first choice.
        span_id: of the client's span, hex.
        started_at: epoch seconds.
        began: the same moment by the monotonic clock.
        retry: how often the client had sent the same request before, as its SDK says.
        request: what it requests, once that is read.
        task: what serves it, while it is being served.
        cancel_cause: why the gateway cancelled it; None if the gateway did not.
        recorded: whether its calls are recorded.
    """

    access: Access
    agent: str
    policy: str | None
    index: int
    response_id: str
    span_id: str | None
    started_at: float
    began: float = field(default_factory=time.monotonic)
    retry: int = 0
    request: ChatRequest | None = None
    task: asyncio.Task[Any] | None = None
    cancel_cause: RequestError | None = None
    recorded: bool = False

    def call_id(self, choice: int) -> str:
        """The id of the call that is recorded for a choice."""
        return f"{self.response_id}:{choice}" if choice else self.response_id

    def replaces(self, other: PendingRequest) -> bool:
        """Whether the client has given `other` up and sent it again as this one."""
        return (self.agent, self.span_id, self.request) == (
            other.agent,
            other.span_id,
            other.request,
        ) and self.retry > other.retry

    def cancel(self, cause: RequestError) -> None:
        """Cancel it; the client gets `cause`, or the cause of an earlier cancellation."""
        self.cancel_cause = self.cancel_cause or cause
        if self.task is not None:
            self.task.cancel()

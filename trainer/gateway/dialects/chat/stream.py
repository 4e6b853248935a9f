"""The stream of Chat Completions: `chat.completion.chunk` objects."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl.trainer.engines.base import Completion
from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.calls import Choice, Reply, ServedPolicy
from agl.trainer.gateway.dialects.chat.answer import usage
from agl.trainer.gateway.dialects.chat.body import ChatCompletionsRequest
from agl.trainer.gateway.dialects.common import service_tier, sse
from agl.trainer.gateway.dialects.deltas import Delta, MessageDeltas
from agl.trainer.gateway.dialects.error_forms import openai_error
from agl.trainer.gateway.errors import RequestError


class ChatStream:
    """The chunks of all choices. Invariant: the deltas of a choice add up to its message."""

    def __init__(self, pending: PendingRequest, served: ServedPolicy, request: ChatCompletionsRequest) -> None:
        self._request = request
        self._deltas = MessageDeltas(request.chat, served.rendering, every_token=bool(request.body.return_token_ids))
        self._base = {
            "id": pending.response_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": served.name,
            "service_tier": service_tier(request.body),
        }

    def push(self, choice: Choice) -> Iterator[bytes]:
        """Chunks for what was sampled of a choice since the last call."""
        for delta in self._deltas.push(choice):
            yield self._chunk(choice.number, delta, logprobs=self._logprobs(choice.number, delta, choice))

    def finish(self, replies: Sequence[Reply]) -> Iterator[bytes]:
        """The chunks that complete every choice, and the usage if the request wants it."""
        for i, reply in enumerate(replies):
            for delta in self._deltas.finish(i, reply):
                yield self._chunk(i, delta, logprobs=self._logprobs(i, delta, reply.completion))
            extra = {"token_ids": reply.completion.token_ids.tolist()} if self._request.body.return_token_ids else {}
            entries = self._logprobs(i, {}, reply.completion, rest=True)
            yield self._chunk(i, {}, reply.finish_reason, entries, **extra)
        if (self._request.body.stream_options or {}).get("include_usage"):
            yield sse({**self._base, "choices": [], "usage": usage(replies)})
        yield b"data: [DONE]\n\n"

    def fail(self, error: RequestError) -> Iterator[bytes]:
        """The error of an answer that broke off."""
        yield sse(openai_error(error))

    def _logprobs(self, index: int, delta: Delta, sampled: Choice | Completion, *, rest: bool = False) -> Any:
        """The log-probs that come with a delta, if the request has `logprobs`."""
        if not self._request.body.logprobs or not (delta.get("content") or rest):
            return None
        entries = self._deltas.logprobs(index, sampled, rest=rest)
        return {"content": entries, "refusal": None} if entries or not rest else None

    def _chunk(
        self, index: int, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None, **extra: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs, **extra}
        return sse({**self._base, "choices": [choice]})

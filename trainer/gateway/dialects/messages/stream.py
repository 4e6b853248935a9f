"""The stream of Anthropic Messages: its events, in Anthropic's order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.calls import Choice, Reply, ServedPolicy, TokenCounts
from agl.trainer.gateway.dialects.common import sse
from agl.trainer.gateway.dialects.deltas import Delta, MessageDeltas
from agl.trainer.gateway.dialects.error_forms import anthropic_error
from agl.trainer.gateway.dialects.messages.answer import message_head, signature, stop_fields, usage
from agl.trainer.gateway.dialects.messages.body import MessagesRequest
from agl.trainer.gateway.errors import RequestError


class MessagesStream:
    """The events of one message. Invariant: they add up to what `answer` returns."""

    def __init__(self, pending: PendingRequest, served: ServedPolicy, request: MessagesRequest) -> None:
        self._pending = pending
        self._served = served
        self._request = request
        self._deltas = MessageDeltas(request.chat, served.rendering)
        self._started = False
        self._blocks = 0
        self._open_block: str | None = None
        """The type of the block that is being written."""

    def push(self, choice: Choice) -> Iterator[bytes]:
        """Events for what was sampled since the last call."""
        yield from self._start(choice.prompt.size)
        for delta in self._deltas.push(choice):
            yield from self._events(delta)

    def finish(self, replies: Sequence[Reply]) -> Iterator[bytes]:
        """Events that complete the message."""
        (reply,) = replies
        yield from self._start(reply.prompt_tokens)
        for delta in self._deltas.finish(0, reply):
            yield from self._events(delta)
        if not self._blocks:
            yield from self._start_block({"type": "text", "text": ""})
        yield from self._stop_block()
        stop = stop_fields(reply, self._request.chat, self._served)
        yield _event("message_delta", delta=stop, usage=usage(TokenCounts.of(replies)))
        yield _event("message_stop")

    def fail(self, error: RequestError) -> Iterator[bytes]:
        """The error of an answer that broke off."""
        yield sse(anthropic_error(error, self._pending.response_id), "error")

    def _start(self, prompt_tokens: int) -> Iterator[bytes]:
        if not self._started:
            self._started = True
            message = {
                **message_head(self._pending, self._served),
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                # How much of the prompt was continued is sent at the end, where clients read the final counts.
                "usage": usage(TokenCounts(prompt_tokens, cached=0, sampled=0, reasoning=0)),
            }
            yield _event("message_start", message=message)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if (reasoning := delta.get("reasoning_content")) and self._request.body.thinks:
            yield from self._begin("thinking", {"thinking": "", "signature": ""})
            if not self._request.body.omits_thoughts:
                yield self._block_delta("thinking_delta", "thinking", reasoning)
        if text := delta.get("content"):
            yield from self._begin("text", {"text": ""})
            yield self._block_delta("text_delta", "text", text)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            yield from self._start_block({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            yield self._block_delta("input_json_delta", "partial_json", function["arguments"])

    def _begin(self, kind: str, empty: Mapping[str, Any]) -> Iterator[bytes]:
        """The start of a block, unless the one that is being written is of this type."""
        if self._open_block != kind:
            yield from self._start_block({"type": kind, **empty})

    def _start_block(self, block: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._stop_block()
        self._open_block = block["type"]
        yield _event("content_block_start", index=self._blocks, content_block=block)
        self._blocks += 1

    def _block_delta(self, kind: str, field: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": kind, field: text})

    def _stop_block(self) -> Iterator[bytes]:
        if self._open_block == "thinking":
            yield self._block_delta("signature_delta", "signature", signature(self._pending))
        if self._open_block is not None:
            yield _event("content_block_stop", index=self._blocks - 1)
            self._open_block = None


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)

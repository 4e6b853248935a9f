"""An answer in Anthropic's Messages form, whole or as a stream of events.

Source: Anthropic API reference, "Create a Message", "Streaming messages" and "Errors".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl.trainer.gateway.calls import ChatRequest, Choice, Reply, ServedPolicy
from agl.trainer.gateway.dialects import chat
from agl.trainer.gateway.dialects.messages_body import MessagesBody
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.http import sse
from agl.trainer.rendering.rendering import Rendering

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def error_body(error: RequestError) -> dict[str, Any]:
    """The error as Anthropic shapes it."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def response(
    response_id: str, served: ServedPolicy, asked: ChatRequest, body: MessagesBody, reply: Reply
) -> dict[str, Any]:
    """The message that answers a request which does not stream."""
    content: list[dict[str, Any]] = []
    reasoning = reply.message.get("reasoning_content")
    if reasoning and body.thinks:
        content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text := reply.message.get("content"):
        content.append({"type": "text", "text": text})
    for call in reply.message.get("tool_calls") or ():
        # JSON has no NaN, though a model may write it.
        given = json.loads(call["function"]["arguments"], parse_constant=lambda _: None)
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    return {
        **_message(response_id, served.name),
        # Programs read `content[0].text` without a look; a policy that says nothing must not break them.
        "content": content or [{"type": "text", "text": ""}],
        **_stop(reply, asked, served.rendering),
        "usage": _usage(reply),
    }


class MessageEvents:
    """Turns tokens, as they come, into Anthropic's events.

    Invariant: the events add up to what `response` returns. It is the chat stream told in other words.
    """

    def __init__(self, response_id: str, served: ServedPolicy, asked: ChatRequest, body: MessagesBody) -> None:
        self._id, self._served, self._asked, self._body = response_id, served, asked, body
        plain = chat.ChatBody(messages=[{}])
        self._chat = chat.Streamer(response_id, served.name, plain, asked, served.rendering)
        self._begun = False
        self._blocks = 0
        self._open: str | None = None
        """The type of the block that is being written."""

    def push(self, choice: Choice) -> Iterator[bytes]:
        """Events for what was sampled since the last call."""
        yield from self._begin(choice.prompt.size)
        for chunk in self._chat.push(choice):
            yield from self._told(chunk["choices"][0]["delta"])

    def finish(self, replies: Sequence[Reply]) -> Iterator[bytes]:
        """Events that complete the message."""
        (reply,) = replies
        yield from self._begin(reply.prompt_tokens)
        for chunk in self._chat.finish(replies):
            yield from self._told(chunk["choices"][0]["delta"])
        if not self._blocks:
            yield from self._start({"type": "text", "text": ""})
        yield from self._stop()
        ending = {"delta": _stop(reply, self._asked, self._served.rendering), "usage": _usage(reply)}
        yield _event("message_delta", **ending)
        yield _event("message_stop")

    def fail(self, error: RequestError) -> Iterator[bytes]:
        """The event that tells of an answer which broke off."""
        yield sse(error_body(error), "error")

    def _begin(self, prompt_tokens: int) -> Iterator[bytes]:
        if self._begun:
            return
        self._begun = True
        # How much of the prompt was continued is told at the end, where clients look for the final counts.
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**_message(self._id, self._served.name), "content": [], **stop,
                                               "usage": usage})  # fmt: skip

    def _told(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        if (reasoning := delta.get("reasoning_content")) and self._body.thinks:
            yield from self._write("thinking", {"thinking": "", "signature": ""}, "thinking_delta", reasoning)
        if text := delta.get("content"):
            yield from self._write("text", {"text": ""}, "text_delta", text)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            yield from self._start({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            yield self._delta("input_json_delta", "partial_json", function["arguments"])

    def _write(self, kind: str, empty: Mapping[str, Any], delta: str, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._start({"type": kind, **empty})
        yield self._delta(delta, kind, text)

    def _start(self, block: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._stop()
        self._open = block["type"]
        yield _event("content_block_start", index=self._blocks, content_block=block)
        self._blocks += 1

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": kind, field: text})

    def _stop(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._blocks - 1)
            self._open = None


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _message(response_id: str, model: str) -> dict[str, Any]:
    return {"id": response_id, "type": "message", "role": "assistant", "model": model}


def _usage(reply: Reply) -> dict[str, int]:
    """Token counts; as Anthropic counts, what was continued exactly from an earlier call is not among the input."""
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": int(reply.completion.token_ids.size),
    }


def _stop(reply: Reply, asked: ChatRequest, rendering: Rendering) -> dict[str, str | None]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reply.finish_reason, "end_turn")
    if reason == "end_turn" and asked.sampling.stop:
        sampled = rendering.decode(reply.completion.token_ids)
        found = [(at, s) for s in asked.sampling.stop if (at := sampled.find(s)) >= 0]
        if found:
            return {"stop_reason": "stop_sequence", "stop_sequence": min(found)[1]}
    return {"stop_reason": reason, "stop_sequence": None}

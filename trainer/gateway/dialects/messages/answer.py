"""The JSON answer of Anthropic Messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.calls import ChatRequest, Reply, ServedPolicy, TokenCounts
from agl.trainer.gateway.dialects.messages.body import MessagesRequest


def answer(pending: PendingRequest, served: ServedPolicy, request: MessagesRequest, replies: Sequence[Reply]) -> bytes:
    """The message of the only reply."""
    (reply,) = replies
    content: list[dict[str, Any]] = []
    reasoning = reply.message.get("reasoning_content")
    if reasoning and request.body.thinks:
        shown = "" if request.body.omits_thoughts else reasoning
        content.append({"type": "thinking", "thinking": shown, "signature": signature(pending)})
    if text := reply.message.get("content"):
        content.append({"type": "text", "text": text})
    for call in reply.message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    message = {
        **message_head(pending, served),
        # Programs read `content[0].text` unchecked; an empty answer must not break them.
        "content": content or [{"type": "text", "text": ""}],
        **stop_fields(reply, request.chat, served),
        "usage": usage(TokenCounts.of(replies)),
    }
    # Not orjson: a model writes integers of any length.
    return json.dumps(message).encode()


def signature(pending: PendingRequest) -> str:
    """What closes a block of thinking. Clients send it back unread; what counts there is the text."""
    return pending.response_id


def message_head(pending: PendingRequest, served: ServedPolicy) -> dict[str, Any]:
    """The fields of a message that are known before its first token."""
    return {"id": pending.response_id, "type": "message", "role": "assistant", "model": served.name}


def usage(counts: TokenCounts) -> dict[str, Any]:
    """Token counts; as Anthropic counts, cached tokens are not among the input."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.sampled,
        "output_tokens_details": {"thinking_tokens": counts.reasoning},
    }


def stop_fields(reply: Reply, chat: ChatRequest, served: ServedPolicy) -> dict[str, str | None]:
    """Why the answer ended, and the stop text that ended it.

    As Anthropic documents `stop_sequences`, an answer that one of them ended says so, also one that has called tools.
    """
    if reply.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_text}
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reply.finish_reason, "end_turn")
    if reply.completion.finish_reason == "length":
        sampled = reply.completion.token_ids.size
        filled = reply.prompt_tokens + sampled >= served.engine.max_context
        if filled and sampled < chat.sampling.max_tokens:
            reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": None}

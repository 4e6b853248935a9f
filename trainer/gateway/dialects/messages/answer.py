"""The JSON answer of Anthropic Messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.calls import ChatRequest, Reply, ServedPolicy, TokenCounts
from agl.trainer.gateway.dialects.messages.body import MessagesRequest
from agl.trainer.rendering.rendering import Rendering


def answer(pending: PendingRequest, served: ServedPolicy, request: MessagesRequest, replies: Sequence[Reply]) -> bytes:
    """The message of the only reply."""
    (reply,) = replies
    content: list[dict[str, Any]] = []
    reasoning = reply.message.get("reasoning_content")
    if reasoning and request.body.thinks:
        content.append({"type": "thinking", "thinking": reasoning, "signature": signature(pending)})
    if text := reply.message.get("content"):
        content.append({"type": "text", "text": text})
    for call in reply.message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    message = {
        **message_head(pending, served),
        # Programs read `content[0].text` unchecked; an empty answer must not break them.
        "content": content or [{"type": "text", "text": ""}],
        **stop_fields(reply, request.chat, served.rendering),
        "usage": usage(reply),
    }
    # Not orjson: a model writes integers of any length.
    return json.dumps(message).encode()


def signature(pending: PendingRequest) -> str:
    """What closes a block of thinking. Clients send it back unread; what counts there is the text."""
    return pending.response_id


def message_head(pending: PendingRequest, served: ServedPolicy) -> dict[str, Any]:
    """The fields of a message that are known before its first token."""
    return {"id": pending.response_id, "type": "message", "role": "assistant", "model": served.name}


def usage(reply: Reply) -> dict[str, Any]:
    """Token counts; as Anthropic counts, cached tokens are not among the input."""
    counts = TokenCounts.of([reply])
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.sampled,
        "output_tokens_details": {"thinking_tokens": counts.reasoning},
    }


def stop_fields(reply: Reply, chat: ChatRequest, rendering: Rendering) -> dict[str, str | None]:
    """Why the answer ended, and the stop text that ended it."""
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reply.finish_reason, "end_turn")
    if reason == "end_turn" and chat.sampling.stop:
        text = rendering.decode(reply.completion.token_ids)
        matches = [(at, s) for s in chat.sampling.stop if (at := text.find(s)) >= 0]
        if matches:
            return {"stop_reason": "stop_sequence", "stop_sequence": min(matches)[1]}
    return {"stop_reason": reason, "stop_sequence": None}

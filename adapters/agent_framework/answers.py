"""The attributes of the `chat` span of an Agent Framework response, whole or streamed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from agl import semconv
from agl.adapters.scopes import counted
from agl.messages import Message, Other, Part, Reasoning, Text, ToolCall, write
from agl.tracing.context import Scope


def facts(scope: Scope, response: Any, content: bool) -> dict[str, Any]:
    """The attributes of a `ChatResponse`."""
    usage = response.usage_details or {}
    reasons = [str(response.finish_reason)] if response.finish_reason else None
    attributes = {
        semconv.RESPONSE_ID: response.response_id,
        semconv.RESPONSE_MODEL: response.model,
        semconv.FINISH_REASONS: reasons,
        **counted(scope, usage),
    }
    if content:
        parts = tuple(_part(part) for message in response.messages for part in message.contents)
        attributes[semconv.OUTPUT_MESSAGES] = write.to_json([Message("assistant", parts)], reasons or ())
    return attributes


def streamed_facts(scope: Scope, updates: Sequence[Any], content: bool) -> dict[str, Any]:
    """The attributes of a stream's updates, which the framework joins. They are not changed."""
    from agent_framework import ChatResponse

    copies = [copy.copy(update) for update in updates]
    for update in copies:
        update.contents = [copy.copy(part) for part in update.contents or ()]
    return facts(scope, ChatResponse.from_updates(copies), content)


def _part(content: Any) -> Part:
    match content.type:
        case "text":
            return Text(content.text or "")
        case "text_reasoning":
            return Reasoning(content.text or "")
        case "function_call":
            return ToolCall(content.call_id or "", content.name or "", content.arguments or "")
    return Other(content.to_dict())

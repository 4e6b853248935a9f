"""Input items of the Responses API as chat messages.

Invariant: an answer that a client sends back as the items it got becomes the assistant message that was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl.trainer.gateway.dialects.common import expect, part_text
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.stored_responses import Item, Message

_ROLES = frozenset({"system", "developer", "user", "assistant"})
_PART_FIELDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def messages_of(items: Sequence[Any], stored_items: Mapping[str, Item]) -> list[Message]:
    """Chat messages for input items. Neighbouring items of one answer become one assistant message.

    Args:
        items: of the request's input.
        stored_items: what references are resolved with, by id.

    Raises:
        RequestError: 400, naming the item at fault.
    """
    messages: list[Message] = []
    assistant: dict[str, Any] | None = None
    for where, item in _resolved(items, stored_items):
        kind = item.get("type") or "message"
        if kind == "reasoning" or kind == "function_call" or (kind == "message" and item.get("role") == "assistant"):
            answered = assistant is not None and (assistant["content"] is not None or "tool_calls" in assistant)
            if assistant is None or (answered and kind != "function_call"):
                assistant = {"role": "assistant", "content": None}
                messages.append(assistant)
            _add_item(assistant, kind, item, where)
            continue
        assistant = None
        if kind == "function_call_output":
            call_id = expect(item.get("call_id"), str, f"{where}.call_id", "is missing")
            output = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                raise RequestError(400, f"{where}.role is {role!r}", code="invalid_value", param=f"{where}.role")
            messages.append({"role": role, "content": _text(item.get("content"), f"{where}.content")})
        else:
            raise RequestError(
                400,
                f"{where} is an item of type {kind!r}; only messages, reasoning and function calls can be trained",
                code="unsupported_value",
                param=where,
            )
    return messages


def _resolved(items: Sequence[Any], stored_items: Mapping[str, Item]) -> Iterator[tuple[str, Item]]:
    """Items with their places, references replaced by the stored items."""
    for i, item in enumerate(items):
        where = f"input.{i}"
        expect(item, dict, where, "is not an object")
        if item.get("type") != "item_reference":
            yield where, item
            continue
        item_id = expect(item.get("id"), str, f"{where}.id", "is missing")
        stored = stored_items.get(item_id)
        if stored is None:
            raise RequestError(404, f"Item with id {item_id!r} not found.", code="not_found", param=where)
        yield where, stored


def _add_item(assistant: dict[str, Any], kind: str, item: Item, where: str) -> None:
    """Add an item to the assistant message that it is part of."""
    if kind == "message":
        assistant["content"] = _text(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ()
        expect(parts, list | tuple, f"{where}.content", "is not a list")
        texts = [p.get("text") for p in parts if isinstance(p, dict)]
        reasoning = "".join(t for t in texts if isinstance(t, str))
        if reasoning:
            assistant["reasoning_content"] = assistant.get("reasoning_content", "") + reasoning
    else:
        function = {
            "name": expect(item.get("name"), str, f"{where}.name", "is missing"),
            "arguments": expect(item.get("arguments"), str, f"{where}.arguments", "is not JSON text"),
        }
        call_id = expect(item.get("call_id"), str, f"{where}.call_id", "is missing")
        assistant.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = expect(content, list, where, "is neither text nor parts")
    return "".join(part_text(part, where, _PART_FIELDS) for part in parts)

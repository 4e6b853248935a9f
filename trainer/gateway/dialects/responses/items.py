"""Input items of the Responses API as chat messages.

Invariant: an answer that a client sends back as the items it got becomes the assistant message that was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl import messages
from agl.trainer.gateway.dialects.common import Fields, content, expect, typed
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.stored_responses import Item, Message

_ROLES = frozenset({"system", "developer", "user", "assistant"})
_PARTS = {
    "input_text": {"text": str},
    "output_text": {"text": str},
    "text": {"text": str},
    "refusal": {"refusal": str},
}
NO_COMPACTION = (
    "Only OpenAI's models write and read compactions: trim the session, or summarise with a request of your own (Codex "
    "does where its provider, `-c model_provider=NAME`, is not called OpenAI)"
)
_ITEMS: Mapping[str, Fields] = {
    "message": {"role": object, "content": object},
    "reasoning": {"content": str | list | None, "summary": str | list | None},
    "function_call": {"name": str, "arguments": str, "call_id": str},
    "function_call_output": {"call_id": str, "output": object},
}


def messages_of(items: Sequence[Any], stored_items: Mapping[str, Item]) -> list[Message]:
    """Chat messages for input items. Neighbouring items of one answer become one assistant message.

    Args:
        items: of the request's input.
        stored_items: what references are resolved with, by id.

    Raises:
        RequestError: 400, naming the item at fault.
    """
    history = messages.read.messages([_checked(item, where) for where, item in _resolved(items, stored_items)])
    return list(messages.write.to_openai(history))


def _checked(item: Item, where: str) -> Item:
    """The known fields of an item, or an error that names the one at fault."""
    if item.get("type") in ("compaction", "compaction_trigger"):
        raise RequestError(400, f"{where} is a {item['type']}. {NO_COMPACTION}", code="unsupported_value", param=where)
    only = "messages, reasoning and function calls"
    item = typed({**item, "type": item.get("type") or "message"}, _ITEMS, where, only)
    role = item.get("role")
    if item["type"] == "message" and not (isinstance(role, str) and role in _ROLES):
        raise RequestError(400, f"{where}.role is {role!r}", code="invalid_value", param=f"{where}.role")
    name = {"message": "content", "function_call_output": "output"}.get(item["type"])
    return item if name is None else {**item, name: content(item[name], _PARTS, f"{where}.{name}")}


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

"""Input items of the Responses API as chat messages.

Invariant: an answer that a client sends back as the items it got becomes the assistant message that was recorded.
"""

from __future__ import annotations

import base64
import binascii
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
    "reasoning": {
        "content": str | list | None,
        "summary": str | list | None,
        "encrypted_content": str | None,
    },
    "function_call": {"name": str, "arguments": str, "call_id": str},
    "function_call_output": {"call_id": str, "output": object},
}


_SEALED = "agl:"
"""Begins the `encrypted_content` of the policies' own reasoning."""


def checked_items(items: Sequence[Any], stored_items: Mapping[str, Item]) -> list[Item]:
    """The items of a request with the fields that are read, references replaced by what they refer to.

    Args:
        items: of the request's input.
        stored_items: what references are resolved with, by id.

    Raises:
        RequestError: 400, naming the item at fault.
    """
    return [_checked(item, where) for where, item in _resolved(items, stored_items)]


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Chat messages for `checked_items`. Neighbouring items of one answer become one assistant message."""
    return list(messages.write.to_openai(messages.read.messages(items)))


def listed_items(response_id: str, items: Sequence[Item]) -> list[dict[str, Any]]:
    """`checked_items` as `GET /responses/ID/input_items` lists them: each with an id, texts as parts."""
    return [_listed(item, item_id("in", response_id, k)) for k, item in enumerate(items)]


def item_id(prefix: str, response_id: str, number: int | None = None) -> str:
    """The id of an item of a response."""
    own = f"{prefix}_{response_id.removeprefix('resp_')}"
    return own if number is None else f"{own}_{number}"


def sealed(reasoning: str) -> str:
    """Reasoning as the `encrypted_content` that a client sends back instead of the text. Nothing is hidden by it: the
    item has the text as well."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def _opened(content: str | None) -> str | None:
    """The reasoning in an `encrypted_content`; None if it is not a policy's."""
    if content is None or not content.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def _listed(item: Item, own_id: str) -> dict[str, Any]:
    kind = item["type"]
    listed = {"id": item["id"] or own_id, "type": kind}
    match kind:
        case "message":
            parts = _listed_parts(item["content"], "output" if item["role"] == "assistant" else "input")
            return listed | {"role": item["role"], "content": parts, "status": "completed"}
        case "reasoning":
            texts = {"summary": "summary_text", "content": "reasoning_text"}
            return listed | {name: _thoughts(item[name], part) for name, part in texts.items()}
        case "function_call_output":
            output = item["output"]
            shown = output if isinstance(output, str) else _listed_parts(output, "input")
            return listed | {"call_id": item["call_id"], "output": shown, "status": "completed"}
    return listed | {name: item[name] for name in ("call_id", "name", "arguments")} | {"status": "completed"}


def _listed_parts(content: str | Sequence[Item], side: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    listed = []
    for part in parts:
        if part["type"] == "refusal" and side == "output":
            listed.append({"type": "refusal", "refusal": part["refusal"]})
        elif side == "output":
            listed.append({"type": "output_text", "text": part["text"], "annotations": []})
        else:
            listed.append({"type": "input_text", "text": part.get("text", part.get("refusal"))})
    return listed


def _thoughts(texts: str | Sequence[Any] | None, kind: str) -> list[dict[str, Any]]:
    parts = [{"text": texts}] if isinstance(texts, str) else texts or ()
    return [{"type": kind, "text": str(part.get("text", ""))} for part in parts if isinstance(part, dict)]


def _checked(item: Item, where: str) -> Item:
    """The known fields of an item, or an error that names the one at fault."""
    if item.get("type") in ("compaction", "compaction_trigger"):
        raise RequestError(400, f"{where} is a {item['type']}. {NO_COMPACTION}", code="unsupported_value", param=where)
    only = "messages, reasoning and function calls"
    own_id = item.get("id")
    item = typed({**item, "type": item.get("type") or "message"}, _ITEMS, where, only)
    item["id"] = own_id if isinstance(own_id, str) else None
    if item["type"] == "reasoning" and not item["content"]:
        item["content"] = _opened(item["encrypted_content"])
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

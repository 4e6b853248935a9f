"""Input items of the Responses API as chat messages, and the conversations that `previous_response_id` goes on from.

Invariant: an answer that a client sends back as the items it got becomes the assistant message that was recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import orjson

from agl.trainer.gateway.access import Access
from agl.trainer.gateway.errors import RequestError

Message = Mapping[str, Any]
Item = Mapping[str, Any]

_ROLES = frozenset({"system", "developer", "user", "assistant"})
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A response that can be continued: what came before it, and the messages it added, the answer last."""

    before: Kept | None
    messages: tuple[Message, ...]

    def conversation(self) -> list[Message]:
        """All messages up to and with the answer; instructions are none of them."""
        turns: list[Kept] = []
        turn: Kept | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [m for turn in reversed(turns) for m in turn.messages]


@dataclass(slots=True)
class History:
    """What an attempt's requests can refer to: its stored responses and their items, by id."""

    responses: dict[str, Kept] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)
    _messages: dict[bytes, Message] = field(default_factory=dict)
    """By their JSON's hash: a client that sends its whole history at each turn would fill the memory with copies."""

    def response(self, response_id: str) -> Kept:
        """A stored response.

        Raises:
            RequestError: 400, as OpenAI has it: this attempt has no such response, or it was not to be stored.
        """
        if response_id not in self.responses:
            raise RequestError(
                400,
                f"Previous response with id {response_id!r} not found; a response is known within its own rollout, "
                "unless it has failed or was asked for with store=false",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self.responses[response_id]

    def keep(self, response_id: str, before: Kept | None, messages: Sequence[Message], items: Sequence[Item]) -> None:
        """Make a response continuable; `messages` are those it added, `items` its output."""
        shared = tuple(self._messages.setdefault(_hash(m), m) for m in messages)
        self.responses[response_id] = Kept(before, shared)
        self.items.update((item["id"], item) for item in items)


class Histories:
    """The history of each attempt; it goes when the attempt does."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Access, History] = WeakKeyDictionary()

    def of(self, access: Access) -> History:
        """An attempt's."""
        return self._of.setdefault(access, History())


def messages_of(items: Sequence[Any], history: History) -> list[Message]:
    """Chat messages for input items. Neighbouring items of one answer become one assistant message.

    Raises:
        RequestError: 400, naming the item at fault.
    """
    messages: list[Message] = []
    said: dict[str, Any] | None = None
    for where, item in _resolved(items, history):
        kind = item.get("type") or "message"
        if kind == "reasoning" or kind == "function_call" or (kind == "message" and item.get("role") == "assistant"):
            begun = said is not None and (said["content"] is not None or "tool_calls" in said)
            if said is None or (begun and kind != "function_call"):
                said = {"role": "assistant", "content": None}
                messages.append(said)
            _say(said, kind, item, where)
            continue
        said = None
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


def expect(value: Any, kind: Any, where: str, otherwise: str) -> Any:
    """`value`, if it is of its kind.

    Raises:
        RequestError: 400, `where` followed by `otherwise`.
    """
    if not isinstance(value, kind):
        raise RequestError(400, f"{where} {otherwise}", code="invalid_value", param=where)
    return value


def _resolved(items: Sequence[Any], history: History) -> Iterator[tuple[str, Item]]:
    """Items with their places; references are followed."""
    for i, item in enumerate(items):
        where = f"input.{i}"
        expect(item, dict, where, "is not an object")
        if item.get("type") != "item_reference":
            yield where, item
            continue
        item_id = expect(item.get("id"), str, f"{where}.id", "is missing")
        referred = history.items.get(item_id)
        if referred is None:
            raise RequestError(404, f"Item with id {item_id!r} not found.", code="not_found", param=where)
        yield where, referred


def _say(said: dict[str, Any], kind: str, item: Item, where: str) -> None:
    """Add an item to the assistant message that it is part of."""
    if kind == "message":
        said["content"] = _text(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ()
        expect(parts, list | tuple, f"{where}.content", "is not a list")
        texts = [p.get("text") for p in parts if isinstance(p, dict)]
        thought = "".join(t for t in texts if isinstance(t, str))
        if thought:
            said["reasoning_content"] = said.get("reasoning_content", "") + thought
    else:
        called = {
            "name": expect(item.get("name"), str, f"{where}.name", "is missing"),
            "arguments": expect(item.get("arguments"), str, f"{where}.arguments", "is not JSON text"),
        }
        call_id = expect(item.get("call_id"), str, f"{where}.call_id", "is missing")
        said.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": called})


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in expect(content, list, where, "is neither text nor parts"):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXTS:
            raise RequestError(
                400,
                f"{where} has a part of type {kind!r}; only text can be trained",
                code="unsupported_value",
                param=where,
            )
        texts.append(expect(part.get(_TEXTS[kind]), str, where, f"has a {kind} part without a text"))
    return "".join(texts)


def _hash(message: Message) -> bytes:
    return hashlib.blake2b(orjson.dumps(message), digest_size=16).digest()

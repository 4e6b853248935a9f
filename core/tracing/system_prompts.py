"""Other system prompts in an agent's requests, in any provider's wire format.

Invariant: a request is changed in the text of a system prompt that was asked to be replaced and in nothing else; the
caller's objects are never changed.

Where the system prompt is (the providers' API references): Chat Completions, messages of the role system or developer;
Responses, `instructions` and such messages in `input`; Messages, `system`; Google's API, `systemInstruction`. Content
is a text, or parts with texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agl import semconv
from agl.messages.google import listed

SHOWN_CHARACTERS = 80
"""How much of an agent's own system prompt is recorded where it was not replaced."""

_ROLES = ("system", "developer")
_FIELDS = ("instructions", "system")
_HISTORIES = ("messages", "input")
_GOOGLES = ("systemInstruction", "system_instruction")
"""Either of protobuf's names; its parts may be one alone."""

NamedTexts = Mapping[str, tuple[str, str]]
"""Observed system prompt -> the name of what replaces it, and its text."""
SystemPrompts = Mapping[str, NamedTexts]
"""Agent -> its system prompts."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A request's body with other system prompts.

    Attributes:
        body: the body to send; the same object if nothing was replaced.
        names: of the prompts that were put in, one each time.
        left: system prompts of the request that were kept.
    """

    body: Any
    names: tuple[str, ...]
    left: tuple[str, ...]

    def facts(self, content: bool) -> dict[str, Any]:
        """Attributes of the request's `chat` span; with what was left if `content`."""
        if self.names:
            return {semconv.SYSTEM_PROMPTS: list(self.names)}
        shown = f"({len(self.left)} not recorded)" if self.left and not content else "".join(self.left[:1])
        return {semconv.SYSTEM_PROMPTS: [], semconv.SYSTEM_PROMPT_LEFT: shown[:SHOWN_CHARACTERS]}


def replace_system_prompts(body: Any, texts: NamedTexts) -> Replaced:
    """A request's body with every system prompt that is a key of `texts` replaced.

    Content in parts is compared as a whole and part by part. A whole of several texts becomes its first text part,
    which gets the fields that only the others have.
    """
    names: list[str] = []
    left: list[str] = []
    changed: Any = body
    for place, content in _contents(body):
        new = _replaced_content(content, texts, names)
        if new is content:
            left.append(_joined(content))
        elif isinstance(place, str):
            changed = {**changed, place: {**changed[place], "parts": new} if place in _GOOGLES else new}
        else:
            field, index = place
            messages = list(changed[field])
            messages[index] = {**messages[index], "content": new}
            changed = {**changed, field: messages}
    return Replaced(changed, tuple(names), tuple(left))


def _contents(body: Any) -> Iterator[tuple[str | tuple[str, int], Any]]:
    """(place, content) of each system prompt; the place is a field of the body, or a field and an index in it."""
    if not isinstance(body, Mapping):
        return
    for field in _FIELDS:
        if body.get(field) and isinstance(body[field], str | list):
            yield field, body[field]
    for field in _GOOGLES:
        own = body.get(field)
        if isinstance(own, Mapping) and isinstance(own.get("parts"), list | Mapping):
            yield field, listed(own["parts"])
    for field in _HISTORIES:
        messages = body.get(field)
        for i, message in enumerate(messages if isinstance(messages, list) else ()):
            if isinstance(message, Mapping) and message.get("role") in _ROLES:
                yield (field, i), message.get("content")


def _replaced_content(content: Any, texts: NamedTexts, names: list[str]) -> Any:
    """The content with its text replaced, or `content` itself; adds to `names`."""
    if isinstance(content, str):
        if (entry := texts.get(content)) is None:
            return content
        names.append(entry[0])
        return entry[1]
    if not isinstance(content, list):
        return content
    parts = [part for part in content if _part_text(part) is not None]
    if (entry := texts.get(_joined(content))) is not None and parts:
        names.append(entry[0])
        missing = {k: v for part in reversed(parts) for k, v in part.items() if k not in parts[0]}
        first = content.index(parts[0])
        rest = [part for part in content[first + 1 :] if _part_text(part) is None]
        return [*content[:first], {**parts[0], **missing, "text": entry[1]}, *rest]
    if not any(_part_text(part) in texts for part in parts):
        return content
    new = []
    for part in content:
        entry = texts.get(_part_text(part) or "")
        if entry is not None:
            names.append(entry[0])
            part = {**part, "text": entry[1]}
        new.append(part)
    return new


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(part) or "" for part in content) if isinstance(content, list) else ""


def _part_text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else None

"""`Message`s in the forms of others: OpenTelemetry's on spans, OpenAI's for chat templates.

Source: OpenTelemetry semantic conventions for generative AI, "Input messages JSON schema" and "Output messages JSON
schema"; OpenAI API reference, Chat Completions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from agl import semconv
from agl.errors import UnreadableMessageError
from agl.messages import read
from agl.messages.types import Message, Other, Part, Reasoning, Text, ToolCall, ToolResult

_HIDDEN = frozenset({"reasoning", "thinking", "redacted_thinking", "reasoningContent"})
"""Types of reasoning that the provider does not show; no chat template writes it."""


def to_otel(message: Message) -> dict[str, Any]:
    """A message in OpenTelemetry's form. `read` reads it back equal."""
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "parts": [_otel(part) for part in message.parts], **named}


def to_json(messages: Iterable[Message], reasons: Sequence[str] = ()) -> str:
    """The value of `gen_ai.input.messages`, or of `gen_ai.output.messages`, where each answer has its finish reason."""
    found = [to_otel(message) for message in messages]
    for message, reason in zip(found, reasons, strict=False):
        message["finish_reason"] = reason
    return json.dumps(found, default=str)


def history_json(history: Any) -> str:
    """The value of `gen_ai.input.messages`: messages in any form, as `read.messages` takes them, in OpenTelemetry's; as
    they came where one is in no known form."""
    try:
        return to_json(read.messages(history))
    except UnreadableMessageError:
        return json.dumps(history, default=str)


def request_facts(body: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes for the messages of a request's body, in any API's form; without any, none."""
    history = next((body[k] for k in ("messages", "input", "prompt") if body.get(k) is not None), None)
    if history is None:
        return {}
    facts: dict[str, Any] = {semconv.INPUT_MESSAGES: history_json(history)}
    instructions = body.get("instructions") or body.get("system")
    if instructions:
        try:
            [system] = read.system(instructions)
            facts[semconv.SYSTEM_INSTRUCTIONS] = json.dumps([_otel(p) for p in system.parts], default=str)
        except UnreadableMessageError:
            facts[semconv.SYSTEM_INSTRUCTIONS] = json.dumps(instructions, default=str)
    return facts


def answer_json(choices: Any, reasons: Sequence[str] = ()) -> str:
    """The value of `gen_ai.output.messages`: the answers that an API or a framework gave, in OpenTelemetry's form.

    Args:
        choices: as for `read.answers`; an unknown form is recorded unchanged.
        reasons: finish reason of each.
    """
    try:
        return to_json(read.answers(choices), reasons)
    except UnreadableMessageError:
        return json.dumps(choices, default=str)


def to_openai(messages: Iterable[Message], *, text_only: bool = True) -> list[dict[str, Any]]:
    """Messages as Chat Completions has them, and chat templates expect them; each tool result is a message.

    Args:
        text_only: refuse a part that is not text, such as an image; otherwise it is kept unchanged.

    Raises:
        UnreadableMessageError: a message has a part that is not text.
    """
    return [written for message in messages for written in _openai(message, text_only)]


def _openai(message: Message, text_only: bool) -> list[dict[str, Any]]:
    named = {} if message.name is None else {"name": message.name}
    written: list[dict[str, Any]] = []
    for result in message.tool_results:
        if text_only and not isinstance(result.content, str):
            _refuse(message, "a tool result that is not only text")
        content = result.content or ("error" if result.failed else "")
        written.append({"role": "tool", "tool_call_id": result.id, "content": content, **named})
    kept = (p.value for p in message.parts if isinstance(p, Other))
    # Of what a client calls its part, anything may come.
    others = [value for value in kept if str(value.get("type") or next(iter(value), None)) not in _HIDDEN]
    if text_only and others:
        _refuse(message, f"a part of type {str(others[0].get('type'))!r}")
    calls = message.tool_calls
    texts = [p for p in message.parts if isinstance(p, Text)]
    if written and not texts and not calls and not others:
        return written
    said: dict[str, Any] = {"role": message.role, "content": message.text or (None if calls else ""), **named}
    if others:
        parts = (p for p in message.parts if isinstance(p, Text) or (isinstance(p, Other) and p.value in others))
        said["content"] = [{"type": "text", "text": p.content} if isinstance(p, Text) else p.value for p in parts]
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if calls:
        said["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.json_arguments}} for c in calls
        ]
    return [*written, said]


def _refuse(message: Message, what: str) -> NoReturn:
    raise UnreadableMessageError(
        f"a message of the role {message.role!r} has {what}; a policy reads text alone",
        hint="send text, or leave this agent out of training with agents=[...]",
    )


def _otel(part: Part) -> Mapping[str, Any]:
    match part:
        case Text(content):
            return {"type": "text", "content": content}
        case Reasoning(content):
            return {"type": "reasoning", "content": content}
        case ToolCall(id, name, arguments):
            return {"type": "tool_call", "id": id, "name": name, "arguments": arguments}
        case ToolResult(id, content, failed):
            mark = {"failed": True} if failed else {}
            return {"type": "tool_call_response", "id": id, "response": content, **mark}
        case Other(value):
            return value

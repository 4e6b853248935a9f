"""Brings clients' messages into the form that chat templates read; the text of a message is never changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from agl.errors import ConfigError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
Rendered = TypeVar("Rendered")

NEIGHBOURS = "\n\n"
"""What stands between the texts of neighbouring messages of one role where a template refuses them as they are."""


def normalise(messages: Sequence[Message], *, parse_arguments: bool, developer: bool) -> list[dict[str, Any]]:
    """Messages in OpenAI's form as chat templates expect them.

    Text parts are joined, missing content becomes "", tool messages get the name of their tool, and fields that no
    template knows are dropped.

    Args:
        messages: of a request.
        parse_arguments: turn the JSON text of tool-call arguments into objects; text that is no JSON object stays text.
        developer: whether the template knows the role "developer"; otherwise it becomes "system".

    Raises:
        ConfigError: a message has a part that is not text, or no role.
    """
    return [_message(m, parse_arguments, developer) for m in with_tool_names(messages)]


def joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with neighbours of one role as one message, for templates whose roles must alternate.

    The APIs allow such neighbours. Their texts, and their reasoning, are separated by `NEIGHBOURS`; tool calls follow
    each other. Results of tools are not joined, since each belongs to its own call.

    Args:
        messages: normalised.
    """
    out: list[dict[str, Any]] = []
    for message in messages:
        if not out or message["role"] == "tool" or message["role"] != out[-1]["role"]:
            out.append(message)
            continue
        last = {**out[-1], **message}
        for key in ("content", "reasoning_content"):
            texts = [text for text in (out[-1].get(key), message.get(key)) if text]
            if key in last:
                last[key] = NEIGHBOURS.join(texts)
        if "tool_calls" in last:
            last["tool_calls"] = [*out[-1].get("tool_calls", ()), *message.get("tool_calls", ())]
        out[-1] = last
    return out


def accepted(
    render: Callable[[list[dict[str, Any]]], Rendered],
    messages: list[dict[str, Any]],
    refusals: tuple[type[Exception], ...],
) -> Rendered:
    """What a template makes of messages or, where it refuses them, of the `joined` ones.

    Args:
        render: the template.
        messages: normalised.
        refusals: what it raises of messages that it refuses.

    Raises:
        Exception: one of `refusals`, of the messages as they are.
    """
    try:
        return render(messages)
    except refusals:
        with suppress(*refusals):
            if len(alternating := joined(messages)) < len(messages):
                return render(alternating)
        raise


def with_tool_names(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """`messages` with `name` set on each tool message that answers one of their calls."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        message = dict(message)
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = call["function"]["name"]
        if message.get("role") == "tool" and not message.get("name"):
            name = names.get(str(message.get("tool_call_id")))
            if name is not None:
                message["name"] = name
        named.append(message)
    return named


def with_native_ids(messages: list[dict[str, Any]], sampled: Sequence[str | None]) -> list[dict[str, Any]]:
    """`messages` after an answer, with the leading tool results under the call ids that the model sampled.

    Clients have other ids for the calls than the model. Results are matched to calls by their order; nothing changes
    when the numbers differ or the model wrote no ids.

    Args:
        messages: normalised.
        sampled: the call ids of the answer; None for a call without an id.
    """
    first = next((i for i, m in enumerate(messages) if m["role"] != "tool"), len(messages))
    if first != len(sampled) or None in sampled:
        return messages
    results = [{**m, "tool_call_id": i} for m, i in zip(messages[:first], sampled, strict=True)]
    return [*results, *messages[first:]]


def rename_call_ids(messages: list[dict[str, Any]], rename: Callable[[str, str, int], str]) -> list[dict[str, Any]]:
    """`messages` with other tool-call ids.

    Args:
        messages: normalised.
        rename: (id, tool name, number of the call in the conversation) -> id.
    """
    renamed: dict[str, str] = {}
    count = 0
    out = []
    for message in messages:
        if calls := message.get("tool_calls"):
            new_calls = []
            for call in calls:
                new_id = rename(str(call.get("id", "")), call["function"]["name"], count)
                renamed[str(call.get("id", ""))] = new_id
                new_calls.append({**call, "id": new_id})
                count += 1
            message = {**message, "tool_calls": new_calls}
        if "tool_call_id" in message:
            old = str(message["tool_call_id"])
            message = {**message, "tool_call_id": renamed.get(old) or rename(old, message.get("name", ""), count)}
        out.append(message)
    return out


def _message(message: Message, parse_arguments: bool, developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise ConfigError("a message has no role", hint=f"its fields are: {', '.join(map(str, message))}")
    # OpenAI's form of an answer that refuses has its text in a field of its own, and no content.
    content = message.get("content") or message.get("refusal")
    out: dict[str, Any] = {
        "role": "system" if role == "developer" and not developer else role,
        "content": _text(content, role),
    }
    for key in ("name", "tool_call_id"):
        if message.get(key):
            out[key] = message[key]
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        out["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_call(call, parse_arguments) for call in calls]
    return out


def _text(content: Any, role: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        fields: Mapping[str, Any] = {"text": part} if isinstance(part, str) else part
        text = fields.get("text", fields.get("refusal"))
        if not isinstance(text, str):
            raise ConfigError(
                f"a {role} message has a content part of type {fields.get('type')!r}; the policy reads text only",
                hint="send text parts, or leave this agent out of training with agents=[...]",
            )
        texts.append(text)
    return "".join(texts)


def _encodable(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments without halves of surrogate pairs, which JSON's escapes can be and no tokenizer takes."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode(errors="replace"))
    return arguments


def _call(call: Mapping[str, Any], parse_arguments: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if parse_arguments and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):  # deeper than the interpreter's stack
            parsed = None
        arguments = _encodable(parsed) if isinstance(parsed, dict) else arguments
    elif not parse_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    out: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id"):
        out["id"] = call["id"]
    return out

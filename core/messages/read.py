"""What an API or a framework wrote -> `Message`s.

Sources: OpenAI API reference (Chat Completions, Responses), Anthropic API reference (Messages), OpenTelemetry's
semantic conventions for generative AI (`gen_ai.input.messages`), and the objects of LangChain, Strands, Agent Framework
and Pydantic AI, as their tracers see them. A part of an unknown kind is kept unchanged (`Other`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

from agl import semconv
from agl.errors import UnreadableMessageError
from agl.messages import google
from agl.messages.types import Message, Other, Part, Reasoning, Text, ToolCall, ToolResult

_BODY = (
    "content",
    "parts",
    "tool_calls",
    "reasoning_content",
    "reasoning",
    "function_call",
    "refusal",
    "audio",
    "images",
)
"""Fields that hold what a message says."""
_HEAD = frozenset({"role", "name", "id", "type", "status", "finish_reason"})
_ITEMS = frozenset({"message", "reasoning", "function_call", "custom_tool_call"})
"""Types of the Responses API's items that together make one answer."""


_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_PLACE = {"rollout": "rollout_id", "attempt": "attempt", "agent": "agent", "span": "span_id"}
T = TypeVar("T")


class Recorded(Protocol):
    """A `chat` span: agl's, or one of OpenTelemetry's SDK."""

    @property
    def attributes(self) -> Any: ...


def sent(call: Recorded) -> list[Message]:
    """The messages of a call's request, a separate system prompt first; none where they were not recorded.

    Raises:
        UnreadableMessageError: one is in no known form; names the call.
    """
    return [*_recorded(call, semconv.SYSTEM_INSTRUCTIONS, system), *_recorded(call, semconv.INPUT_MESSAGES, messages)]


def said(call: Recorded) -> list[Message]:
    """A call's answers, one for each that was asked for; none where they were not recorded.

    Raises:
        UnreadableMessageError: one is in no known form; names the call.
    """
    return _recorded(call, semconv.OUTPUT_MESSAGES, answers)


def offered(call: Recorded) -> list[dict[str, Any]]:
    """The tools of a call's request, in the form of Chat Completions.

    Raises:
        UnreadableMessageError: one has no name; names the call.
    """
    return _recorded(call, semconv.TOOL_DEFINITIONS, tools)


def _recorded(call: Recorded, name: str, read: Callable[[Any], list[T]]) -> list[T]:
    recorded = (call.attributes or {}).get(name)
    if recorded is None:
        return []
    try:
        # MassGen's plugin records a text as it is.
        written = not isinstance(recorded, str) or not recorded.lstrip().startswith(("[", "{", '"'))
        return read(recorded if written else json.loads(recorded))
    except (ValueError, UnreadableMessageError) as error:
        why = error.message if isinstance(error, UnreadableMessageError) else f"no JSON ({error})"
        raise UnreadableMessageError(
            f"{name} cannot be read: {why}",
            hint="record it in the form of OpenTelemetry's conventions, or leave the agent out with agents=[...]",
            **{name: getattr(call, field, None) for name, field in _PLACE.items()},
        ) from error


def body(request: Mapping[str, Any]) -> list[Message]:
    """The messages of a request's body in any API's form, its separate system prompt first.

    Raises:
        UnreadableMessageError: one is in no known form.
    """
    request = google.common(request)
    history = next((request[k] for k in ("messages", "input", "prompt") if request.get(k) is not None), [])
    return [*system(request.get("instructions") or request.get("system")), *messages(history)]


def system(content: Any) -> list[Message]:
    """The message of a system prompt that stands apart from the history: a text or parts; none if it is empty."""
    return [Message("system", _parts(content, "system"))] if content else []


def messages(history: Any) -> list[Message]:
    """The messages of a history; a text is the user's. Items of the Responses API that make one answer are one message.

    Raises:
        UnreadableMessageError: says which one is in no known form.
    """
    if isinstance(history, str):
        return [Message("user", (Text(history),))]
    found: list[Message] = []
    thought = False
    """Whether the last message is reasoning and the answer's text or tool calls follow."""
    for i, item in enumerate(_list(history, "messages")):
        message = _message(item, f"messages.{i}")
        kind = _field(item, "type")
        follows = thought or (kind == "function_call" and found and found[-1].role == "assistant")
        if follows and kind in _ITEMS and message.role == "assistant":
            before = found.pop()
            message = Message("assistant", (*before.parts, *message.parts), before.name)
        thought = kind == "reasoning" and all(isinstance(p, Reasoning | Other) for p in message.parts)
        found.append(message)
    return found


def answers(choices: Any) -> list[Message]:
    """The answers to one request: each choice's message, or the one that all items of a response make.

    Raises:
        UnreadableMessageError: says which one is in no known form.
    """
    choices = [choices] if isinstance(choices, str | Mapping) else _list(choices, "answers")
    found = [_message(choice, f"answers.{i}", "assistant") for i, choice in enumerate(choices)]
    if len(found) > 1 and any(_field(choice, "type") and "parts" not in choice for choice in choices):
        return [Message("assistant", tuple(part for message in found for part in message.parts))]
    return found


def tools(definitions: Any) -> list[dict[str, Any]]:
    """Tool definitions in any API's form, in that of Chat Completions.

    Raises:
        UnreadableMessageError: one has no name, so the model's own provider runs it.
    """
    found = []
    for i, tool in enumerate(_list(definitions or [], "tools")):
        function = _field(tool, "function") or tool
        if not isinstance(_field(function, "name"), str):
            _refuse(f"tools.{i}", f"has no name; its fields are {', '.join(map(repr, tool))}")
        parameters = function.get("parameters", function.get("input_schema"))
        known = {"name": function["name"], "description": function.get("description"), "parameters": parameters}
        known["strict"] = function.get("strict")
        found.append({"type": "function", "function": {k: v for k, v in known.items() if v is not None}})
    return found


def _message(item: Any, at: str, role: str | None = None) -> Message:
    """One message, or one item of the Responses API. `role`: of one that names none."""
    if isinstance(item, str):
        return Message(role or "user", (Text(item),))
    if not isinstance(item, Mapping):
        _refuse(at, "is neither a text nor an object")
    speaker = item.get("role")
    if speaker is None:
        # Of a part that stands alone, the type says what it is.
        speaker = (
            "assistant"
            if item.get("kind") == "response"
            else role
            if item.get("type", "message") == "message"
            else None
        )
    if not isinstance(speaker, str):
        if item.get("type") in _OUTPUTS:
            return Message("tool", (ToolResult(_id(item, "call_id"), _result(item.get("output"), at)),))
        if not isinstance(item.get("type"), str) or ("content" in item and item["type"] != "reasoning"):
            _refuse(at, f"has no role; its fields are {', '.join(map(repr, item))}")
        return Message("assistant", (_part(item, at),))
    if not any(name in item for name in _BODY) and any(v is not None for k, v in item.items() if k not in _HEAD):
        _refuse(at, f"has no content; its fields are {', '.join(map(repr, item))}")
    parts: list[Part] = []
    if reasoning := item.get("reasoning_content") or item.get("reasoning"):
        parts.append(Reasoning(reasoning) if isinstance(reasoning, str) else Other({"reasoning": reasoning}))
    content = item["parts"] if item.get("parts") is not None else item.get("content")
    if speaker in ("tool", "function") and item.get("parts") is None:
        failed = item.get("status") == "error"
        parts.append(ToolResult(_id(item, "tool_call_id"), _result(content, f"{at}.content"), failed))
        content = None
    calls = [_call(call, f"{at}.tool_calls.{k}") for k, call in enumerate(_list(item.get("tool_calls") or [], at))]
    if item.get("function_call"):
        calls.append(_call(item["function_call"], f"{at}.function_call"))
    # LangChain repeats the calls that are among Anthropic's and OpenAI's parts.
    known = {call.id for call in calls}
    parts += [p for p in _parts(content, f"{at}.content") if not (isinstance(p, ToolCall) and p.id in known)]
    if isinstance(refusal := item.get("refusal"), str):
        parts.append(Text(refusal))
    parts += (Other({"type": k, k: item[k]}) for k in ("audio", "images") if item.get(k))
    name = item.get("name")
    role = "assistant" if speaker == "model" else speaker
    return Message(role, (*parts, *calls), name if isinstance(name, str) and name else None)


def _parts(content: Any, at: str) -> tuple[Part, ...]:
    if content is None or content == "":
        return ()
    if isinstance(content, str):
        return (Text(content),)
    return tuple(_part(part, f"{at}.{k}") for k, part in enumerate(_list(content, at)))


def _part(part: Any, at: str) -> Part:
    """A part of a message, of any API."""
    if isinstance(part, str):
        return Text(part)
    if not isinstance(part, Mapping):
        _refuse(at, "is neither a text nor an object")
    # Strands gives its blocks no type.
    kind = part.get("type") or part.get("part_kind") or next((k for k in _UNTYPED if k in part), None)
    match kind:
        case "text" | "input_text" | "output_text":
            return Text(_text(part, ("text", "content"), at))
        case "refusal":
            return Text(_text(part, ("refusal", "content"), at))
        case "thinking" if isinstance(thoughts := part.get("thinking"), list):
            # Mistral's.
            return Reasoning("".join(t for p in thoughts if isinstance(t := _field(p, "text"), str)))
        case "thinking":
            return Reasoning(_text(part, ("thinking", "content"), at))
        case "reasoning" | "reasoningContent":
            return _reasoning(part)
        case "tool_use" | "function_call" | "custom_tool_call" | "tool_call" | "tool-call":
            return _call(part, at)
        case "toolUse":
            return _call(part["toolUse"], at)
        case "tool_result":
            return ToolResult(_id(part, "tool_use_id"), _result(part.get("content"), at), bool(part.get("is_error")))
        case "toolResult" if isinstance(result := part["toolResult"], Mapping):
            content = _result(result.get("content"), at)
            return ToolResult(_id(result, "toolUseId"), content, result.get("status") == "error")
        case "function_call_output" | "custom_tool_call_output":
            return ToolResult(_id(part, "call_id"), _result(part.get("output"), at))
        case "tool_call_response":
            content = part["response"] if "response" in part else part.get("result")
            return ToolResult(_id(part, "id"), _result(content, at), bool(part.get("failed")))
    return Other(part)


_UNTYPED = ("toolUse", "toolResult", "reasoningContent", "text")


def _reasoning(part: Mapping[str, Any]) -> Part:
    """Reasoning as text, if the provider shows it; hidden reasoning unchanged."""
    shown: Any = part.get("reasoningContent") or part
    shown = shown.get("reasoningText") or shown
    for name in ("content", "summary", "reasoning", "text"):
        said = shown.get(name)
        if isinstance(said, list | tuple):
            said = "".join(t for p in said if isinstance(t := _field(p, "text"), str))
        if isinstance(said, str) and said:
            return Reasoning(said)
    return Other(part)


def _call(call: Any, at: str) -> ToolCall:
    function = _field(call, "function") or _field(call, "custom") or call
    name = next((n for k in ("name", "tool_name") if (n := _field(function, k)) is not None), None)
    if not isinstance(name, str):
        _refuse(at, "is a tool call without a name")
    arguments = next((function[k] for k in ("arguments", "args", "input") if function.get(k) is not None), "")
    if not arguments and isinstance(streamed := call.get("partial_json"), str):
        arguments = streamed
    return ToolCall(next((i for k in _CALL_IDS if (i := _id(call, k))), ""), name, arguments)


_CALL_IDS = ("call_id", "tool_call_id", "toolUseId", "id")
"""In this order: an item of the Responses API and a part of Pydantic AI's also have their own id."""


def _result(content: Any, at: str) -> Any:
    """A tool result's content as one text, or unchanged if it holds anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list | tuple) and content:
        parts = [_part(p, at) if isinstance(p, str | Mapping) else Other({}) for p in content]
        if all(isinstance(p, Text) for p in parts):
            return "".join(p.content for p in parts if isinstance(p, Text))
    return content


def _text(part: Mapping[str, Any], names: Sequence[str], at: str) -> str:
    text = next((part[name] for name in names if part.get(name) is not None), None)
    if not isinstance(text, str):
        _refuse(at, f"is a part of type {part.get('type')!r} without a text")
    return text


def _id(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    return "" if value is None else str(value)


def _field(of: Any, name: str) -> Any:
    return of.get(name) if isinstance(of, Mapping) else None


def _list(value: Any, at: str) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else _refuse(at, f"is a {type(value).__name__}, and no list")


def _refuse(at: str, why: str) -> NoReturn:
    raise UnreadableMessageError(f"{at} {why}")

"""The conversation of a recorded call, in the form of Chat Completions: messages, tools, answer.

Recorded are requests in the form of their provider's API, and answers in the form of whatever adapter saw them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from agl import semconv
from agl.mdp.spans import Span
from agl.mdp.types import Call, FinishReason
from agl.trainer.gateway.dialects.chat.body import read as read_chat
from agl.trainer.gateway.dialects.messages.body import read as read_messages
from agl.trainer.gateway.dialects.responses.body import read as read_responses
from agl.trainer.gateway.dialects.responses.items import messages_of
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.stored_responses import StoredResponses
from agl.trainer.rendering.normalise import Message

_ITEMS = frozenset({"message", "function_call", "function_call_output", "reasoning", "item_reference"})
"""Types of the Responses API's items."""
_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})
"""Types of Anthropic's content blocks that no other API has."""
_CUT = frozenset({"length", "max_tokens", "max_output_tokens", "incomplete", "model_context_window_exceeded"})
_BROKEN = frozenset({"content_filter", "refusal", "failed", "cancelled", "error"})


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One call's texts.

    Attributes:
        messages: of the request, whole. tools: of the request. answer: the assistant's message.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    answer: Message


class NoConversationError(Exception):
    """A call's texts are not known; the message is the reason in a few words."""


def of_calls(calls: Sequence[Call]) -> dict[str, Conversation | NoConversationError]:
    """Call id -> its conversation, of an attempt's calls that the gateway recorded, in order of arrival.

    A call's record holds what its parent's does not, so a conversation is put together from its calls.
    """
    conversations: dict[str, Conversation | NoConversationError] = {}
    for call in calls:
        parent = None if call.parent_id is None else conversations.get(call.parent_id)
        if not call.response or "messages" not in call.request or (call.parent_id is not None and parent is None):
            conversations[call.id] = NoConversationError("texts not recorded")
        elif isinstance(parent, NoConversationError):
            conversations[call.id] = parent
        else:
            before = [] if parent is None else [*parent.messages, parent.answer]
            tools = call.request.get("tools") or () if parent is None else parent.tools
            conversations[call.id] = Conversation([*before, *call.request["messages"]], tools, call.response)
    return conversations


def of_span(span: Span) -> Conversation:
    """The conversation of a `chat` span that no gateway recorded.

    Raises:
        NoConversationError: its texts were not recorded, or are none that can be trained.
    """
    facts = span.attributes
    if facts.get(semconv.PREVIOUS_RESPONSE):
        raise NoConversationError("earlier messages kept by the provider")
    messages, answers = _json(facts.get(semconv.INPUT_MESSAGES)), _json(facts.get(semconv.OUTPUT_MESSAGES))
    if not messages or not answers:
        raise NoConversationError("texts not recorded")
    tools = _json(facts.get(semconv.TOOL_DEFINITIONS))
    try:
        request = _read(messages, tools)
        return Conversation(request.messages, request.tools or (), _answer(answers))
    except RequestError as error:
        raise NoConversationError("not only text") from error


def finish_reason(span: Span) -> FinishReason:
    """Why the answer of a `chat` span ended, in the gateway's words."""
    if span.status == "error":
        return "error"
    reasons = span.attributes.get(semconv.FINISH_REASONS) or ("stop",)
    reason = str(reasons if isinstance(reasons, str) else reasons[0]).lower()
    return "length" if reason in _CUT else "cancelled" if reason in _BROKEN else "stop"


def _read(messages: list[Any], tools: list[Any]) -> Any:
    """The request in the gateway's form, read by the API whose form it has."""
    parts = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"] if isinstance(p, Mapping)]
    responses = any(m.get("type") in _ITEMS for m in messages) or any(
        str(p.get("type")).startswith(("input_", "output_")) for p in parts
    )
    # Tools in the form of the Responses API have their name at the top, as Anthropic's do.
    responses = responses or any(t.get("type") == "function" and "function" not in t for t in tools)
    if responses:
        access = cast(Any, SimpleNamespace(responses=StoredResponses()))
        return read_responses({"input": messages, **_given(tools=tools)}, access).chat
    if any(p.get("type") in _BLOCKS for p in parts) or any("input_schema" in t for t in tools):
        return read_messages({"messages": messages, "max_tokens": 1, **_given(tools=tools)}, cast(Any, None)).chat
    return read_chat({"messages": messages, **_given(tools=tools)}, cast(Any, None)).chat


def _answer(answers: list[Any]) -> Message:
    """The assistant's message, in whatever form an adapter recorded it."""
    if any(a.get("type") in _ITEMS for a in answers):
        merged: dict[str, Any] = {"role": "assistant", "content": ""}
        for part in messages_of(answers, {}):
            merged["content"] += part.get("content") or ""
            if part.get("tool_calls"):
                merged["tool_calls"] = [*merged.get("tool_calls", ()), *part["tool_calls"]]
            if part.get("reasoning_content"):
                merged["reasoning_content"] = part["reasoning_content"]
        return merged
    if len(answers) > 1:
        raise NoConversationError("several answers to one request")
    (answer,) = answers
    content = answer.get("content")
    message: dict[str, Any] = {"role": "assistant", "content": content if isinstance(content, str) else ""}
    blocks = [b for b in content if isinstance(b, Mapping)] if isinstance(content, list) else []
    message["content"] += "".join(str(b["text"]) for b in blocks if isinstance(b.get("text"), str))
    thoughts = "".join(str(b["thinking"]) for b in blocks if isinstance(b.get("thinking"), str))
    if reasoning := answer.get("reasoning_content") or thoughts:
        message["reasoning_content"] = reasoning
    # LangChain repeats Anthropic's blocks as tool calls.
    calls = list(_tool_calls(answer.get("tool_calls") or blocks))
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_calls(parts: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Tool calls of OpenAI, LangChain, Agent Framework, Anthropic and Strands, in OpenAI's form."""
    for part in parts:
        call = part.get("toolUse") or part
        function = call.get("function") or call
        name = function.get("name")
        arguments = next((function[k] for k in ("arguments", "args", "input") if function.get(k) is not None), None)
        if not isinstance(name, str) or (call is part and part.get("type") == "text"):
            continue
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        call_id = str(call.get("id") or call.get("toolUseId") or call.get("call_id") or "")
        yield {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _json(text: Any) -> list[Any]:
    """The objects of a recorded list; none if it is no such list."""
    try:
        values = json.loads(str(text or "[]"))
    except ValueError:
        return []
    return values if isinstance(values, list) and all(isinstance(v, Mapping) for v in values) else []

"""The conversation of a recorded call, in the form of Chat Completions: messages, tools, answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl import semconv
from agl.errors import UnreadableMessageError
from agl.mdp.spans import Span
from agl.mdp.types import Call, FinishReason
from agl.messages import foreign, read, write
from agl.trainer.rendering.normalise import Message

_CUT = frozenset({"length", "max_tokens", "max_output_tokens", "incomplete", "model_context_window_exceeded"})
_BROKEN = frozenset({"content_filter", "refusal", "failed", "cancelled", "error"})


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One call's texts.

    Attributes:
        messages: of the request, whole.
        tools: of the request.
        answer: the assistant's message.
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
        UnreadableMessageError: they are in no known form.
    """
    if span.attributes.get(semconv.PREVIOUS_RESPONSE):
        raise NoConversationError("earlier messages kept by the provider")
    messages = read.sent(span)
    answers = read.said(span)
    if not messages or not answers:
        form = foreign.form(span)
        raise NoConversationError("texts not recorded" if form is None else f"texts in the form of {form}")
    if len(answers) > 1:
        raise NoConversationError("several answers to one request")
    try:
        (answer,) = write.to_openai(answers)
        return Conversation(write.to_openai(messages), read.offered(span), answer)
    except UnreadableMessageError as error:
        raise NoConversationError("not only text") from error


def finish_reason(span: Span) -> FinishReason:
    """Why the answer of a `chat` span ended, in the gateway's words."""
    if span.status == "error":
        return "error"
    reasons = span.attributes.get(semconv.FINISH_REASONS) or ("stop",)
    reason = str(reasons if isinstance(reasons, str) else reasons[0]).lower()
    return "length" if reason in _CUT else "cancelled" if reason in _BROKEN else "stop"

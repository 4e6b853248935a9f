"""Spans of calls that no adapter saw, inferred from requests and responses: a `chat` span per call, and the tools.

A tool runs between the response that calls it and the request that brings its result; the two are joined by the tool
call's id. When it started and ended within that time is unknown, so its span is marked as inferred.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agl import semconv
from agl.errors import UnreadableMessageError
from agl.mdp.order import in_order, numbers_of_calls
from agl.mdp.spans import Span, recorded
from agl.mdp.tool_runs import is_answered, joined, persons_answers, tool_name
from agl.mdp.types import Call
from agl.messages import Message, ToolCall, ToolResult, read, write
from agl.messages.tool_output import tool_output
from agl.tracing.offered_tools import recorded_description
from agl.tracing.provider_formats import request_messages

MOST_OPEN_TOOL_CALLS = 10_000
"""Tool calls of an attempt without a result that are remembered: the latest ones."""


@dataclass(eq=False)
class SpanInference:
    """Makes the spans of one attempt from its requests and responses, in the order of their arrival.

    Attributes:
        rollout_id, attempt: identify the attempt.
        trace_id, parent_id: of the attempt's root span.
        capture_content: whether texts are recorded.
    """

    rollout_id: str
    attempt: int
    trace_id: str
    parent_id: str | None
    capture_content: bool = True
    invented: set[str] = field(default_factory=set)
    """The ids of `chat` spans whose sequence numbers say their order, and not when they began."""
    _issued: dict[str, tuple[ToolCall, Span]] = field(default_factory=dict)
    """Tool call id -> the tool call, and the `chat` span of the response that holds it."""

    def chat(
        self,
        agent: str,
        model: str,
        start: float,
        end: float,
        attributes: Mapping[str, Any],
        error: str | None = None,
        span_id: str | None = None,
        sequence: int | None = None,
    ) -> Span:
        """The span of an LLM call; `sequence` is its number."""
        attributes = {**attributes, semconv.SEQUENCE: sequence}
        where = {"parent_id": self.parent_id, "span_id": span_id, "start": start, "end": end}
        return recorded(self, semconv.CHAT, model, agent, attributes, error=error, **where)

    def asks(self, chat: Span, calls: Iterable[ToolCall]) -> None:
        """Remember the tool calls of a response."""
        for call in calls:
            self._issued[call.id] = call, chat
        # Most of them are answered by the next request; those that never are must not fill the memory.
        while len(self._issued) > MOST_OPEN_TOOL_CALLS:
            del self._issued[next(iter(self._issued))]

    def tools(
        self,
        results: Mapping[str, ToolResult],
        before: float,
        sequence: int | None = None,
        *,
        began: int | None = None,
        most: float = math.inf,
    ) -> list[Span]:
        """The spans of tools with results that appear first in a request at `before`.

        Args:
            results: tool call id -> result, of the request.
            before: when the request was sent, in seconds since the epoch.
            sequence: the request's number.
            began: the same moment in nanoseconds of the monotonic clock, where it is known.
            most: the longest that a tool may have run, in seconds, where that alone is known.
        """
        spans = []
        for left, (call_id, result) in zip(reversed(range(len(results))), results.items(), strict=True):
            if (issued := self._issued.pop(call_id, None)) is None:
                continue
            call, chat = issued
            output = tool_output(result.content)
            by_result = output.failed and not result.failed and not output.marked
            facts = {
                semconv.TOOL_NAME: call.name,
                semconv.TOOL_CALL_ID: call_id,
                semconv.INFERRED: True,
                semconv.FAILED_BY_RESULT: by_result or None,
                semconv.SEQUENCE: None if sequence is None else sequence - 1 - left,
            }
            if self.capture_content:
                facts |= {semconv.TOOL_CALL_ARGUMENTS: call.json_arguments, semconv.TOOL_CALL_RESULT: result.text}
                facts[semconv.TOOL_DESCRIPTION] = recorded_description(chat, call.name)
            error = None
            if result.failed or output.failed:
                error = result.text if self.capture_content else "the tool failed"
            start = before - self._seconds_between(chat, before, began, most)
            span_id = _digest(f"{self.rollout_id}/{self.attempt}/{call_id}")
            where = {"parent_id": chat.parent_id, "span_id": span_id, "start": start, "end": before}
            tool = recorded(self, semconv.EXECUTE_TOOL, call.name, chat.agent or "", facts, error=error, **where)
            spans.append(tool)
        return spans

    def _seconds_between(self, chat: Span, before: float, began: int | None, most: float) -> float:
        """From the end of a response to the request that follows it, which came at `before` and `began`."""
        if began is not None and chat.sequence is not None and chat.span_id not in self.invented:
            # A sequence number is a time of the monotonic clock, too.
            return max(0.0, (began - chat.sequence) / 1e9 - chat.seconds)
        # The wall clock may have been set in between.
        return min(max(0.0, before - chat.end), most)


def completed(spans: Sequence[Span], calls: Sequence[Call] = ()) -> list[Span]:
    """The spans of an attempt, completed by those that its clients did not make; tools that a program runs by hand are
    `joined` to their calls.

    These are a `chat` span for each gateway call without one (programs in other languages make none), and spans of the
    tools that a loop around a bare SDK ran.
    """
    spans = joined(spans, calls)
    known = {s.span_id for s in spans}
    unseen = sorted((c for c in calls if c.span_id not in known), key=lambda c: c.index)
    chats = [*(s for s in spans if s.operation == semconv.CHAT)]
    if not unseen and not chats:
        return spans
    root = next((s for s in spans if s.parent_id is None), None)
    first = spans[0] if spans else unseen[0]
    trace_id = root.trace_id if root else _digest(first.rollout_id) * 2
    inference = SpanInference(first.rollout_id, first.attempt, trace_id, root.span_id if root else None)
    numbers = numbers_of_calls(calls, spans)
    inferred = [_chat(inference, call, numbers[call.id]) for call in unseen]
    inference.invented.update(span.span_id for span in inferred)
    most = root.seconds if root else math.inf
    run_or_followed = (s for s in spans if s.is_tool_run or s.operation == semconv.HANDOFF)
    known_tools = {s.attributes.get(semconv.TOOL_CALL_ID) for s in run_or_followed}
    known_tools |= {call_id for s in spans for call_id in s.attributes.get(semconv.STRUCTURED_ANSWERS, ())}
    answers = persons_answers(spans)
    tools_without_id = {
        tool_name(s) for s in spans if s.operation == semconv.EXECUTE_TOOL and semconv.TOOL_CALL_ID not in s.attributes
    }
    for span in in_order([*chats, *inferred]):
        results = {r.id: r for message in _readable(read.sent, span) for r in message.tool_results}
        began = None if span.span_id in inference.invented else span.sequence
        tools = inference.tools(results, span.start, span.sequence, began=began, most=most)
        # A result of a tool that has spans without ids may be that of one of these.
        inferred += [
            t
            for t in tools
            if t.attributes[semconv.TOOL_CALL_ID] not in known_tools
            and tool_name(t) not in tools_without_id
            and not is_answered(str(t.attributes.get(semconv.TOOL_CALL_RESULT, "")), answers)
        ]
        inference.asks(span, [c for message in _readable(read.said, span) for c in message.tool_calls if c.id])
    return [*spans, *inferred]


def with_messages(spans: Sequence[Span], calls: Sequence[Call]) -> list[Span]:
    """The spans; those of gateway calls have the whole conversation that the call was sent, and its response.

    Args:
        spans: `completed` ones, where a call may have none of its own.
        calls: in order of arrival.
    """
    sent: dict[str, list[Any]] = {}
    by_id = {call.id: call for call in calls}
    for call in calls:
        parent = by_id.get(call.parent_id or "")
        history = [*sent.get(parent.id, []), dict(parent.response)] if parent and parent.response else []
        sent[call.id] = [*history, *call.request.get("messages", [])]
    # Of several calls in one span, one that did not fail counts.
    ordered = sorted(calls, key=lambda call: call.error is None)
    by_span = {span_id: call for call in ordered for span_id in (call.span_id, _digest(call.id))}
    result = []
    for span in spans:
        call = by_span.get(span.span_id) if span.operation == semconv.CHAT else None
        if call is not None:
            messages = {
                semconv.INPUT_MESSAGES: write.history_json(sent[call.id]),
                semconv.OUTPUT_MESSAGES: write.answer_json(
                    [dict(call.response)] if call.response and call.error is None else []
                ),
            }
            span = replace(span, attributes={**span.attributes, **messages})
        result.append(span)
    return result


def _chat(inference: SpanInference, call: Call, sequence: int) -> Span:
    facts = {
        semconv.ROUTED: call.policy is not None or None,
        semconv.RESPONSE_ID: call.id,
        semconv.FINISH_REASONS: [call.finish_reason],
        semconv.INPUT_TOKENS: int(call.prompt_ids.size),
        semconv.OUTPUT_TOKENS: int(call.response_ids.size),
        **{name: call.request.get(name) for name in (semconv.SYSTEM_PROMPTS, semconv.SYSTEM_PROMPT_LEFT)},
        **request_messages(call.request),
        semconv.OUTPUT_MESSAGES: write.answer_json(dict(call.response), [call.finish_reason])
        if call.response and call.error is None
        else None,
    }
    end = max(call.started_at, call.ended_at)
    return inference.chat(
        call.agent, call.policy or "", call.started_at, end, facts, call.error, _digest(call.id), sequence
    )


def _readable(of: Callable[[Span], list[Message]], span: Span) -> list[Message]:
    """Messages of a span; none where they are in no known form, for no tool is inferred from those."""
    try:
        return of(span)
    except UnreadableMessageError:
        return []


def totals(spans: Sequence[Span]) -> dict[str, Any]:
    """Counts over an attempt's spans: calls, failed calls, tokens in and out (None if unknown), tools and agents."""
    chats = [s for s in spans if s.operation == semconv.CHAT]

    def total(name: str) -> int | None:
        known = [n for s in chats if isinstance(n := s.attributes.get(name), int)]
        return sum(known) if known else None

    return {
        "calls": len(chats),
        "failed_calls": sum(s.status == "error" for s in chats),
        "input_tokens": total(semconv.INPUT_TOKENS),
        "output_tokens": total(semconv.OUTPUT_TOKENS),
        "tools": sum(s.is_tool_run for s in spans),
        "agents": list(dict.fromkeys(s.agent for s in chats if s.agent)),
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

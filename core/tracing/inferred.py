"""Spans of what no adapter saw, from what passed on the wire: a `chat` span per call, and the tools in between.

A tool runs between the answer that asks for it and the request that brings its result; the two are joined by the tool
call's id. When it began and ended within that time is not known, so its span says that it was inferred.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl import semconv
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.tracing import provider_formats as answers
from agl.tracing.provider_formats import ToolCall, ToolResult


@dataclass(eq=False)
class SpanInference:
    """The calls of one attempt, in the order in which they pass.

    Attributes:
        trace_id, parent_id: of the attempt's root span. capture_content: whether texts are recorded.
    """

    rollout_id: str
    attempt: int
    trace_id: str
    parent_id: str | None
    capture_content: bool = True
    _issued: dict[str, tuple[ToolCall, Span]] = field(default_factory=dict)
    """Tool call id -> the call, and the span of the answer that it is in."""

    def chat(
        self,
        agent: str,
        model: str,
        start: float,
        end: float,
        attributes: Mapping[str, Any],
        error: str | None = None,
        span_id: str | None = None,
    ) -> Span:
        """The span of a call."""
        return self._span(semconv.CHAT, model, agent, start, end, attributes, error, span_id, self.parent_id)

    def asks(self, chat: Span, calls: Iterable[ToolCall]) -> None:
        """Note the tools that a call's answer asks for."""
        for call in calls:
            self._issued[call.id] = call, chat

    def tools(self, results: Mapping[str, ToolResult], before: float) -> list[Span]:
        """The spans of the tools whose results a request at `before` brings for the first time."""
        found = []
        for call_id, result in results.items():
            if (issued := self._issued.pop(call_id, None)) is None:
                continue
            call, chat = issued
            facts = {semconv.TOOL_NAME: call.name, semconv.TOOL_CALL_ID: call_id, semconv.INFERRED: True}
            if self.capture_content:
                facts |= {semconv.TOOL_CALL_ARGUMENTS: call.arguments, semconv.TOOL_CALL_RESULT: result.text}
            error = (result.text if self.capture_content else "the tool failed") if result.failed else None
            since = min(chat.end, before)
            span_id = _digest(f"{self.rollout_id}/{self.attempt}/{call_id}")
            who, ends = chat.agent or "", (since, before)
            found.append(self._span(semconv.EXECUTE_TOOL, call.name, who, *ends, facts, error, span_id, chat.parent_id))
        return found

    def _span(
        self,
        kind: str,
        name: str,
        agent: str,
        start: float,
        end: float,
        attributes: Mapping[str, Any],
        error: str | None,
        span_id: str | None,
        parent_id: str | None,
    ) -> Span:
        facts = {
            semconv.OPERATION_NAME: kind,
            semconv.AGENT_NAME: agent,
            semconv.ROLLOUT_ID: self.rollout_id,
            semconv.ATTEMPT: self.attempt,
            **{k: v for k, v in attributes.items() if v is not None},
        }
        return Span(
            self.trace_id,
            span_id or secrets.token_hex(8),
            parent_id,
            self.rollout_id,
            self.attempt,
            f"{kind} {name}".strip(),
            start,
            end,
            "unset" if error is None else "error",
            error,
            facts,
        )


def completed(spans: Sequence[Span], calls: Sequence[Call] = ()) -> list[Span]:
    """The spans of an attempt, and those that its clients did not make: a `chat` for each gateway call that no span
    stands for (programs in other languages make none), and the tools that a loop around a bare SDK ran."""
    known = {s.span_id for s in spans}
    unseen = sorted((c for c in calls if c.span_id not in known), key=lambda c: c.index)
    chats = [*(s for s in spans if s.operation == semconv.CHAT)]
    if not unseen and not chats:
        return list(spans)
    root = next((s for s in spans if s.parent_id is None), None)
    first = spans[0] if spans else unseen[0]
    trace_id = root.trace_id if root else _digest(first.rollout_id) * 2
    wire = SpanInference(first.rollout_id, first.attempt, trace_id, root.span_id if root else None)
    made = [_chat(wire, call) for call in unseen]
    ran = {s.attributes.get(semconv.TOOL_CALL_ID) for s in spans if s.operation == semconv.EXECUTE_TOOL}
    for span in sorted([*chats, *made], key=lambda s: s.start):
        given = answers.tool_results({"messages": _messages(span, semconv.INPUT_MESSAGES)})
        made += [t for t in wire.tools(given, span.start) if t.attributes[semconv.TOOL_CALL_ID] not in ran]
        wire.asks(span, [c for m in _messages(span, semconv.OUTPUT_MESSAGES) for c in _tool_calls(m)])
    return [*spans, *made]


def _chat(wire: SpanInference, call: Call) -> Span:
    facts = {
        semconv.ROUTED: call.policy is not None or None,
        semconv.RESPONSE_ID: call.id,
        semconv.FINISH_REASONS: [call.finish_reason],
        semconv.INPUT_TOKENS: int(call.prompt_ids.size),
        semconv.OUTPUT_TOKENS: int(call.response_ids.size),
        **answers.asked(call.request),
        semconv.OUTPUT_MESSAGES: json.dumps([dict(call.response)]) if call.response else None,
    }
    ended = max(call.started_at, call.ended_at)
    name = call.policy or ""
    return wire.chat(call.agent, name, call.started_at, ended, facts, call.error, _digest(call.id))


def _messages(span: Span, name: str) -> list[Any]:
    try:
        messages = json.loads(str(span.attributes.get(name) or "[]"))
    except ValueError:
        return []
    return messages if isinstance(messages, list) else []


def _tool_calls(message: Any) -> Iterable[ToolCall]:
    """Those of a message in OpenAI's form, or of content blocks in Anthropic's."""
    answer = answers.ResponseAccumulator()
    if isinstance(message, Mapping):
        answer.whole({"choices": [{"message": message}]})
        answer.whole({"type": "message", "content": message.get("content")})
    return answer.tool_calls()


def totals(spans: Sequence[Span]) -> dict[str, Any]:
    """Counts over an attempt's spans: calls, tokens in and out (None where no provider told), tools, errors, agents."""
    chats = [s for s in spans if s.operation == semconv.CHAT]

    def total(name: str) -> int | None:
        known = [n for s in chats if isinstance(n := s.attributes.get(name), int)]
        return sum(known) if known else None

    return {
        "calls": len(chats),
        "failed_calls": sum(s.status == "error" for s in chats),
        "input_tokens": total(semconv.INPUT_TOKENS),
        "output_tokens": total(semconv.OUTPUT_TOKENS),
        "tools": sum(s.operation == semconv.EXECUTE_TOOL for s in spans),
        "agents": list(dict.fromkeys(s.agent for s in chats if s.agent)),
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

"""Spans that no client makes: tools that a loop around a bare SDK ran, and which calls of tools are none of those."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl import semconv
from agl.mdp.spans import Span
from agl.messages import ToolCall, ToolResult
from agl.tracing.inferred import MOST_OPEN_TOOL_CALLS, SpanInference, completed

ASKED = {"role": "user", "parts": [{"type": "text", "content": "refund order 17"}]}
CALL = {"type": "tool_call", "id": "call_1", "name": "transfer_to_billing", "arguments": {}}
RESULT = {"type": "tool_call_response", "id": "call_1", "response": "billing takes over"}


def span(id: str, operation: str, start: float, **attributes: Any) -> Span:
    facts = {semconv.OPERATION_NAME: operation, **attributes}
    return Span("t" * 32, id, None if id == "root" else "root", "ro", 1, operation, start, start + 1, attributes=facts)


def chat(id: str, start: float, sent: list[Any], said: list[Any]) -> Span:
    answer = [{"role": "assistant", "parts": said}]
    messages = {semconv.INPUT_MESSAGES: json.dumps(sent), semconv.OUTPUT_MESSAGES: json.dumps(answer)}
    return span(id, semconv.CHAT, start, **messages)


@pytest.mark.parametrize("operation", [None, semconv.HANDOFF, semconv.EXECUTE_TOOL])
def test_a_tool_call_with_a_span_of_its_run_or_its_handoff_gets_no_other(operation: str | None) -> None:
    said = {"role": "assistant", "parts": [CALL]}
    spans = [
        span("root", semconv.INVOKE_AGENT, 0.0),
        chat("c1", 1.0, [ASKED], [CALL]),
        chat("c2", 5.0, [ASKED, said, {"role": "tool", "parts": [RESULT]}], [{"type": "text", "content": "done"}]),
    ]
    if operation is not None:
        spans.append(span("own", operation, 3.0, **{semconv.TOOL_CALL_ID: "call_1"}))
    inferred = [s for s in completed(spans) if s.attributes.get(semconv.INFERRED)]
    assert [s.attributes[semconv.TOOL_NAME] for s in inferred] == ["transfer_to_billing"] * (operation is None)


def test_tool_calls_without_a_result_are_forgotten() -> None:
    """A proxy sees the answers of a provider that is not trusted: it may ask for tools without end."""
    inference = SpanInference("ro", 1, "t" * 32, None)
    asking = chat("c1", 1.0, [ASKED], [CALL])
    for number in range(MOST_OPEN_TOOL_CALLS + 1):
        inference.asks(asking, [ToolCall(str(number), "look", "{}")])
    forgotten, known, latest = "0", "1", str(MOST_OPEN_TOOL_CALLS)
    results = {call_id: ToolResult(call_id, "seen") for call_id in (forgotten, known, latest)}
    spans = inference.tools(results, 2.0)
    assert [span.attributes[semconv.TOOL_CALL_ID] for span in spans] == [known, latest]

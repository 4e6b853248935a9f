"""Requests and answers of every wire form as span attributes, from bodies as the providers' references show them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import semconv
from agl.messages import ToolResult, google, read, write
from agl.tracing.provider_formats import ResponseAccumulator, request_messages, settings, tool_results

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAID = {"role": "assistant", "content": "so", "tool_calls": [CALL]}

CHAT = [
    {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "s"}}]},
    {"id": "c", "choices": [{"index": 0, "delta": {"content": "o"}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "add"}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
]
MESSAGES = [
    {"type": "message_start", "message": {"type": "message", "id": "c", "model": "m", "content": [],
     "usage": {"input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "so"}},
    {"type": "content_block_start", "index": 1,
     "content_block": {"type": "tool_use", "id": "call_1", "name": "add", "input": {}}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a": 1}'}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_calls"}, "usage": {"output_tokens": 2}},
    {"type": "message_stop"},
]  # fmt: skip
RESPONSE = {
    "id": "c", "model": "m", "status": "completed", "usage": {"input_tokens": 5, "output_tokens": 2},
    "output": [
        {"type": "message", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
    ],
}  # fmt: skip

_CALLED = {"functionCall": {"id": "call_1", "name": "add", "args": {"a": 1}}, "thoughtSignature": "c2ln"}
_HEAD = {"responseId": "c", "modelVersion": "m"}
GOOGLE = [
    {**_HEAD, "candidates": [{"content": {"role": "model", "parts": [{"text": "s"}]}}]},
    {**_HEAD, "candidates": [{"content": {"role": "model", "parts": [{"text": "o"}]}, "index": 0}]},
    {**_HEAD, "candidates": [{"content": {"parts": [_CALLED]}, "finishReason": "tool_calls"}],
     "usageMetadata": {"promptTokenCount": 5, "candidatesTokenCount": 1, "thoughtsTokenCount": 1}},
]  # fmt: skip
WHOLE_GOOGLE = {**GOOGLE[2], "candidates": [
    {"content": {"role": "model", "parts": [{"text": "so"}, _CALLED]}, "finishReason": "tool_calls", "index": 0}
]}  # fmt: skip


def _received(body: Any, kind: str = "application/json") -> ResponseAccumulator:
    """An answer from its bytes, as a proxy has them."""
    text = json.dumps(body)
    if kind == "text/event-stream":
        text = "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in body)
    answer = ResponseAccumulator()
    answer.received(httpx.Response(200, headers={"content-type": kind}), text.encode())
    return answer


def _streamed(events: list[Any]) -> ResponseAccumulator:
    answer = ResponseAccumulator()
    for event in events:
        answer.event(event)
    return answer


def _whole(body: Any) -> ResponseAccumulator:
    answer = ResponseAccumulator()
    answer.whole(body)
    return answer


WHOLE_CHAT = {
    "id": "c", "model": "m", "choices": [{"index": 0, "message": SAID, "finish_reason": "tool_calls"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2},
}  # fmt: skip
WHOLE_MESSAGE = {
    "type": "message", "id": "c", "model": "m", "stop_reason": "tool_calls",
    "content": [{"type": "text", "text": "so"}, {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}}],
    "usage": {"input_tokens": 5, "output_tokens": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    [
        _whole(WHOLE_CHAT), _streamed(CHAT), _whole(WHOLE_MESSAGE), _streamed(MESSAGES), _whole(RESPONSE),
        _streamed([{"type": "response.created"}, {"type": "response.completed", "response": RESPONSE}]),
        _received(WHOLE_CHAT), _received(CHAT, "text/event-stream"),
        _received(WHOLE_GOOGLE), _received(GOOGLE, "text/event-stream"), _received(GOOGLE),
    ],
    ids=["chat", "chat stream", "messages", "messages stream", "responses", "responses stream", "chat bytes",
         "chat events", "google", "google stream", "google array"],
)  # fmt: skip
def test_every_form_says_the_same(answer: ResponseAccumulator) -> None:
    facts = answer.facts(content=True)
    said = read.answers(json.loads(facts.pop(semconv.OUTPUT_MESSAGES)))
    assert write.to_openai(said) == [SAID]
    details = (semconv.CACHE_READ_TOKENS, semconv.REASONING_TOKENS)
    assert {name: value for name, value in facts.items() if name not in details} == {
        semconv.RESPONSE_ID: "c", semconv.RESPONSE_MODEL: "m", semconv.FINISH_REASONS: ["tool_calls"],
        semconv.INPUT_TOKENS: 5, semconv.OUTPUT_TOKENS: 2,
    }  # fmt: skip
    assert [(c.id, c.name) for c in answer.tool_calls()] == [("call_1", "add")]
    assert semconv.OUTPUT_MESSAGES not in answer.facts(content=False)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "tool", "tool_call_id": "x", "content": "5"}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "5"}]}]},
        {"input": [{"type": "function_call_output", "call_id": "x", "output": "5"}]},
        {"contents": [{"parts": [{"functionResponse": {"id": "x", "name": "f", "response": {"output": "5"}}}]}]},
    ],
)
def test_tool_results(body: dict[str, Any]) -> None:
    assert tool_results(body) == {"x": ToolResult("x", "5")}


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "choices", "message", "delta", "content", "tool_calls", "function", "usage", "error", "index",
                 "output", "response", "content_block", "messages", "input", "name", "id", "arguments", "text",
                 "contents", "parts", "candidates", "functionCall", "usageMetadata"]
            ) | st.text(max_size=5), inner, max_size=5,
        )
    ),
    max_leaves=20,
)  # fmt: skip


@given(_json)
def test_nothing_on_the_wire_breaks_it(body: Any) -> None:
    answer = ResponseAccumulator()
    answer.whole(body)
    for kind in (None, "message_start", "content_block_start", "content_block_delta", "message_delta", "error"):
        if isinstance(body, dict):
            answer.event({**body, "type": kind} if kind else body)
    answer.facts(content=True)
    if isinstance(body, dict):
        request_messages(body)
        tool_results(body)


def test_what_google_sent_is_read_like_any_request() -> None:
    body = {
        "systemInstruction": {"parts": [{"text": "be brief"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "sum?"}]},
            {"role": "model", "parts": [{"text": "so"}, _CALLED]},
        ],
        "tools": [{"functionDeclarations": [{"name": "add", "parameters": {"type": "OBJECT"}}]}],
        "generationConfig": {"temperature": 0.5, "maxOutputTokens": 9},
    }
    facts = request_messages(google.common(body))
    assert [m.text for m in read.system(json.loads(facts[semconv.SYSTEM_INSTRUCTIONS]))] == ["be brief"]
    history = read.messages(json.loads(facts[semconv.INPUT_MESSAGES]))
    assert write.to_openai(history) == [{"role": "user", "content": "sum?"}, SAID]
    assert history == read.body(body)[1:]
    assert read.tools(json.loads(facts[semconv.TOOL_DEFINITIONS])) == [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    ]
    expected = {"gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 9}
    assert settings(body) == settings(google.common(body)) == expected

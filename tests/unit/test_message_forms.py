"""Messages are read from every form that a store of agl ever held, and back from OpenTelemetry's, whole."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import semconv
from agl.errors import UnreadableMessageError
from agl.messages import Message, Other, Reasoning, Text, ToolCall, ToolResult, read, write

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "recorded_messages.jsonl").read_text().splitlines()
]
"""What the adapters, and the hook of the SDKs, wrote on spans before messages were a type; each form once."""


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["by"])
def test_what_earlier_versions_recorded_is_read(recorded: dict[str, Any]) -> None:
    span = SimpleNamespace(attributes={k: json.dumps(v) for k, v in recorded.items()})
    if semconv.OUTPUT_MESSAGES in recorded:
        [message] = read.said(span)
        called = [(c.name, json.loads(c.json_arguments)) for c in message.tool_calls]
        assert (message.text.rstrip(), called) in [("sum 5", []), ("", [("add", {"a": 2, "b": 3})])]
        assert all(c.id.startswith(("call_", "toolu_")) for c in message.tool_calls)
    else:
        sent = read.sent(span)
        results = [r for message in sent for r in message.tool_results]
        calls = [c for message in sent for c in message.tool_calls]
        assert [r.text for r in results] == ["5"] * len(results)
        # A request that continues a response by its id has the result alone.
        assert [m.text for m in sent if m.role == "user" and m.text] == ["what is 2+3?"] or not calls
        assert {c.id for c in calls} <= {r.id for r in results}
    assert all(not isinstance(p, Other) for m in (*read.sent(span), *read.said(span)) for p in m.parts)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
IDS = st.text(max_size=5)
CALLS = st.builds(ToolCall, IDS, st.text(), st.text() | st.dictionaries(st.text(), JSON, max_size=2))
IMAGES = st.builds(
    lambda url: Other({"type": "image_url", "image_url": {"url": url}}) if url else Other({"type": "file"}), st.text()
)
RESULTS = st.builds(
    ToolResult, IDS, st.text() | st.just([{"type": "image", "source": {"data": "AAAA"}}]), st.booleans()
)
TEXTS = st.builds(Text, st.text())
THOUGHTS = st.builds(Reasoning, st.text(min_size=1))
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "critic"])


def message(*parts: Any, roles: Any = ROLES) -> Any:
    return st.builds(
        Message, roles, st.lists(st.one_of(*parts), max_size=5).map(tuple), st.none() | st.text(min_size=1)
    )


@given(st.lists(message(TEXTS, THOUGHTS, CALLS, RESULTS, IMAGES), max_size=4))
def test_opentelemetrys_form_is_read_back_equal(messages: list[Message]) -> None:
    assert read.messages(json.loads(write.to_json(messages))) == messages


@given(st.lists(message(TEXTS, THOUGHTS, CALLS, roles=st.just("assistant")), max_size=4))
def test_openais_form_keeps_what_a_template_writes(messages: list[Message]) -> None:
    again = read.messages(json.loads(json.dumps(write.to_openai(messages))))
    for before, after in zip(messages, again, strict=True):
        assert (after.role, after.text, after.reasoning, after.name) == (
            before.role, before.text, before.reasoning, before.name,
        )  # fmt: skip
        calls = [(c.id, c.name, c.json_arguments) for c in before.tool_calls]
        assert [(c.id, c.name, c.json_arguments) for c in after.tool_calls] == calls


@given(JSON | st.lists(st.dictionaries(st.sampled_from(["role", "type", "content", "parts", "tool_calls"]), JSON)))
def test_anything_is_read_or_refused(value: Any) -> None:
    try:
        found = read.messages(value)
    except UnreadableMessageError:
        pass
    else:
        assert read.messages(json.loads(write.to_json(found))) == found


@pytest.mark.parametrize(
    "bad",
    [
        {"role": "user"} | {"text": "hello"}, {"content": "hello"}, {"role": "user", "content": 5}, 5, None,
        {"role": "assistant", "tool_calls": [{"id": "c"}]}, {"role": "user", "parts": [{"type": "text"}]},
        {"type": "ai", "content": "hello"}, {"role": "user", "content": [None]},
    ],
)  # fmt: skip
def test_a_message_in_no_known_form_names_its_call(bad: Any) -> None:
    facts = {semconv.INPUT_MESSAGES: json.dumps(["hello", bad])}
    span = SimpleNamespace(rollout_id="ro-1", attempt=2, agent="solver", span_id="00ab", attributes=facts)
    with pytest.raises(UnreadableMessageError, match=r"messages\.1") as caught:
        read.sent(span)
    assert caught.value.where == {"rollout": "ro-1", "attempt": 2, "agent": "solver", "span": "00ab"}
    # The one who records keeps it as it came, so that nothing is lost.
    assert json.loads(write.request_facts({"messages": ["hello", bad]})[semconv.INPUT_MESSAGES]) == ["hello", bad]


def test_a_text_that_is_recorded_as_it_is() -> None:
    span = SimpleNamespace(attributes={semconv.INPUT_MESSAGES: "what is it?", semconv.OUTPUT_MESSAGES: "5 apples"})
    assert read.sent(span) == [Message("user", (Text("what is it?"),))]
    assert read.said(span) == [Message("assistant", (Text("5 apples"),))]
    cut = SimpleNamespace(attributes={semconv.OUTPUT_MESSAGES: '[{"role": "assis'})
    with pytest.raises(UnreadableMessageError, match="no JSON"):
        read.said(cut)


def test_a_template_gets_no_image_in_silence() -> None:
    image = Other({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    asked = Message("user", (Text("what is it?"), image))
    with pytest.raises(UnreadableMessageError, match="image_url"):
        write.to_openai([asked])
    [written] = write.to_openai([asked], text_only=False)
    assert written["content"] == [{"type": "text", "text": "what is it?"}, image.value]


def test_items_of_one_answer_are_one_message() -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "xyz"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c1", "id": "fc_1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "5"}]},
        {"type": "message", "role": "assistant", "content": "done"},
    ]
    answer = Message("assistant", (Reasoning("hm"), Text("so"), ToolCall("c1", "add", "{}")))
    told = Message("tool", (ToolResult("c1", "5"),))
    assert read.messages(items) == [Message("user", (Text("hi"),)), answer, told, Message("assistant", (Text("done"),))]

"""A stream is recorded like the same answer unstreamed, and a stream that was cut like the beginning of it."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from answer_forms import CALL_STREAMS, KINDS, Part, cutter, events, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from agl import semconv
from agl.messages import Message, Other, Reasoning, Text, ToolCall, read
from agl.tracing.provider_formats import ResponseAccumulator

TEXT = st.text(min_size=1, max_size=12)
ARGUMENTS = st.dictionaries(st.text("ab", min_size=1, max_size=3), st.integers() | TEXT | st.none(), max_size=3)
NAME = st.sampled_from(["add", "mul", "get"])
ONCE = ("reasoning", "text", "refusal", "audio", "function_call")


@st.composite
def answers(draw: st.DrawFn, api: str) -> list[Part]:
    kinds = draw(st.lists(st.sampled_from(KINDS[api]), max_size=6))
    if api == "chat":
        kinds = [k for k in KINDS["chat"] for _ in range(min(kinds.count(k), 1 if k in ONCE else 6))]
        # Chat Completions has calls of one kind, old or new.
        if "function_call" in kinds:
            kinds = [k for k in kinds if k not in ("call", "custom")]
    parts: list[Part] = []
    # Gemini's older compatible servers give calls no id.
    identified = api != "chat" or draw(st.booleans())
    for i, kind in enumerate(kinds):
        call_id = f"call_{i}" if identified else ""
        match kind:
            case "call":
                parts.append((kind, call_id, draw(NAME), draw(ARGUMENTS)))
            case "custom":
                # Without an id, a text of a custom tool could not be seen to be whole.
                parts.append((kind, f"call_{i}", draw(NAME), draw(TEXT)))
            case "function_call":
                parts.append((kind, draw(NAME), draw(ARGUMENTS)))
            case "audio":
                parts.append((kind, draw(TEXT), base64.b64encode(draw(st.binary(min_size=1, max_size=9))).decode()))
            case "server":
                parts.append((kind, f"call_{i}", draw(ARGUMENTS)))
            case _:
                parts.append((kind, draw(TEXT)))
    return parts


def received(values: Any, kind: str) -> ResponseAccumulator:
    """An answer from its bytes."""
    if kind == "text/event-stream":
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in values)
    else:
        text = json.dumps(values)
    answer = ResponseAccumulator()
    answer.received(httpx.Response(200, headers={"content-type": kind}), text.encode())
    return answer


def recorded(answer: ResponseAccumulator) -> list[Message]:
    facts = answer.facts(content=True)
    return read.answers(json.loads(facts.get(semconv.OUTPUT_MESSAGES, "[]")))


def begins(part: Any, of: Any) -> bool:
    """Whether a part is the beginning of another."""
    match part, of:
        case (Text(a), Text(b)) | (Reasoning(a), Reasoning(b)):
            return b.startswith(a)
        case ToolCall(id, name, a), ToolCall(known_id, known_name, b):
            texts = [v if isinstance(v, str) else json.dumps(v) for v in (a, b)]
            return (id, name) == (known_id, known_name) and texts[1].startswith(texts[0])
        case Other(a), Other(b):
            return a["type"] == b["type"]
    return False


@pytest.mark.parametrize("api", KINDS)
@given(data=st.data(), seed=st.integers(0, 2**32), calls=st.sampled_from(CALL_STREAMS))
@settings(max_examples=60, deadline=None)
def test_a_stream_is_recorded_like_the_answer_that_it_streams(
    api: str, data: st.DataObject, seed: int, calls: str
) -> None:
    parts = data.draw(answers(api))
    unstreamed = received(whole(api, parts), "application/json")
    chunks = events(api, parts, cutter(seed), calls)
    streamed = received(chunks, "text/event-stream")
    assert recorded(streamed) == recorded(unstreamed)
    assert streamed.facts(content=False) == unstreamed.facts(content=False)
    assert [*streamed.tool_calls()] == [*unstreamed.tool_calls()]
    [answer] = recorded(unstreamed)
    # Nothing of the answer is missing.
    assert len([p for p in answer.parts if isinstance(p, ToolCall)]) == sum(
        part[0] in ("call", "custom", "function_call") for part in parts
    )
    for kind in ("text", "cited", "refusal"):
        assert all(part[1] in answer.text for part in parts if part[0] == kind)
    for n in range(len(chunks)):
        for cut in recorded(received(chunks[:n], "text/event-stream")):
            assert len(cut.parts) <= len(answer.parts)
            assert all(map(begins, cut.parts, answer.parts)), (cut.parts, answer.parts)


@pytest.mark.parametrize(
    ("field", "pieces"),
    [
        ("arguments", ["", "{}", ""]),
        ("arguments", ['{"a": 1', "}", ""]),
        ("input", ["", "0", "1"]),
        ("input", ["{}", "x"]),
    ],
)
def test_a_name_that_is_repeated_begins_no_other_call(field: str, pieces: list[str]) -> None:
    function = "custom" if field == "input" else "function"
    deltas: list[dict[str, Any]] = [{"index": 0, function: {"name": "add", field: piece}} for piece in pieces]
    deltas[0]["id"] = "call_0"
    answer = received([{"choices": [{"index": 0, "delta": {"tool_calls": [d]}}]} for d in deltas], "text/event-stream")
    [message] = recorded(answer)
    [call] = message.tool_calls
    assert (call.id, call.name) == ("call_0", "add")
    assert call.arguments in ("".join(pieces), json.loads("".join(pieces)) if field == "arguments" else None)


def test_arguments_of_a_call_of_gemini_that_come_in_pieces() -> None:
    def chunk(**call: Any) -> dict[str, Any]:
        return {"candidates": [{"content": {"role": "model", "parts": [{"functionCall": call}]}}]}

    def piece(path: str, **value: Any) -> dict[str, Any]:
        return chunk(partialArgs=[{"jsonPath": path, **value}], willContinue=True)

    chunks = [
        chunk(name="book", id="1", willContinue=True),
        piece("$.city", stringValue="Ber", willContinue=True),
        piece("$.city", stringValue="lin"),
        piece("$.guests[0].age", numberValue=7),
        piece("$.guests[1].age", numberValue=8),
        piece("$.late", boolValue=True),
        chunk(),
        chunk(name="now", id="2", args={"zone": "UTC"}),
    ]
    [message] = recorded(received(chunks, "text/event-stream"))
    booked = {"city": "Berlin", "guests": [{"age": 7}, {"age": 8}], "late": True}
    assert message.tool_calls == (ToolCall("1", "book", booked), ToolCall("2", "now", {"zone": "UTC"}))


def test_a_compaction_that_is_streamed_has_its_text() -> None:
    block = {"type": "compaction", "content": None}
    chunks = [
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "compaction_delta", "content": "so far"}},
        {"type": "content_block_stop", "index": 0},
    ]
    [message] = recorded(received(chunks, "text/event-stream"))
    assert message.parts == (Other({"type": "compaction", "content": "so far"}),)

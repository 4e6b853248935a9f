"""Tool calls are found in every documented form, and what cannot be read stays in the text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.trainer.rendering.toolparsers import FORMATS, ParsedMessage, assemble

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "tags": {"type": "array"}},
            },
        },
    }
]


def read(name: str, text: str) -> ParsedMessage:
    return assemble(FORMATS[name](text, TOOLS), None)


def calls(message: ParsedMessage) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "search", "arguments": {"query": "a", "limit": 2}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"a\\", \\"limit\\": 2}"}</tool_call>'),
        (
            "xml",
            "<tool_call>\n<function=search>\n<parameter=query>\na\n</parameter>\n<parameter=limit>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        ("llama", '{"name": "search", "parameters": {"query": "a", "limit": 2}}'),
        ("llama", '<|python_tag|>{"type": "function", "name": "search", "parameters": {"query": "a", "limit": 2}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a", "limit": 2}, "id": "abcdefghi"}]'),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "a", "limit": 2}'),
        ("mistral", '[TOOL_CALLS]search[CALL_ID]abcdefghi[ARGS]{"query": "a", "limit": 2}'),
    ],
)
def test_one_call(name: str, text: str):
    message = read(name, text)
    assert calls(message) == [("search", {"query": "a", "limit": 2})]
    assert (message.content, message.malformed) == ("", ())


def test_calls_keep_their_order_and_the_text_around_them():
    one, two = ('<tool_call>{"name": "' + n + '", "arguments": {}}</tool_call>' for n in ("a", "b"))
    message = read("hermes", f"First.\n{one}\n{two}\nLast.")
    assert [call.name for call in message.tool_calls] == ["a", "b"]
    assert message.content.split() == ["First.", "Last."]
    both = read("llama", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}')
    assert [call.name for call in both.tool_calls] == ["a", "b"]
    listed = read("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]')
    assert [call.name for call in listed.tool_calls] == ["a", "b"]


def test_the_ids_that_a_model_writes_are_kept():
    message = read("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "abcdefghi"}]')
    assert message.tool_calls[0].id == "abcdefghi"


def test_a_tag_within_an_argument_does_not_end_the_call():
    message = read("hermes", '<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>')
    assert calls(message) == [("a", {"x": "</tool_call>"})]


@pytest.mark.parametrize("spelled", ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS] [1]", "</function>"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "a SPELLED b"}}</tool_call>'),
        ("xml", "<tool_call><function=search><parameter=query>a SPELLED b</parameter></function></tool_call>"),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a SPELLED b"}}]'),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "a SPELLED b"}'),
    ],
)
def test_a_mark_within_an_argument_is_text(name: str, text: str, spelled: str):
    text = text.replace("SPELLED", spelled)
    message = read(name, text + text)
    assert calls(message) == [("search", {"query": f"a {spelled} b"})] * 2
    assert (message.content, message.malformed) == ("", ())


def test_a_strings_schema_decides_how_a_bare_value_is_read():
    values = "<parameter=query>12</parameter><parameter=limit>12</parameter>"
    message = read("xml", f"<tool_call><function=search>{values}</function></tool_call>")
    assert calls(message) == [("search", {"query": "12", "limit": 12})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {}'),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>not json</tool_call>"),
        ("xml", "<tool_call><function=a><parameter=x>1</parameter>"),
        ("xml", "<tool_call>{}</tool_call>"),
        ("llama", '{"name": "a", "parameters": {'),
        ("llama", "<|python_tag|>print(1)"),
        ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {'),
        ("mistral", "[TOOL_CALLS]"),
    ],
)
def test_a_broken_call_is_reported_and_stays_in_the_text(name: str, text: str):
    message = read(name, text)
    assert message.tool_calls == ()
    assert message.malformed == (text,)
    assert message.content == text


def test_a_broken_call_beside_a_whole_one():
    good, bad = '<tool_call>{"name": "a", "arguments": {}}</tool_call>', '<tool_call>{"name": </tool_call>'
    message = read("hermes", bad + good)
    assert [call.name for call in message.tool_calls] == ["a"]
    assert message.malformed == (bad,)
    assert message.content == bad


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("mistral", "[TOOL_CALLS]", '[TOOL_CALLS]a{"x": 1}'),
        ("hermes", "<tool_call>{", '<tool_call>{"name": "a", "arguments": {}}</tool_call>'),
    ],
)
def test_white_space_after_a_broken_call_hides_it_from_nobody(name: str, bad: str, good: str):
    message = read(name, f"{bad}\n{good}")
    assert (message.content, message.malformed, len(message.tool_calls)) == (bad, (bad,), 1)


CALL = '{"name": "a", "arguments": {"x": "{\\\\\\"[", "y": [1]}}'
WHOLE = {
    "hermes": f"Well.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    "xml": "Well.\n" + 2 * "<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "llama": f"{CALL}; {CALL}",
    "mistral": f"Well.[TOOL_CALLS] [{CALL}, {CALL}]",
}
MARKS = {"hermes": "<tool_call>", "xml": "<tool_call>", "llama": "{", "mistral": "[TOOL_CALLS]"}


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_ends_within_its_second_call_is_unfinished(name: str):
    text, mark = WHOLE[name], MARKS[name]
    assert len(calls(read(name, text))) == 2
    assert not read(name, text).unfinished
    second = text.rindex(CALL) if name in ("llama", "mistral") else text.rindex(mark) + len(mark)
    for end in range(second, len(text)):
        # Llama's second call begins after the separator.
        assert read(name, text[:end]).unfinished == (text[:end].rstrip("; ") != CALL), text[:end]


@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_call_that_has_its_end_is_finished(name: str):
    broken = '{"name": "a", "arguments": "{["}'
    text = WHOLE[name].replace(CALL, broken).replace("<function=a>", "") + ("" if name == "llama" else "\nDone.")
    assert read(name, text).malformed
    assert not read(name, text).unfinished


@pytest.mark.parametrize("text", ['{"answer": 42}', "The set {1, 2}.", "", "{"])
def test_json_that_is_no_call_is_an_answer(text: str):
    message = read("llama", text)
    assert (message.content, message.tool_calls, message.malformed) == (text, (), ())


pieces = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', "<function=a>", "</function>", "[TOOL_CALLS]",
         "[ARGS]", "<parameter=x>", "</parameter>", "{", "}", "[", "]", '"', "text", "\n", "<|python_tag|>", ";"]
    ),
    max_size=12,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@given(text=pieces)
def test_nothing_is_lost_and_nothing_crashes(name: str, text: str):
    message = read(name, text)
    if not message.tool_calls:
        assert message.content == text
    assert all(raw in message.content for raw in message.malformed)
    assert all(isinstance(json.loads(call.arguments), dict) for call in message.tool_calls)

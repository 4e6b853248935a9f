"""Texts that a degenerate policy writes must not stall the process: every reader of sampled text is linear in it.

A reader that is quadratic takes 64 times as long for a text of 8 times the length. Only ratios of processor time count.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.errors import RewardError
from agl.rewards import JSONSchema
from agl.trainer.graders import judge, schema_worker, sql, sql_worker
from agl.trainer.graders.code import program_of
from agl.trainer.graders.schema import json_of
from agl.trainer.rendering.toolparsers import FORMATS, Malformed, ToolCall

TIMES = 8
MOST = 3 * TIMES
"""The largest ratio that is taken for linear; a quadratic reader has `TIMES` squared."""

FILLERS = [
    " ", "\n", "x", "[", "{", '"', "\\", "'", "`", "(", "/*", "--", "```", "``` ", "```\n", "```sql \n", "a\n```",
    "<tool_call>", "</tool_call>", '<tool_call>{"', '<tool_call>["', "<tool_call>[", '<tool_call>"', "<function=",
    "<parameter=", "<parameter=a>", "<parameter=a></parameter>", "[TOOL_CALLS]", "[TOOL_CALLS]x ",
    "[TOOL_CALLS]x[ARGS] ",
    '{"name": ', "[1,", '{"a":', "score ", "* ", "1 / ", "0",
]  # fmt: skip
HEADS = ["", "[TOOL_CALLS]x", "<tool_call>", "<tool_call><function=f>", "```", "```python\n", "score: ", "1", "select "]


def _parsed(name: str) -> Callable[[str], object]:
    return lambda text: list(FORMATS[name](text, []))


READERS: dict[str, Callable[[str], object]] = {
    **{f"tool calls, {name}": _parsed(name) for name in FORMATS},
    "code": program_of,
    "sql": sql.query_of,
    "sql, order": sql.has_order,
    "sql, quoted": sql_worker.without_quoted,
    "schema": json_of,
    "judge, score": judge._SCORE.search,
    "judge, bare": judge._BARE.fullmatch,
}


def cpu(read: Callable[[Any], object], text: Any) -> float:
    def once() -> float:
        began = time.process_time()
        read(text)
        return time.process_time() - began

    return min(once() for _ in range(2))


@pytest.mark.parametrize("name", READERS)
def test_a_reader_is_linear_in_the_text(name: str) -> None:
    read = READERS[name]
    for head in HEADS:
        for filler in FILLERS:
            short, long = (head + filler * (n // len(filler)) for n in (4_000, 4_000 * TIMES))
            # Below a millisecond the clock's own noise is larger than the difference.
            taken = max(cpu(read, short), 1e-3)
            assert cpu(read, long) < MOST * taken, (name, head, filler)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([*FILLERS, *HEADS, "\ud800", "é", "}", "]", "]}", ">", "[CALL_ID]", "1e999"]), max_size=40)
)
def test_nothing_that_is_written_is_lost_or_raises(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    pieces = list(FORMATS[name](text, []))
    if not any(isinstance(piece, ToolCall) for piece in pieces):
        assert "".join(piece.raw if isinstance(piece, Malformed) else piece for piece in pieces) == text


def test_what_is_nested_deeper_than_the_stack_is_malformed() -> None:
    deep = "[" * 100_000
    for name, text in {
        "hermes": f"<tool_call>{deep}",
        "mistral": f"[TOOL_CALLS]{deep}",
        "llama": f'{{"name": {deep}',
        "xml": f"<tool_call><function=f><parameter=a>{deep}</parameter></function></tool_call>",
    }.items():
        pieces = [piece for piece in FORMATS[name](text, []) if piece]
        assert len(pieces) == 1
        assert isinstance(pieces[0], Malformed) or (name == "xml" and isinstance(pieces[0], ToolCall))


def test_calls_after_malformed_ones_are_still_read() -> None:
    good = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'
    pieces = [p for p in FORMATS["hermes"]("<tool_call>{bad}</tool_call>" * 200 + good, []) if p]
    assert [type(p) for p in pieces] == [Malformed] * 200 + [ToolCall]


def test_equal_items_are_found_in_linear_time() -> None:
    schema = {"type": "array", "uniqueItems": True}
    grade = JSONSchema(schema)

    def items(n: int) -> Any:
        return {"schema": schema, "value": [{"a": i, "b": [i]} for i in range(n)], "partial": False}

    assert cpu(schema_worker.grade, items(8_000)) < MOST * cpu(schema_worker.grade, items(1_000))
    for equal in ([1, 1.0], [{"a": 1, "b": 2}, {"b": 2, "a": 1}], [[1], [1]], ["x", "x"], [None, None]):
        assert grade(None, json.dumps(equal)) == 0.0, equal
    for different in ([1, True], [0, False], ["1", 1], [[1, 2], [2, 1]], [{"a": 1}, {"a": 2}], [1, 1.5], []):
        assert grade(None, json.dumps(different)) == 1.0, different


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ({"pattern": "^(a+)+$"}, f'"{"a" * 40}b"'),
        ({"patternProperties": {"^(a|a)*$": False}}, f'{{"{"a" * 40}b": 1}}'),
        ({"multipleOf": 0.5}, "1e400"),
        ({"multipleOf": 0.1}, "9" * 4000),
        ({"$ref": "#/definitions/deep"}, "[" * 1500 + "]" * 1500),
        ({"$ref": "#/definitions/twice"}, "[" * 60 + "]" * 60),
    ],
    ids=["backtracking", "backtracking keys", "infinity", "digits", "deep", "exponential"],
)
def test_a_value_that_stalls_its_schema_is_wrong(rule: Any, value: str) -> None:
    again = {"items": {"$ref": "#/definitions/twice"}}
    definitions = {
        "deep": {"items": {"$ref": "#/definitions/deep"}, "maxItems": 1, "type": "array"},
        "twice": {"anyOf": [{**again, "minItems": 2}, {**again, "minItems": 3}]},
    }
    grade = JSONSchema({"definitions": definitions, "properties": {"x": rule}}, timeout=1.0)
    assert grade(None, f'{{"x": {value}}}') == 0.0
    assert grade(None, '{"y": 1}') == 1.0


@pytest.mark.parametrize("value", [float("inf"), int("9" * 4000)])
def test_numbers_that_no_float_holds_end_no_process(value: float) -> None:
    assert schema_worker.grade({"schema": {"multipleOf": 0.5}, "value": value, "partial": False}) == {"share": 0.0}


def test_a_schema_that_cannot_be_followed_is_no_wrong_answer() -> None:
    with pytest.raises(RewardError, match="cannot follow its schema"):
        JSONSchema({"properties": {"x": {"$ref": "#/nowhere"}}})(None, '{"x": "a"}')


def test_the_readers_of_sql_say_what_the_patterns_said() -> None:
    """Against the regular expressions that they replaced, on texts short enough for those."""
    import re

    quoted = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/", re.S)
    fenced = re.compile(r"```[ \t]*(?:sql|sqlite|postgresql|mysql)?[ \t]*\n(.*?)```", re.S | re.I)
    rng = random.Random(0)
    words = ["'", "''", '"', "`", "[", "]", "--", "\n", "/*", "*/", "a", " order by x ", "(", ")", ";", "select"]
    for _ in range(4000):
        text = "".join(rng.choices(words, k=rng.randrange(12)))
        if all(text.count(mark) % 2 == 0 for mark in "'\"`"):
            assert sql_worker.without_quoted(text) == quoted.sub(" ", text), text
    words = ["```", "```sql", "``` SQL ", "```python", "\n", "select 1", " ", "x"]
    for _ in range(4000):
        text = "".join(rng.choices(words, k=rng.randrange(10)))
        blocks = fenced.findall(text)
        assert sql.query_of(text) == (blocks[-1] if blocks else text).strip().rstrip("; \n\t"), text
    for query, ordered in {
        "select a from t order by a": True,
        "select a from (select b from t order by b)": False,
        "select a from t where x in (1, (2), 3) order by a": True,
        "select ')' from (select 1 order by 1)": False,
        "select ( order by a": True,
        "select 'order by'": False,
        "select 1 -- order by a": False,
    }.items():
        assert sql.has_order(query) == ordered, query

"""JSON that is parsed piece by piece has the value, or is refused, as if it were parsed at once."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.trainer.http.json_pieces import parse_in_pieces

MARKS = st.text(st.sampled_from('[]{},:"\\ \n1ae\u2200'), max_size=4)
CHANGES = [b"", *(bytes([code]) for code in b'[]{},:"\\ 10a\xff')]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | MARKS,
    lambda values: st.lists(values, max_size=6) | st.dictionaries(MARKS, values, max_size=6),
    max_leaves=30,
)


def outcome(parse: Any, text: bytes) -> tuple[bool, Any]:
    try:
        return True, parse(text)
    except ValueError:
        return False, None


@settings(max_examples=400, deadline=None)
@given(VALUES, st.integers(1, 12), st.sampled_from([None, 1]))
def test_the_value_is_that_of_the_whole(value: Any, piece: int, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent).encode()
    assert parse_in_pieces(text, 100, orjson.loads, piece) == value


@settings(max_examples=1500, deadline=None)
@given(st.data(), VALUES, st.integers(1, 6))
def test_text_that_is_no_json_is_refused_as_at_once(data: st.DataObject, value: Any, piece: int) -> None:
    text = bytearray(json.dumps([value, {"a": value}, value]).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", *(bytes([c]) for c in b'[]{},:"\\ 10a\xff')])
        )
    mutated = bytes(text)
    assert outcome(lambda t: parse_in_pieces(t, 100, orjson.loads, piece), mutated) == outcome(orjson.loads, mutated)


@pytest.mark.parametrize("depth", [1, 5, 100])
def test_depth_is_counted(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    assert parse_in_pieces(deep, depth, orjson.loads, 2) == orjson.loads(deep)
    with pytest.raises(ValueError, match=f"more than {depth - 1} deep"):
        parse_in_pieces(deep, depth - 1, orjson.loads, 2)


def test_no_piece_is_large() -> None:
    """What one call of the parser gets bounds for how long nothing else runs."""
    sizes: list[int] = []

    def load(text: bytes) -> Any:
        sizes.append(text.count(b",") + text.count(b"{") + text.count(b"["))
        return orjson.loads(text)

    many = [{"k": [n, {"n": n}]} for n in range(3_000)]
    for value in (many, {"a": 1, "tasks": many}, [[[many]], many], {"a": {"b": {"c": many}}, "d": many}):
        sizes.clear()
        assert parse_in_pieces(orjson.dumps(value), 100, load, 100) == value
        assert max(sizes) <= 110, max(sizes)

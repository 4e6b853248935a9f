"""Spans over the wire: what is encoded is decoded equal, and what is no export request is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.mdp.spans import Event, Span
from agl.tracing import otlp

_text = st.text(max_size=20)
_values = (
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | _text | st.lists(_text, max_size=3)
)
_attributes = st.dictionaries(_text, _values, max_size=5)
_times = st.integers(0, 2**41).map(lambda ms: ms / 1000)
_spans = st.builds(
    Span,
    trace_id=st.integers(1, 2**128 - 1).map(lambda n: f"{n:032x}"),
    span_id=st.integers(1, 2**64 - 1).map(lambda n: f"{n:016x}"),
    parent_id=st.none() | st.integers(1, 2**64 - 1).map(lambda n: f"{n:016x}"),
    rollout_id=st.just("ro-1"),
    attempt=st.just(2),
    name=_text,
    start=_times,
    end=_times,
    status=st.sampled_from(["unset", "ok", "error"]),
    status_message=st.none() | _text,
    attributes=_attributes,
    events=st.lists(st.builds(Event, _text, _times, _attributes), max_size=2).map(tuple),
)


@given(st.lists(_spans, max_size=3))
def test_there_and_back(spans: list[Span]) -> None:
    wire = json.loads(json.dumps(otlp.encode(spans), allow_nan=False))
    back = otlp.decode(wire, rollout_id="ro-1", attempt=2)
    assert [replace(s, start=0, end=0, events=()) for s in back] == [
        replace(s, start=0, end=0, events=()) for s in spans
    ]
    for one, other in zip(back, spans, strict=True):
        assert [one.start, one.end] == pytest.approx([other.start, max(other.start, other.end)], abs=1e-6)
        assert [(e.name, e.attributes) for e in one.events] == [(e.name, e.attributes) for e in other.events]


def test_numbers_that_json_has_not() -> None:
    span = Span("a" * 32, "b" * 16, None, "ro-1", 1, "n", 0.0, 1.0, attributes={"x": math.nan, "y": -math.inf})
    (back,) = otlp.decode(json.loads(json.dumps(otlp.encode([span]), allow_nan=False)), rollout_id="ro-1", attempt=1)
    assert math.isnan(back.attributes["x"])
    assert back.attributes["y"] == -math.inf


@pytest.mark.parametrize(
    "request_", [[], "x", {"resourceSpans": [1]}, {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "zz"}]}]}]}]
)
def test_what_is_no_request(request_: Any) -> None:
    with pytest.raises(ValueError, match="not an OTLP export request"):
        otlp.decode(request_, rollout_id="ro-1", attempt=1)

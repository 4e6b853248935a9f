"""JSON schemas, an answer's structure, and signs of depth."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agl.errors import ConfigError, RewardError
from agl.rewards import Depth, JSONSchema, Structure

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


class City(BaseModel):
    city: str
    people: int


@pytest.mark.parametrize(
    ("output", "valid", "partial"),
    [
        ({"city": "Rome", "people": 3}, 1.0, 1.0),
        ('{"city": "Rome", "people": 3}', 1.0, 1.0),
        ('Sure:\n```json\n{"city": "Rome", "people": 3}\n```\n', 1.0, 1.0),
        (City(city="Rome", people=3), 1.0, 1.0),
        ('{"city": "Rome", "people": "3"}', 0.0, 2 / 3),
        ('{"city": "Rome"}', 0.0, 2 / 3),
        ('{"city": "Rome", "people": 3, "more": 1}', 0.0, 2 / 3),
        ('{"city": 1, "people": -1}', 0.0, 1 / 3),
        ("[]", 0.0, 0.0),
        ('{"city": "Rome", "people": NaN}', 0.0, 0.0),
        ({"city": "Rome", "people": math.nan}, 0.0, 0.0),
        ("no JSON", 0.0, 0.0),
        ("", 0.0, 0.0),
        (None, 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
    ],
)
def test_json_that_a_schema_allows(output: Any, valid: float, partial: float) -> None:
    assert JSONSchema(SCHEMA)({}, output) == valid
    assert JSONSchema(SCHEMA, partial=True)({}, output) == pytest.approx(partial)


def test_where_the_schema_comes_from() -> None:
    assert JSONSchema(City)({}, '{"city": "Rome", "people": 3}') == 1.0
    assert JSONSchema("spec.schema")({"spec": {"schema": SCHEMA}}, '{"city": "Rome"}') == 0.0
    with pytest.raises(RewardError, match="finds no schema in the task at 'spec'"):
        JSONSchema("spec")({}, "{}")
    with pytest.raises(RewardError, match="the task's schema at 'spec'"):
        JSONSchema("spec")({"spec": {"type": "strin"}}, "{}")
    with pytest.raises(ConfigError, match="this is not a JSON schema"):
        JSONSchema({"type": "strin"})
    with pytest.raises(ConfigError, match="cannot make a schema of a int"):
        JSONSchema(3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["city", "people", "x"]), inner),
    max_leaves=8,
)


@given(JSON)
def test_partial_is_1_for_what_is_valid_alone(value: Any) -> None:
    text = json.dumps(value)
    valid, partial = JSONSchema(SCHEMA)({}, text), JSONSchema(SCHEMA, partial=True)({}, text)
    assert 0 <= partial <= 1
    assert (partial == 1) == (valid == 1)


REPORT = """# Findings

The first paragraph, with `code`.

Another one.

- a point
- a second

```python
# no heading
```

## Sources
none
"""


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, 1.0),
        ({"headings": 2}, 1.0),
        ({"headings": 4}, 0.5),
        ({"headings": 4, "list_items": 2}, 0.75),
        ({"code_blocks": 1, "paragraphs": 3}, 1.0),
        ({"sections": ("findings", "Sources", "Method")}, 2 / 3),
        ({"patterns": (r"(?m)a second$", r"(?m)^- \d"), "max_words": 100}, 2 / 3),
        ({"min_words": 100}, 0.23),
        ({"max_words": 10}, 10 / 23),
    ],
)
def test_the_mean_over_what_is_required(options: dict[str, Any], value: float) -> None:
    assert len(REPORT.split()) == 23
    assert Structure(**options)({}, REPORT) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.5),
        ("<think>a</think><answer>b", 0.5),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.5),
        ("</think><think>a", 0.0),
        ("", 0.0),
    ],
)
def test_tags_once_closed_and_in_order(text: str, value: float) -> None:
    assert Structure(tags=("think", "answer"))({}, text) == value


def test_bad_requirements() -> None:
    with pytest.raises(ConfigError, match="Structure has no option 'heading'"):
        Structure(heading=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"use a tuple \(a text, \.\.\.\)"):
        Structure(tags="think")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot read the pattern"):
        Structure(patterns=("(",))


def test_depth_grows_with_examples_reasons_and_specifics() -> None:
    shallow = "It is good."
    reasoned = "It is good because it is fast. Therefore people like it, since time is short."
    deep = f"{reasoned} For example, in 2019 the Boeing 737 took 3 hours; such as `A320`, it needs 20% less."
    values = [Depth()({}, text) for text in ("", shallow, reasoned, deep)]
    assert values == sorted(values)
    assert values[0] == 0.0
    assert values[1] < values[2] < values[3] == 1.0
    with pytest.raises(ConfigError):
        Depth(examples=0)


@given(
    st.text(max_size=200) | st.lists(st.sampled_from(["# a", "- b", "```", "for example 3", "", "<t>"])).map("\n".join)
)
def test_every_value_lies_in_the_range(text: str) -> None:
    for grader in (Structure(), Structure(headings=1, tags=("t",), min_words=5, max_words=9), Depth()):
        assert 0.0 <= grader({}, text) <= 1.0

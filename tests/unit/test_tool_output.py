"""What a tool returned -> its text and its outcome, from the object, whatever the framework makes of it."""

from __future__ import annotations

import dataclasses
import enum
import json
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agl.messages.tool_output import reports_failure, tool_output


@dataclasses.dataclass
class Result:
    error: str | None = None
    rows: int = 3


class Model(BaseModel):
    success: bool = True


class Status(enum.Enum):
    OK = "ok"
    ERROR = "error"


class Text(str, enum.Enum):  # noqa: UP042 (its str() is "Text.ERROR")
    ERROR = "error"


class WithStatus(BaseModel):
    status: Status = Status.ERROR


class Pair(NamedTuple):
    ok: bool
    error: str | None = None


class Silent:
    """An object that nothing can be had of."""

    @property
    def content(self) -> str:
        raise RuntimeError("not now")

    def __str__(self) -> str:
        raise RuntimeError("not now")


class WithoutTruth:
    """A table, as pandas has them."""

    def __bool__(self) -> bool:
        raise ValueError("the truth value of a table is ambiguous")

    def __str__(self) -> str:
        return "a table"


def blocks(*texts: str) -> list[Any]:
    return [{"type": "text", "text": text, "id": f"lc_{i}"} for i, text in enumerate(texts)]


def mcp(text: str, failed: bool) -> Any:
    return SimpleNamespace(content=[SimpleNamespace(type="text", text=text)], is_error=failed, structured_content=None)


SAYS_SO = [
    ({"error": ["no rows", "no columns"]}, '{"error": ["no rows", "no columns"]}'),
    ({"error": np.array(["no rows"])}, '{"error": ["no rows"]}'),
    ({"error": 404}, '{"error": 404}'),
    ({"error": "no"}, '{"error": "no"}'),
    ({"success": False}, '{"success": false}'),
    ({"success": np.bool_(False)}, '{"success": false}'),
    ({"Is_Error": True}, '{"Is_Error": true}'),
    ({"status": "failed"}, '{"status": "failed"}'),
    ('{"error": "no"}', '{"error": "no"}'),
    ("{'error': 'no'}", "{'error': 'no'}"),
    ('"Error: no"', '"Error: no"'),
    ("Error: no", "Error: no"),
    (b"Error: no", "Error: no"),
    (Result("no"), '{"error": "no", "rows": 3}'),
    (Model(success=False), '{"success": false}'),
    (blocks("Error: no"), "Error: no"),
    (blocks('{"error": "no"}'), '{"error": "no"}'),
    (tuple(blocks("Error: no")), "Error: no"),
    (blocks("Error: no")[0], "Error: no"),
    (json.dumps(blocks("Error: no")), json.dumps(blocks("Error: no"))),
    (str(blocks("Error: no")), str(blocks("Error: no"))),
    ({"status": "success", "content": [{"json": {"error": "no"}}]}, '{"error": "no"}'),
    (mcp("Error: no", failed=False), "Error: no"),
    (SimpleNamespace(content=[], isError=False, structuredContent={"error": "no"}), '{"error": "no"}'),
]
WRITTEN_BY_PYTHON = [
    ({"status": Status.ERROR}, '{"status": "error"}'),
    ({"status": Text.ERROR}, '{"status": "error"}'),
    (WithStatus(), '{"status": "error"}'),
    (Pair(ok=False, error="no"), '{"ok": false, "error": "no"}'),
    ("ValueError: no", "ValueError: no"),
    ("ValueError('no')", "ValueError('no')"),
    ("requests.exceptions.ConnectionError: no", "requests.exceptions.ConnectionError: no"),
    ("KeyError", "KeyError"),
]
"""What programs return, or make of an exception."""
SAYS_SO += WRITTEN_BY_PYTHON
MARKED = [
    (mcp("sold out", failed=True), "sold out"),
    ({"content": blocks("sold out"), "isError": True}, "sold out"),
    ({"content": [], "isError": True}, ""),
    ({"status": "error", "content": [{"text": "sold out"}]}, "sold out"),
    (SimpleNamespace(content="sold out", status="error", tool_call_id="call_1"), "sold out"),
    (SimpleNamespace(content=blocks("sold out"), status="error", tool_call_id="call_1"), "sold out"),
    (ValueError("sold out"), "sold out"),
    (KeyError(), "KeyError"),
]
SUCCEEDED = [
    ({"value": 3.1, "error": 0.02}, '{"value": 3.1, "error": 0.02}'),
    ({"fit": 2, "error": np.array([0.1, 0.2])}, '{"fit": 2, "error": [0.1, 0.2]}'),
    ({"fit": 2, "error": [[0.1, 0.0], [0.0, 0.2]]}, '{"fit": 2, "error": [[0.1, 0.0], [0.0, 0.2]]}'),
    ({"fit": 2, "error": np.float32(0.5)}, '{"fit": 2, "error": 0.5}'),
    ({"rows": 1, "error": WithoutTruth()}, '{"rows": 1, "error": "a table"}'),
    ({"error": None}, '{"error": null}'),
    ({"errors": []}, '{"errors": []}'),
    ({"error": ""}, '{"error": ""}'),
    ({"success": True, "status": "ok"}, '{"success": true, "status": "ok"}'),
    ({"success": None}, '{"success": null}'),
    ({"success": 0}, '{"success": 0}'),
    ("{'error': None}", "{'error': None}"),
    ("errors: 0", "errors: 0"),
    ("ErrorBoundary is a React component", "ErrorBoundary is a React component"),
    ("ValueError is a class of Python", "ValueError is a class of Python"),
    ({"status": Status.OK}, '{"status": "ok"}'),
    (Pair(ok=True), '{"ok": true, "error": null}'),
    ("{not an object", "{not an object"),
    (Result(), '{"error": null, "rows": 3}'),
    (Model(), '{"success": true}'),
    (mcp("sold out", failed=False), "sold out"),
    (blocks("a", "b"), "a\nb"),
    ([*blocks("a"), {"type": "image", "data": "AA"}], 'a\n{"type": "image", "data": "AA"}'),
    (["Error: no"], '["Error: no"]'),
    ([{"type": "dog"}], '[{"type": "dog"}]'),
    ({"text": "hello"}, '{"text": "hello"}'),
    ({"status": "success", "content": [1]}, '{"status": "success", "content": [1]}'),
    ({"naïve": {1}}, '{"naïve": [1]}'),
    ({(1, 2): 3}, "{(1, 2): 3}"),
    (np.arange(2), "[0, 1]"),
    (None, "null"),
    (5, "5"),
    ("", ""),
    (Silent(), "<Silent>"),
]


@pytest.mark.parametrize(("returned", "text"), SAYS_SO, ids=repr)
def test_what_says_that_the_tool_failed(returned: Any, text: str) -> None:
    output = tool_output(returned)
    assert (output.text, output.failed, output.marked) == (text, True, False)


@pytest.mark.parametrize(("returned", "text"), MARKED, ids=lambda value: type(value).__name__)
def test_what_is_marked_as_failed(returned: Any, text: str) -> None:
    output = tool_output(returned)
    assert (output.text, output.failed, output.marked) == (text, True, True)


@pytest.mark.parametrize(("returned", "text"), SUCCEEDED, ids=lambda value: type(value).__name__)
def test_what_only_looks_like_a_failure(returned: Any, text: str) -> None:
    output = tool_output(returned)
    assert (output.text, output.failed) == (text, False)


def test_a_circle_and_a_deep_nest_are_texts_too() -> None:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    assert tool_output(circle).text == "{'self': {...}}"
    deep = "[" * 100_000
    assert tool_output(deep).text == deep
    assert not reports_failure(deep)


KEYS = st.sampled_from(["error", "errors", "isError", "is_error", "success", "ok", "status", "rows"])
SCALARS = st.sampled_from([None, True, False, 0, 1, "", "error", "Error: no", "failed", "success", "ok"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


@given(VALUES)
def test_the_text_of_a_value_tells_what_the_value_tells(value: Any) -> None:
    """Whoever has the text alone, such as a request that brings it back, comes to the same outcome."""
    output = tool_output(value)
    assert reports_failure(output.text) == output.failed
    # As Python writes it, which is what most frameworks do with an object.
    if isinstance(value, dict):
        assert reports_failure(str(value)) == output.failed


@pytest.mark.parametrize("written", [str, repr])
def test_an_mcp_result_that_a_program_writes_says_whether_it_failed(written: Any) -> None:
    types = pytest.importorskip("mcp.types")
    for failed in (True, False):
        result = types.CallToolResult(content=[types.TextContent(type="text", text="isError=True")], isError=failed)
        assert tool_output(written(result)).failed is failed

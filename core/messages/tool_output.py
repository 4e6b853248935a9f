"""What a tool returned -> its text and its outcome: once, from the object, for every framework alike.

Frameworks put a returned object into words in different ways, and some of these hide that the tool failed.

Source: Model Context Protocol, `CallToolResult` (`content`, `isError`, `structuredContent`); the content blocks of
OpenAI, Anthropic, LangChain and Amazon Bedrock (Strands).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

_SAYS_ERROR = re.compile(
    r"\s*(?:error\b|exception\b|traceback \(most recent call last\)|failed\b|failure\b"
    r"|(?-i:(?:\w+\.)*[A-Z]\w*(?:Error|Exception))(?:[:(]|\s*$))",
    re.I,
)
"""The last line: an exception as Python writes it, `ValueError: no` or `ValueError('no')`."""
_WRITTEN_MCP = re.compile(r"(?:CallToolResult\()?_?meta=.*\bis_?[eE]rror=True(?:,? \w+='\w*')*\)?\s*", re.S)
"""A failed MCP result as a program's `str(result)` writes it."""
_STATUSES = ("success", "error")
"""Of results that wrap content blocks (Strands, LangChain)."""
_TEXTS = ("text", "input_text", "output_text")
"""Types of content blocks that hold text."""
_BEDROCK = frozenset({"text", "json", "image", "document", "video"})
"""Content blocks of one field and no type."""
_LITERAL = 20_000
"""Characters up to which a text is read as a Python literal."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a tool returned.

    Attributes:
        text: a text unchanged; of content blocks, the texts, a line each; of anything else, JSON.
        failed: whether it says that the tool failed, by a mark or in its words.
        marked: whether a mark says so: MCP's `isError`, the status of a tool message, or that it is an exception.
    """

    text: str
    failed: bool
    marked: bool


def tool_output(returned: Any) -> ToolOutput:
    """The text and the outcome of what a tool returned.

    Args:
        returned: any object: a value, content blocks, an MCP result, a framework's tool message, an exception.
    """
    marked, content = _unwrapped(returned)
    text = content if isinstance(content, str) else _json(content)
    return ToolOutput(text, marked or _says_so(content), marked)


def reports_failure(text: str) -> bool:
    """Whether the text of a tool's result says that the tool failed: the rule of `tool_output`, read from the text."""
    return _says_so(text)


def _unwrapped(value: Any, marked: bool = False) -> tuple[bool, Any]:
    """Whether a result is marked as failed, and its content: a text or a JSON value."""
    if isinstance(value, str):
        return marked, str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return marked, bytes(value).decode(errors="replace")
    if isinstance(value, BaseException):
        return True, _shown(value) or type(value).__name__
    if (inner := _content(value)) is not None:
        return _unwrapped(inner, marked or _is_marked(value))
    if (texts := _block_texts(value)) is not None:
        return marked, "\n".join(texts)
    if callable(fields := getattr(value, "_asdict", None)) and isinstance(value, tuple):  # a named tuple
        return marked, fields()
    if isinstance(value, dict | list | tuple | int | float | None) and not isinstance(value, Enum):
        return marked, value
    return _unwrapped(_plain(value), marked)


def _says_so(content: Any) -> bool:
    """Whether a result's content, a text or a JSON value, says that the tool failed."""
    if not isinstance(content, str):
        return isinstance(content, dict) and _has_failure_field(content)
    written = _written_value(content)
    if written is None:
        return _SAYS_ERROR.match(content) is not None or _WRITTEN_MCP.fullmatch(content) is not None
    marked, inner = _unwrapped(written)
    return marked or _says_so(inner)


def _has_failure_field(value: Mapping[Any, Any]) -> bool:
    fields = {str(k).lower().replace("_", ""): v for k, v in value.items()}
    return (
        any(_is_error(fields.get(key)) for key in ("error", "iserror", "exception"))
        or any(_plain(fields.get(key)) is False for key in ("success", "ok"))
        or str(_plain(fields.get("status", ""))).lower() in ("error", "failed", "failure")
    )


def _is_error(value: Any) -> bool:
    """Whether the value of a field for errors says that there was one. The error of a measurement says nothing."""
    if isinstance(value, list | tuple):
        return any(_is_error(each) for each in value)
    plain = _plain(value)
    if isinstance(plain, float):
        return False
    if isinstance(plain, list):
        return _is_error(plain)
    # Objects such as tables have no truth value.
    with contextlib.suppress(Exception):
        return bool(value)
    return False


def _written_value(text: str) -> Any:
    """The object, list or string that a text is as JSON, or as Python writes it (`str(result)`); else None."""
    start = text.lstrip()[:1]
    if start not in ("{", "[", '"'):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    if start in ("{", "[") and len(text) <= _LITERAL:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return ast.literal_eval(text.strip())
    return None


def _content(value: Any) -> Any:
    """The content of a result that wraps it; None of anything else."""
    content = _field(value, "content")
    if isinstance(content, list | tuple):
        if _marks(value):
            structured = (_field(value, name) for name in ("structuredContent", "structured_content"))
            return content or next((s for s in structured if s is not None), "")
        return content if _field(value, "status") in _STATUSES and _block_texts(content) is not None else None
    # LangChain's message of a tool.
    return content if isinstance(content, str) and _field(value, "tool_call_id") is not None else None


def _is_marked(value: Any) -> bool:
    return True in _marks(value) or _field(value, "status") == "error"


def _marks(value: Any) -> list[bool]:
    return [mark for name in ("isError", "is_error") if isinstance(mark := _field(value, name), bool)]


def _block_texts(value: Any) -> list[str] | None:
    """The texts of content blocks, other blocks as JSON; None where there is no block with text."""
    blocks = value if isinstance(value, list | tuple) else [value]
    if not all(map(_is_block, blocks)) or (blocks is not value and _field(value, "type") not in _TEXTS):
        return None
    texts = [_block_text(block) for block in blocks]
    if all(text is None for text in texts):
        return None
    return [_json(block) if text is None else text for block, text in zip(blocks, texts, strict=True)]


def _is_block(value: Any) -> bool:
    if isinstance(value, Mapping) and len(value) == 1:
        return not _BEDROCK.isdisjoint(value)
    return isinstance(_field(value, "type"), str)


def _block_text(block: Any) -> str | None:
    text = _field(block, "text")
    if isinstance(text, str) and _field(block, "type") in (None, *_TEXTS):
        return text
    if isinstance(block, Mapping) and "json" in block:
        return _json(block["json"])
    return None


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):  # such as keys that are no texts, or a circle
        return _shown(value)


def _plain(value: Any) -> Any:
    """An object as a JSON value, one level deep; as its own text where it has no fields."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str | int | float | None):
        return value
    with contextlib.suppress(Exception):
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, Set):
            return list(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        # The methods of Pydantic's models, and of arrays.
        for method in ("model_dump", "tolist"):
            if callable(convert := getattr(value, method, None)) and not isinstance(value, type):
                plain = convert()
                return plain if isinstance(plain, str | dict | list | int | float) else _shown(value)
    return _shown(value)


def _shown(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _field(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    if isinstance(value, type):
        return None
    try:
        return getattr(value, name, None)
    except Exception:  # of a user's property
        return None

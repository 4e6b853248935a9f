"""What of an exception shows that a model's answer caused it: the text or value that could not be read."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_KEPT_CHARACTERS = 2_000
"""Of a text that could not be read; compared with the beginning of what an answer holds."""
_KEPT_INPUTS = 8
_NODES = 10_000
"""Values of an answer's JSON that are compared, which bounds the work."""
_STARTS = 200
"""Brackets of a text at which JSON is looked for, which does so, too."""
_PYDANTIC = "pydantic_core._pydantic_core.ValidationError"
_JSONSCHEMA = "jsonschema.exceptions.ValidationError"


def unreadable_inputs(errors: Iterable[BaseException]) -> list[str]:
    """What JSON, pydantic and jsonschema exceptions say that they could not read, as texts for `is_answer`.

    Args:
        errors: an exception and its causes. Those of HTTP libraries, which are an `OSError`, too, are left out.
    """
    inputs: list[str] = []
    for error in errors:
        names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
        if isinstance(error, OSError):
            continue
        if isinstance(error, json.JSONDecodeError):
            inputs.append(_described((), str(error.doc)))
        elif _PYDANTIC in names:
            with contextlib.suppress(Exception):
                details = error.errors(include_url=False, include_context=False)  # type: ignore[attr-defined]
                inputs += [_described(detail["loc"], detail["input"]) for detail in details]
        elif _JSONSCHEMA in names:
            with contextlib.suppress(Exception):
                inputs.append(_described(error.absolute_path, error.instance))  # type: ignore[attr-defined]
    return inputs[:_KEPT_INPUTS]


def _described(path: Iterable[Any], value: Any) -> str:
    kept = {"text": value[:_KEPT_CHARACTERS]} if isinstance(value, str) else {"value": _canonical(value)}
    return json.dumps({"path": [key if isinstance(key, int) else str(key) for key in path], **kept})


def _canonical(value: Any) -> str:
    """A JSON value as one text; of a long one, its digest."""
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= _KEPT_CHARACTERS else hashlib.sha256(text.encode()).hexdigest()


def answer_texts(answer: Mapping[str, Any]) -> list[str]:
    """The texts of an assistant's message: its content, then the arguments of its tool calls; none if not recorded.

    Before tool calls, an empty content says nothing: it is no answer that somebody could not read.
    """
    content = answer.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    calls = [call for call in answer.get("tool_calls") or () if isinstance(call, dict)]
    if calls and not any(isinstance(text, str) and text.strip() for text in texts):
        texts = []
    arguments = [(call.get("function") or call).get("arguments") for call in calls]
    return [text if isinstance(text, str) else json.dumps(text) for text in (*texts, *arguments) if text is not None]


def is_answer(inputs: Sequence[str], texts: Sequence[str]) -> bool:
    """Whether what could not be read (`unreadable_inputs`) is, each of it, a part of one of an answer's texts."""
    return bool(inputs) and bool(texts) and all(_is_part(json.loads(each), texts) for each in inputs)


def _is_part(unreadable: dict[str, Any], texts: Sequence[str]) -> bool:
    path = unreadable["path"]
    if "text" in unreadable:
        wanted = unreadable["text"].strip()
        if not wanted:
            whole = any(not text.strip() for text in texts)
        else:
            whole = not path and any(wanted in text for text in texts)
        if whole:
            return True
    for text in texts:
        for node in _nodes(text):
            value, depth = _follow(node, path)
            # A number alone may be anywhere; what has a place in the answer, or is an object, may not.
            placed = depth > 0 or isinstance(value, dict | list)
            if placed and _same(unreadable, value):
                return True
    return False


def _same(unreadable: dict[str, Any], value: Any) -> bool:
    if "text" in unreadable:
        return isinstance(value, str) and value[:_KEPT_CHARACTERS] == unreadable["text"]
    return not isinstance(value, str) and _canonical(value) == unreadable["value"]


def _follow(node: Any, path: Sequence[Any]) -> tuple[Any, int]:
    """The value at a path and how many of its keys led there; keys that lead nowhere (tags of unions, a field that is
    missing) are passed over."""
    depth = 0
    for key in path:
        inside = key in node if isinstance(node, dict) else isinstance(node, list) and isinstance(key, int)
        if inside and (isinstance(node, dict) or -len(node) <= key < len(node)):
            node = node[key]
            depth += 1
    return node, depth


def _nodes(text: str) -> Iterator[Any]:
    """The objects and lists in the JSON of a text, outermost first."""
    waiting: list[Any] = []
    decoder = json.JSONDecoder(strict=False)
    position = _next_bracket(text, 0)
    for _ in range(_STARTS):
        if position is None:
            break
        try:
            value, end = decoder.raw_decode(text, position)
            waiting.append(value)
        except (ValueError, RecursionError):
            end = position + 1
        position = _next_bracket(text, end)
    for _ in range(_NODES):
        if not waiting:
            return
        node = waiting.pop(0)
        if isinstance(node, dict | list):
            yield node
            waiting += node.values() if isinstance(node, dict) else node


def _next_bracket(text: str, start: int) -> int | None:
    found = [at for bracket in "{[" if (at := text.find(bracket, start)) >= 0]
    return min(found, default=None)

"""Finds the graded text in a task or an output: the `answer=` and `output=` options of graders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from agl.errors import RewardError, UnreadableMessageError
from agl.messages import Text, ToolResult, read
from agl.tracing.context import current

Field = str | Callable[[Any], Any]
"""A key, a dotted path of keys, indices and attributes (`"meta.gold.0"`), or a function."""

Extractor = Field | re.Pattern[str]
"""A `Field`, or a pattern whose last match in the text counts: its first group, or all of it."""

ANSWER_FIELDS = ("answer", "ground_truth", "solution", "expected", "reference", "target", "label", "result")
"""Fields of a dict task that hold the reference, in order of preference."""

_MISSING = object()


def failure(message: str, *, hint: str | None = None, cls: type[RewardError] = RewardError) -> RewardError:
    """A `RewardError` with the current rollout: a failure that is not the agent's fault."""
    scope = current()
    if scope is None:
        return cls(message, hint=hint)
    rollout = scope.rollout
    return cls(message, hint=hint, rollout=rollout.rollout_id, attempt=rollout.attempt, agent=rollout.agent)


def lookup(value: Any, path: str) -> Any:
    """The value at a key or dotted path; `_MISSING` if there is none. A key that contains dots comes first."""
    if isinstance(value, Mapping) and path in value:
        return value[path]
    for step in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(step, _MISSING)
        elif isinstance(value, Sequence) and not isinstance(value, str) and step.lstrip("-").isdigit():
            value = value[int(step)] if -len(value) <= int(step) < len(value) else _MISSING
        else:
            value = getattr(value, step, _MISSING)
        if value is _MISSING:
            return _MISSING
    return value


def reference(task: Any, answer: Field | None, grader: str) -> Any:
    """The task's reference.

    Args:
        answer: where it is; the first of `ANSWER_FIELDS` if None, or the task itself where it is no dict.

    Raises:
        RewardError: it is not there, or None.
    """
    if callable(answer):
        value = answer(task)
    elif answer is not None:
        value = lookup(task, answer)
    elif isinstance(task, Mapping):
        value = next((task[name] for name in ANSWER_FIELDS if name in task), _MISSING)
    else:
        value = _MISSING
    if value is _MISSING or value is None:
        fields = (
            f"it has {', '.join(map(repr, task))}" if isinstance(task, Mapping) else f"it is a {type(task).__name__}"
        )
        raise failure(
            f"{grader} finds no reference in the task: "
            + (f"nothing at {answer!r}; {fields}" if isinstance(answer, str) else fields),
            hint='say where it is: answer="key", a dotted path, or a function of the task',
        )
    return value


def references(task: Any, answer: Field | None, grader: str) -> list[str]:
    """The references as texts; several where the task holds a list, of which any may match.

    Raises:
        RewardError: there is none.
    """
    value = reference(task, answer, grader)
    values = value if isinstance(value, list | tuple | set | frozenset) else [value]
    if not values:
        raise failure(f"{grader} finds an empty list of references in the task", hint="give at least one")
    return [text_of(one) for one in values]


def extract(output: Any, extractor: Extractor | None) -> Any:
    """The part of an output that is graded; None if it is missing, which is the agent's fault and grades lowest."""
    if extractor is None:
        return output
    if isinstance(extractor, re.Pattern):
        match = None
        for match in extractor.finditer(text_of(output)):  # noqa: B007
            pass
        return None if match is None else match[1] if extractor.groups else match[0]
    value = extractor(output) if callable(extractor) else lookup(output, extractor)
    return None if value is _MISSING else value


def text_of(value: Any) -> str:
    """The text of any output: a text, a message, the last of several messages, or else its JSON."""
    match value:
        case None:
            return ""
        case str():
            return value
        case Mapping():
            for name in ("content", "messages", "output", "text"):
                if name in value:
                    part = value[name]
                    return text_of(part) if name != "content" or isinstance(part, str) else _texts(part)
        case list() | tuple():
            if value and all(_is_message(one) for one in value):
                return text_of(value[-1])
        case bool() | int() | float():
            return str(value)
        case _:
            if (text := _object_text(value)) is not None:
                return text
    try:
        return json.dumps(plain(value), ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _texts(content: Any) -> str:
    """The texts among a message's parts, one a line, without thoughts and tool calls."""
    try:
        [message] = read.answers({"content": [content] if isinstance(content, Mapping) else content})
    except UnreadableMessageError:
        return json.dumps(content, ensure_ascii=False, default=str)
    texts = (p.text if isinstance(p, ToolResult) else p.content if isinstance(p, Text) else "" for p in message.parts)
    return "\n".join(filter(None, texts))


def plain(value: Any) -> Any:
    """Pydantic models and dataclasses as dicts; other values unchanged."""
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value


def _is_message(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "content" in value
    return not isinstance(value, str) and _object_text(value) is not None


def _object_text(message: Any) -> str | None:
    """The text of a framework's message or result object; None if it has none."""
    for name in ("final_output", "content", "text", "message", "messages", "choices"):
        value = getattr(message, name, None)
        if name == "content" and isinstance(value, list):
            return _texts([plain(part) for part in value])
        if name in ("messages", "choices", "message"):
            inner = value[-1] if isinstance(value, list | tuple) and value else value
            if inner is not None and not isinstance(inner, list | tuple) and not callable(inner):
                return text_of(inner)
        elif isinstance(value, str):
            return str(value)
        elif name == "final_output" and value is not None:
            return text_of(value)
    return None

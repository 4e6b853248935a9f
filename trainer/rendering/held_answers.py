"""Reads answers that were held to a grammar: what is JSON of the schema is a text, whatever marks its strings spell."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agl.trainer.rendering.reasoning import END_THINK, THINK
from agl.trainer.rendering.toolchoice import may_become_call
from agl.trainer.rendering.toolparsers import ParsedMessage

_SPACE = " \n"
"""What a grammar allows before JSON."""


def held_message(text: str, grammar: str, around_thoughts: str | None = "\n") -> ParsedMessage | None:
    """The message of an answer that is JSON of a schema, or the beginning of one; None of an answer that is something
    else, such as a call.

    Args:
        text: of the answer, without its stop token.
        grammar: what `agl.trainer.engines.base.json_grammar` made.
        around_thoughts: the characters that the model's parser removes around a thought; None for all white space.
    """
    parts = _parts(grammar)
    trigger = parts.get("trigger", "")
    otherwise = parts.get("otherwise")
    is_schema = not trigger and [form[::2] for form in _three(parts["forms"])] == [["", ""]]
    if not is_schema and otherwise is None:
        return None
    reasoning, content = _parted(text, parts.get("reasoning", "none"), around_thoughts)
    if not is_schema and _is_call(content, parts["forms"], trigger.strip()):
        return None
    return ParsedMessage(content, reasoning or None)


@functools.lru_cache(64)
def _parts(grammar: str) -> Mapping[str, Any]:
    return json.loads(grammar)


def _three(forms: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Forms without how their arguments are written."""
    return [list(form[:3]) for form in forms]


def _parted(text: str, reasoning: str, around_thoughts: str | None) -> tuple[str, str]:
    """The thought that a grammar allows before the rest, and that rest.

    Args:
        reasoning: as of `json_grammar`.
        around_thoughts: as of `held_message`.
    """
    begun = text.lstrip(_SPACE)
    if reasoning == "none" or not (reasoning == "open" or begun.startswith(THINK)):
        return "", begun
    thought, _, rest = begun.removeprefix(THINK).partition(END_THINK)
    return thought.strip(around_thoughts), rest.lstrip(_SPACE)


def _is_call(content: str, forms: Sequence[Sequence[Any]], tag: str) -> bool:
    """Whether an answer, of which there may be no more than the beginning, is a call and not JSON."""
    if tag != "{":
        return bool(content) and (content.startswith(tag) or tag.startswith(content))
    # A call is JSON itself: one of the forms, whose beginnings no answer of the schema has.
    return may_become_call(content, forms)

"""A grammar as llguidance takes it: the text of `json_grammar` in its dialect of Lark.

Invariant: importing this module loads neither torch nor llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agl.errors import ConfigError
from agl.trainer.rendering.reasoning import END_THINK, THINK
from agl.trainer.rendering.toolchoice import CALL_ID, COUNT, any_arguments

_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
"""As `json.dumps` writes it: of free whitespace a policy could write without end. What llguidance does not know of a
schema holds nothing back."""
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "unevaluatedProperties", "dependentSchemas"}
_NAMED, _NESTED = (
    {"properties", "$defs", "definitions"},
    {"items", "prefixItems", "additionalProperties", "anyOf", "oneOf"},
)
"""Keywords of JSON Schema: that can add properties; that hold schemas by name; that hold schemas."""
_BY_NAME = _NAMED | {"patternProperties", "dependentSchemas"}
_HOLDING = _NESTED | {"allOf", "not", "if", "then", "else", "contains"}
_KINDS: Mapping[str, type] = {
    **dict.fromkeys(_BY_NAME, dict), "required": list, "enum": list, "pattern": str,
}  # fmt: skip
"""Keywords -> what their values are."""


def schemas_of(parts: Mapping[str, Any]) -> list[tuple[int | None, Any]]:
    """The schemas of a grammar with the numbers of their forms; None is that of `otherwise`."""
    schemas: list[tuple[int | None, Any]] = [(number, form[1]) for number, form in enumerate(parts["forms"])]
    if parts.get("otherwise") is not None:
        schemas.append((None, parts["otherwise"]))
    return schemas


def places(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each place in a schema, as `$.properties.name`, with the schema that is there; `$` is all of it."""
    stack = [("$", schema)]
    while stack:
        where, one = stack.pop()
        if isinstance(one, list):
            stack += [(f"{where}[{i}]", inner) for i, inner in enumerate(one)]
        elif isinstance(one, dict):
            yield where, one
            for key, inner in one.items():
                if key in _BY_NAME and isinstance(inner, dict):
                    stack += [(f"{where}.{key}.{name}", named) for name, named in inner.items()]
                elif key in _HOLDING:
                    stack.append((f"{where}.{key}", inner))


def _require_readable(schema: Any, form: int | None) -> None:
    """Refuse a schema in which there is something else where names, lists or texts are read."""
    if not isinstance(schema, dict):
        raise _unreadable("it", type(schema).__name__, form, "$")
    for place, one in places(schema):
        for key, kind in _KINDS.items():
            if key in one and not isinstance(one[key], kind):
                raise _unreadable(key, type(one[key]).__name__, form, place)


def _unreadable(what: str, kind: str, form: int | None, place: str) -> ConfigError:
    return ConfigError(
        f"answers cannot be held to this schema: {what} is a {kind}", hint="see json-schema.org", form=form,
        schema=place,
    )  # fmt: skip


class Lark:
    """The grammars of a tokenizer as texts.

    Args:
        tokenizer: a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}

    def texts(self, grammar: str) -> list[str]:
        """The grammar, and behind it the one to take where that cannot be held.

        Args:
            grammar: what `agl.trainer.engines.base.json_grammar` made.

        Raises:
            ConfigError: a schema is none; `where` has its form and the place, as of `Grammars.admitted`.
        """
        parts = json.loads(grammar)
        for form, schema in schemas_of(parts):
            _require_readable(schema, form)
        start = self._start(parts.get("reasoning", "none"))
        texts = [start + self._lark(parts["forms"], parts)]
        if parts["forms"] and all(before or after for before, _, after, *_ in parts["forms"]):
            # A call that the agent forces is one at least, whatever its parameters.
            calls = [
                (before, any_arguments(schema, style[0] if style else "json"), after, *style)
                for before, schema, after, *style in parts["forms"]
            ]
            texts.append(start + self._lark(calls, parts))
        return texts

    def _lark(self, forms: Sequence[Sequence[Any]], parts: Mapping[str, Any]) -> str:
        """Those forms, and what the answer may be otherwise, in llguidance's dialect of Lark."""
        # Calls that were recorded before there were others have none of these.
        trigger = parts.get("trigger", "")
        otherwise = parts.get("otherwise")
        several = parts.get("several", True)
        section = parts.get("section")
        # What an allOf of a schema refers to must stay open for the rest of it.
        closed = _closed if "allOf" not in json.dumps([*forms, otherwise]) else lambda schema: schema
        tag = trigger.strip()
        if section:
            opening, separator, ending = section
            opening = opening.lstrip()
        elif array := re.match(r" ?\[", forms[0][0].removeprefix(trigger)) if trigger == "[TOOL_CALLS]" else None:
            # Mistral's first form is an array of calls, of which each has an id.
            opening = trigger + array.group()
            separator = ", "
            ending = "]"
        else:
            opening = trigger
            separator = ""
            ending = ""
        is_list = bool(ending)
        rules = []
        for i, (before, schema, after, *style) in enumerate(forms):
            begin = self._form_text(before.removeprefix(opening))
            end = self._form_text(after.removesuffix(ending))
            rules.append(f"form{i}: {begin} json{i} {end}")
            rules += self._arguments(f"json{i}", schema, style[0] if style else "json", closed)
        rules.append(f"form: {' | '.join(f'form{i}' for i in range(len(forms))) or self._anything(parts['stop'])}")
        if not trigger:
            return "\n".join(["answer: form", *rules])
        begin, space = self._text(tag), r"/[ \n]{0,2}/"
        if is_list:
            opened = self._text(opening.removeprefix(tag))
            # Of two texts that begin alike, llguidance reads the longer one: what both begin with stands before them.
            shared = separator if several and ending.startswith(separator) else ""
            between = self._text(separator.removeprefix(shared))
            after = self._text(shared)
            more = f"({between} form {after})*" if several else ""
            calls = f"{opened} form {after} {more} {self._text(ending.removeprefix(shared))}"
        else:
            calls = f"form ({space} {begin} form)*" if several and forms else "form"
        if otherwise is not None:
            rules.append(f"json: {_json(closed(otherwise))}")
            return "\n".join([f"answer: json | {space} {begin} {calls}", *rules])
        if tag == "{":
            return "\n".join([f"answer: TEXT | {begin} form", r"TEXT: /[ \n]*([^{ \n](.|\n)*)?/", *rules])
        if self._marks_in(tag):  # which no text holds
            before, mark = self._before_mark(tag)
            rules.append(rf"BEFORE: /(.|\n)*{_escaped(before)}/")
            return "\n".join([f"answer: TEXT | BEFORE {mark} {calls} | {begin} {calls}", r"TEXT: /(.|\n)*/", *rules])
        text = rf"TEXT: ~/(.|\n)*{_escaped(tag)}(.|\n)*/"
        return "\n".join([f"answer: TEXT | first {calls}", rf"first[lazy]: /(.|\n)*{_escaped(tag)}/", text, *rules])

    def _form_text(self, text: str) -> str:
        """A text of a form, in which some parts stand for others."""
        patterns = {CALL_ID: "/[a-zA-Z0-9]{9}/", COUNT: "/:[0-9]{1,3}/"}
        pieces = re.split(f"({'|'.join(patterns)})", text)
        return " ".join(patterns.get(piece) or self._text(piece) for piece in pieces)

    def _anything(self, stop: Sequence[int]) -> str:
        """Any text and any control tokens but those that end the answer: the rest of a call of unknown form."""
        ids = " | ".join(f"<[{token}]>" for token in self._added.values() if token not in stop)
        return rf"(/(.|\n)+/ | {ids})*" if ids else r"/(.|\n)*/"

    def _arguments(
        self, name: str, schema: Mapping[str, Any], style: Any, closed: Callable[[Any], Any]
    ) -> Iterator[str]:
        """The rules of arguments in a style."""
        if style in ("json", "compact"):
            yield f"{name}: {_json(closed(schema), compact=style == 'compact')}"
        elif style == "xml":
            yield from self._elements(name, schema, ("<parameter=", ">\n", ">\n", "\n</parameter>\n"))
        else:
            yield from self._elements(name, schema, style)

    def _elements(self, name: str, schema: Mapping[str, Any], style: Sequence[str]) -> Iterator[str]:
        """The rules of arguments that are elements in the schema's order, their texts without quotes."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        begin, before_text, before_value, end = style
        elements = []
        for k, (parameter, one) in enumerate((schema.get("properties") or {}).items()):
            element = f"{name}x{k}"
            elements.append(element if parameter in schema.get("required", ()) else f"{element}?")
            one = one if isinstance(one, dict) else {}
            texts = one.get("enum", [one["const"]] if "const" in one else [])
            texts = [text for text in texts if isinstance(text, str)]
            pattern = re.fullmatch(r"\^(.*)\$", one.get("pattern", ""))
            is_text = one.get("type") == "string"
            opening = self._text(f"{begin}{parameter}{before_text if is_text else before_value}")
            yield f"{element}: {opening} {element}v"
            if not is_text:
                yield f"{element}v: {element}j {self._text(end)}\n{element}j: {_json(_closed(one) | shared)}"
            elif texts:
                yield f"{element}v: ({' | '.join(map(self._text, texts))}) {self._text(end)}"
            elif pattern:
                yield f"{element}v: {_regex(pattern[1])} {self._text(end)}"
            else:
                yield from self._element_text(f"{element}v", end)
        yield f"{name}: {' '.join(elements) or json.dumps('')}"

    def _element_text(self, name: str, end: str) -> Iterator[str]:
        """The rules of a text that goes on to its end, which it does not spell."""
        mark = end.strip("\n")
        if self._marks_in(mark):
            before, rest = self._before_mark(end)
            yield f"{name}: {name.upper()} {rest}"
            yield rf"{name.upper()}: /(.|\n)*{_escaped(before)}/ & ~/(.|\n)*{_escaped(mark)}(.|\n)*/"
        else:
            yield f"{name}: {name}t {self._text(end.lstrip()[len(mark) :])}"
            yield rf"{name}t[lazy]: /(.|\n)*{_escaped(mark)}/"

    def _start(self, reasoning: str) -> str:
        """The rule that begins all others, by what comes before the answer."""
        if reasoning == "none":
            return "start: answer\n"
        optional = reasoning == "possible"
        begin = self._text(THINK) if optional else ""
        ending = _escaped(END_THINK)
        # The parser ends a thought at the first text of its end, however that is spelled.
        if END_THINK in self._added:
            thought, rule = f"THOUGHT {self._text(END_THINK)}", rf"THOUGHT: /(.|\n)*/ & ~/(.|\n)*{ending}(.|\n)*/"
        else:
            thought, rule = "ended", rf"ended[lazy]: /(.|\n)*{ending}/"
        return f"start: thought{'?' * optional} answer\nthought: {begin} {thought} /[ \\n]{{0,2}}/\n{rule}\n"

    def _marks_in(self, text: str) -> list[str]:
        """The tokens that were added to the vocabulary, of which a text has some, in its order."""
        return sorted((added for added in self._added if added in text), key=text.index)

    def _before_mark(self, text: str) -> tuple[str, str]:
        """A text up to the first token in it that was added, and the rest. A pattern before it takes what is before
        that token for itself, so it has to end with it."""
        before = text.partition(self._marks_in(text)[0])[0]
        return before, self._text(text.removeprefix(before))

    def _text(self, text: str) -> str:
        """A text; llguidance spells none of the tokens that were added to the vocabulary."""
        added = "|".join(map(re.escape, sorted(self._added, key=len, reverse=True)))
        return " ".join(
            f"<[{self._added[piece]}]>" if piece in self._added else json.dumps(piece, ensure_ascii=False)
            for piece in re.split(f"({added})" if added else "$^", text)
            if piece
        )


def _escaped(text: str) -> str:
    """A text within a regular expression of Lark."""
    return re.sub(r"([\\^$.|?*+()\[\]{}/])", r"\\\1", text).replace("\n", r"\n")


def _regex(pattern: str) -> str:
    """A pattern of a schema, as a regular expression of Lark."""
    return "/" + re.sub(r"(?<!\\)/", r"\\/", pattern) + "/"


def _json(schema: Mapping[str, Any], *, compact: bool = False) -> str:
    form = _FORM | {"item_separator": ",", "key_separator": ":"} if compact else _FORM
    return f"%json {json.dumps({**schema, 'x-guidance': form})}"


def _closed(schema: Any) -> Any:
    """A schema without the properties that it does not name, where it does not speak of others: a policy could write
    them without end."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict) or ("properties" in schema and not _COMBINING.isdisjoint(schema)):
        return schema
    closed = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            closed[key] = {name: _closed(one) for name, one in value.items()}
        else:
            closed[key] = _closed(value) if key in _NESTED else value
    return {"additionalProperties": False, **closed} if "properties" in schema else closed

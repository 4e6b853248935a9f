"""A grammar as llguidance takes it: the text of `json_grammar` in its dialect of Lark.

Invariant: importing this module loads neither torch nor llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl.errors import ConfigError
from agl.trainer.rendering.reasoning import END_THINK, THINK
from agl.trainer.rendering.toolchoice import CALL_ID

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
        # Calls that were recorded before there were others have none of these.
        others = parts.get("trigger", ""), parts.get("otherwise"), parts.get("several", True)
        start = self._start(parts.get("reasoning", "none"))
        texts = [start + self._lark(parts["forms"], *others)]
        if all(before or after for before, _, after, *_ in parts["forms"]):
            # A call that the agent forces is one at least, whatever its parameters.
            calls = [(before, _any(schema, style), after, *style) for before, schema, after, *style in parts["forms"]]
            texts.append(start + self._lark(calls, *others))
        return texts

    def _lark(self, forms: Sequence[Sequence[Any]], trigger: str, otherwise: Any, several: bool) -> str:
        """Those forms, and what the answer may be otherwise, in llguidance's dialect of Lark."""
        # What an allOf of a schema refers to must stay open for the rest of it.
        closed = _closed if "allOf" not in json.dumps([*forms, otherwise]) else lambda schema: schema
        # Mistral's first form is an array of calls, of which each has an id.
        array = re.match(r" ?\[", forms[0][0].removeprefix(trigger)) if trigger == "[TOOL_CALLS]" else None
        opening, ending = (array.group(), "]") if array else ("", "")
        rules = []
        for i, (before, schema, after, *style) in enumerate(forms):
            begin = self._text(before.removeprefix(trigger + opening))
            end = " /[a-zA-Z0-9]{9}/ ".join(map(self._text, after.removesuffix(ending).split(CALL_ID)))
            rules.append(f"form{i}: {begin} json{i} {end}")
            rules += self._elements(f"json{i}", schema) if style == ["xml"] else [f"json{i}: {_json(closed(schema))}"]
        form = " | ".join(f"form{i}" for i in range(len(forms)))
        if array:
            rules.append(f"item: {form}")
            form = f'{self._text(opening)} item (", " item)* "]"' if several else f'{self._text(opening)} item "]"'
        if not trigger:
            return "\n".join([f"answer: {form}", *rules])
        tag = trigger.strip()
        begin, space = self._text(tag), r"/[ \n]{0,2}/"
        calls = f"form ({space} {begin} form)*" if several else "form"
        rules.append(f"form: {form}")
        if tag == "{":
            return "\n".join([f"answer: TEXT | {begin} form", r"TEXT: /[ \n]*([^{ \n](.|\n)*)?/", *rules])
        if otherwise is not None:
            rules.append(f"json: {_json(closed(otherwise))}")
            return "\n".join([f"answer: json | {space} {begin} {calls}", *rules])
        if tag in self._added:  # which no text holds
            return "\n".join([f"answer: TEXT | TEXT {begin} {calls} | {begin} {calls}", r"TEXT: /(.|\n)*/", *rules])
        pattern = re.escape(tag).replace("/", r"\/")
        text = rf"TEXT: ~/(.|\n)*{pattern}(.|\n)*/"
        return "\n".join([f"answer: TEXT | first {calls}", rf"first[lazy]: /(.|\n)*{pattern}/", text, *rules])

    def _elements(self, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
        """The rules of arguments that are XML elements in the schema's order, their texts without quotes."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        elements = []
        for k, (parameter, one) in enumerate((schema.get("properties") or {}).items()):
            element, end = f"{name}x{k}", self._text("\n</parameter>\n")
            elements.append(element if parameter in schema.get("required", ()) else f"{element}?")
            one = one if isinstance(one, dict) else {}
            texts = one.get("enum", [one["const"]] if "const" in one else [])
            texts = [text for text in texts if isinstance(text, str)]
            pattern = re.fullmatch(r"\^(.*)\$", one.get("pattern", ""))
            begin, line = self._text(f"<parameter={parameter}>\n"), self._text("\n")
            yield f"{element}: {begin} {element}v"
            if one.get("type") != "string":
                yield f"{element}v: {element}j {end}\n{element}j: {_json(_closed(one) | shared)}"
            elif texts:
                yield f"{element}v: ({' | '.join(map(self._text, texts))}) {end}"
            elif pattern:
                yield f"{element}v: {_regex(pattern[1])} {end}"
            else:
                yield f"{element}v: {element}t {line}\n" + rf"{element}t[lazy]: /(.|\n)*<\/parameter>/"
        yield f"{name}: {' '.join(elements) or json.dumps('')}"

    def _start(self, reasoning: str) -> str:
        """The rule that begins all others, by what comes before the answer."""
        if reasoning == "none":
            return "start: answer\n"
        optional = reasoning == "possible"
        begin = self._text(THINK) if optional else ""
        ending = re.escape(END_THINK).replace("/", r"\/")
        # The parser ends a thought at the first text of its end, however that is spelled.
        if END_THINK in self._added:
            thought, rule = f"THOUGHT {self._text(END_THINK)}", rf"THOUGHT: /(.|\n)*/ & ~/(.|\n)*{ending}(.|\n)*/"
        else:
            thought, rule = "ended", rf"ended[lazy]: /(.|\n)*{ending}/"
        return f"start: thought{'?' * optional} answer\nthought: {begin} {thought} /[ \\n]{{0,2}}/\n{rule}\n"

    def _text(self, text: str) -> str:
        """A text; llguidance spells none of the tokens that were added to the vocabulary."""
        added = "|".join(map(re.escape, sorted(self._added, key=len, reverse=True)))
        return " ".join(
            f"<[{self._added[piece]}]>" if piece in self._added else json.dumps(piece, ensure_ascii=False)
            for piece in re.split(f"({added})" if added else "$^", text)
            if piece
        )


def _regex(pattern: str) -> str:
    """A pattern of a schema, as a regular expression of Lark."""
    return "/" + re.sub(r"(?<!\\)/", r"\\/", pattern) + "/"


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _FORM})}"


def _any(schema: Mapping[str, Any], style: Sequence[str]) -> dict[str, Any]:
    """A schema of any arguments, or of XML elements with any texts."""
    free = {name: {"type": "string"} for name in schema.get("properties") or {}}
    return {"type": "object"} | ({"properties": free} if style == ["xml"] else {})


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

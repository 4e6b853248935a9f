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
from agl.trainer.rendering.toolchoice import CALL_ID, COUNT, UNQUOTED, any_arguments

_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
"""As `json.dumps` writes it: of free whitespace a policy could write without end. What llguidance does not know of a
schema holds nothing back."""
_XML = ("<parameter=", ">\n", ">\n", "\n</parameter>\n")
"""The elements of the style "xml"."""
_NO_END = "^([^<]|<+[^</])*<*$"
_HELD_TEXTS = {"pattern", "format", "enum", "const", "maxLength", "minLength"}
"""Keywords that hold a text to something else."""
_SPACE = r"[\s\x1c-\x1f]*"
"""What Python strips before a text."""
_UNQUOTED_DEPTH = 4
"""How deep arguments without quotes are nested at most."""
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "unevaluatedProperties", "dependentSchemas"}
_NAMED = {"properties", "$defs", "definitions"}
_NESTED = {"items", "prefixItems", "additionalProperties", "anyOf", "oneOf"}
"""Keywords of JSON Schema: that can add properties; that hold schemas by name; that hold schemas."""
_BY_NAME = _NAMED | {"patternProperties", "dependentSchemas"}
_HOLDING = _NESTED | {"allOf", "not", "if", "then", "else", "contains"}
_KINDS: Mapping[str, type] = {
    **dict.fromkeys(_BY_NAME, dict),
    "required": list,
    "enum": list,
    "pattern": str,
}
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


def _spelled(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The texts that an answer of one place of a schema has to spell, each with what it is."""
    for keyword in ("properties", "dependentSchemas"):
        for name in schema.get(keyword) or ():
            yield "the name", name
    yield "the pattern", re.sub(r"\\(.)", r"\1", schema.get("pattern", ""))
    for name in schema.get("required") or ():
        if isinstance(name, str):
            yield "the name", name
    values = [*(schema.get("enum") or ()), schema.get("const")]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield "the value", value
        elif isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            yield from (("the name", name) for name in value)
            values += value.values()


def _unreadable(what: str, kind: str, form: int | None, place: str) -> ConfigError:
    return ConfigError(
        f"answers cannot be held to this schema: {what} is a {kind}",
        hint="see json-schema.org",
        form=form,
        schema=place,
    )


class Lark:
    """The grammars of a tokenizer as texts.

    Args:
        tokenizer: a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}
        added = tokenizer.added_tokens_decoder.values()
        self._marks = [t.content for t in added if t.special or re.fullmatch("<.*>", t.content, re.S)]
        """The tokens that llguidance spells in no text."""

    def texts(self, grammar: str) -> list[str]:
        """The grammar, and behind it the one to take where that cannot be held.

        Args:
            grammar: what `agl.trainer.engines.base.json_grammar` made.

        Raises:
            ConfigError: a schema is none, or has names or values that no answer can spell; `where` has its form and the
                place, as of `Grammars.admitted`.
        """
        parts = json.loads(grammar)
        for form, schema in schemas_of(parts):
            _require_readable(schema, form)
            style = "json" if form is None else _style_of(parts["forms"][form])
            self._require_spellable(schema, form, style)
        start = self._start(parts.get("reasoning", "none"))
        texts = [start + self._lark(parts["forms"], parts)]
        if parts["forms"] and all(before or after for before, _, after, *_ in parts["forms"]):
            # A call that the agent forces is one at least, whatever its parameters.
            calls = [
                (form[0], any_arguments(form[1], _style_of(form)), form[2], _style_of(form)) for form in parts["forms"]
            ]
            texts.append(start + self._lark(calls, parts))
        return texts

    def _require_spellable(self, schema: Any, form: int | None, style: Any) -> None:
        """Refuse a schema with a name or a value that an answer cannot spell.

        Where there is one way to go on, llguidance takes the tokens that the tokenizer makes of it, marks among them,
        which end an answer or begin a call. And elements have their names and texts without quotes.
        """
        in_json = style in ("json", "compact")
        for place, one in places(schema):
            for what, text in _spelled(one):
                written = json.dumps(text, ensure_ascii=False) if in_json else text
                found = next((mark for mark in self._marks if mark in written), None)
                why = f"has the model's mark {found!r} in it"
                if found is None and not in_json:
                    found = next((end for end in _ends_of(style, what) if end in text), None)
                    why = f"has {found!r} in it, which ends it where the model writes arguments as elements"
                if found is not None:
                    raise ConfigError(
                        f"answers cannot be held to this schema: {what} {text!r} {why}",
                        hint="spell it otherwise",
                        form=form,
                        schema=place,
                    )

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
        for i, form in enumerate(forms):
            begin = self._form_text(form[0].removeprefix(opening))
            end = self._form_text(form[2].removesuffix(ending))
            rules.append(f"form{i}: {begin} json{i} {end}")
            rules += self._arguments(f"json{i}", form[1], _style_of(form), closed)
        rules.append(f"form: {' | '.join(f'form{i}' for i in range(len(forms))) or self._anything(parts['stop'])}")
        if not trigger:
            return "\n".join(["answer: form", *rules])
        begin = self._text(tag)
        # Where texts have a mark, too, the white space before one is a text.
        space = r"/[ \n]{0,2}/" if parts.get("spaced", True) else ""
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
            begins = "|".join(map(_escaped, ("{", "<|python_tag|>", THINK)))
            text = rf"TEXT: /(.|\n)*/ & ~/{_SPACE}({begins})(.|\n)*/"
            return "\n".join([f"answer: TEXT | {begin} form", text, *rules])
        # Parsers of texts read the tag however it is spelled, and what follows a thought's mark as the thought.
        tagless = rf"~/(.|\n)*{_escaped(tag)}(.|\n)*/"
        thoughtless = rf"~/{_SPACE}{THINK}(.|\n)*/"
        text = rf"TEXT: /(.|\n)*/ & {tagless}"
        if self._marks_in(tag):
            before, mark = self._before_mark(tag)
            rules.append(rf"BEFORE: /(.|\n)*{_escaped(before)}/ & {tagless} & {thoughtless}")
            return "\n".join([f"answer: TEXT | BEFORE {mark} {calls} | {begin} {calls}", text, *rules])
        first = rf"first[lazy]: /(.|\n)*{_escaped(tag)}/ & {thoughtless}"
        return "\n".join([f"answer: TEXT | first {calls}", first, text, *rules])

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
            yield from self._elements(name, schema, _XML)
        elif style[0] == UNQUOTED:
            yield from self._unquoted(name, style[1])
        else:
            yield from self._elements(name, schema, style)

    def _unquoted(self, name: str, quote: str) -> Iterator[str]:
        """The rules of any arguments whose names have no quotes, and whose texts are between marks."""
        terminal = name.upper()
        mark = self._text(quote)
        yield rf"{terminal}TEXT: /(.|\n)+/ & ~/(.|\n)*{_escaped(quote)}(.|\n)*/"
        yield rf"{terminal}NAME: /[A-Za-z_][A-Za-z0-9_.\-]*/"
        yield rf"{terminal}PLAIN: /true|false|null|-?(0|[1-9][0-9]{{0,15}})(\.[0-9]{{1,15}})?/"
        plain = f"{name}d0"
        yield f"{plain}: {mark} {terminal}TEXT? {mark} | {terminal}PLAIN"
        for depth in range(1, _UNQUOTED_DEPTH):
            inner = f"{name}d{depth - 1}"
            yield f'{name}d{depth}: {plain} | {name}o{depth} | "[" ({inner} ("," {inner})*)? "]"'
        for depth in range(1, _UNQUOTED_DEPTH + 1):
            member = f'{terminal}NAME ":" {name}d{depth - 1}'
            yield f'{name}o{depth}: "{{" ({member} ("," {member})*)? "}}"'
        yield f"{name}: {name}o{_UNQUOTED_DEPTH}"

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
                yield f"{element}v: {element}j {self._text(end)}\n{element}j: {_json(_endless(_closed(one) | shared))}"
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
            thought = f"THOUGHT {self._text(END_THINK)}"
            rule = rf"THOUGHT: /(.|\n)*/ & ~/(.|\n)*{ending}(.|\n)*/"
        else:
            thought = "ended"
            rule = rf"ended[lazy]: /(.|\n)*{ending}/"
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


def _style_of(form: Sequence[Any]) -> Any:
    """How the arguments of a form are written."""
    return form[3] if len(form) > 3 else "json"


def _ends_of(style: Any, what: str) -> tuple[str, ...]:
    """The texts that end a name or a value which is written without quotes, as an element has it."""
    if style[0] == UNQUOTED:
        return ()
    _, before_text, before_value, end = _XML if style == "xml" else style
    if what == "the name":
        return (before_text.strip()[:1], before_value.strip()[:1], "\n")
    return (end.strip(),)


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
    closed = _with_inner(schema, _closed)
    return {"additionalProperties": False, **closed} if "properties" in schema else closed


def _with_inner(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema whose inner schemas are changed."""
    changed = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            changed[key] = {name: change(one) for name, one in value.items()}
        else:
            changed[key] = change(value) if key in _NESTED else value
    return changed


def _endless(schema: Any) -> Any:
    """A schema whose texts do not spell the end of an element, which parsers look for in them, too."""
    if isinstance(schema, list):
        return [_endless(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = _with_inner(schema, _endless)
    is_free = inner.get("type") == "string" and inner.keys().isdisjoint(_HELD_TEXTS)
    return {**inner, "pattern": _NO_END} if is_free else inner

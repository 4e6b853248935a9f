"""A tool call as the chat template writes it: how it begins, so that a required call can be begun in the prompt, and
how it goes on, so that an answer can be held to it.

All of it is taken from rendered placeholder calls: with one argument and with two, one of them and two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agl.errors import ConfigError
from agl.trainer.rendering.normalise import Tools
from agl.trainer.rendering.reasoning import END_THINK, THINK

NAME = "placeholder_tool"
KEY = "placeholder_key"
VALUE = "placeholder value"
CALL_ID = "call00001"
COUNT = ":7041"
"""The number of a call in ids that name the tool, as Kimi's do; in a form it stands for any number."""
FIRST_COUNT = ":0"
_OTHER_KEY = "placeholder_second"
_OTHER_VALUE = "placeholder two"
_NUMBER = 70417
_THOUGHT = "placeholder thought"
PLACEHOLDER_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "placeholder",
            "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}},
        },
    },
)

Style = str | tuple[str, str] | tuple[str, str, str, str]
"""How arguments are written: as JSON ("json"), as JSON without spaces ("compact"), as XML elements like Qwen3-Coder's
("xml"), or as other elements: what begins one, what is between its name and a text, what is between its name and any
other value, and what ends it. Or like Gemma's (`UNQUOTED` and the mark around texts): JSON without spaces whose names
have no quotes."""
UNQUOTED = "unquoted"
Form = tuple[str, dict[str, Any], str, Style]
Forms = tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A tool call that the answer must be.

    Attributes:
        opening: the text that begins it.
        rests: the ways to end it: text, the JSON schema of the arguments that follow it, text up to the end of the
            answer (`CALL_ID` in it stands for any id of nine letters and digits, `COUNT` for any number), and how
            arguments are written. Empty where the template writes them in another form.
        loose: `rests` of calls with any arguments, where these are written in a form that is held to no schema.
        begin: the text of each call before its name.
        single: the text of one call.
        pair: the text of two calls; "" where the template writes one.
        section: the texts before, between and after several calls, where these have one mark around all of them.
        is_text: whether other answers hold none of the marks that begin a call.
    """

    opening: str
    rests: Forms
    loose: Forms = ()
    begin: str = ""
    single: str = ""
    pair: str = ""
    section: tuple[str, str, str] | None = None
    is_text: bool = True

    @property
    def trigger(self) -> str:
        """What begins a call, by which other text differs from it: a tag, such as `<tool_call>`, or `{` where a call is
        the whole answer; "" for nothing."""
        tag = re.match(r"\s*<[^<>\s]+>|\[TOOL_CALLS\]|\{", self._after_reasoning)
        return tag.group() if tag else ""

    @property
    def forms(self) -> Forms:
        """The whole calls, in the form of `rests` or, where there are none, of `loose`; without the texts of a section
        around them."""
        opening, closing = (self.section[0], self.section[2]) if self.section else ("", "")
        return tuple(
            ((self._after_reasoning + text).removeprefix(opening), schema, close.removesuffix(closing), style)
            for text, schema, close, style in self.rests or self.loose
        )

    @property
    def two(self) -> str:
        """The text of two calls, as the template writes them or, where it writes one, one behind the other."""
        return self.pair or f"{self.single}\n{self.single}"

    @property
    def marks(self) -> tuple[str, str]:
        """The mark that begins each call, and the one that ends it; "" where there is none."""
        begins = re.findall(r"<[^<>]+>?", self.begin)
        ends = re.findall(r"<[^<>]+>", self.forms[0][2]) if self.rests else []
        # Where texts are written in a mark, too, a call is begun by what is nearest to its name.
        return (begins[0] if self.is_text else begins[-1]) if begins else "", ends[-1] if ends else ""

    @property
    def _after_reasoning(self) -> str:
        """`opening` where the answer has reasoned; some generation prompts begin that, and a call has to end it."""
        _, ends, call = self.opening.rpartition(END_THINK)
        return call.lstrip("\n") if ends else call


class Render(Protocol):
    """The full text of a conversation."""

    def __call__(self, messages: list[dict[str, Any]], tools: Tools, generation: bool) -> str: ...


def placeholder_call(name: str, call_id: str, value: str = VALUE) -> dict[str, Any]:
    """A tool call whose rendering shows where name and arguments go."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {KEY: value}}}


def rendered_call(render: Render, tools: Tools, name: str) -> str | None:
    """The text after the generation prompt when the assistant calls `name`; None if the template writes no call there.

    The call is followed by its result, since some templates write the last answer differently from earlier ones.
    """
    return next(_written(render, tools, [(name, {KEY: VALUE})]), None)


def _written(render: Render, tools: Tools, calls: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """The texts after the generation prompt that calls are written as, each with ids of another form.

    Where the prompt begins a thought, an answer without one may be written as if the prompt did not: then its text is
    that of an answer with a thought, which is taken out, or follows the end of an empty one.
    """
    user = {"role": "user", "content": "placeholder"}
    prompt = render([user], tools, True)
    for named in (False, True):
        ids = [f"functions.{name}{COUNT}" if named else CALL_ID for name, _ in calls]
        made = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, (name, arguments) in zip(ids, calls, strict=True)
        ]
        results = [
            {"role": "tool", "content": "placeholder", "tool_call_id": call_id, "name": name}
            for call_id, (name, _) in zip(ids, calls, strict=True)
        ]
        assistant = {"role": "assistant", "content": "", "tool_calls": made}
        for answer in (assistant, {**assistant, "reasoning_content": _THOUGHT}):
            text = _after_prompt(prompt, render([user, answer, *results], tools, False))
            if text is not None and _has_all(text, calls):
                yield text
                break


def _after_prompt(prompt: str, whole: str) -> str | None:
    """The answer in the `whole` text of a conversation, without a placeholder's thought; None if it does not follow."""
    if whole.startswith(prompt):
        return whole[len(prompt) :].replace(_THOUGHT, "", 1)
    before, begins, space = prompt.rpartition(THINK)
    if not begins or space.strip() or not whole.startswith(before):
        return None
    answer = whole[len(before) :]
    if answer.startswith(THINK):
        return None
    return answer if answer.startswith(END_THINK) else f"{END_THINK}\n\n{answer}"


def _has_all(text: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether calls are written in a text with their names before their arguments."""
    for name, arguments in calls:
        _, found, text = text.partition(name)
        if not found or not all(key in text for key in arguments):
            return False
    return True


def xml_parameter(name: str, value: str) -> str:
    """An argument as Qwen3-Coder and 3.5 write it."""
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def any_arguments(schema: Any, style: Style) -> dict[str, Any]:
    """A schema of any arguments, or of elements with any texts."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    free = {name: {"type": "string"} for name in properties or {}}
    return {"type": "object"} | ({} if style in ("json", "compact") else {"properties": free})


def forced_call(render: Render, tools: Tools, force: str | bool, ends: Sequence[str]) -> ForcedCall:
    """The call that `force` asks for.

    Args:
        render: of the model.
        tools: of the request.
        force: a tool's name, or True for any of them.
        ends: the texts that an answer can end with.

    Raises:
        ConfigError: no such tool, or the template cannot write a tool call right after its generation prompt.
    """
    schemas = {str(f.get("name")): f.get("parameters") or {} for f in (t.get("function", t) for t in tools or ())}
    names = list(schemas)
    if force is not True and force not in names:
        raise ConfigError(f"tool_choice names {force!r}, which is none of the request's tools", hint=f"tools: {names}")
    if not names:
        raise ConfigError("tool_choice asks for a tool call, but the request has no tools", hint="pass tools=[...]")
    name = names[0] if len(names) == 1 else NAME if force is True else str(force)
    call = rendered_call(render, tools, name)
    if call is None:
        raise ConfigError(
            "tool_choice cannot be enforced: the chat template writes no tool call right after its generation prompt",
            hint='use tool_choice="auto" with this model',
        )
    before, _, after = call.partition(name)
    opening = before
    single = min((call.partition(end)[0] for end in ends if end in call), key=len, default=call)
    form = _form(render, tools, name, after)
    loose = _unquoted(after) if form is None else None
    if name is not NAME:
        if loose is not None:
            between = ""
        elif form is None:
            between = re.sub(r"(\{\s*\"|<[^<>]*)$", "", after[: after.index(KEY)]).removesuffix("<arg_key>")
        else:
            between = form[0]
        opening = (before + name + between).rstrip(" ")
        schemas = {name: schemas[name]}
    is_text = _is_text(render, tools, opening)
    if form is None:
        calls = tuple(((before + tool)[len(opening) :], {}, loose[1], loose[0]) for tool in schemas) if loose else ()
        return ForcedCall(opening, (), calls, single=single, is_text=is_text)
    between, rest, style = form
    close = min((rest.partition(end)[0] for end in ends if end in rest), key=len, default=None)
    if close is None or CALL_ID in between + ("" if "[TOOL_CALLS]" in before else close):
        return ForcedCall(opening, (), single=single, is_text=is_text)
    # Some write the name twice.
    texts = {tool: before + tool + between.replace(name, tool) for tool in schemas}
    rests = tuple((texts[tool][len(opening) :], schema, close, style) for tool, schema in schemas.items())
    begin = before.rpartition(END_THINK)[2].lstrip("\n") if END_THINK in before else before
    pair = _pair(render, tools, name)
    section = _section(pair, name, begin, close)
    begin = begin.removeprefix(section[0]) if section else begin
    pair = min((pair.partition(end)[0] for end in ends if end in pair), key=len, default=pair)
    return ForcedCall(opening, rests, (), begin, single, pair, section, is_text)


def _form(render: Render, tools: Tools, name: str, after: str) -> tuple[str, str, Style] | None:
    """How a call goes on after its name: the text before its arguments, the text after them and how these are written;
    None for another way.

    Args:
        after: what follows the name in a call with one argument.
    """
    separators: dict[Style, tuple[str, str]] = {"json": (", ", ": "), "compact": (",", ":")}
    for style, separator in separators.items():
        between, found, rest = after.partition(json.dumps({KEY: VALUE}, separators=separator))
        if found:
            return between, rest, style
    between, found, rest = after.partition(xml_parameter(KEY, VALUE))
    if found:
        return between, rest, "xml"
    two = next(_written(render, tools, [(name, {KEY: VALUE, _OTHER_KEY: _OTHER_VALUE})]), "")
    typed = next(_written(render, tools, [(name, {KEY: _NUMBER})]), "")
    begin, _, after_key = after.partition(KEY)
    text, _, after_value = after_key.partition(VALUE)
    between_arguments = two.partition(VALUE)[2].partition(_OTHER_KEY)[0]
    mark = re.match(r"[^>]*>\s*", between_arguments)
    end = mark.group() if mark else ""
    element = between_arguments[len(end) :]
    value = typed.partition(KEY)[2].partition(str(_NUMBER))[0]
    if not (end and element and begin.endswith(element) and after_value.startswith(end) and value):
        return None
    return begin.removesuffix(element), after_value.removeprefix(end), (element, text, value, end)


def _unquoted(after: str) -> tuple[Style, str] | None:
    """How arguments without quotes are written, and what ends the call behind them; None for another way.

    Args:
        after: as of `_form`.
    """
    found = re.match(rf"\{{{KEY}:(<[^<>]+>){VALUE}\1\}}(<[^<>]+>)", after)
    return ((UNQUOTED, found[1]), found[2]) if found else None


def _pair(render: Render, tools: Tools, name: str) -> str:
    """The text of two calls and what follows; "" if the template writes no more than one."""
    try:
        return next(_written(render, tools, [(name, {KEY: VALUE}), (name, {KEY: VALUE})]), "")
    except Exception:  # each template and renderer refuses with an error of its own
        return ""


def _section(pair: str, name: str, before: str, close: str) -> tuple[str, str, str] | None:
    """The texts before, between and after several calls in one section; None where each call has all of its marks.

    Args:
        pair: the text of two calls.
        before, close: of a single one: the texts before its name and after its arguments.
    """
    between_calls = pair.partition(KEY)[2].partition(VALUE)[2].partition(name)[0]
    ends = [close[: mark.end()] for mark in re.finditer(">", close)]
    call_end = max((end for end in ends if end in between_calls), key=len, default="")
    if not call_end:
        return None
    next_call = between_calls.partition(call_end)[2]
    begins = [next_call[mark.start() :] for mark in re.finditer("<", next_call)]
    call_begin = max((begin for begin in begins if before.endswith(begin)), key=len, default="")
    section_begin = before.removesuffix(call_begin)
    section_end = close.removeprefix(call_end)
    if not (call_begin and "<" in section_begin and "<" in section_end):
        return None
    return section_begin, next_call.removesuffix(call_begin), section_end


def _is_text(render: Render, tools: Tools, opening: str) -> bool:
    """Whether an answer that is a text is written without the mark that begins a call."""
    trigger = ForcedCall(opening, ()).trigger.strip()
    user = {"role": "user", "content": "placeholder"}
    answer = {"role": "assistant", "content": VALUE}
    prompt = render([user], tools, True)
    whole = render([user, answer], tools, False)
    return trigger not in whole[len(prompt) :] if whole.startswith(prompt) and trigger else True


def may_become_call(text: str, forms: Iterable[Sequence[Any]]) -> bool:
    """Whether a text begins as a call in one of these forms does, or is so short that it may yet.

    Args:
        forms: (what comes before the arguments, ...), as in `ForcedCall.forms`.
    """
    return any(text.startswith(form[0]) or form[0].startswith(text) for form in forms)


def reads_as_call(schema: Any, call: ForcedCall) -> bool:
    """Whether an answer of a schema may begin as a call does, where a call is JSON without a mark.

    Args:
        schema: of the answer; what it does not say counts as if it allowed everything.
        call: one whose trigger is `{`.
    """
    keys = set(re.findall(r'"(\w+)": ', "".join(before for before, *_ in call.forms)))
    return _allows(schema, keys, schema, set())


def _allows(schema: Any, keys: set[str], root: Any, seen: set[str]) -> bool:
    """Whether a schema allows an object that has these keys and no others."""
    if not isinstance(schema, dict):
        return schema is not False
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and reference not in seen:
        target = root
        for name in reference[2:].split("/"):
            target = target.get(name, {}) if isinstance(target, dict) else {}
        if not _allows(target, keys, root, seen | {reference}):
            return False
    for choice in ("anyOf", "oneOf"):
        if choice in schema and not any(_allows(one, keys, root, seen) for one in schema[choice]):
            return False
    if not all(_allows(one, keys, root, seen) for one in schema.get("allOf", ())):
        return False
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return any(isinstance(value, dict) and value.keys() >= keys for value in values)
    if not keys.issuperset(schema.get("required", ())):
        return False
    # `Lark` closes a schema that names its properties.
    named = schema.get("properties")
    return not named or schema.get("additionalProperties", False) is not False or keys <= named.keys()

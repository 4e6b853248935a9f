"""Finds tool calls in sampled text; a call that cannot be parsed stays in the text, so nothing is lost."""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agl.trainer.rendering.normalise import Tools


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made, from `tool_call`.

    Attributes:
        name: of the tool.
        id: that the model sampled.
        arguments: the text of a JSON object that every parser reads.
        raw: the text that it was read from, where the parser is one of `FORMATS`.
    """

    name: str
    arguments: str
    id: str | None = None
    raw: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """An assistant turn, parsed from its tokens.

    Attributes:
        content: the text, the raw text of malformed calls included.
        reasoning: the text of the reasoning block; None if there is none.
        tool_calls: the calls, in order.
        malformed: raw text of each attempted call that could not be parsed, without white space around it.
        unfinished: whether it ends within the last of them.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Malformed:
    """Raw text of an attempted call that could not be parsed; `unfinished` where the response ends within it."""

    raw: str
    unfinished: bool = False


Piece = str | ToolCall | Malformed
"""A part of a response: text, a call, or an attempted call."""

MOST_NESTED = 64
"""How deep a call's arguments may be nested: less than in requests, since clients send them back within one."""
WASTED = 4
"""How many times its length a text may be read in vain for JSON that is none; calls after that are malformed."""

# All of it in linear time: a policy writes the text.
_SPACE = re.compile(r"\s*+")
_MISTRAL_CALL = re.compile(r"([\w.-]++)\s*+(?:\[CALL_ID\](\w++)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_XML_HEAD = re.compile(r"\s*+<function=([^>\n]++)>")
_JSON_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.S)
"""Also one without its end."""
_XML_PARAMETER = re.compile(r"\s*+<parameter=([^>\n]++)>")
_XML_CLOSE = re.compile(r"\s*+(?:</function>)?+\s*+</tool_call>")

ToolFormat = Callable[[str, Tools], Iterator[Piece]]
"""Splits a response's text into its pieces, in order; together they are the whole text."""


def assemble(pieces: Iterator[Piece], reasoning: str | None) -> ParsedMessage:
    """The message that the pieces make up.

    Args:
        pieces: of one response.
        reasoning: its reasoning block.
    """
    texts: list[str] = []
    calls: list[ToolCall] = []
    malformed: list[str] = []
    unfinished = False
    for piece in pieces:
        if isinstance(piece, ToolCall):
            calls.append(piece)
        elif isinstance(piece, Malformed):
            unfinished = unfinished or piece.unfinished
            malformed.append(piece.raw.strip())  # as the content is where there is a call
            texts.append(piece.raw)
        else:
            texts.append(piece)
    content = "".join(texts)
    content = content.strip() if calls else content
    return ParsedMessage(content, reasoning, tuple(calls), tuple(malformed), unfinished)


def tool_call(name: str, arguments: dict[str, Any], raw: str, call_id: str | None = None) -> ToolCall | Malformed:
    """A call with these arguments; malformed if they are nested too deep.

    A model may write what Python's JSON has, and others' has not: NaN and numbers beyond a float's range become null,
    half a surrogate pair becomes a question mark, as in names: clients that read arguments could not send it back.

    Args:
        name: of the tool.
        arguments: as Python read them.
        raw: text of the call.
        call_id: that the model sampled.
    """
    if _depth_exceeds(arguments, MOST_NESTED):
        return Malformed(raw)
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(arguments), parse_constant=lambda _: None)
        text = json.dumps(finite, ensure_ascii=False)
    return ToolCall(name, text.encode(errors="replace").decode(), call_id, raw)


def _depth_exceeds(value: Any, most: int) -> bool:
    """Whether objects and lists are nested deeper than `most`; `value` is the first of them."""
    level = [value]
    for _ in range(most):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, dict | list)]
    return bool(level)


def call_from(value: Any, raw: str) -> ToolCall | Malformed:
    """A call from a JSON value like `{"name": ..., "arguments" | "parameters": {...}}`."""
    if not isinstance(value, Mapping):
        return Malformed(raw)
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return Malformed(raw)
    call_id = value.get("id")
    return tool_call(name, arguments, raw, call_id if isinstance(call_id, str) else None)


def hermes(text: str, tools: Tools) -> Iterator[Piece]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen2.5/3 write it."""
    at = wasted = 0
    tags = _Tags(text)
    while (start := text.find("<tool_call>", at)) >= 0:
        yield text[at:start]
        # Read as JSON first: a text among the arguments may hold the tags themselves.
        value = None
        end = start
        if wasted <= WASTED * len(text):
            value, end = _raw_decode(text, _skip_space(text, start + len("<tool_call>")))
        end = _skip_space(text, end)
        if value is not None and text.startswith("</tool_call>", end):
            at = end + len("</tool_call>")
            yield call_from(value, text[start:at])
        else:
            at = tags.block_end(start)
            wasted += end - start
            raw = text[start:at]
            yield Malformed(raw, at == len(text) and not raw.endswith("</tool_call>"))
    yield text[at:]


def xml_function(text: str, tools: Tools) -> Iterator[Piece]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, as Qwen3-Coder and 3.5 do.

    Values are bare text; a tool's schema says which of them are strings.
    """
    at = wasted = 0
    tags = _Tags(text)
    while (start := text.find("<tool_call>", at)) >= 0:
        yield text[at:start]
        # Read by its elements first: a text among them may hold the tags themselves.
        is_whole, end = _xml_end(text, start) if wasted <= WASTED * len(text) else (False, start)
        at = end if is_whole else tags.block_end(start)
        wasted += 0 if is_whole else end - start
        raw = text[start:at]
        yield _xml_call(raw, tools) if raw.endswith("</tool_call>") else Malformed(raw, at == len(text))
    yield text[at:]


def bare_json(text: str, tools: Tools) -> Iterator[Piece]:
    """`{"name": ..., "parameters": {...}}`, separated by `;` or white space, as Llama 3.1 writes it.

    The whole answer is calls or none of it is. `<|python_tag|>` may stand in front.
    """
    body = text.strip()
    tagged = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").strip()
    if not tagged and not re.match(r'\{\s*"(name|type|function|parameters|arguments)"', body):
        yield text
        return
    calls: list[ToolCall] = []
    at = 0
    while at < len(body):
        value, end = _raw_decode(body, at)
        call = call_from(value, body[at:end])
        if isinstance(call, Malformed):
            yield Malformed(text, _is_open(body))
            return
        calls.append(call)
        at = end
        while at < len(body) and body[at] in "; \t\r\n":
            at += 1
    if calls:
        yield from calls
    else:
        yield Malformed(text, unfinished=True)


def mistral(text: str, tools: Tools) -> Iterator[Piece]:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`, newer: `[TOOL_CALLS]NAME[ARGS]{...}`."""
    mark = "[TOOL_CALLS]"
    at = wasted = 0
    while (start := text.find(mark, at)) >= 0:
        yield text[at:start]
        # Read as JSON first: a text among the arguments may hold the mark itself.
        body = _skip_space(text, start + len(mark))
        end = body
        calls = None
        if wasted <= WASTED * len(text):
            calls, end = _mistral_calls(text, body)
        if calls is not None and not any(isinstance(call, Malformed) for call in calls):
            # All of them are one text, mark included.
            yield replace(calls[0], raw=text[start:end])
            yield from (replace(call, raw="") for call in calls[1:])
            at = end
            continue
        wasted += end - body
        following = text.find(mark, body)
        at = len(text) if following < 0 else following
        attempt = text[body:at].strip()
        begun = _is_open(attempt) or not ("{" in attempt or attempt.startswith("["))
        yield Malformed(text[start:at], begun and following < 0)
    yield text[at:]


def _mistral_calls(text: str, at: int) -> tuple[list[ToolCall | Malformed] | None, int]:
    """The calls behind a mark and where they end; None and how far they were read where there are none."""
    if text.startswith("[", at):
        value, end = _raw_decode(text, at)
        calls = [call_from(one, text[at:end]) for one in value] if isinstance(value, list) else []
        return calls or None, end
    match = _MISTRAL_CALL.match(text, at)
    if match is None:
        return None, at
    value, end = _raw_decode(text, match.end())
    if not isinstance(value, dict):
        return None, end
    return [tool_call(match[1], value, text[at:end], match[2])], end


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": hermes,
    "xml": xml_function,
    "llama": bare_json,
    "mistral": mistral,
}
"""Name -> format."""


READ_MARKS = ("[CALL_ID]", "[ARGS]", "<|python_tag|>")
"""Control tokens that these formats read and that not every template writes."""


def detect(rendered_call: str) -> str | None:
    """The format that an assistant's tool call is rendered in by a chat template; None for one that is not known."""
    if "<function=" in rendered_call and "<parameter=" in rendered_call:
        return "xml"
    if "[TOOL_CALLS]" in rendered_call:
        return "mistral"
    if "<tool_call>" in rendered_call and '"name"' in rendered_call:
        return "hermes"
    if re.search(r'(^|[\s>])\{\s*"name"', rendered_call):
        return "llama"
    return None


class _Tags:
    """Where the tags of a text are, so that no block searches all that comes after it."""

    def __init__(self, text: str) -> None:
        self._places = [(m.start(), m.end(), m[0] == "</tool_call>") for m in re.finditer("</?tool_call>", text)]
        self._length = len(text)

    def block_end(self, start: int) -> int:
        """Where the block at `start` ends: after its close, else before the next block or with the text."""
        i = bisect.bisect_right(self._places, (start, self._length, True))
        if i == len(self._places):
            return self._length
        place, end, closes = self._places[i]
        return end if closes else place


def _is_open(text: str) -> bool:
    """Whether a JSON text ends within an array or an object."""
    brackets = _JSON_STRING.sub("", text)
    return sum(map(brackets.count, "[{")) > sum(map(brackets.count, "]}"))


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _xml_end(text: str, start: int) -> tuple[bool, int]:
    """Whether a call that begins at `start` has nothing but a head and whole elements, and how far it was read."""
    match = _XML_HEAD.match(text, start + len("<tool_call>"))
    at = match.end() if match else start
    while match is not None:
        parameter = _XML_PARAMETER.match(text, at)
        if parameter is None:
            closed = _XML_CLOSE.match(text, at)
            return closed is not None, closed.end() if closed else at
        end = text.find("</parameter>", parameter.end())
        if end < 0:
            return False, len(text)
        at = end + len("</parameter>")
    return False, at


def _xml_call(raw: str, tools: Tools) -> ToolCall | Malformed:
    body = raw.removeprefix("<tool_call>").removesuffix("</tool_call>")
    match = _XML_HEAD.match(body)
    if match is None or not (name := match[1].strip()):
        return Malformed(raw)
    inner = body[match.end() :].rstrip().removesuffix("</function>")
    types = _parameter_types(name, tools)
    arguments: dict[str, Any] = {}
    at = 0
    while parameter := _XML_PARAMETER.match(inner, at):
        end = inner.find("</parameter>", parameter.end())
        if end < 0:
            return Malformed(raw)
        key = parameter[1].strip()
        value = inner[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[key] = _value(value, types.get(key))
        at = end + len("</parameter>")
    # Whatever else there is between the parameters was meant to be something.
    return Malformed(raw) if inner[at:].strip() else tool_call(name, arguments, raw)


def _parameter_types(name: str, tools: Tools) -> dict[str, Any]:
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: (schema or {}).get("type") for key, schema in properties.items()}
    return {}


def _value(text: str, declared: Any) -> Any:
    if declared == "string":
        return text
    value = _loads(text.strip())
    return text if value is None and text.strip() != "null" else value


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # deeper than the interpreter's stack
        return None


def _raw_decode(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that starts at `at` and where it ends; None and how far it was read where there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError as error:
        return None, error.pos
    except (ValueError, RecursionError):  # too many digits; deeper than the interpreter's stack
        return None, len(text)

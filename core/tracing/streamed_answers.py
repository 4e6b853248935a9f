"""A streamed answer, put together to what the same API sends unstreamed, so that both are recorded equal.

Of a stream that was cut, this is what had come of the answer. One class per API: Chat Completions, Responses,
Anthropic's Messages, Google's.

Sources: OpenAI API reference (chat completion chunks, streaming events of Responses), Anthropic API reference
(streaming messages), Gemini API reference. Events are untrusted: what does not fit is skipped.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from agl.messages import google

Json = Mapping[str, Any]


class StreamedAnswer(Protocol):
    """An answer that grows."""

    def items(self) -> list[Any]:
        """The messages or items that have come, in the form of an unstreamed answer."""
        ...


class ChatMessage:
    """A choice's message of Chat Completions, from its deltas."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.content: list[Any] = []
        self.audio: dict[str, Any] = {}
        self.audio_data: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.latest: dict[Any, dict[str, Any]] = {}
        """The index that calls have in the stream -> the newest call that has it."""

    def add(self, delta: Json) -> None:
        """Add a delta."""
        for name, value in delta.items():
            if name == "content":
                self._say(value)
            elif name == "tool_calls":
                self._call(_mappings(value))
            elif name == "audio":
                self._sound(_mapping(value))
            elif name == "function_call":
                _grow_function(self.fields.setdefault(name, {}), _mapping(value))
            elif isinstance(value, str) and name != "role":
                _append(self.fields, name, value)
            elif isinstance(value, list):
                self.fields[name] = [*_list(self.fields.get(name)), *value]

    def items(self) -> list[Any]:
        message = {"role": "assistant", **self.fields, "content": self.content}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.audio or self.audio_data:
            message["audio"] = {**self.audio, **({"data": _joined(self.audio_data)} if self.audio_data else {})}
        return [message]

    def _say(self, content: Any) -> None:
        """Add a text, or a list of parts (Mistral's)."""
        for part in [content] if isinstance(content, str) else _list(content):
            kind, text = ("text", part) if isinstance(part, str) else _text_of(part)
            if text is None:
                self.content += _mappings([part])
            elif self.content and self.content[-1].get("type") == kind:
                self.content[-1][kind] += text
            elif text:
                self.content.append({"type": kind, kind: text})

    def _sound(self, audio: Json) -> None:
        for name, value in audio.items():
            if name == "data":
                self.audio_data.append(_str(value))
            elif name == "transcript":
                _append(self.audio, name, value)
            elif value is not None:
                self.audio[name] = value

    def _call(self, pieces: list[Json]) -> None:
        begun: list[int] = []
        for piece in pieces:
            index = piece.get("index")
            call = self.latest.get(index if isinstance(index, int) else None)
            if call is None or _begins_another(piece, call, again=id(call) in begun):
                call = self.latest[index if isinstance(index, int) else None] = {}
                self.calls.append(call)
            begun.append(id(call))
            for name, value in piece.items():
                if name in ("function", "custom"):
                    _grow_function(call.setdefault(name, {}), _mapping(value))
                elif name != "index" and (value or name not in call):
                    call[name] = value


def _begins_another(piece: Json, call: Json, *, again: bool) -> bool:
    """Whether a piece of a tool call begins another call than `call`, whose index it has.

    Servers that are compatible with OpenAI's give all parallel calls the index 0, or none; each of them comes whole.

    Args:
        again: whether the same delta has a piece of `call` already.
    """
    if piece.get("id") and call.get("id"):
        return piece["id"] != call["id"]
    more = _function(piece)
    function = _function(call)
    if not more.get("name"):
        return False
    if more["name"] == function.get("name") and not again and ("custom" in call or more.get("arguments") == ""):
        # The name repeated. Any beginning of a custom tool's text may look whole, and a last piece may be empty.
        return False
    arguments = function.get("arguments", function.get("input"))
    if again or not isinstance(arguments, str):
        return bool(again or arguments)
    with contextlib.suppress(ValueError):
        json.loads(arguments)
        return True
    return False


def _function(call: Json) -> Json:
    return _mapping(call.get("function") or call.get("custom"))


def _grow_function(function: dict[str, Any], piece: Json) -> None:
    for name, value in piece.items():
        # Some servers repeat the name with each piece of the arguments.
        if name == "name" and function.get("name") == value:
            continue
        if isinstance(value, str):
            _append(function, name, value)
        elif value is not None:
            function[name] = value


_DELTAS = {
    "response.output_text.delta": ("content", "text"),
    "response.refusal.delta": ("content", "refusal"),
    "response.reasoning_text.delta": ("content", "text"),
    "response.reasoning_summary_text.delta": ("summary", "text"),
    "response.function_call_arguments.delta": (None, "arguments"),
    "response.custom_tool_call_input.delta": (None, "input"),
    "response.mcp_call_arguments.delta": (None, "arguments"),
    "response.code_interpreter_call_code.delta": (None, "code"),
}
"""Event -> the item's list of parts that it is about (None: the item itself), and the field whose text grows."""
_PARTS = {
    "response.content_part.added": "content",
    "response.content_part.done": "content",
    "response.reasoning_summary_part.added": "summary",
    "response.reasoning_summary_part.done": "summary",
}
_ITEMS = ("response.output_item.added", "response.output_item.done")


class ResponseItems:
    """The output of the Responses API, from its events."""

    def __init__(self) -> None:
        self.output: dict[int, dict[str, Any]] = {}
        self.parts: dict[tuple[int, str, int], dict[str, Any]] = {}
        """By the item's index, its list, and the index there."""
        self.done: set[int] = set()

    @staticmethod
    def knows(kind: str) -> bool:
        """Whether events of this type say something of the output."""
        return kind in _DELTAS or kind in _PARTS or kind in _ITEMS

    def add(self, kind: str, event: Json) -> None:
        """Add an event of a known type."""
        at = _int(event.get("output_index"))
        if kind in _ITEMS:
            self._item(at, _mapping(event.get("item")))
            if kind == _ITEMS[1]:
                self.done.add(at)
        elif kind in _PARTS:
            self._part(at, _PARTS[kind], event).update(_mapping(event.get("part")))
        else:
            parts, field = _DELTAS[kind]
            of = self.output.setdefault(at, {}) if parts is None else self._part(at, parts, event)
            _append(of, field, event.get("delta"))

    def items(self) -> list[Any]:
        return [item for at, item in sorted(self.output.items()) if at in self.done or self._has_begun(item)]

    @staticmethod
    def _has_begun(item: Json) -> bool:
        """Whether an item that is not done says anything. Reasoning is announced, and hidden reasoning says no more."""
        if item.get("type") == "reasoning":
            return any(part.get("text") for name in ("summary", "content") for part in _mappings(item.get(name)))
        return isinstance(item.get("type"), str)

    def _item(self, at: int, item: Json) -> None:
        """Set an item. It comes twice: first empty, then whole."""
        self.output[at] = {**item}
        for name in ("content", "summary"):
            if name in item:
                parts = self.output[at][name] = [{**part} for part in _mappings(item[name])]
                self.parts.update(((at, name, i), part) for i, part in enumerate(parts))

    def _part(self, at: int, name: str, event: Json) -> dict[str, Any]:
        """The part that an event is about."""
        key = (at, name, _int(event.get("summary_index" if name == "summary" else "content_index")))
        if key not in self.parts:
            self.parts[key] = {}
            # `content` of reasoning has another type than that of a message; the event of the item says which it is.
            self.output.setdefault(at, {}).setdefault(name, []).append(self.parts[key])
        return self.parts[key]


_BLOCK_DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "compaction_delta": "content",
}


class MessageBlocks:
    """The content of a message of Anthropic's API, from its events."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[str, Any]] = {}
        self.inputs: dict[int, str] = {}
        """A block's index -> the JSON of its input, as far as it has come."""
        self.done: set[int] = set()

    def start(self, index: int, block: Json) -> None:
        """Begin a block."""
        self.blocks[index] = {**block}

    def add(self, index: int, delta: Json) -> None:
        """Add a delta to a block."""
        kind = delta.get("type")
        if kind == "input_json_delta":
            self.inputs[index] = self.inputs.get(index, "") + _str(delta.get("partial_json"))
        elif kind == "citations_delta" and index in self.blocks:
            block = self.blocks[index]
            block["citations"] = [*_list(block.get("citations")), delta.get("citation")]
        elif (field := _BLOCK_DELTAS.get(_str(kind))) is not None:
            default = {"type": _str(kind).removesuffix("_delta").replace("signature", "thinking")}
            _append(self.blocks.setdefault(index, default), field, delta.get(field))

    def stop(self, index: int) -> None:
        """End a block."""
        self.done.add(index)

    def items(self) -> list[Any]:
        content = []
        for index, block in sorted(self.blocks.items()):
            written = self.inputs.get(index, "")
            # Every input begins as {}, and may stay so.
            unwritten = block.get("input") == {} and index not in self.done
            content.append({**block, "input": _parsed(written)} if written or unwritten else block)
        return [{"role": "assistant", "content": content}]


_STEPS = re.compile(r"\.([^.\[\]]+)|\[(\d{1,6})\]")
"""A step of a JSON path: a name, or an index."""


class GoogleParts:
    """A candidate's content of Google's API, from its chunks; an unstreamed answer is one chunk."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []
        self.unfinished: dict[str, Any] | None = None
        """The call whose arguments come in pieces (`streamFunctionCallArguments`)."""

    def add(self, content: Any) -> None:
        """Add a chunk's content. Neighbouring texts of one kind are one."""
        for part in google.message(content)["parts"]:
            if self._continues(part):
                continue
            kind = part.get("type")
            text = part.get("content")
            last = self.parts[-1] if self.parts else {}
            if kind not in ("text", "reasoning"):
                self.parts.append(part)
            elif last.get("type") == kind:
                last["content"] += text
            elif text:
                self.parts.append(part)

    def items(self) -> list[Any]:
        return [{"role": "assistant", "parts": self.parts}]

    def _continues(self, part: dict[str, Any]) -> bool:
        """Whether a part is a piece of the call before it, which it is added to."""
        if part.get("type") != "tool_call":
            return False
        pieces = _mappings(part.pop("partialArgs", None))
        goes_on = part.pop("willContinue", None) is True
        call = part if part.get("name") or self.unfinished is None else self.unfinished
        for piece in pieces:
            _set_piece(call["arguments"], piece)
        self.unfinished = call if goes_on else None
        return call is not part


def _set_piece(arguments: dict[str, Any], piece: Json) -> None:
    """Add a `PartialArg` to arguments: a value, or a piece of a text, at a JSON path such as `$.places[0].name`."""
    values = (piece[name] for name in ("stringValue", "numberValue", "boolValue") if name in piece)
    value = next(values, None)
    steps: list[Any] = [name or int(index) for name, index in _STEPS.findall(_str(piece.get("jsonPath")))]
    at: Any = arguments
    for step, following in itertools.pairwise([*steps, None]):
        place: Any = step
        if isinstance(at, list) and isinstance(step, int):
            place = min(step, len(at))
            at += [None] * (place == len(at))
        elif not (isinstance(at, dict) and isinstance(step, str)):
            return
        else:
            at.setdefault(step, None)
        known: Any = at[place]
        if following is None:
            at[place] = known + value if isinstance(known, str) and isinstance(value, str) else value
        elif known is None:
            at[place] = [] if isinstance(following, int) else {}
        at = at[place]


def _text_of(part: Any) -> tuple[str, str | None]:
    """The kind and the text of a part of a content; None for what is neither text nor reasoning."""
    kind = _str(_mapping(part).get("type"))
    value = _mapping(part).get(kind) if kind in ("text", "thinking") else None
    if isinstance(value, list):
        value = "".join(_str(_mapping(each).get("text")) for each in value)
    return kind, value if isinstance(value, str) else None


def _joined(pieces: list[str]) -> str:
    """Base64 of which each piece may be padded."""
    if any(piece.endswith("=") for piece in pieces[:-1]):
        with contextlib.suppress(ValueError):
            return base64.b64encode(b"".join(map(base64.b64decode, pieces))).decode()
    return "".join(pieces)


def _parsed(text: str) -> Any:
    """JSON as its value; what is cut unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _append(fields: dict[str, Any], name: str, piece: Any) -> None:
    if isinstance(piece, str):
        known = fields.get(name)
        fields[name] = known + piece if isinstance(known, str) else piece


def _mapping(value: Any) -> Json:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Json]:
    return [each for each in _list(value) if isinstance(each, Mapping)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _str(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0

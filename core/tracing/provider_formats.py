"""What a model request asks and what its answer says, in the wire forms of the providers, as span attributes.

Sources: OpenAI API reference (Chat Completions, Completions, Responses), Anthropic API reference (Messages). Bodies
come from the wire, so nothing is taken for granted; what does not fit is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl import semconv

Json = Mapping[str, Any]

_SAMPLING = ("temperature", "top_p", "max_tokens")


def asked(body: Json) -> dict[str, Any]:
    """The messages of a request, as sent."""
    messages = next((body[k] for k in ("messages", "input", "prompt") if body.get(k) is not None), None)
    if messages is None:
        return {}
    instructions = body.get("instructions") or body.get("system")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if instructions and isinstance(messages, list):
        messages = [{"role": "system", "content": instructions}, *messages]
    return {semconv.INPUT_MESSAGES: json.dumps(messages, default=str)}


def settings(body: Json) -> dict[str, Any]:
    """The model that a request names, and how it is to be sampled."""
    facts = {f"gen_ai.request.{name}": body[name] for name in _SAMPLING if isinstance(body.get(name), int | float)}
    return {semconv.REQUEST_MODEL: str(body.get("model") or ""), **facts}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool gave, as the client told the model: text, and whether it says that the tool failed."""

    text: str
    failed: bool = False


def tool_results(body: Json) -> dict[str, ToolResult]:
    """The results of tool calls that a request holds, by call id."""
    found: dict[str, ToolResult] = {}
    history = body.get("messages")
    if history is None:
        history = body.get("input")
    for message in _dicts(history):
        if message.get("role") == "tool" and message.get("tool_call_id"):
            found[str(message["tool_call_id"])] = ToolResult(_text(message.get("content")))
        elif message.get("type") == "function_call_output" and message.get("call_id"):
            found[str(message["call_id"])] = ToolResult(_text(message.get("output")))
        for block in _dicts(message.get("content")):
            if block.get("type") == "tool_result" and block.get("tool_use_id"):
                failed = bool(block.get("is_error"))
                found[str(block["tool_use_id"])] = ToolResult(_text(block.get("content")), failed)
    return found


@dataclass(slots=True)
class ToolCall:
    """A tool call in an answer; `arguments` is JSON text as the model wrote it."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class _Said:
    """One choice of an answer."""

    text: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)
    finish: str | None = None


@dataclass(slots=True)
class ResponseAccumulator:
    """An answer as it comes: `whole` with a body, or `event` with each JSON event of a stream, in any wire form.

    Attributes:
        error: what the provider says went wrong.
    """

    id: str | None = None
    model: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    _said: dict[int, _Said] = field(default_factory=dict)

    def whole(self, body: Any) -> None:
        """Take a body that is not a stream."""
        if not isinstance(body, Mapping):
            return
        if isinstance(body.get("error"), Mapping | str):
            self._fail(body["error"])
        self._head(body)
        for choice in _dicts(body.get("choices")):
            said = self._choice(choice.get("index"))
            message = choice.get("message")
            if isinstance(message, Mapping):
                said.text = _text(message.get("content"))
                self._chat_calls(said, message)
            elif isinstance(choice.get("text"), str):
                said.text = choice["text"]
            said.finish = _str(choice.get("finish_reason")) or said.finish
        if isinstance(body.get("output"), list):
            self._items(body)
        if body.get("type") == "message":
            said = self._choice(0)
            for i, block in enumerate(_dicts(body.get("content"))):
                self._block(said, i, block)
            said.finish = _str(body.get("stop_reason")) or said.finish

    def event(self, data: Any) -> None:
        """Take one event of a stream."""
        if not isinstance(data, Mapping):
            return
        kind = data.get("type")
        match kind:
            case "message_start" | "response.completed" | "response.incomplete" | "response.failed":
                self.whole(data.get("message") or data.get("response"))
            case "content_block_start":
                self._block(self._choice(0), _index(data.get("index")), _dict(data.get("content_block")))
            case "content_block_delta":
                delta, said = _dict(data.get("delta")), self._choice(0)
                said.text += _str(delta.get("text"))
                if delta.get("type") == "input_json_delta":
                    call = said.calls.setdefault(_index(data.get("index")), ToolCall())
                    call.arguments += _str(delta.get("partial_json"))
            case "message_delta":
                self._choice(0).finish = _str(_dict(data.get("delta")).get("stop_reason")) or None
                self._head(data)
            case "error":
                self._fail(data.get("error") or data.get("message"))
        if kind is not None:
            return
        if data.get("error") is not None:
            self._fail(data["error"])
        self._head(data)
        for choice in _dicts(data.get("choices")):
            said, delta = self._choice(choice.get("index")), choice.get("delta")
            if isinstance(delta, Mapping):
                said.text += _text(delta.get("content"))
                self._chat_calls(said, delta)
            elif isinstance(choice.get("text"), str):
                said.text += choice["text"]
            said.finish = _str(choice.get("finish_reason")) or said.finish

    def tool_calls(self) -> Iterator[ToolCall]:
        """Every tool call in it that has an id."""
        for said in self._said.values():
            yield from (call for call in said.calls.values() if call.id)

    def facts(self, content: bool) -> dict[str, Any]:
        """Span attributes; with the messages if `content`."""
        reasons = [said.finish for said in self._said.values() if said.finish]
        facts: dict[str, Any] = {
            semconv.RESPONSE_ID: self.id,
            semconv.RESPONSE_MODEL: self.model,
            semconv.FINISH_REASONS: reasons or None,
            semconv.INPUT_TOKENS: self.input_tokens,
            semconv.OUTPUT_TOKENS: self.output_tokens,
        }
        if content and self._said:
            facts[semconv.OUTPUT_MESSAGES] = json.dumps([_message(s) for _, s in sorted(self._said.items())])
        return {k: v for k, v in facts.items() if v is not None}

    def _choice(self, index: Any) -> _Said:
        return self._said.setdefault(_index(index), _Said())

    def _fail(self, error: Any) -> None:
        self.error = str(error.get("message") or error) if isinstance(error, Mapping) else str(error)

    def _head(self, body: Json) -> None:
        self.id = _str(body.get("id")) or self.id
        self.model = _str(body.get("model")) or self.model
        usage = body.get("usage")
        if isinstance(usage, Mapping):
            given = usage.get("prompt_tokens", usage.get("input_tokens"))
            if isinstance(given, int):
                # Anthropic's count leaves out what its cache holds; the attribute counts the whole prompt.
                cached = (usage.get(k) for k in ("cache_read_input_tokens", "cache_creation_input_tokens"))
                self.input_tokens = given + sum(n for n in cached if isinstance(n, int))
            sampled = usage.get("completion_tokens", usage.get("output_tokens"))
            if isinstance(sampled, int):
                self.output_tokens = sampled

    def _chat_calls(self, said: _Said, message: Json) -> None:
        for place, part in enumerate(_dicts(message.get("tool_calls"))):
            call = said.calls.setdefault(_index(part.get("index", place)), ToolCall())
            function = _dict(part.get("function"))
            call.id = _str(part.get("id")) or call.id
            call.name += _str(function.get("name"))
            call.arguments += _str(function.get("arguments"))

    def _block(self, said: _Said, index: int, block: Json) -> None:
        if block.get("type") == "text":
            said.text += _str(block.get("text"))
        elif block.get("type") == "tool_use":
            given = block.get("input")
            said.calls[index] = ToolCall(
                _str(block.get("id")), _str(block.get("name")), json.dumps(given) if given else ""
            )

    def _items(self, body: Json) -> None:
        said = self._choice(0)
        for i, item in enumerate(_dicts(body.get("output"))):
            if item.get("type") == "message":
                said.text += "".join(_str(p.get("text")) for p in _dicts(item.get("content")))
            elif item.get("type") == "function_call":
                said.calls[i] = ToolCall(_str(item.get("call_id")), _str(item.get("name")), _str(item.get("arguments")))
        said.finish = _str(body.get("status")) or said.finish


def _message(said: _Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None}
    if said.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in said.calls.values()
        ]
    return message


def _dicts(value: Any) -> list[Json]:
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list) else []


def _dict(value: Any) -> Json:
    return value if isinstance(value, Mapping) else {}


def _str(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _index(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(
            p if isinstance(p, str) else str(p.get("text") or "") for p in content if isinstance(p, str | dict)
        )
    return "" if content is None else json.dumps(content, default=str)

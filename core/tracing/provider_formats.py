"""Requests and responses of model APIs, in the providers' wire formats, as span attributes.

Sources: OpenAI API reference (Chat Completions, Completions, Responses), Anthropic API reference (Messages). Bodies are
untrusted: parts that do not fit are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl import semconv

Json = Mapping[str, Any]

_SAMPLING = ("temperature", "top_p", "max_tokens")


def request_messages(body: Json) -> dict[str, Any]:
    """The messages of a request, with its system prompt and its tools."""
    messages = next((body[k] for k in ("messages", "input", "prompt") if body.get(k) is not None), None)
    if messages is None:
        return {}
    instructions = body.get("instructions") or body.get("system")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if instructions and isinstance(messages, list):
        messages = [{"role": "system", "content": instructions}, *messages]
    facts = {semconv.INPUT_MESSAGES: json.dumps(messages, default=str)}
    if body.get("tools"):
        facts[semconv.TOOL_DEFINITIONS] = json.dumps(body["tools"], default=str)
    if previous := body.get("previous_response_id") or body.get("conversation"):
        facts[semconv.PREVIOUS_RESPONSE] = str(previous)
    return facts


def settings(body: Json) -> dict[str, Any]:
    """The model and the sampling options of a request."""
    facts = {f"gen_ai.request.{name}": body[name] for name in _SAMPLING if isinstance(body.get(name), int | float)}
    return {semconv.REQUEST_MODEL: str(body.get("model") or ""), **facts}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's result in a request: its text, and whether the request marks it as failed."""

    text: str
    failed: bool = False


def tool_results(body: Json) -> dict[str, ToolResult]:
    """Tool call id -> the result that a request holds."""
    results: dict[str, ToolResult] = {}
    history = body.get("messages")
    if history is None:
        history = body.get("input")
    for message in _dicts(history):
        if message.get("role") == "tool" and message.get("tool_call_id"):
            results[str(message["tool_call_id"])] = ToolResult(_text(message.get("content")))
        elif message.get("type") == "function_call_output" and message.get("call_id"):
            results[str(message["call_id"])] = ToolResult(_text(message.get("output")))
        for block in _dicts(message.get("content")):
            if block.get("type") == "tool_result" and block.get("tool_use_id"):
                failed = bool(block.get("is_error"))
                results[str(block["tool_use_id"])] = ToolResult(_text(block.get("content")), failed)
    return results


@dataclass(slots=True)
class ToolCall:
    """A tool call in a response; `arguments` is JSON text as the model wrote it."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class _Choice:
    """One choice of a response."""

    text: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)
    finish: str | None = None


@dataclass(slots=True)
class ResponseAccumulator:
    """A response in any wire format, from its body (`whole`) or from each JSON event of a stream (`event`).

    Attributes:
        id, model: as the provider reports them.
        input_tokens, output_tokens: usage; None if the provider does not report it.
        error: the provider's error message.
    """

    id: str | None = None
    model: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    _choices: dict[int, _Choice] = field(default_factory=dict)

    def whole(self, body: Any) -> None:
        """Add a body that is not a stream."""
        if not isinstance(body, Mapping):
            return
        if isinstance(body.get("error"), Mapping | str):
            self._fail(body["error"])
        self._head(body)
        for part in _dicts(body.get("choices")):
            choice = self._choice(part.get("index"))
            message = part.get("message")
            if isinstance(message, Mapping):
                choice.text = _text(message.get("content"))
                self._chat_calls(choice, message)
            elif isinstance(part.get("text"), str):
                choice.text = part["text"]
            choice.finish = _str(part.get("finish_reason")) or choice.finish
        if isinstance(body.get("output"), list):
            self._items(body)
        if body.get("type") == "message":
            choice = self._choice(0)
            for i, block in enumerate(_dicts(body.get("content"))):
                self._block(choice, i, block)
            choice.finish = _str(body.get("stop_reason")) or choice.finish

    def event(self, data: Any) -> None:
        """Add one event of a stream."""
        if not isinstance(data, Mapping):
            return
        kind = data.get("type")
        match kind:
            case "message_start" | "response.completed" | "response.incomplete" | "response.failed":
                self.whole(data.get("message") or data.get("response"))
            case "content_block_start":
                self._block(self._choice(0), _index(data.get("index")), _dict(data.get("content_block")))
            case "content_block_delta":
                delta, choice = _dict(data.get("delta")), self._choice(0)
                choice.text += _str(delta.get("text"))
                if delta.get("type") == "input_json_delta":
                    call = choice.calls.setdefault(_index(data.get("index")), ToolCall())
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
        for part in _dicts(data.get("choices")):
            choice, delta = self._choice(part.get("index")), part.get("delta")
            if isinstance(delta, Mapping):
                choice.text += _text(delta.get("content"))
                self._chat_calls(choice, delta)
            elif isinstance(part.get("text"), str):
                choice.text += part["text"]
            choice.finish = _str(part.get("finish_reason")) or choice.finish

    def tool_calls(self) -> Iterator[ToolCall]:
        """Every tool call that has an id."""
        for choice in self._choices.values():
            yield from (call for call in choice.calls.values() if call.id)

    def facts(self, content: bool) -> dict[str, Any]:
        """Span attributes; with the messages if `content`."""
        reasons = [choice.finish for choice in self._choices.values() if choice.finish]
        facts: dict[str, Any] = {
            semconv.RESPONSE_ID: self.id,
            semconv.RESPONSE_MODEL: self.model,
            semconv.FINISH_REASONS: reasons or None,
            semconv.INPUT_TOKENS: self.input_tokens,
            semconv.OUTPUT_TOKENS: self.output_tokens,
        }
        if content and self._choices:
            facts[semconv.OUTPUT_MESSAGES] = json.dumps([_message(s) for _, s in sorted(self._choices.items())])
        return {k: v for k, v in facts.items() if v is not None}

    def _choice(self, index: Any) -> _Choice:
        return self._choices.setdefault(_index(index), _Choice())

    def _fail(self, error: Any) -> None:
        self.error = str(error.get("message") or error) if isinstance(error, Mapping) else str(error)

    def _head(self, body: Json) -> None:
        self.id = _str(body.get("id")) or self.id
        self.model = _str(body.get("model")) or self.model
        usage = body.get("usage")
        if isinstance(usage, Mapping):
            prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
            if isinstance(prompt, int):
                # Anthropic's count excludes cached tokens; the attribute counts the whole prompt.
                cached = (usage.get(k) for k in ("cache_read_input_tokens", "cache_creation_input_tokens"))
                self.input_tokens = prompt + sum(n for n in cached if isinstance(n, int))
            sampled = usage.get("completion_tokens", usage.get("output_tokens"))
            if isinstance(sampled, int):
                self.output_tokens = sampled

    def _chat_calls(self, choice: _Choice, message: Json) -> None:
        for i, part in enumerate(_dicts(message.get("tool_calls"))):
            call = choice.calls.setdefault(_index(part.get("index", i)), ToolCall())
            function = _dict(part.get("function"))
            call.id = _str(part.get("id")) or call.id
            call.name += _str(function.get("name"))
            call.arguments += _str(function.get("arguments"))

    def _block(self, choice: _Choice, index: int, block: Json) -> None:
        if block.get("type") == "text":
            choice.text += _str(block.get("text"))
        elif block.get("type") == "tool_use":
            arguments = block.get("input")
            choice.calls[index] = ToolCall(
                _str(block.get("id")), _str(block.get("name")), json.dumps(arguments) if arguments else ""
            )

    def _items(self, body: Json) -> None:
        choice = self._choice(0)
        for i, item in enumerate(_dicts(body.get("output"))):
            if item.get("type") == "message":
                choice.text += "".join(_str(p.get("text")) for p in _dicts(item.get("content")))
            elif item.get("type") == "function_call":
                choice.calls[i] = ToolCall(
                    _str(item.get("call_id")), _str(item.get("name")), _str(item.get("arguments"))
                )
        choice.finish = _str(body.get("status")) or choice.finish


def _message(choice: _Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or None}
    if choice.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in choice.calls.values()
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

"""Requests and responses of model APIs, in the providers' wire formats, as span attributes.

Sources: OpenAI API reference (Chat Completions, Completions, Responses), Anthropic API reference (Messages), Gemini API
reference (GenerateContentResponse). Bodies are untrusted: parts that do not fit are skipped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl import semconv
from agl.errors import UnreadableMessageError
from agl.messages import Message, ToolCall, ToolResult, google, read, write

Json = Mapping[str, Any]

_SAMPLING = ("temperature", "top_p", "max_tokens")


def is_stream(response: Any) -> bool:
    """Whether an httpx response is a stream of server-sent events."""
    return response.headers.get("content-type", "").startswith("text/event-stream")


def json_values(response: Any, body: bytes) -> list[Any]:
    """The JSON of an httpx response's body, or of each server-sent event in it (WHATWG HTML, section 9.2).

    The body is encoded as the headers say, and may be cut short. What cannot be read is left out.
    """
    headers = {"content-encoding": response.headers.get("content-encoding", "identity")}
    try:
        body = type(response)(200, headers=headers, content=body).content
    except Exception:  # the DecodingError of its version of httpx
        return []
    texts = [body]
    if is_stream(response):
        blocks = body.replace(b"\r\n", b"\n").split(b"\n\n")
        lines = ((line[5:].lstrip() for line in block.split(b"\n") if line.startswith(b"data:")) for block in blocks)
        texts = [b"\n".join(data) for data in lines]
    values = []
    for text in texts:
        with contextlib.suppress(ValueError):
            values.append(json.loads(text))
    return values


def request_messages(body: Json) -> dict[str, Any]:
    """The messages of a request, with its system prompt and its tools."""
    facts = write.request_facts(body)
    if facts and body.get("tools"):
        facts[semconv.TOOL_DEFINITIONS] = json.dumps(body["tools"], default=str)
    if facts and (previous := body.get("previous_response_id") or body.get("conversation")):
        facts[semconv.PREVIOUS_RESPONSE] = str(previous)
    if facts and (conversation := body.get("conversation")):
        named = conversation.get("id") if isinstance(conversation, Mapping) else conversation
        facts[semconv.CONVERSATION_ID] = str(named)
    return facts


def settings(body: Json) -> dict[str, Any]:
    """The model and the sampling options of a request."""
    facts = {f"gen_ai.request.{name}": body[name] for name in _SAMPLING if isinstance(body.get(name), int | float)}
    return {semconv.REQUEST_MODEL: str(body.get("model") or ""), **facts}


def tool_results(body: Json) -> dict[str, ToolResult]:
    """Tool call id -> the result that a request holds."""
    try:
        history = read.body(body)
    except UnreadableMessageError:
        return {}
    return {result.id: result for message in history for result in message.tool_results if result.id}


def finish_reason(status: str | None, incomplete: str | None, *, calls_tools: bool) -> str | None:
    """The finish reason of a response of OpenAI's Responses API, in the words of Chat Completions; None if it is not
    finished, or failed.

    Args:
        status: `response.status`. incomplete: `response.incomplete_details.reason`.
        calls_tools: whether it holds a function call.
    """
    if status == "incomplete":
        return "length" if incomplete in ("max_output_tokens", None) else incomplete
    if status != "completed":
        return None
    return "tool_calls" if calls_tools else "stop"


@dataclass(slots=True)
class _Choice:
    """One choice of a response.

    Attributes:
        whole: its message, or its items, unchanged. parts: those of a stream, which grow, in OpenTelemetry's form.
    """

    whole: Any = ()
    parts: dict[Any, dict[str, Any]] = field(default_factory=dict)
    finish: str | None = None

    def add(self, key: Any, kind: str, **texts: Any) -> None:
        """Append texts to the fields of a part."""
        part = self.parts.setdefault(key, {"type": kind})
        if part["type"] == kind:
            for name, text in texts.items():
                part[name] = part.get(name, "") + _str(text)

    def message(self) -> Message:
        streamed = {"role": "assistant", "parts": [p for p in self.parts.values() if p.get("content") != ""]}
        found = read.answers([*([self.whole] if isinstance(self.whole, Mapping) else self.whole), streamed])
        return Message("assistant", tuple(part for message in found for part in message.parts))


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

    def received(self, response: Any, body: bytes) -> None:
        """Add what was received of the body of an httpx response. A body that cannot be read adds nothing."""
        for value in json_values(response, body):
            # Google's answers are made of the same parts, whole, as events, or as an array of them.
            for each in google.listed(value):
                (self.event if is_stream(response) or "candidates" in _dict(each) else self.whole)(each)

    def whole(self, body: Any) -> None:
        """Add a body that is not a stream."""
        if not isinstance(body, Mapping):
            return
        if isinstance(body.get("error"), Mapping | str):
            self._fail(body["error"])
        self._head(body)
        for part in _dicts(body.get("choices")):
            choice = self._choice(part.get("index"))
            said = part.get("message", part.get("text"))
            choice.whole = [said] if isinstance(said, str) else _dict(said)
            choice.finish = _str(part.get("finish_reason")) or choice.finish
        if isinstance(body.get("output"), list):
            choice, items = self._choice(0), _dicts(body["output"])
            incomplete = _str(_dict(body.get("incomplete_details")).get("reason"))
            calls_tools = any(item.get("type") == "function_call" for item in items)
            finish = finish_reason(_str(body.get("status")), incomplete or None, calls_tools=calls_tools)
            choice.whole, choice.finish = body["output"], finish or choice.finish
        if body.get("type") == "message":
            choice = self._choice(0)
            choice.whole, choice.finish = body, _str(body.get("stop_reason")) or choice.finish

    def event(self, data: Any) -> None:
        """Add one event of a stream."""
        if not isinstance(data, Mapping):
            return
        kind = data.get("type")
        match kind:
            case (
                "message_start" | "response.created" | "response.completed" | "response.incomplete" | "response.failed"
            ):
                self.whole(data.get("message") or data.get("response"))
            case "content_block_start":
                self._block(self._choice(0), _index(data.get("index")), _dict(data.get("content_block")))
            case "content_block_delta":
                delta, choice, index = _dict(data.get("delta")), self._choice(0), _index(data.get("index"))
                match delta.get("type"):
                    case "text_delta":
                        choice.add(index, "text", content=delta.get("text"))
                    case "thinking_delta":
                        choice.add(index, "reasoning", content=delta.get("thinking"))
                    case "input_json_delta":
                        choice.add(index, "tool_call", arguments=delta.get("partial_json"))
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
        for part in _dicts(data.get("candidates")):
            choice = self._choice(part.get("index"))
            for each in google.message(part.get("content"))["parts"]:
                if (kind := each.get("type")) in ("text", "reasoning"):
                    choice.add(kind, kind, content=each["content"])
                else:
                    choice.parts[len(choice.parts)] = each
            choice.finish = _str(part.get("finishReason")) or choice.finish
        for part in _dicts(data.get("choices")):
            choice, delta = self._choice(part.get("index")), part.get("delta")
            if isinstance(delta, Mapping):
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                if isinstance(thought, str):
                    choice.add("reasoning", "reasoning", content=thought)
                choice.add("text", "text", content=_text(delta.get("content")))
                for i, call in enumerate(_dicts(delta.get("tool_calls"))):
                    self._call(choice, i, call)
            choice.add("text", "text", content=part.get("text"))
            choice.finish = _str(part.get("finish_reason")) or choice.finish

    def tool_calls(self) -> Iterator[ToolCall]:
        """Every tool call that has an id."""
        for choice in self._choices.values():
            with contextlib.suppress(UnreadableMessageError):
                yield from (call for call in choice.message().tool_calls if call.id)

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
            choices = [choice for _, choice in sorted(self._choices.items())]
            try:
                messages = [choice.message() for choice in choices]
                facts[semconv.OUTPUT_MESSAGES] = write.to_json(messages, [choice.finish or "" for choice in choices])
            except UnreadableMessageError:
                facts[semconv.OUTPUT_MESSAGES] = json.dumps([choice.whole for choice in choices], default=str)
        return {k: v for k, v in facts.items() if v is not None}

    def _choice(self, index: Any) -> _Choice:
        return self._choices.setdefault(_index(index), _Choice())

    def _fail(self, error: Any) -> None:
        self.error = str(error.get("message") or error) if isinstance(error, Mapping) else str(error)

    def _head(self, body: Json) -> None:
        self.id = _str(body.get("id") or body.get("responseId")) or self.id
        self.model = _str(body.get("model") or body.get("modelVersion")) or self.model
        usage = body.get("usage", body.get("usageMetadata"))
        if isinstance(usage, Mapping):
            prompt = usage.get("prompt_tokens", usage.get("input_tokens", usage.get("promptTokenCount")))
            if isinstance(prompt, int):
                # Anthropic's count excludes cached tokens; the attribute counts the whole prompt.
                cached = (usage.get(k) for k in ("cache_read_input_tokens", "cache_creation_input_tokens"))
                self.input_tokens = prompt + sum(n for n in cached if isinstance(n, int))
            sampled = usage.get("completion_tokens", usage.get("output_tokens", usage.get("candidatesTokenCount")))
            if isinstance(sampled, int):
                self.output_tokens = sampled + _index(usage.get("thoughtsTokenCount"))  # Google counts them apart

    def _call(self, choice: _Choice, i: int, call: Json) -> None:
        function, key = _dict(call.get("function")), ("call", _index(call.get("index", i)))
        choice.add(key, "tool_call", name=function.get("name"), arguments=function.get("arguments"))
        choice.parts[key]["id"] = _str(call.get("id")) or choice.parts[key].get("id", "")

    def _block(self, choice: _Choice, index: int, block: Json) -> None:
        match block.get("type"):
            case "text":
                choice.add(index, "text", content=block.get("text"))
            case "thinking":
                choice.add(index, "reasoning", content=block.get("thinking"))
            case "tool_use":
                arguments = json.dumps(block["input"]) if block.get("input") else ""
                choice.add(index, "tool_call", id=block.get("id"), name=block.get("name"), arguments=arguments)
            case str():
                choice.parts[index] = dict(block)


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

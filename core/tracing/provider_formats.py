"""Requests and responses of model APIs, in the providers' wire formats, as span attributes.

Sources: OpenAI API reference (Chat Completions, Completions, Responses), Anthropic API reference (Messages), Gemini API
reference (GenerateContentResponse). Bodies are untrusted: parts that do not fit are skipped.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agl import semconv
from agl.errors import UnreadableMessageError
from agl.messages import Message, Reasoning, Text, ToolCall, ToolResult, google, read, write
from agl.tracing.streamed_answers import ChatMessage, GoogleParts, MessageBlocks, ResponseItems, StreamedAnswer
from agl.tracing.usage import reported_usage, usage_facts

Json = Mapping[str, Any]
_NUMBERS = {
    "temperature": semconv.REQUEST_TEMPERATURE,
    "top_p": semconv.REQUEST_TOP_P,
    "topP": semconv.REQUEST_TOP_P,
    "top_k": semconv.REQUEST_TOP_K,
    "topK": semconv.REQUEST_TOP_K,
    "max_tokens": semconv.REQUEST_MAX_TOKENS,
    "max_completion_tokens": semconv.REQUEST_MAX_TOKENS,
    "max_output_tokens": semconv.REQUEST_MAX_TOKENS,
    "maxOutputTokens": semconv.REQUEST_MAX_TOKENS,
    "seed": semconv.REQUEST_SEED,
    "n": semconv.REQUEST_CHOICES,
    "candidateCount": semconv.REQUEST_CHOICES,
    "frequency_penalty": semconv.REQUEST_FREQUENCY_PENALTY,
    "frequencyPenalty": semconv.REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": semconv.REQUEST_PRESENCE_PENALTY,
    "presencePenalty": semconv.REQUEST_PRESENCE_PENALTY,
}
"""A request's field of any API -> the attribute that has its number."""
_KINDS = frozenset(
    {
        "modalities",
        "responseModalities",
        "responseMimeType",
        "response_format",
        "output_format",
        "text",
        "output_config",
    }
)
"""Fields that say what kind of answer a request wants."""
_STOPS = frozenset({"stop", "stop_sequences", "stopSequences"})
_OUTPUT_TYPES = {
    "json_object": "json",
    "json_schema": "json",
    "text": "text",
    "application/json": "json",
    "text/plain": "text",
    "audio": "speech",
    "image": "image",
}
"""How a request names the kind of answer that it wants -> how OpenTelemetry does."""


def is_stream(response: Any) -> bool:
    """Whether an httpx response is a stream of server-sent events."""
    return response.headers.get("content-type", "").startswith("text/event-stream")


def json_values(response: Any, body: bytes, load: Callable[[bytes], Any] = json.loads) -> Iterator[Any]:
    """The JSON of an httpx response's body, or of each server-sent event in it.

    The body is encoded as the headers say, and may be cut short. What cannot be read is left out.

    Args:
        load: the value of JSON text; raises ValueError.
    """
    headers = {"content-encoding": response.headers.get("content-encoding", "identity")}
    try:
        body = type(response)(200, headers=headers, content=body).content
    except Exception:  # the DecodingError of its version of httpx
        return
    for text in _events(body) if is_stream(response) else [body]:
        with contextlib.suppress(ValueError, RecursionError):
            yield load(text)


def _events(body: bytes) -> Iterator[bytes]:
    """The data of each server-sent event (WHATWG HTML, section 9.2)."""
    data: list[bytes] = []
    for line in io.BytesIO(body):
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].lstrip())
        elif not line and data:
            yield b"\n".join(data)
            data = []
    if data:
        yield b"\n".join(data)


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


def settings(body: Json, path: str = "") -> dict[str, Any]:
    """How a request wants its answer to be sampled and sent, but not the model.

    Args:
        body: of any API.
        path: where the request goes; Google's says whether the answer is streamed.
    """
    facts: dict[str, Any] = {}
    options = body
    if "generationConfig" in body or "generation_config" in body:
        options = google.camel(body.get("generationConfig") or body.get("generation_config"))
    for name, value in options.items():
        if name in _NUMBERS and value.__class__ in (int, float):
            facts[_NUMBERS[name]] = value
        elif name in _STOPS and value:
            facts[semconv.REQUEST_STOP_SEQUENCES] = [value] if isinstance(value, str) else _texts(value)
        elif name == "stream" and value.__class__ is bool:
            facts[semconv.REQUEST_STREAM] = value
    if semconv.REQUEST_CHOICES in facts and facts[semconv.REQUEST_CHOICES] == 1:
        del facts[semconv.REQUEST_CHOICES]
    if ":streamGenerateContent" in path:
        facts[semconv.REQUEST_STREAM] = True
    # Most requests have none of them.
    if not _KINDS.isdisjoint(options) and (wanted := _output_type(options)) is not None:
        facts[semconv.OUTPUT_TYPE] = wanted
    return facts


def _output_type(options: Json) -> str | None:
    """What kind of answer a request wants, in OpenTelemetry's words; None if it does not say."""
    for name in ("modalities", "responseModalities"):
        if name in options:
            kinds = [_OUTPUT_TYPES.get(kind.lower()) for kind in _texts(options[name])]
            special = [kind for kind in kinds if kind in ("speech", "image")]
            return special[0] if special else "text"
    if "responseMimeType" in options:
        return _OUTPUT_TYPES.get(_str(options["responseMimeType"]))
    wanted: Any = None
    if "response_format" in options or "output_format" in options:
        wanted = options.get("response_format") or options.get("output_format")
    elif "text" in options or "output_config" in options:
        wanted = _dict(options.get("text") or options.get("output_config")).get("format")
    return _OUTPUT_TYPES.get(_str(_dict(wanted).get("type")))


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
        status: `response.status`.
        incomplete: `response.incomplete_details.reason`.
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
        whole: what came of it unstreamed: its messages or items, unchanged.
        streamed: what came in pieces.
    """

    whole: list[Any] = field(default_factory=list)
    streamed: StreamedAnswer | None = None
    finish: str | None = None

    def items(self) -> list[Any]:
        return [*self.whole, *(self.streamed.items() if self.streamed is not None else ())]

    def message(self) -> Message:
        parts = (part for message in read.answers(self.items()) for part in message.parts)
        # Streams begin with empty texts, which an unstreamed answer leaves out.
        return Message("assistant", tuple(p for p in parts if not isinstance(p, Text | Reasoning) or p.content))


@dataclass(slots=True)
class ResponseAccumulator:
    """A response in any wire format, from its body (`whole`) or from each JSON event of a stream (`event`).

    Attributes:
        id, model: as the provider reports them.
        usage: as the provider reports it; {} if it does not.
        error: the provider's error message.
    """

    id: str | None = None
    model: str | None = None
    usage: Json = field(default_factory=dict)
    error: str | None = None
    _choices: dict[int, _Choice] = field(default_factory=dict)

    def received(self, response: Any, body: bytes, load: Callable[[bytes], Any] = json.loads) -> None:
        """Add what was received of the body of an httpx response. A body that cannot be read adds nothing.

        Args:
            load: as of `json_values`.
        """
        for value in json_values(response, body, load):
            # Google's answers are made of the same parts, whole, as events, or as an array of them.
            for each in google.listed(value):
                (self.event if is_stream(response) or "candidates" in _dict(each) else self.whole)(each)

    def whole(self, body: Any) -> None:
        """Add a body that is not a stream."""
        if not isinstance(body, Mapping):
            return
        if isinstance(body.get("error"), Mapping | str):
            self._fail(body["error"])
        elif body.get("status") == "failed":
            self._fail("the provider says that the response has failed")
        self._head(body)
        for part in _dicts(body.get("choices")):
            choice = self._choice(part.get("index"))
            answer = part.get("message", part.get("text"))
            choice.whole = [answer if isinstance(answer, str) else {"content": None, **_dict(answer)}]
            self._finish(choice, part.get("finish_reason"))
        if isinstance(body.get("output"), list):
            choice = self._choice(0)
            items = _dicts(body["output"])
            incomplete = _str(_dict(body.get("incomplete_details")).get("reason"))
            calls_tools = any(item.get("type") == "function_call" for item in items)
            finish = finish_reason(_str(body.get("status")), incomplete or None, calls_tools=calls_tools)
            choice.finish = finish or choice.finish
            # At the end of a stream some servers leave out what they have streamed.
            if body["output"] or choice.streamed is None:
                choice.whole = body["output"]
                choice.streamed = None
        if body.get("type") == "message":
            choice = self._choice(0)
            choice.whole, choice.finish = [body], _str(body.get("stop_reason")) or choice.finish

    def event(self, data: Any) -> None:
        """Add one event of a stream."""
        if not isinstance(data, Mapping):
            return
        kind = data.get("type")
        if kind is not None:
            if isinstance(kind, str):
                self._typed(kind, data)
            return
        if data.get("error") is not None:
            self._fail(data["error"])
        self._head(data)
        if "candidates" in data:
            for part in _dicts(data["candidates"]):
                choice = self._choice(part.get("index"))
                _streamed(choice, GoogleParts).add(part.get("content"))
                choice.finish = _str(part.get("finishReason")) or choice.finish
        if "choices" in data:
            for part in _dicts(data["choices"]):
                choice = self._choice(part.get("index"))
                delta = part.get("delta")
                message = _streamed(choice, ChatMessage)
                if isinstance(delta, Mapping):
                    message.add(delta)
                elif "text" in part:
                    message.add({"content": part["text"]})
                self._finish(choice, part.get("finish_reason"))

    def _typed(self, kind: str, data: Json) -> None:
        """Add an event that names its type: of the Responses API, or of Anthropic's."""
        if kind == "content_block_delta":
            _streamed(self._choice(0), MessageBlocks).add(_index(data.get("index")), _dict(data.get("delta")))
        elif kind == "content_block_start":
            _streamed(self._choice(0), MessageBlocks).start(_index(data.get("index")), _dict(data.get("content_block")))
        elif kind == "content_block_stop":
            _streamed(self._choice(0), MessageBlocks).stop(_index(data.get("index")))
        elif kind == "message_delta":
            self._choice(0).finish = _str(_dict(data.get("delta")).get("stop_reason")) or None
            self._head(data)
        elif kind == "error":
            self._fail(data.get("error") or data.get("message"))
        elif ResponseItems.knows(kind):
            _streamed(self._choice(0), ResponseItems).add(kind, data)
        elif isinstance(data.get("message"), Mapping) or isinstance(data.get("response"), Mapping):
            # The beginning of a message, and each state of a response.
            self.whole(data.get("message") or data.get("response"))

    def tool_calls(self) -> Iterator[ToolCall]:
        """Every tool call that has an id."""
        for choice in self._choices.values():
            with contextlib.suppress(UnreadableMessageError):
                yield from (call for call in choice.message().tool_calls if call.id)

    def facts(self, content: bool) -> dict[str, Any]:
        """Span attributes; with the messages if `content`."""
        choices = [choice for _, choice in sorted(self._choices.items())]
        reasons = [choice.finish for choice in choices if choice.finish]
        facts: dict[str, Any] = {
            semconv.RESPONSE_ID: self.id,
            semconv.RESPONSE_MODEL: self.model,
            semconv.FINISH_REASONS: reasons or None,
            **usage_facts(self.usage),
        }
        if content and choices:
            try:
                messages = [choice.message() for choice in choices]
                facts[semconv.OUTPUT_MESSAGES] = write.to_json(messages, [choice.finish or "" for choice in choices])
            except UnreadableMessageError:
                items = [item for choice in choices for item in choice.items()]
                facts[semconv.OUTPUT_MESSAGES] = json.dumps(items, default=str)
        return {k: v for k, v in facts.items() if v is not None}

    def _choice(self, index: Any) -> _Choice:
        return self._choices.setdefault(_index(index), _Choice())

    def _finish(self, choice: _Choice, reason: Any) -> None:
        """Note why a choice of Chat Completions ended; "error" is what OpenRouter says of a provider that failed."""
        choice.finish = _str(reason) or choice.finish
        if reason == "error" and self.error is None:
            self._fail("the answer's finish_reason is 'error'")

    def _fail(self, error: Any) -> None:
        self.error = str(error.get("message") or error) if isinstance(error, Mapping) else str(error)

    def _head(self, body: Json) -> None:
        self.id = _str(body.get("id") or body.get("responseId")) or self.id
        self.model = _str(body.get("model") or body.get("modelVersion")) or self.model
        usage = reported_usage(body)
        if isinstance(usage, Mapping):
            # A stream may report its numbers one by one, with nulls for the others.
            self.usage = {**self.usage, **{name: value for name, value in usage.items() if value is not None}}


Streamed = TypeVar("Streamed", bound=StreamedAnswer)


def _streamed(choice: _Choice, api: type[Streamed]) -> Streamed:
    """What has been streamed of a choice, in the form of an API."""
    if not isinstance(choice.streamed, api):
        choice.streamed = api()
    return choice.streamed


def _dicts(value: Any) -> list[Json]:
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list) else []


def _dict(value: Any) -> Json:
    return value if isinstance(value, Mapping) else {}


def _str(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _index(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list | tuple) else []

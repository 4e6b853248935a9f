"""Requests as other tracers record them, under names of their own: what each is called, and which question it asks.

`FORMS` is the one table of their names. Only the question is read from them (`question`): their calls are not trained.

Sources: the conventions of OpenInference, OpenLLMetry (Traceloop), Langfuse, MLflow, Logfire and Pydantic AI, Vercel's
AI SDK, LangWatch, Laminar, Braintrust, Google's Agent Development Kit, Genkit, and the events of OpenTelemetry's
conventions before version 1.37.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from agl import semconv
from agl.errors import UnreadableMessageError
from agl.messages import read
from agl.messages.types import Message, Other, Text

_DETAILS = "gen_ai.client.inference.operation.details"
FORMS: Mapping[str, str] = {
    "langfuse.trace.input": "Langfuse (langfuse.*)",
    "langfuse.observation.input": "Langfuse (langfuse.*)",
    "langfuse.": "Langfuse (langfuse.*)",
    "llm.input_messages": "OpenInference (llm.input_messages)",
    "input.value": "OpenInference (input.value)",
    "gen_ai.prompt": "OpenLLMetry (gen_ai.prompt)",
    "traceloop.entity.input": "OpenLLMetry (traceloop.entity.input)",
    "mlflow.spanInputs": "MLflow (mlflow.spanInputs)",
    "ai.prompt.messages": "Vercel's AI SDK (ai.prompt)",
    "ai.prompt": "Vercel's AI SDK (ai.prompt)",
    "pydantic_ai.all_messages": "Pydantic AI (pydantic_ai.all_messages)",
    "all_messages_events": "Pydantic AI (all_messages_events)",
    "request_data": "Logfire (request_data)",
    "events": "Logfire (events)",
    "langwatch.input": "LangWatch (langwatch.input)",
    "lmnr.span.input": "Laminar (lmnr.span.input)",
    "braintrust.input_json": "Braintrust (braintrust.input)",
    "braintrust.input": "Braintrust (braintrust.input)",
    "gcp.vertex.agent.llm_request": "Google's ADK (gcp.vertex.agent.llm_request)",
    "genkit:input": "Genkit (genkit:input)",
    "gen_ai.user.message": "events (gen_ai.user.message)",
    "gen_ai.content.prompt": "events (gen_ai.content.prompt)",
    _DETAILS: f"events ({_DETAILS})",
}
"""How the names of attributes and events begin under which other tracers record a request -> what that form is called.
The first one that a span has is read."""
_IN_PIECES = ("llm.input_messages", "gen_ai.prompt")
"""Names under which each field of each message may be an attribute of its own."""
_INSIDE = ("inputs", "messages", "contents", "input", "prompt")
"""Fields under which an input has the messages or the text, in the order in which they are looked for."""
_SETTINGS = frozenset(
    {
        "model",
        "system",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "max_tokens",
        "max_output_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "n",
        "text",
        "reasoning",
        "response_format",
        "store",
        "include",
        "metadata",
        "user",
        "timeout",
        "extra_headers",
        "extra_body",
    }
)
"""Fields next to a text that asks, of a request, that ask nothing."""
_ROLES = {
    "human": "user",
    "HumanMessageChunk": "user",
    "ai": "assistant",
    "AIMessageChunk": "assistant",
    "model": "assistant",
}
_SPEAKERS = frozenset({"user", "assistant", "system", "developer", "tool", "function", *_ROLES})
_EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")


class _SpanEvent(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def attributes(self) -> Any: ...


class RecordedWithEvents(read.Recorded, Protocol):
    """A span: agl's, or one of OpenTelemetry's SDK."""

    @property
    def events(self) -> Sequence[_SpanEvent]: ...


def form(span: RecordedWithEvents) -> str | None:
    """The form in which a span has texts that are not read; None if it has none."""
    names = [*span.attributes, *(event.name for event in span.events)]
    return next((form for begin, form in FORMS.items() if any(name.startswith(begin) for name in names)), None)


def question(span: RecordedWithEvents) -> dict[str, Any] | None:
    """The question of a span's request, or of a function's input; None if that is not recorded.

    Returns:
        "input": what the user said last, before any answer to it: what comes before, such as examples or earlier turns,
        asked something else. "files": digests of the pictures and files among it. "history": a digest of what was said
        before, if there were answers: the same question after another conversation is another one.
    """
    for history in _histories(span):
        if history and (asked := last_question(history)) is not None:
            return asked
    return None


def last_question(history: Sequence[Message]) -> dict[str, Any] | None:
    """The question of a request's last user message, as of `question`; None if there is none."""
    last = next((i for i in reversed(range(len(history))) if _speaks(history[i])), None)
    if last is None:
        # Some programs write all into the system prompt.
        prompts = [message.text for message in history if message.role in ("system", "developer") and message.text]
        return {"input": "\n\n".join(prompts)} if prompts else None
    said = [*takewhile(_speaks, reversed(history[: last + 1]))][::-1]
    asked: dict[str, Any] = {"input": "\n\n".join(message.text for message in said if message.text)}
    if files := [_digest(_content(part)) for message in said for part in message.parts if isinstance(part, Other)]:
        asked["files"] = files
    before = history[: last + 1 - len(said)]
    if any(message.role == "assistant" for message in before):
        asked["history"] = _digest(
            [(message.role, message.text) for message in before if message.role not in ("system", "developer")]
        )
    return asked


def _speaks(message: Message) -> bool:
    """Whether a user says something here: tools' results are the user's messages in some APIs."""
    said = any(isinstance(part, Other) or (isinstance(part, Text) and part.content) for part in message.parts)
    return message.role == "user" and said


def _content(part: Other) -> dict[str, Any]:
    return {name: value for name, value in part.value.items() if name != "cache_control"}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _histories(span: RecordedWithEvents) -> Iterator[list[Message]]:
    """The messages that a span has in each form that it has them in; the conventions' come first."""
    try:
        yield read.sent(span)
    except UnreadableMessageError:
        pass
    for name in FORMS:
        recorded = _parsed(span.attributes.get(name))
        if recorded is not None and (name != "events" or _are_events(recorded)):
            yield _messages(recorded)
        elif name in _IN_PIECES and (pieces := _pieces(span.attributes, f"{name}.")):
            yield _messages(pieces)
    spoken = [_of_event(event.name, event.attributes) for event in span.events if _EVENT.fullmatch(event.name)]
    yield _messages(spoken)
    for event in span.events:
        if event.name == _DETAILS:
            yield _messages(_parsed(event.attributes.get(semconv.INPUT_MESSAGES)))
        elif event.name == "gen_ai.content.prompt":
            yield _messages(_parsed(event.attributes.get("gen_ai.prompt")))


def _are_events(value: Any) -> bool:
    """Whether these are Logfire's: others use that name, too."""
    return isinstance(value, list) and all(isinstance(item, Mapping) and "event.name" in item for item in value)


def _pieces(attributes: Mapping[str, Any], begin: str) -> list[dict[str, Any]]:
    """The messages whose fields are attributes: `gen_ai.prompt.0.content`, `llm.input_messages.0.message.content`."""
    messages: dict[int, dict[str, Any]] = {}
    for name, value in attributes.items():
        number, _, field = name.removeprefix(begin).partition(".")
        field = field.removeprefix("message.")
        if name.startswith(begin) and number.isdecimal() and field:
            message = messages.setdefault(int(number), {"role": "user"})
            if field == "role":
                message["role"] = value
            elif field == "content":
                message["content"] = _parsed_parts(value)
            elif field.startswith("contents.") and not field.endswith(".type"):
                # OpenInference's parts.
                part = {"type": "text", "text": value} if field.endswith(".text") else {"type": field, "value": value}
                message.setdefault("content", []).append(part)
    return [message for _, message in sorted(messages.items()) if "content" in message]


def _of_event(name: str, attributes: Any) -> dict[str, Any]:
    """The message of an event, or of Logfire's record of it."""
    if isinstance(answer := attributes.get("message"), Mapping):
        return {"role": "assistant", "content": _parsed_parts(answer.get("content"))}
    said = _EVENT.fullmatch(name)
    body = attributes.get("body")
    fields = {**attributes, **body} if isinstance(body, Mapping) else dict(attributes)
    role = fields.get("role") or (said and said[1]) or "user"
    return {"role": role, "content": _parsed_parts(fields.get("content"))}


def _parsed(value: Any) -> Any:
    """The value of JSON text; anything else unchanged."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{", '"')):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _messages(value: Any) -> list[Message]:
    """The messages of a recorded input; of one that has none, a user's message of its only text, or of all of it."""
    if value is None or value in ("", [], {}):
        return []
    if isinstance(value, Mapping) and isinstance(inputs := value.get("inputs"), Mapping):
        # LangChain's run, of which the rest is how it is traced.
        value = inputs
    try:
        if (history := _history(value)) is not None:
            return history
    except (UnreadableMessageError, RecursionError):
        pass
    try:
        texts = [*_texts(value)]
        text = texts[0] if len(texts) == 1 else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    except (RecursionError, TypeError):
        return []
    return [Message("user", (Text(text),))]


def _history(value: Any) -> list[Message] | None:
    """The messages in an input, however deep; None if there are none.

    Raises:
        UnreadableMessageError: one is in no known form.
    """
    if isinstance(value, str):
        return read.messages(value)
    if isinstance(value, list | tuple):
        spoken = [_spoken(item) for item in value]
        if spoken and all(item is not None for item in spoken):
            return read.messages(spoken)
        # LangChain's inputs are batches.
        return _history(value[0]) if len(value) == 1 and isinstance(value[0], list | Mapping) else None
    if not isinstance(value, Mapping):
        return None
    if "contents" in value:
        return read.body(value)
    for name in _INSIDE:
        inner = _parsed(value.get(name))
        alone = all(not other for field, other in value.items() if field != name and field not in _SETTINGS)
        known = isinstance(inner, list | Mapping) or (isinstance(inner, str) and bool(inner) and alone)
        if known and (found := _history(inner)) is not None:
            return found
    return None


def _spoken(item: Any) -> dict[str, Any] | None:
    """An item as a message with a role; None if it is none."""
    if isinstance(item, list | tuple) and len(item) == 2 and _role(item[0]):
        return {"role": _role(item[0]), "content": item[1]}
    if not isinstance(item, Mapping):
        return None
    if "event.name" in item:
        return _of_event(str(item["event.name"]), item)
    if isinstance(item.get("message"), Mapping):
        item = item["message"]
    if "lc" in item and isinstance(item.get("kwargs"), Mapping):
        item = item["kwargs"]
    role = _role(item.get("role") or item.get("type"))
    if role is None:
        # An item of the Responses API.
        return dict(item) if item.get("type") in ("function_call", "function_call_output", "reasoning") else None
    if "parts" in item:
        return {**item, "role": role}
    return {"role": role, "content": _parsed_parts(item.get("content"))}


def _role(name: Any) -> str | None:
    """The role that a message names; None if it is none."""
    return _ROLES.get(name, name) if isinstance(name, str) and name in _SPEAKERS else None


def _parsed_parts(content: Any) -> Any:
    """A message's content, of which some tracers record the parts as JSON text."""
    parsed = _parsed(content)
    parts = isinstance(parsed, list) and all(isinstance(part, Mapping) and "type" in part for part in parsed)
    return parsed if parts or not isinstance(content, str) else content


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value, and its numbers as texts, at any depth."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif value is not None:
        yield str(value)

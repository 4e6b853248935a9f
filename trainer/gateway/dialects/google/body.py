"""A request in the form of Google's API, which is read as the one of Chat Completions that means the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl import messages
from agl.errors import UnreadableMessageError
from agl.messages import google
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.dialects.base import DialectRequest
from agl.trainer.gateway.dialects.chat.body import read as read_chat
from agl.trainer.gateway.dialects.common import (
    OTHER_DISTRIBUTION,
    Unsupported,
    expect,
    fields,
    known_fields,
    require_neutral,
)
from agl.trainer.gateway.errors import RequestError

BODY = {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig"} | {
    "model", "safetySettings", "labels", "serviceTier", "store"
}  # fmt: skip
"""The fields of a request; those of the second set have no effect."""
CONFIG = {*google.OPTIONS, "responseMimeType", "responseSchema", "responseJsonSchema", "thinkingConfig"} | {
    "mediaResolution"
}
"""Those of its `generationConfig`; a resolution has no effect where there are no media."""
COUNTS = {"maxOutputTokens", "candidateCount"}
"""Those of which 0 asks for nothing."""
TOOL_CONFIG = {"functionCallingConfig", "retrievalConfig"}
CALLING = {"mode", "allowedFunctionNames"}

_ON_SERVERS = Unsupported("is of Google's servers, which a policy in training does not have; leave it out")
_NO_LOGPROBS = Unsupported("is not supported; Chat Completions and Responses have the log-probs of an answer")
_TEXT_ALONE = Unsupported("asks for more than text, and a policy in training writes text alone; leave it out")
UNSUPPORTED_OF_BODY: Mapping[str, Unsupported] = dict.fromkeys(
    ("cachedContent", "continuationToken", "modelArmorConfig"), _ON_SERVERS
)
UNSUPPORTED_OF_CONFIG = {
    **dict.fromkeys(("presencePenalty", "frequencyPenalty"), OTHER_DISTRIBUTION),
    **dict.fromkeys(("responseLogprobs", "logprobs"), _NO_LOGPROBS),
    **dict.fromkeys(("routingConfig", "modelSelectionConfig", "modelConfig", "generationOutputConfig"), _ON_SERVERS),
    **dict.fromkeys(("speechConfig", "imageConfig", "audioTimestamp", "audioTranscriptionConfig"), _TEXT_ALONE),
    "enableEnhancedCivicAnswers": _ON_SERVERS,
    "responseModalities": _TEXT_ALONE._replace(neutral=([], ["TEXT"], ["MODALITY_UNSPECIFIED"])),
}
UNSUPPORTED_OF_TOOL_CONFIG = {"includeServerSideToolInvocations": _ON_SERVERS}
UNSUPPORTED_OF_CALLING = {
    "streamFunctionCallArguments": Unsupported("is not supported: a call comes whole; leave it out")
}
UNSUPPORTED_OF_FUNCTION = {
    "behavior": Unsupported("is for the Live API; leave it out", ("", "UNSPECIFIED", "BLOCKING"))
}
"""The other documented fields of each."""

_CHOICES = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_NAMES = {"tool_choice": "toolConfig", "response_format": "responseSchema", **{v: k for k, v in google.OPTIONS.items()}}

GoogleRequest = DialectRequest[dict[str, Any]]
"""Its body is the `thinkingConfig`."""


def read(data: Any, access: Access, *, model: str = "", stream: bool = False, counting: bool = False) -> GoogleRequest:
    """A request from its body's JSON, and from the model and the method of its URL.

    Args:
        counting: whether its tokens are only counted, so that it may stand in a `generateContentRequest`.

    Raises:
        RequestError: 400, naming the field at fault.
    """
    if counting:
        data = google.camel(data).get("generateContentRequest") or data
    body = _known(data, BODY, UNSUPPORTED_OF_BODY, "")
    config = _known(body.get("generationConfig"), CONFIG, UNSUPPORTED_OF_CONFIG, "generationConfig.")
    # Protobuf's zero is a number that is not set, and a tool in which nothing is set is none.
    config = {name: value for name, value in config.items() if name not in COUNTS or value != 0}
    declared = [tool for tool in google.listed(body.get("tools")) if not _is_empty(tool)]
    contents = expect(body.get("contents") or None, list, "contents", "is not a list of contents")
    for i, content in enumerate(contents):
        role = fields(content, {"role": str | None, "parts": list}, f"contents.{i}")["role"]
        if role not in (None, "", "user", "model", "function"):
            raise _refused(f"contents.{i}.role", f"is {role!r}, neither user nor model")
    if contents[-1].get("role") == "model":
        raise _refused("contents", "ends with the model's; an answer cannot be begun for the policy")
    _known(body.get("systemInstruction"), {"role", "parts"}, {}, "systemInstruction.")
    asked = {**body, "contents": _turns(contents), "generationConfig": config, "tools": declared}
    known = dict(google.common(asked))
    choice = _known(body.get("toolConfig"), TOOL_CONFIG, UNSUPPORTED_OF_TOOL_CONFIG, "toolConfig.")
    choice = _known(choice.get("functionCallingConfig"), CALLING, UNSUPPORTED_OF_CALLING, "functionCallingConfig.")
    chosen: Any = _CHOICES.get(str(choice.get("mode") or "AUTO"), str(choice.get("mode")))
    allowed = expect(choice.get("allowedFunctionNames") or [], list, "allowedFunctionNames", "is not a list")
    for i, tool in enumerate(declared):
        for k, function in enumerate(google.listed(google.camel(tool).get("functionDeclarations"))):
            require_neutral(google.camel(function), UNSUPPORTED_OF_FUNCTION, f"tools.{i}.functionDeclarations.{k}.")
    try:
        tools = messages.read.tools(known["tools"])
        if choice.get("mode") == "VALIDATED":
            tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
        if chosen == "required" and len(allowed) == 1:
            chosen = {"type": "function", "function": {"name": allowed[0]}}
        elif allowed:
            # Of several, any may be called: the policy sees no others.
            tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        history = [*messages.read.system(known.pop("system")), *messages.read.messages(known["messages"])]
        written = messages.write.to_openai(history)
        chat = {**known, "messages": written, "tools": tools, "tool_choice": chosen, **_form(config)}
        request = read_chat({"model": model, **chat}, access)
    except UnreadableMessageError as error:
        raise RequestError(400, error.message, code="unsupported_value") from None
    except RequestError as error:
        name = (error.param or "").partition(".")[0]
        shown = _NAMES.get(name, name) + error.message.removeprefix(name)
        raise RequestError(error.status, shown, code=error.code, param=_NAMES.get(name, error.param)) from None
    failed = frozenset(result.id for message in history for result in message.tool_results if result.failed)
    thinking = google.camel(config.get("thinkingConfig"))
    schema = "responseSchema" if config.get("responseJsonSchema") is None else "responseJsonSchema"
    chat = replace(request.chat, failed_tools=failed, schema_field=f"generationConfig.{schema}")
    return DialectRequest(thinking, chat, stream)


def _turns(contents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The contents, neighbouring ones of the model as one: Google's SDK keeps a streamed answer as a content for each
    of its chunks, the last of which has an empty text."""
    turns: list[dict[str, Any]] = []
    for content in contents:
        if turns and content.get("role") == "model" == turns[-1].get("role"):
            # Extended in place: a new list for each chunk would take quadratic time.
            turns[-1]["parts"].extend(content["parts"])
        else:
            turns.append({**content, "parts": [*content["parts"]]})
    return turns


def _is_empty(tool: Any) -> bool:
    return isinstance(tool, dict) and all(value is None for value in tool.values())


def _known(data: Any, known: Collection[str], refused: Mapping[str, Unsupported], where: str) -> dict[str, Any]:
    """The `known_fields` of an object (of None, none)."""
    found = google.camel(expect({} if data is None and where else data, dict, where[:-1] or "the body", "is no object"))
    return known_fields(found, known, refused, where)


def _form(config: dict[str, Any]) -> dict[str, Any]:
    """The `response_format` of Chat Completions; none for free text."""
    schema, kind = config.get("responseJsonSchema"), config.get("responseMimeType") or "text/plain"
    schema = google.json_schema(config.get("responseSchema")) if schema is None else google.ordered(schema)
    if kind != "application/json" and (schema is not None or kind != "text/plain"):
        raise _refused("responseMimeType", f"is {kind!r}; application/json can have a schema, text/plain has none")
    if kind != "application/json":
        return {}
    if schema is None:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _refused(where: str, why: str) -> RequestError:
    return RequestError(400, f"{where} {why}", code="invalid_value", param=where)

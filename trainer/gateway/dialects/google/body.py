"""A request in the form of Google's API, which is read as the one of Chat Completions that means the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, Required

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from agl import messages
from agl.errors import UnreadableMessageError
from agl.messages import google
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.dialects.base import DialectRequest
from agl.trainer.gateway.dialects.chat.body import read_fields as read_chat
from agl.trainer.gateway.dialects.common import (
    OTHER_DISTRIBUTION,
    Integer,
    Several,
    Unsupported,
    check_at_most,
    check_tool_names,
    checked,
    closed,
    expect,
    known_fields,
    pairs,
    tool_names,
)
from agl.trainer.gateway.errors import RequestError

Upper = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)
"""Google takes the words of its enumerations in small letters, too."""


@closed
class Body(TypedDict, total=False):
    """The fields of a request. Those under "no effect" are accepted and do not concern sampling."""

    contents: Any
    systemInstruction: Any
    tools: Any
    toolConfig: Any
    generationConfig: Any
    # No effect.
    model: str
    safetySettings: Any
    labels: Annotated[dict[str, str], pairs(64)]
    serviceTier: str
    store: bool


@closed
class SafetySetting(TypedDict, total=False):
    """It has no effect, so its words are not read."""

    category: str
    threshold: str
    method: str


@closed
class GenerationConfig(TypedDict, total=False):
    """A resolution has no effect where there are no media. Of numbers, Chat Completions has the bounds."""

    temperature: float
    topP: float
    topK: Annotated[float, Field(ge=0)]
    maxOutputTokens: Integer
    seed: Integer
    candidateCount: Integer
    stopSequences: Several[str] | str
    responseMimeType: str
    responseSchema: Any
    responseJsonSchema: Any
    thinkingConfig: Any
    mediaResolution: str


@closed
class ThinkingConfig(TypedDict, total=False):
    """How much it thinks has no effect."""

    includeThoughts: bool
    thinkingBudget: Integer
    thinkingLevel: Annotated[Literal["THINKING_LEVEL_UNSPECIFIED", "MINIMAL", "LOW", "MEDIUM", "HIGH"], Upper]


@closed
class ToolConfig(TypedDict, total=False):
    functionCallingConfig: Any
    retrievalConfig: Any


@closed
class FunctionCallingConfig(TypedDict, total=False):
    mode: Annotated[Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"], Upper]
    allowedFunctionNames: Several[str]


@closed
class RetrievalConfig(TypedDict, total=False):
    """It has no effect where nothing is retrieved."""

    latLng: Annotated[dict[str, float], pairs(2)]
    languageCode: str


@closed
class Tool(TypedDict, total=False):
    functionDeclarations: Any


@closed
class FunctionDeclaration(TypedDict, total=False):
    """What it returns is not told to the policy."""

    name: Required[str]
    description: str
    parameters: dict[str, Any]
    parametersJsonSchema: dict[str, Any]
    response: dict[str, Any]
    responseJsonSchema: Any


@closed
class Content(TypedDict, total=False):
    role: str
    parts: Required[Any]


@closed
class TextPart(TypedDict, total=False):
    """A part with what says something about it; of that, the thought alone is read."""

    text: str
    thought: bool
    thoughtSignature: str
    partMetadata: dict[str, Any]
    mediaResolution: Any


@closed
class Part(TextPart, total=False):
    functionCall: Any
    functionResponse: Any


@closed
class FunctionCall(TypedDict, total=False):
    id: str
    name: Required[str]
    args: dict[str, Any]


@closed
class FunctionResponse(TypedDict, total=False):
    """When a result is read is a matter of the Live API."""

    id: str
    name: Required[str]
    response: dict[str, Any]
    willContinue: bool
    scheduling: str


@closed
class CountedRequest(TypedDict, total=False):
    """What a request is counted in. Its own contents have no effect beside those of the request."""

    generateContentRequest: Required[dict[str, Any]]
    contents: Any
    model: str


MOST_STOPS = 5
"""Texts of `stopSequences`."""

ZERO_IS_UNSET = {"maxOutputTokens", "candidateCount"}
"""Options of which 0 asks for nothing."""

_ON_SERVERS = Unsupported("is of Google's servers, which a policy in training does not have; leave it out")
_NO_LOGPROBS = Unsupported("is not supported; Chat Completions and Responses have the log-probs of an answer")
_TEXT_ALONE = Unsupported("asks for more than text, and a policy in training writes text alone; leave it out")
_READS_TEXT = Unsupported("is no text, and a policy reads text alone; leave it out", ())
_IN_PIECES = Unsupported("is not supported: a call comes whole; leave it out")
UNSUPPORTED_OF_BODY: Mapping[str, Unsupported] = dict.fromkeys(
    ("cachedContent", "continuationToken", "modelArmorConfig"), _ON_SERVERS
)
UNSUPPORTED_OF_CONFIG = {
    **dict.fromkeys(("presencePenalty", "frequencyPenalty"), OTHER_DISTRIBUTION),
    **dict.fromkeys(("responseLogprobs", "logprobs"), _NO_LOGPROBS),
    **dict.fromkeys(("routingConfig", "modelSelectionConfig", "modelConfig", "generationOutputConfig"), _ON_SERVERS),
    **dict.fromkeys(("speechConfig", "imageConfig", "audioTimestamp", "audioTranscriptionConfig"), _TEXT_ALONE),
    **dict.fromkeys(("enableAffectiveDialog", "translationConfig", "responseFormat"), _TEXT_ALONE),
    "enableEnhancedCivicAnswers": _ON_SERVERS,
    "responseModalities": _TEXT_ALONE._replace(neutral=([], ["TEXT"], ["text"], ["MODALITY_UNSPECIFIED"])),
}
UNSUPPORTED_OF_TOOL_CONFIG = {"includeServerSideToolInvocations": _ON_SERVERS}
UNSUPPORTED_OF_CALLING = {"streamFunctionCallArguments": _IN_PIECES}
UNSUPPORTED_OF_TOOL = {
    **dict.fromkeys(
        (
            "retrieval",
            "computerUse",
            "fileSearch",
            "googleSearch",
            "googleSearchRetrieval",
            "googleMaps",
            "codeExecution",
            "enterpriseWebSearch",
            "parallelAiSearch",
            "exaAiSearch",
            "urlContext",
        ),
        _ON_SERVERS._replace(neutral=()),
    ),
    "mcpServers": _ON_SERVERS,
}
UNSUPPORTED_OF_FUNCTION = {
    "behavior": Unsupported("is for the Live API; leave it out", ("", "UNSPECIFIED", "BLOCKING"))
}
UNSUPPORTED_OF_PART: Mapping[str, Unsupported] = dict.fromkeys(
    (
        "inlineData",
        "fileData",
        "executableCode",
        "codeExecutionResult",
        "toolCall",
        "toolResponse",
        "videoMetadata",
        "audioTranscription",
        "audioMetadata",
        "speechMetadata",
        "documentMetadata",
        "spreadsheetMetadata",
        "mediaProcessing",
    ),
    _READS_TEXT,
)
UNSUPPORTED_OF_CALL = {"partialArgs": _IN_PIECES, "willContinue": _IN_PIECES}
UNSUPPORTED_OF_RESULT = {"parts": _READS_TEXT._replace(neutral=([],))}
"""The other documented fields of each."""

_CALLING = "toolConfig.functionCallingConfig"
_ROLES = ("", "user", "model", *google.RESULT_ROLES)
_CHOICES = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_NAMES = {
    "tool_choice": "toolConfig",
    **{theirs: f"generationConfig.{ours}" for ours, theirs in google.OPTIONS.items()},
}
"""What Chat Completions calls a field -> its place in a request of Google's."""

GoogleRequest = DialectRequest[dict[str, Any]]
"""Its body is the `thinkingConfig`."""


def read(data: Any, access: Access, *, model: str = "", stream: bool = False, counting: bool = False) -> GoogleRequest:
    """A request from its body's JSON, and from the model and the method of its URL.

    Args:
        counting: whether its tokens are only counted, so that it may stand in a `generateContentRequest`, and end with
            the model's turn.

    Raises:
        RequestError: 400, naming the field at fault.
    """
    if counting and (whole := google.camel(data).get("generateContentRequest")):
        _object(CountedRequest, data, "")
        data = whole
    body = _object(Body, data, "", UNSUPPORTED_OF_BODY)
    for i, setting in enumerate(google.listed(body.get("safetySettings"))):
        _object(SafetySetting, setting, f"safetySettings.{i}")
    config = _object(GenerationConfig, body.get("generationConfig") or {}, "generationConfig", UNSUPPORTED_OF_CONFIG)
    # Protobuf's zero is a number that is not set, and a tool in which nothing is set is none.
    config = {name: value for name, value in config.items() if name not in ZERO_IS_UNSET or value != 0}
    check_at_most(google.listed(config.get("stopSequences")), MOST_STOPS, "generationConfig.stopSequences")
    thinking = _object(ThinkingConfig, config.get("thinkingConfig") or {}, "generationConfig.thinkingConfig")
    _only_one(thinking, "thinkingBudget", "thinkingLevel", "generationConfig.thinkingConfig.")
    turns = google.listed(body.get("contents"))
    contents = [_content(turn, f"contents.{i}", Part) for i, turn in enumerate(turns)]
    if not contents:
        raise _refused("contents", "is empty; it has the turns of the conversation")
    for i, content in enumerate(contents):
        if content.get("role", "") not in _ROLES:
            raise _refused(f"contents.{i}.role", f"is {content['role']!r}, neither user nor model")
    if contents[-1].get("role") == "model" and not counting:
        raise _refused("contents", "ends with the model's; an answer cannot be begun for the policy")
    system = _content(body["systemInstruction"], "systemInstruction", TextPart) if "systemInstruction" in body else None
    choice = _object(ToolConfig, body.get("toolConfig") or {}, "toolConfig", UNSUPPORTED_OF_TOOL_CONFIG)
    _object(RetrievalConfig, choice.get("retrievalConfig") or {}, "toolConfig.retrievalConfig")
    calling = choice.get("functionCallingConfig") or {}
    calling = _object(FunctionCallingConfig, calling, _CALLING, UNSUPPORTED_OF_CALLING)
    declared = [_tool(tool, f"tools.{i}") for i, tool in enumerate(google.listed(body.get("tools")))]
    _check_functions(declared)
    asked = {
        "contents": _turns(contents),
        "systemInstruction": system,
        "generationConfig": config,
        "tools": [tool for tool in declared if tool],
    }
    known = dict(google.common(asked))
    form = _form(config)
    try:
        tools, chosen = _chosen(messages.read.tools(known["tools"]), calling)
        history = [*messages.read.system(known.pop("system")), *messages.read.messages(known["messages"])]
        written = messages.write.to_openai(history)
        chat = {**known, "messages": written, "tools": tools, "tool_choice": chosen, **form}
        request = read_chat({"model": model, **chat}, access)
    except UnreadableMessageError as error:
        raise RequestError(400, error.message, code="unsupported_value") from None
    except RequestError as error:
        name = (error.param or "").partition(".")[0]
        shown = _NAMES.get(name, name) + error.message.removeprefix(name)
        raise RequestError(error.status, shown, code=error.code, param=_NAMES.get(name, error.param)) from None
    failed = frozenset(result.id for message in history for result in message.tool_results if result.failed)
    chat = replace(request.chat, failed_tools=failed, schema_field=f"generationConfig.{_schema_field(config)}")
    return DialectRequest(thinking, chat, stream)


def _object(
    kind: Any, value: Any, where: str, refused: Mapping[str, Unsupported] = MappingProxyType({})
) -> dict[str, Any]:
    """The fields of an object that ask for something, under the first of protobuf's names.

    Args:
        kind: a `closed` TypedDict.
        value: the object.
        where: names it in errors; "" for the body.
        refused: the documented fields that the type lacks.

    Raises:
        RequestError: 400, no object, or as for `known_fields` and `checked`.
    """
    given = google.camel(expect(value, dict, where or "the body", "is no object"))
    known = known_fields(given, kind.__annotations__, refused, f"{where}." if where else "")
    return checked(kind, known, where)


def _content(value: Any, where: str, kind: Any) -> dict[str, Any]:
    """A content; of a single part, a list. `kind`: of its parts."""
    content = _object(Content, value, where)
    parts = google.listed(content["parts"])
    return {**content, "parts": [_part(part, f"{where}.parts.{i}", kind) for i, part in enumerate(parts)]}


def _part(value: Any, where: str, kind: Any) -> dict[str, Any]:
    part = _object(kind, value, where, UNSUPPORTED_OF_PART)
    if "functionCall" in part:
        call = _object(FunctionCall, part["functionCall"], f"{where}.functionCall", UNSUPPORTED_OF_CALL)
        part = {**part, "functionCall": call}
    if "functionResponse" in part:
        result = _object(FunctionResponse, part["functionResponse"], f"{where}.functionResponse", UNSUPPORTED_OF_RESULT)
        part = {**part, "functionResponse": result}
    if not part.keys() & {"text", "functionCall", "functionResponse"}:
        raise _refused(where, "has nothing in it that is read; send text, a functionCall or a functionResponse")
    return part


def _tool(value: Any, where: str) -> dict[str, Any]:
    """A tool, if anything is set in it."""
    tool = _object(Tool, value, where, UNSUPPORTED_OF_TOOL)
    functions = []
    for k, function in enumerate(google.listed(tool.get("functionDeclarations"))):
        at = f"{where}.functionDeclarations.{k}"
        functions.append(_object(FunctionDeclaration, function, at, UNSUPPORTED_OF_FUNCTION))
        _only_one(functions[-1], "parameters", "parametersJsonSchema", f"{at}.")
        _only_one(functions[-1], "response", "responseJsonSchema", f"{at}.")
        check_tool_names({f"{at}.name": functions[-1]["name"]}, "[a-zA-Z_][a-zA-Z0-9_.:-]{0,127}")
    return {"functionDeclarations": functions} if functions else {}


def _check_functions(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse two functions of one name."""
    names = Counter(function["name"] for tool in tools for function in tool.get("functionDeclarations", ()))
    for name, count in names.items():
        if count > 1:
            raise _refused("tools", f"has {count} function declarations called {name!r}; names are unique")


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


def _chosen(tools: list[dict[str, Any]], calling: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """The tools that the policy sees, in the form of Chat Completions, and its `tool_choice`."""
    allowed = calling.get("allowedFunctionNames") or []
    for name in allowed:
        if name not in tool_names(tools):
            raise _refused(f"{_CALLING}.allowedFunctionNames", f"names {name!r}, which is not among the tools")
    mode = calling.get("mode", "AUTO")
    if mode == "VALIDATED":
        tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
    if mode == "ANY" and len(allowed) == 1:
        return tools, {"type": "function", "function": {"name": allowed[0]}}
    if allowed:
        # Of several, any may be called: the policy sees no others.
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    return tools, _CHOICES[mode]


def _form(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `response_format` of Chat Completions; none for free text."""
    _only_one(config, "responseSchema", "responseJsonSchema", "generationConfig.")
    name = _schema_field(config)
    schema = config.get(name)
    kind = config.get("responseMimeType") or "text/plain"
    if kind != "application/json":
        if schema is None and kind == "text/plain":
            return {}
        why = f"is {kind!r}; application/json can have a schema, text/plain has none"
        raise _refused("generationConfig.responseMimeType", why)
    if schema is None:
        return {"response_format": {"type": "json_object"}}
    expect(schema, dict, f"generationConfig.{name}", "is no schema, which is an object")
    schema = google.ordered(schema) if name == "responseJsonSchema" else google.json_schema(schema)
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _schema_field(config: Mapping[str, Any]) -> str:
    return "responseJsonSchema" if "responseJsonSchema" in config else "responseSchema"


def _only_one(fields: Mapping[str, Any], first: str, second: str, where: str) -> None:
    """Refuse two fields of which either says the same thing."""
    if first in fields and second in fields:
        raise _refused(f"{where}{first}", f"stands beside {second}; send one of them")


def _refused(where: str, why: str) -> RequestError:
    return RequestError(400, f"{where} {why}", code="invalid_value", param=where)

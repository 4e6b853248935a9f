"""A request in the form of Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Required

from pydantic import Discriminator, Field
from typing_extensions import TypedDict

from agl.trainer.engines.base import Sampling
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.calls import ChatRequest
from agl.trainer.gateway.dialects.base import DialectRequest
from agl.trainer.gateway.dialects.common import (
    MODERATION,
    OTHER_DISTRIBUTION,
    FormatName,
    Integer,
    OpenAIBody,
    PlainFormat,
    Several,
    ToolChoice,
    Unsupported,
    check_at_most,
    check_tool_names,
    checked,
    closed,
    contradiction,
    fields,
    json_schema,
    listed,
    nucleus,
    only_functions,
    require_neutral,
    tool_choice,
    tool_choice_object,
    typed,
    validated,
)
from agl.trainer.gateway.errors import RequestError


@closed
class StreamOptions(TypedDict, total=False):
    include_usage: bool | None
    include_obfuscation: bool | None
    continuous_usage_stats: bool | None


@closed
class NamedSchema(TypedDict, total=False):
    """`response_format.json_schema`."""

    name: Required[FormatName]
    schema: Required[dict[str, Any]]
    description: str | None
    strict: bool | None


@closed
class SchemaFormat(TypedDict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


@closed
class CacheBreakpoint(TypedDict, total=False):
    mode: Required[Literal["explicit"]]
    ttl: Literal["30m", "12h"] | None


@closed
class PredictedText(TypedDict, total=False):
    type: Required[Literal["text"]]
    text: Required[str]
    prompt_cache_breakpoint: CacheBreakpoint | None


@closed
class Prediction(TypedDict):
    type: Literal["content"]
    content: str | Several[PredictedText]


@closed
class Function(TypedDict, total=False):
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


@closed
class FunctionTool(TypedDict):
    type: Literal["function"]
    function: Function


@listed
class ToolName(TypedDict):
    name: str


@listed
class NamedTool(TypedDict):
    type: Literal["function"]
    function: ToolName


@closed
class ChosenName(TypedDict):
    name: str


@closed
class ChosenTool(TypedDict):
    type: Literal["function"]
    function: ChosenName


@closed
class AllowedTools(TypedDict):
    mode: Literal["auto", "required"]
    tools: Several[NamedTool]


@closed
class AllowedToolsChoice(TypedDict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


TOOL_CHOICE = Annotated[ChosenTool | AllowedToolsChoice, Discriminator("type")]
"""The forms of a choice that is an object."""


class ChatBody(OpenAIBody):
    """The fields of a request. Those under "no effect" are accepted and do not concern sampling."""

    model: str = ""
    messages: Several[dict[str, Any]] = Field(min_length=1)
    tools: Several[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: Integer | None = Field(default=None, ge=1)
    max_completion_tokens: Integer | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: Integer | None = Field(default=None, ge=-1)
    n: Integer | None = Field(default=None, ge=1, le=128)
    stop: str | Several[str] | None = None
    seed: Integer | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)
    return_token_ids: bool | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Discriminator("type")] | None = None
    # No effect.
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Prediction | None = None


UNSUPPORTED = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "logit_bias"), OTHER_DISTRIBUTION),
    "modalities": Unsupported("asks for more than text, and a policy in training writes text alone", ([], ["text"])),
    "audio": Unsupported("asks for speech, and a policy in training writes text alone; leave it out"),
    "web_search_options": Unsupported("needs the provider's web search; give the agent a search tool of its own", ()),
    "moderation": MODERATION,
    "functions": Unsupported("is the old form of tools; send tools"),
    "function_call": Unsupported("is the old form of tool_choice; send tool_choice", ("", "none", "auto")),
}
"""The other documented fields."""

UNSUPPORTED_OF_STREAM = {
    "continuous_usage_stats": Unsupported(
        "is vLLM's own; ask for include_usage: the last chunk has the counts of tokens"
    ),
}
"""Fields of `stream_options` that other servers have."""

MOST_STOPS = 4
"""Texts of `stop`."""

ChatCompletionsRequest = DialectRequest[ChatBody]

_RECORDED = {*ChatBody.model_fields} - {*OpenAIBody.model_fields, "messages", "tools", "store"} | {"service_tier"}
"""Fields that are recorded with the call, unchanged: those that concern sampling."""

UNSUPPORTED_OF_MESSAGE = {
    "function_call": Unsupported("is the old form of tool_calls; send tool_calls"),
    "audio": Unsupported("refers to speech, and a policy in training writes text alone; send the message's text"),
}
"""Documented fields of a message that a policy cannot read."""

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PARTS = {"text": {"text": str}, "refusal": {"refusal": str}}
_MESSAGE = {
    "role": object,
    "name": str | None,
    "tool_call_id": str | None,
    "reasoning_content": str | None,
    "content": str | list | None,
    "refusal": str | None,
    "tool_calls": list | None,
}


def read(data: Any, access: Access) -> ChatCompletionsRequest:
    """A request from its body's JSON.

    Raises:
        RequestError: 400, naming the field at fault.
    """
    request = read_fields(data, access)
    _check_as_openai(request.body)
    return request


def read_fields(data: Any, access: Access) -> ChatCompletionsRequest:
    """As `read`, with as many stop texts and with such names of tools as another provider takes.

    Raises:
        RequestError: 400, naming the field at fault.
    """
    body = validated(ChatBody, data, UNSUPPORTED)
    require_neutral(body.stream_options or {}, UNSUPPORTED_OF_STREAM, "stream_options.")
    for i, message in enumerate(body.messages):
        _check_message(message, f"messages.{i}")
    tools, force = _tools(body)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stop:
        raise RequestError(400, "stop: an empty text ends every answer", code="invalid_value", param="stop")
    if body.top_logprobs and not body.logprobs:
        raise RequestError(400, "top_logprobs needs logprobs=true", code="invalid_value", param="top_logprobs")
    sampling = Sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=nucleus(body.top_p),
        top_k=max(body.top_k or 0, 0),
        stop=stop,
        seed=body.seed or 0,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        grammar=json_schema(body.response_format, "response_format"),
    )
    options = {k: v for k, v in data.items() if k in _RECORDED}
    chat = ChatRequest(
        body.messages, tools, force, sampling, body.n or 1, options, one_call=body.parallel_tool_calls is False
    )
    return DialectRequest(body, chat, bool(body.stream))


def _check_as_openai(body: ChatBody) -> None:
    """Refuse what OpenAI refuses, whatever the model: too many stop texts, names, parameters that contradict others.

    Two tools of one name are taken, as they are there.
    """
    check_at_most(body.stop if isinstance(body.stop, list) else (), MOST_STOPS, "stop")
    names = {f"tools.{i}.function.name": tool["function"]["name"] for i, tool in enumerate(body.tools or ())}
    check_tool_names(names, "[a-zA-Z0-9_-]{1,64}")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise contradiction("max_tokens", "and max_completion_tokens are both set; send one of them")
    if body.stream_options is not None and not body.stream:
        raise contradiction("stream_options", "is only allowed when stream is true; leave it out")
    if body.parallel_tool_calls is not None and not body.tools:
        raise contradiction("parallel_tool_calls", "is only allowed when there are tools; leave it out")


def _check_message(message: Mapping[str, Any], where: str) -> None:
    known = fields(message, _MESSAGE, where)
    require_neutral(message, UNSUPPORTED_OF_MESSAGE, f"{where}.")
    if not isinstance(known["role"], str) or known["role"] not in _ROLES:
        raise RequestError(400, f"{where}.role is {known['role']!r}", code="invalid_value", param=f"{where}.role")
    for i, part in enumerate(known["content"] if isinstance(known["content"], list) else ()):
        if not isinstance(part, str):
            typed(part, _PARTS, f"{where}.content.{i}", "text")
    for k, call in enumerate(known["tool_calls"] or ()):
        at = f"{where}.tool_calls.{k}"
        function = fields(call, {"id": str | None, "function": dict}, at)["function"]
        fields(function, {"name": str, "arguments": str | dict | None}, f"{at}.function")
    if known["role"] == "tool" and known["tool_call_id"] is None:
        raise RequestError(400, f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id")


def _tools(body: ChatBody) -> ToolChoice:
    tools = []
    for i, tool in enumerate(body.tools or ()):
        only_functions(tool.get("type"), f"tools.{i}")
        tools.append(checked(FunctionTool, tool, f"tools.{i}"))
    choice = body.tool_choice
    if isinstance(choice, dict):
        return tool_choice_object(tools, choice, TOOL_CHOICE)
    return tool_choice(tools, choice, required=("required", "any"))

"""A request in the form of the Responses API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Required

from pydantic import Discriminator, Field
from typing_extensions import TypedDict

from agl import messages
from agl.trainer.engines.base import Sampling
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.calls import ChatRequest
from agl.trainer.gateway.dialects.base import DialectRequest
from agl.trainer.gateway.dialects.common import (
    CODE_CALLS,
    MODERATION,
    OTHER_DISTRIBUTION,
    SEARCHED,
    FormatName,
    Integer,
    OpenAIBody,
    PlainFormat,
    Several,
    ToolChoice,
    Unsupported,
    check_tool_names,
    checked,
    closed,
    expect,
    json_schema,
    listed,
    nucleus,
    only_functions,
    tool_choice,
    tool_choice_object,
    validated,
)
from agl.trainer.gateway.dialects.responses.items import checked_items, messages_of
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.stored_responses import Item, Message, StoredResponse

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"


@closed
class SchemaFormat(TypedDict, total=False):
    type: Required[Literal["json_schema"]]
    name: Required[FormatName]
    schema: Required[dict[str, Any]]
    description: str | None
    strict: bool | None


@closed
class Text(TypedDict, total=False):
    format: Annotated[PlainFormat | SchemaFormat, Discriminator("type")] | None
    verbosity: Literal["low", "medium", "high"] | None


Summary = Literal["auto", "concise", "detailed"]


@closed
class Reasoning(TypedDict, total=False):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    summary: Summary | None
    generate_summary: Summary | None
    context: Literal["auto", "current_turn", "all_turns"] | None
    # The SDK's own type allows any text.
    mode: str | None


@closed
class StreamOptions(TypedDict, total=False):
    include_obfuscation: bool | None


@closed
class ImageOptions(TypedDict, total=False):
    context_compression: Literal["auto", "enabled", "disabled"] | None


@closed
class FunctionTool(TypedDict, total=False):
    type: Required[Literal["function"]]
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    # No effect.
    output_schema: dict[str, Any] | None


@listed
class NamedTool(TypedDict):
    type: Literal["function"]
    name: str


@closed
class ChosenTool(TypedDict):
    type: Literal["function"]
    name: str


@closed
class AllowedTools(TypedDict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Several[NamedTool]


TOOL_CHOICE = Annotated[ChosenTool | AllowedTools, Discriminator("type")]
"""The forms of a choice that is an object."""

Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ResponsesBody(OpenAIBody):
    """The fields of a request. Those under "no effect" are accepted and do not concern sampling."""

    model: str = ""
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: Integer | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    include: Several[Includable] | None = None
    top_logprobs: Integer | None = Field(None, ge=0, le=20)
    text: Text | None = None
    # No effect. Nothing is ever truncated: a prompt that is too long is refused.
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: Reasoning | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Integer | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None
    image: ImageOptions | None = None


class CountedBody(ResponsesBody):
    """The fields of a request whose tokens are counted."""

    # No effect.
    personality: str | None = None


UNSUPPORTED = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), OTHER_DISTRIBUTION),
    "background": Unsupported("is not supported: answers are given at once"),
    "conversation": Unsupported("is not supported: use previous_response_id, or send the whole input"),
    "prompt": Unsupported("is not supported: prompts are not stored here; send instructions and input"),
    "context_management": Unsupported(
        "is not supported: a compacted history is not what the policy saw; send the whole input"
    ),
    "moderation": MODERATION,
    "access_programs": Unsupported("is for OpenAI's models alone; leave it out", ({}, {"cyber": "standard"})),
}
"""The other documented fields."""

_RECORDED = {*ResponsesBody.model_fields} - {
    *OpenAIBody.model_fields,
    "input",
    "instructions",
    "tools",
    "stream_options",
    "image",
}
"""Fields that are recorded with the call, unchanged."""

UNSUPPORTED_OF_TOOL = {
    "defer_loading": SEARCHED,
    "allowed_callers": Unsupported(CODE_CALLS, ([], ["direct"])),
    "async": Unsupported("is not supported: the policy waits for a tool's result; leave it out"),
}
"""Documented fields of a function that a policy cannot honour."""


@dataclass(frozen=True, slots=True, eq=False)
class ResponsesRequest(DialectRequest[ResponsesBody]):
    """A request of the dialect.

    Attributes:
        items: of its input.
        new: their messages.
        previous: the response that it continues.
        logprobs: whether the answer has log-probs.
        seals: whether its reasoning has `encrypted_content`.
    """

    items: list[Item]
    new: list[Message]
    previous: StoredResponse | None
    logprobs: bool
    seals: bool


def read(data: Any, access: Access, *, counting: bool = False) -> ResponsesRequest:
    """A request from its body's JSON.

    Args:
        data: the body's JSON.
        access: of the attempt; its stored responses can be continued.
        counting: whether its tokens are only counted, so that there may be no input.

    Raises:
        RequestError: 400, naming the field at fault.
    """
    body = validated(CountedBody if counting else ResponsesBody, data, UNSUPPORTED)
    previous = None if body.previous_response_id is None else access.responses.get(body.previous_response_id)
    items = [] if counting and previous is not None and body.input is None else _items(body)
    found = checked_items(items, access.responses.items)
    new = messages_of(found)
    # Instructions belong to this request alone: OpenAI does not carry them over to the next response.
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    history = [*system, *(previous.conversation() if previous else ()), *new]
    tools, force = _tools(body)
    included = body.include or ()
    logprobs = bool(body.top_logprobs) or LOGPROBS in included
    sampling = Sampling(
        max_tokens=body.max_output_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=nucleus(body.top_p),
        top_logprobs=(body.top_logprobs or 0) if logprobs else 0,
        grammar=json_schema((body.text or {}).get("format"), "text.format"),
    )
    options = {k: v for k, v in data.items() if k in _RECORDED}
    chat = ChatRequest(
        history,
        tools,
        force,
        sampling,
        options=options,
        one_call=body.parallel_tool_calls is False,
        schema_field="text.format",
    )
    seals = SEALED_REASONING in included
    return ResponsesRequest(body, chat, bool(body.stream), found, new, previous, logprobs, seals)


def _items(body: ResponsesBody) -> list[Any]:
    """The items of the input, in which a text is the user's."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    if body.input is None:
        raise RequestError(400, "input is missing", code="missing_required_parameter", param="input")
    expect(body.input, list, "input", "is neither text nor a list of items")
    if not body.input:
        raise RequestError(400, "input is empty", code="invalid_value", param="input")
    return body.input


def _tools(body: ResponsesBody) -> ToolChoice:
    """Tools in the form of Chat Completions, and which one is forced."""
    offered = []
    for i, tool in enumerate(body.tools or ()):
        where = f"tools.{i}"
        only_functions(tool.get("type"), where)
        offered.append(checked(FunctionTool, tool, where, UNSUPPORTED_OF_TOOL))
    # Two tools of one name are taken, as by OpenAI.
    check_tool_names({f"tools.{i}.name": tool["name"] for i, tool in enumerate(offered)}, "[a-zA-Z0-9_-]{1,128}")
    tools = messages.read.tools(offered)
    choice = body.tool_choice
    if isinstance(choice, dict):
        return tool_choice_object(tools, choice, TOOL_CHOICE)
    return tool_choice(tools, choice, required=("required",))

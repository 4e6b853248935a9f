"""A request in the form of Anthropic Messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Required

from pydantic import BaseModel, Discriminator, Field
from typing_extensions import TypedDict

from agl import messages
from agl.messages import Message
from agl.trainer.engines.base import Sampling
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.calls import ChatRequest
from agl.trainer.gateway.dialects.base import DialectRequest
from agl.trainer.gateway.dialects.common import (
    CLOSED,
    CODE_CALLS,
    SEARCHED,
    Integer,
    Several,
    ToolChoice,
    Unsupported,
    any_tool,
    check_tool_names,
    checked,
    closed,
    contradiction,
    expect,
    json_schema,
    nucleus,
    tool_names,
    validated,
)
from agl.trainer.gateway.errors import RequestError


@closed
class CacheControl(TypedDict, total=False):
    type: Required[Literal["ephemeral"]]
    ttl: Literal["5m", "1h"] | None


@closed
class SchemaFormat(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@closed
class TaskBudget(TypedDict, total=False):
    type: Required[Literal["tokens"]]
    total: Required[Annotated[Integer, Field(ge=1)]]
    remaining: Annotated[Integer, Field(ge=0)] | None


Effort = Literal["low", "medium", "high", "xhigh", "max"]


@closed
class OutputConfig(TypedDict, total=False):
    """Of its fields, the format alone concerns the answer."""

    format: SchemaFormat | None
    effort: Effort | None
    task_budget: TaskBudget | None


@closed
class BlockBinding(TypedDict, total=False):
    """What the provider does with thoughts of another conversation; here all are read."""

    prefix_mismatch_behavior: Literal["error", "drop_block"] | None


class ThinkingDisplay(TypedDict, total=False):
    """What the types of thinking that are shown have in common."""

    display: Literal["summarized", "omitted"] | None
    block_binding: BlockBinding | None


@closed
class EnabledThinking(ThinkingDisplay, total=False):
    type: Required[Literal["enabled"]]
    budget_tokens: Required[Annotated[Integer, Field(ge=1024)]]


@closed
class AdaptiveThinking(ThinkingDisplay, total=False):
    type: Required[Literal["adaptive"]]


@closed
class OtherThinking(TypedDict):
    """None at all, or, as far as a model follows it, none before the first call; a policy thinks when it does."""

    type: Literal["disabled", "between_tools"]


@closed
class SeveralCalls(TypedDict, total=False):
    type: Required[Literal["auto", "any"]]
    disable_parallel_tool_use: bool | None


@closed
class ChosenTool(TypedDict, total=False):
    type: Required[Literal["tool"]]
    name: Required[str]
    disable_parallel_tool_use: bool | None


@closed
class NoTool(TypedDict):
    type: Literal["none"]


@closed
class Metadata(TypedDict, total=False):
    user_id: str | None


@closed
class Diagnostics(TypedDict, total=False):
    previous_message_id: str | None


@closed
class BillingPolicy(TypedDict, total=False):
    type: Required[Literal["billing_policy"]]
    bill_to: Literal["self", "user_profile"] | None


@closed
class FallbackCredit(TypedDict, total=False):
    token: Required[str]
    mode: Literal["strict", "best_effort"] | None


class MessagesBody(BaseModel):
    """The fields of a request. Those under "no effect" are accepted and do not concern sampling."""

    model_config = CLOSED

    model: str = ""
    messages: Several[dict[str, Any]] = Field(min_length=1)
    max_tokens: Integer = Field(ge=0)
    system: str | list[Any] | None = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: Annotated[SeveralCalls | ChosenTool | NoTool, Discriminator("type")] | None = None
    stop_sequences: Several[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Integer | None = Field(None, ge=0)
    thinking: Annotated[EnabledThinking | AdaptiveThinking | OtherThinking, Discriminator("type")] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None
    """What `output_config.format` was called before."""
    # No effect.
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    speed: Literal["standard", "fast"] | None = None
    diagnostics: Diagnostics | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    billing_policy: BillingPolicy | None = None
    fallback_credit_token: str | FallbackCredit | None = None

    @property
    def thinks(self) -> bool:
        """Whether the client wants blocks of the model's reasoning in the answer."""
        return self.thinking is not None and self.thinking["type"] != "disabled"

    @property
    def omits_thoughts(self) -> bool:
        """Whether these blocks are to be without the text of it."""
        return self.thinking is not None and self.thinking.get("display") == "omitted"


MessagesRequest = DialectRequest[MessagesBody]

_KEPT_THOUGHTS = {"type": "clear_thinking_20251015"}
_ON_SERVERS = Unsupported("runs on Anthropic's servers, which a policy in training does not have; leave it out")
UNSUPPORTED = {
    **dict.fromkeys(("container", "mcp_servers", "compaction", "thread", "fallbacks"), _ON_SERVERS),
    "context_management": Unsupported(
        "would hide what was said from the policy, which is not supported; leave it out, or keep all",
        ({}, {"edits": []}, *({"edits": [{**_KEPT_THOUGHTS, "keep": keep}]} for keep in ("all", {"type": "all"}))),
    ),
}
"""The other documented fields: what would change what the policy reads, or what answers."""

UNSUPPORTED_OF_TOOL = {"defer_loading": SEARCHED, "allowed_callers": Unsupported(CODE_CALLS, ([], ["direct"]))}
"""Documented fields of a tool that a policy cannot honour."""

_TOOLSET = Unsupported("is of Anthropic's toolsets, which a policy in training does not have; leave it out")
UNSUPPORTED_OF_BLOCK: Mapping[str, Mapping[str, Unsupported]] = {
    "tool_use": {"caller": Unsupported(CODE_CALLS, ({}, {"type": "direct"})), "toolset_name": _TOOLSET},
    "tool_result": {"toolset_name": _TOOLSET},
}
"""Type of a block -> its documented fields that a policy cannot honour."""

_RECORDED = {*MessagesBody.model_fields} - {
    "messages",
    "system",
    "tools",
    "metadata",
    "cache_control",
    "service_tier",
    "inference_geo",
    "speed",
    "diagnostics",
    "user_profile_id",
    "workspace_id",
    "billing_policy",
    "fallback_credit_token",
}
"""Fields that are recorded with the call, unchanged: those that concern sampling."""

_LEAST_NUCLEUS_OF_THINKING = 0.95


class Cached(TypedDict, total=False):
    """What blocks and tools have in common, without an effect."""

    cache_control: CacheControl | None


@closed
class TextBlock(Cached, total=False):
    """The citations of an earlier answer's text are dropped."""

    type: Required[Literal["text"]]
    text: Required[str]
    citations: list[Any] | None


@closed
class ThinkingBlock(TypedDict, total=False):
    type: Required[Literal["thinking"]]
    thinking: Required[str]
    signature: str | None


@closed
class RedactedThinkingBlock(TypedDict, total=False):
    type: Required[Literal["redacted_thinking"]]
    data: str | None


@closed
class ToolUseBlock(Cached, total=False):
    type: Required[Literal["tool_use"]]
    id: Required[str]
    name: Required[str]
    input: Required[dict[str, Any]]


@closed
class ToolResultBlock(Cached, total=False):
    type: Required[Literal["tool_result"]]
    tool_use_id: Required[str]
    content: str | list[Any] | None
    is_error: bool | None


@closed
class Tool(Cached, total=False):
    """How its arguments are streamed and examples of its input are dropped."""

    type: Literal["custom"] | None
    name: Required[str]
    description: str | None
    input_schema: Required[dict[str, Any]]
    strict: bool | None
    eager_input_streaming: bool | None
    input_examples: Several[dict[str, Any]] | None


@closed
class InputMessage(TypedDict):
    role: Literal["user", "assistant"]
    content: str | list[Any]


@closed
class SystemOutputConfig(TypedDict, total=False):
    """It has no effect."""

    effort: Effort | None


@closed
class SystemMessage(TypedDict, total=False):
    """A system message within the conversation."""

    role: Required[Literal["system"]]
    content: str | list[Any] | None
    output_config: SystemOutputConfig | None


_MESSAGE = Annotated[InputMessage | SystemMessage, Discriminator("role")]
UNSUPPORTED_OF_MESSAGE = {
    "clear_at": Unsupported("would hide the message later, which is not supported; leave it out", ("never",))
}
_TEXT = {"text": TextBlock}
_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "system": _TEXT,
    "user": {**_TEXT, "tool_result": ToolResultBlock},
    "assistant": {
        **_TEXT,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
}
"""Role -> the types of its blocks."""


def read(data: Any, access: Access, *, counting: bool = False) -> MessagesRequest:
    """A request from its body's JSON.

    Args:
        data: the body's JSON.
        access: of the attempt.
        counting: whether its tokens are only counted, so that `max_tokens` may be missing, and the last message may be
            the assistant's.

    Raises:
        RequestError: 400, naming the field at fault.
    """
    if counting and isinstance(data, dict):
        data = {**data, "max_tokens": 1 if data.get("max_tokens") is None else data["max_tokens"]}
    body = validated(MessagesBody, data, UNSUPPORTED)
    if not counting:
        _check_as_anthropic(body)
    if "" in (body.stop_sequences or ()):
        raise _invalid("stop_sequences", "an empty text ends every answer")
    system = messages.read.system(_content(body.system or "", _TEXT, "system", "text"))
    history = [message for message in system if message.text]
    for i, message in enumerate(body.messages):
        history += _message(message, f"messages.{i}")
    if history[-1].role == "assistant" and not counting:
        raise _invalid("messages", "the last one is the assistant's; an answer cannot be begun for the policy")
    tools, force = _tools(body)
    sampling = Sampling(
        max_tokens=body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=nucleus(body.top_p),
        top_k=body.top_k or 0,
        stop=tuple(body.stop_sequences or ()),
        grammar=_grammar(body),
    )
    options = {k: v for k, v in data.items() if k in _RECORDED}
    failed_tools = frozenset(result.id for message in history for result in message.tool_results if result.failed)
    written = messages.write.to_openai(history)
    chat = ChatRequest(
        written,
        tools,
        force,
        sampling,
        options=options,
        failed_tools=failed_tools,
        one_call=bool((body.tool_choice or {}).get("disable_parallel_tool_use")),
        schema_field="output_config.format" if (body.output_config or {}).get("format") else "output_format",
    )
    return DialectRequest(body, chat, bool(body.stream))


def _check_as_anthropic(body: MessagesBody) -> None:
    """Refuse what Anthropic refuses, whatever the model: parameters that contradict others."""
    if body.max_tokens == 0:
        why = "would fill the provider's cache and sample nothing, and a policy in training has no such cache"
        raise _invalid("max_tokens", f"0 {why}; leave this request out, or ask for 1 token or more")
    if body.output_format is not None and (body.output_config or {}).get("format") is not None:
        raise contradiction("output_format", "is the old name of output_config.format; send one of them")
    thinking = body.thinking
    if thinking is None or thinking["type"] != "enabled":
        return
    # Between calls it thinks anew, so that with tools its budget can be larger than an answer.
    if thinking["budget_tokens"] >= body.max_tokens and not body.tools:
        why = f"is {thinking['budget_tokens']}; it must be less than max_tokens, which is {body.max_tokens}"
        raise contradiction("thinking.budget_tokens", why)
    if body.temperature not in (None, 1):
        raise contradiction("temperature", f"is {body.temperature}; it can only be 1 when thinking is enabled")
    if body.top_k:
        raise contradiction("top_k", "must not be set when thinking is enabled")
    if body.top_p is not None and body.top_p < _LEAST_NUCLEUS_OF_THINKING:
        why = f"is {body.top_p}; it is at least {_LEAST_NUCLEUS_OF_THINKING} when thinking is enabled"
        raise contradiction("top_p", why)
    if (body.tool_choice or {}).get("type") in ("any", "tool"):
        raise contradiction("tool_choice", "cannot force a call when thinking is enabled; let the model choose (auto)")


def _grammar(body: MessagesBody) -> str:
    """The JSON schema that the answer must fit, as JSON text; "" for free text."""
    form = (body.output_config or {}).get("format")
    if form is not None:
        return json_schema(form, "output_config.format", ("json_schema",))
    return json_schema(body.output_format, "output_format", ("json_schema",))


def _message(message: Mapping[str, Any], where: str) -> list[Message]:
    known = checked(_MESSAGE, message, where, UNSUPPORTED_OF_MESSAGE)
    role = known["role"]
    blocks = _content(known.get("content") or "", _BLOCKS[role], f"{where}.content", "text and tools")
    for i, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if block["type"] == "tool_result":
            result = block.get("content") or ""
            block["content"] = _content(result, _TEXT, f"{where}.content.{i}.content", "text")
    return messages.read.messages([{"role": role, "content": blocks}])


def _content(value: str | list[Any], kinds: Mapping[str, Any], where: str, only: str) -> str | list[dict[str, Any]]:
    """A text, or blocks of these types. `only`: what can be trained, for errors."""
    if isinstance(value, str):
        return value
    return [_block(block, kinds, f"{where}.{i}", only) for i, block in enumerate(value)] or ""


def _block(value: Any, kinds: Mapping[str, Any], where: str, only: str) -> dict[str, Any]:
    kind = expect(value, dict, where, "is not an object").get("type")
    if not isinstance(kind, str) or kind not in kinds:
        why = f"{where} has the type {kind!r}; only {only} can be trained"
        raise RequestError(400, why, code="unsupported_value", param=where)
    return checked(kinds[kind], value, where, UNSUPPORTED_OF_BLOCK.get(kind, {}))


# -- tools ------------------------------------------------------------------------------------------------------------


def _tools(body: MessagesBody) -> ToolChoice:
    offered = [_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools or ())]
    check_tool_names({f"tools.{i}.name": tool["name"] for i, tool in enumerate(offered)}, "[a-zA-Z0-9_-]{1,128}")
    tools = messages.read.tools(offered)
    for name, count in Counter(tool_names(tools)).items():
        if count > 1:
            raise _invalid("tools", f"Tool names must be unique, and {count} are called {name!r}")
    match body.tool_choice:
        case {"type": "none"}:
            return None, None
        case {"type": "any"}:
            if not tools:
                raise _invalid("tool_choice", "requires a tool, but there are none")
            return tools, any_tool(tools)
        case {"type": "tool", "name": name}:
            if name not in tool_names(tools):
                raise _invalid("tool_choice.name", f"{name!r} is not among the tools")
            return tools, name
    return tools or None, None


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            400,
            f"{where} is Anthropic's tool {tool['type']!r}; a policy in training knows tools by their input_schema",
            code="unsupported_value",
            param=where,
        )
    return checked(Tool, tool, where, UNSUPPORTED_OF_TOOL)


def _invalid(where: str, why: str) -> RequestError:
    return RequestError(400, f"{where}: {why}", code="invalid_value", param=where)

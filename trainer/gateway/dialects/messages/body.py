"""A request in the form of Anthropic Messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from agl import messages
from agl.messages import Message
from agl.trainer.engines.base import Sampling
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.calls import ChatRequest
from agl.trainer.gateway.dialects.base import DialectRequest
from agl.trainer.gateway.dialects.common import (
    CODE_CALLS,
    SEARCHED,
    Fields,
    ToolChoice,
    Unsupported,
    any_tool,
    content,
    fields,
    json_schema,
    nucleus,
    require_neutral,
    tool_names,
    validated,
)
from agl.trainer.gateway.errors import RequestError


class MessagesBody(BaseModel):
    """The fields of a request. Those under "no effect" are accepted and do not concern sampling."""

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    thinking: dict[str, Any] | None = None
    stream: bool | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    """What `output_config.format` was called before."""
    # No effect.
    metadata: Any = None
    cache_control: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    billing_policy: Any = None
    fallback_credit_token: Any = None

    @property
    def thinks(self) -> bool:
        """Whether the client wants the model's reasoning in the answer."""
        return (self.thinking or {}).get("type") in ("enabled", "adaptive")


MessagesRequest = DialectRequest[MessagesBody]

_ON_SERVERS = Unsupported("runs on Anthropic's servers, which a policy in training does not have; leave it out")
UNSUPPORTED = {
    **dict.fromkeys(("container", "mcp_servers", "compaction", "thread", "fallbacks"), _ON_SERVERS),
    "context_management": _ON_SERVERS._replace(neutral=({}, {"edits": []})),
}
"""The other documented fields: what would change what the policy reads, or what answers."""

UNSUPPORTED_OF_TOOL = {"defer_loading": SEARCHED, "allowed_callers": Unsupported(CODE_CALLS, ([], ["direct"]))}
"""Documented fields of a tool that a policy cannot honour."""

_RECORDED = {*MessagesBody.model_fields} - {
    "messages", "system", "tools", "metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics",
    "user_profile_id", "workspace_id", "billing_policy", "fallback_credit_token",
}  # fmt: skip
"""Fields that are recorded with the call, unchanged: those that concern sampling."""

_TEXT = {"text": {"text": str}}
_BLOCKS: Mapping[str, Mapping[str, Fields]] = {
    "system": _TEXT,
    "user": _TEXT | {"tool_result": {"tool_use_id": str, "content": object, "is_error": object}},
    "assistant": {
        **_TEXT,
        "thinking": {"thinking": str},
        "redacted_thinking": {},
        "tool_use": {"id": str, "name": str, "input": dict},
    },
}
"""Role -> the types of its blocks, and their fields."""
_TOOL: Fields = {"name": str, "description": str | None, "input_schema": dict, "strict": bool | None}


def read(data: Any, access: Access, *, counting: bool = False) -> MessagesRequest:
    """A request from its body's JSON.

    Args:
        data: the body's JSON. access: of the attempt.
        counting: whether its tokens are only counted, so that `max_tokens` may be missing.

    Raises:
        RequestError: 400, naming the field at fault.
    """
    if counting and isinstance(data, dict):
        data = {"max_tokens": 1, **data}
    body = validated(MessagesBody, data, UNSUPPORTED)
    if "" in (body.stop_sequences or ()):
        raise _invalid("stop_sequences", "an empty text ends every answer")
    system = messages.read.system(content(body.system or "", _TEXT, "system"))
    history = [message for message in system if message.text]
    for i, message in enumerate(body.messages):
        history += _message(message, f"messages.{i}")
    if history[-1].role == "assistant":
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


def _grammar(body: MessagesBody) -> str:
    """The JSON schema that the answer must fit, as JSON text; "" for free text."""
    form = (body.output_config or {}).get("format")
    if form is not None:
        return json_schema(form, "output_config.format", ("json_schema",))
    return json_schema(body.output_format, "output_format", ("json_schema",))


def _message(message: Mapping[str, Any], where: str) -> list[Message]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _BLOCKS:
        raise _invalid(f"{where}.role", f"{role!r} is neither user nor assistant")
    blocks = content(message.get("content"), _BLOCKS[role], f"{where}.content", "text and tools")
    for i, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if block["type"] == "tool_result":
            block["content"] = content(block["content"] or "", _TEXT, f"{where}.content.{i}.content")
    return messages.read.messages([{"role": role, "content": blocks}])


# -- tools ------------------------------------------------------------------------------------------------------------


def _tools(body: MessagesBody) -> ToolChoice:
    tools = messages.read.tools([_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools or ())])
    choice = body.tool_choice or {"type": "auto"}
    match choice.get("type"):
        case "auto":
            return tools or None, None
        case "none":
            return None, None
        case "any":
            if not tools:
                raise _invalid("tool_choice", "requires a tool, but there are none")
            return tools, any_tool(tools)
        case "tool":
            if choice.get("name") not in tool_names(tools):
                raise _invalid("tool_choice.name", f"{choice.get('name')!r} is not among the tools")
            return tools, choice["name"]
    raise _invalid("tool_choice.type", f"{choice.get('type')!r} is unknown; use auto, any, tool or none")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            400,
            f"{where} is Anthropic's tool {tool['type']!r}; a policy in training knows tools by their input_schema",
            code="unsupported_value",
            param=f"{where}.type",
        )
    require_neutral(tool, UNSUPPORTED_OF_TOOL, f"{where}.")
    return fields(tool, _TOOL, where)


def _invalid(where: str, why: str) -> RequestError:
    return RequestError(400, f"{where}: {why}", code="invalid_value", param=where)

"""A request in the form of Anthropic Messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from agl.trainer.engines.base import Sampling
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.calls import ChatRequest
from agl.trainer.gateway.dialects.base import DialectRequest
from agl.trainer.gateway.dialects.common import ToolChoice, any_tool, tool_names, validated
from agl.trainer.gateway.errors import RequestError


class MessagesBody(BaseModel, extra="forbid"):
    """The fields of a request. Those under "no effect" are accepted and do not concern sampling."""

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    thinking: dict[str, Any] | None = None
    stream: bool | None = None
    # No effect. Sampling is never constrained to a format: the policy has to learn it.
    output_config: Any = None
    output_format: Any = None
    metadata: Any = None
    cache_control: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    # Features of Anthropic's servers, which would change what the policy reads or what answers.
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None
    compaction: Any = None
    thread: Any = None
    fallbacks: Any = None

    @property
    def thinks(self) -> bool:
        """Whether the client wants the model's reasoning in the answer."""
        return (self.thinking or {}).get("type") in ("enabled", "adaptive")


MessagesRequest = DialectRequest[MessagesBody]

_SERVER_FEATURES = ("container", "mcp_servers", "context_management", "compaction", "thread", "fallbacks")

_RECORDED = frozenset(
    {
        "model",
        "max_tokens",
        "tool_choice",
        "stop_sequences",
        "temperature",
        "top_p",
        "top_k",
        "thinking",
        "stream",
        "output_config",
        "output_format",
    }
)
"""Fields that are recorded with the call, unchanged: those that concern sampling."""

Block = Mapping[str, Any]


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
    body = validated(MessagesBody, data)
    for name in _SERVER_FEATURES:
        if getattr(body, name):
            raise RequestError(
                400,
                f"{name} runs on Anthropic's servers, which a policy in training does not have; leave it out",
                code="unsupported_parameter",
                param=name,
            )
    if "" in (body.stop_sequences or ()):
        raise _invalid("stop_sequences", "an empty text ends every answer")
    system = _text(body.system or "", "system")
    messages = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages.{i}")
    if messages[-1]["role"] == "assistant":
        raise _invalid("messages", "the last one is the assistant's; an answer cannot be begun for the policy")
    tools, force = _tools(body)
    sampling = Sampling(
        max_tokens=body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        stop=tuple(body.stop_sequences or ()),
    )
    options = {k: v for k, v in data.items() if k in _RECORDED}
    failed_tools = _failed_tools(body.messages)
    chat = ChatRequest(messages, tools, force, sampling, options=options, failed_tools=failed_tools)
    return DialectRequest(body, chat, bool(body.stream))


# -- messages ---------------------------------------------------------------------------------------------------------


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """A message in OpenAI's form: each tool result becomes a separate message, before the text next to it."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        return [{"role": "system", "content": _text(content, f"{where}.content")}]
    if role not in ("user", "assistant"):
        raise _invalid(f"{where}.role", f"{role!r} is neither user nor assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _blocks(content, f"{where}.content")
    return [_assistant(blocks)] if role == "assistant" else _user(blocks)


def _user(blocks: list[tuple[str, str, Block]]) -> list[dict[str, Any]]:
    results, texts = [], []
    for kind, where, block in blocks:
        if kind == "text":
            texts.append(_string(block, "text", where))
        elif kind == "tool_result":
            text = _text(block.get("content") or "", f"{where}.content")
            if not text and block.get("is_error"):
                text = "error"
            results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text})
        else:
            raise _unreadable(kind, where)
    return [*results, {"role": "user", "content": "".join(texts)}] if texts or not results else results


def _failed_tools(messages: list[dict[str, Any]]) -> frozenset[str]:
    """The ids of the tool uses whose results are marked as errors."""
    blocks = (b for m in messages if isinstance(m.get("content"), list) for b in m["content"])
    return frozenset(str(b["tool_use_id"]) for b in blocks if b.get("type") == "tool_result" and b.get("is_error"))


def _assistant(blocks: list[tuple[str, str, Block]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for kind, where, block in blocks:
        if kind == "text":
            texts.append(_string(block, "text", where))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise _invalid(f"{where}.input", "is not an object")
            function = {"name": _string(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": _string(block, "id", where), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _unreadable(kind, where)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any, where: str) -> list[tuple[str, str, Block]]:
    """(type, where, block) of each content block."""
    if not isinstance(content, list):
        raise _invalid(where, "is neither text nor content blocks")
    blocks = []
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise _invalid(f"{where}.{i}", "is not an object")
        blocks.append((str(block.get("type")), f"{where}.{i}", block))
    return blocks


def _text(content: Any, where: str) -> str:
    """The text of a content that may hold only text."""
    if isinstance(content, str):
        return content
    texts = []
    for kind, at, block in _blocks(content, where):
        if kind != "text":
            raise _unreadable(kind, at)
        texts.append(_string(block, "text", at))
    return "".join(texts)


# -- tools ------------------------------------------------------------------------------------------------------------


def _tools(body: MessagesBody) -> ToolChoice:
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools or ())]
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
    function: dict[str, Any] = {"name": _string(tool, "name", where)}
    if tool.get("description") is not None:
        function["description"] = _string(tool, "description", where)
    if not isinstance(tool.get("input_schema"), dict):
        raise _invalid(f"{where}.input_schema", "is not a JSON schema")
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _string(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{where}.{name}", "is missing" if value is None else "is not a text")
    return value


def _invalid(where: str, why: str) -> RequestError:
    return RequestError(400, f"{where}: {why}", code="invalid_value", param=where)


def _unreadable(kind: str, where: str) -> RequestError:
    message = f"{where} is a block of type {kind!r}; only text and tools can be trained"
    return RequestError(400, message, code="unsupported_value", param=where)

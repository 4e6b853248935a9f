"""What a request to the OpenAI Responses API asks for.

Source: OpenAI API reference, "Create a model response".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agl.trainer.engines.base import Sampling
from agl.trainer.gateway.calls import ChatRequest
from agl.trainer.gateway.dialects.bodies import validated
from agl.trainer.gateway.dialects.responses_items import History, Kept, Message, expect, messages_of
from agl.trainer.gateway.errors import RequestError

LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(BaseModel):
    """The fields of a request. Those under "no effect" are understood and do not concern sampling."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # What they ask for is kept nowhere here.
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    # No effect. Sampling is never constrained to a format: the policy has to learn it. Nothing is ever truncated: a
    # prompt that is too long is refused.
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    stream_options: Any = None
    user: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None


_RECORDED = frozenset(
    {
        "model", "previous_response_id", "store", "tool_choice", "max_output_tokens", "temperature", "top_p", "stream",
        "include", "top_logprobs", "text", "truncation", "reasoning", "parallel_tool_calls", "max_tool_calls",
    }
)  # fmt: skip
"""Fields that are kept with the call as they were sent."""

_NOT_HERE = {
    "background": "answers are given at once",
    "conversation": "use previous_response_id, or send the whole input",
    "prompt": "prompts are not stored here; send instructions and input",
    "context_management": "a compacted history is not what the policy saw; send the whole input",
}


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request that was read.

    Attributes:
        body: its fields. chat: in no dialect. new: the messages of its input. before: the response that it continues.
    """

    body: ResponsesBody
    chat: ChatRequest
    new: list[Message]
    before: Kept | None

    @property
    def logprobs(self) -> bool:
        """Whether log-probs are asked for."""
        return _logprobs(self.body)


def read(data: Any, history: History) -> Asked:
    """A request body.

    Args:
        data: the body's JSON.
        history: of the attempt.

    Raises:
        RequestError: 400, naming the field at fault.
    """
    body = validated(ResponsesBody, data)
    for name, instead in _NOT_HERE.items():
        if getattr(body, name):
            raise RequestError(400, f"{name} is not supported: {instead}", code="unsupported_parameter", param=name)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    expect(items, list, "input", "is neither text nor a list of items")
    if not items:
        raise RequestError(400, "input is empty", code="invalid_value", param="input")
    before = None if body.previous_response_id is None else history.response(body.previous_response_id)
    new = messages_of(items, history)
    # Instructions are those of this request alone: OpenAI does not carry them over to the next response.
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    messages = [*system, *(before.conversation() if before else ()), *new]
    tools, force = _tools(body)
    sampling = Sampling(
        max_tokens=body.max_output_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_logprobs=(body.top_logprobs or 0) if _logprobs(body) else 0,
    )
    sent = {k: v for k, v in data.items() if k in _RECORDED}
    return Asked(body, ChatRequest(messages, tools, force, sampling, asked=sent), new, before)


def _tools(body: ResponsesBody) -> tuple[list[dict[str, Any]] | None, str | Literal[True] | None]:
    """Tools in the form of Chat Completions, and which one is forced."""
    tools = []
    for i, tool in enumerate(body.tools or ()):
        where = f"tools.{i}"
        if tool.get("type") != "function":
            raise RequestError(
                400,
                f"{where} is of type {tool.get('type')!r}; a policy can be trained with function tools only, "
                "which run in the agent",
                code="unsupported_value",
                param=where,
            )
        expect(tool.get("name"), str, f"{where}.name", "is missing")
        expect(tool.get("description"), str | None, f"{where}.description", "is not a text")
        expect(tool.get("parameters"), dict | None, f"{where}.parameters", "is not a JSON schema")
        kept = {k: tool[k] for k in ("name", "description", "parameters", "strict") if tool.get(k) is not None}
        tools.append({"type": "function", "function": kept})
    names = [t["function"]["name"] for t in tools]
    choice = body.tool_choice
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise RequestError(
                400,
                f"tool_choice of type {choice.get('type')!r} is not supported; send only the tools that may be called",
                code="unsupported_value",
                param="tool_choice",
            )
        if choice.get("name") not in names:
            raise RequestError(
                400, f"tool_choice names {choice.get('name')!r}, which is not among the tools", param="tool_choice"
            )
        return tools, choice["name"]
    if choice == "none":
        return None, None
    if choice == "required":
        if not names:
            raise RequestError(400, "tool_choice requires a tool, but there are none", param="tool_choice")
        return tools, names[0] if len(names) == 1 else True
    if choice not in (None, "auto"):
        raise RequestError(400, f"tool_choice {choice!r} is unknown", code="invalid_value", param="tool_choice")
    return tools or None, None


def _logprobs(body: ResponsesBody) -> bool:
    return body.top_logprobs is not None or LOGPROBS in (body.include or ())

"""What passes through the gateway in no dialect: a request, its wire call, its replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agl.mdp.types import IntArray
from agl.trainer.engines.base import Completion, Engine, Sampling
from agl.trainer.gateway.access import Access
from agl.trainer.gateway.errors import RequestError
from agl.trainer.rendering.normalise import with_tool_names
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolparsers import ParsedMessage


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy that the gateway serves: its engine, how its messages become tokens, and which tokens end an answer."""

    name: str
    engine: Engine
    rendering: Rendering
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What an agent asks for, in no dialect.

    Attributes:
        messages, tools: as OpenAI chat messages and tools. force_tool: a name, or True for any.
        sampling: as the agent asked (its `seed` is mixed with the request's own).
        n: how many answers. asked: the sampling fields as sent, for the record.
        failed_tools: the ids of the tool calls whose results say that they failed, where the dialect can say so.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    force_tool: str | Literal[True] | None
    sampling: Sampling
    n: int = 1
    asked: Mapping[str, Any] | None = None
    failed_tools: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request from its arrival to its record.

    Attributes:
        access, agent, policy: whose; policy None when the agent is not selected. index: among the attempt's calls.
        response_id: of the answer and of its first choice's call. span_id: the client's span. started: epoch seconds.
        task: what serves it, while it is being served. why: what cancelled it, unless the client did.
        settled: whether its calls are recorded.
    """

    access: Access
    agent: str
    policy: str | None
    index: int
    response_id: str
    span_id: str | None
    started: float
    task: asyncio.Task[Any] | None = None
    why: RequestError | None = None
    settled: bool = False

    def call_id(self, choice: int) -> str:
        """The id of the call that is recorded for a choice."""
        return f"{self.response_id}:{choice}" if choice else self.response_id

    def cancel(self, why: RequestError) -> None:
        """Cancel it and tell the client why."""
        self.why = self.why or why
        if self.task is not None:
            self.task.cancel()


@dataclass(slots=True, eq=False)
class Choice:
    """One answer while it is sampled.

    Attributes:
        number: from 0. prompt: int32 [P], `forced` included. forced: int32 [F], the beginning written for the model.
        ids, logprobs: sampled so far, of a stream. recorded: whether its call is.
    """

    number: int
    prompt: IntArray
    forced: IntArray
    ids: list[int]
    logprobs: list[float]
    recorded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One answer.

    Attributes:
        call_id: of the recorded call. message: the assistant message in OpenAI's form.
        parsed: what the message was made from. completion: the sampled tokens.
        finish_reason: "stop", "length" or "tool_calls". prompt_tokens: P. cached_tokens: of these, continued exactly.
    """

    call_id: str
    message: Mapping[str, Any]
    parsed: ParsedMessage
    completion: Completion
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int


OnTokens = Callable[[Choice, Sequence[int]], None]
"""Called with a choice and its newly sampled ids, as they come."""


def cut_at_stop(parsed: ParsedMessage, stop: Sequence[str]) -> ParsedMessage:
    """The stop text itself is not part of the answer's text, though its tokens are part of what was sampled."""
    ends = [at for s in stop if (at := parsed.content.find(s)) >= 0]
    return replace(parsed, content=parsed.content[: min(ends)]) if ends else parsed


def assistant_message(
    parsed: ParsedMessage, tool_call_id: Callable[[int], str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The assistant message in OpenAI's form, and the ids minted for its tool calls."""
    ids = tuple(tool_call_id(k) for k in range(len(parsed.tool_calls)))
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if ids:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": _text(c.name), "arguments": _json_text(c.arguments)}}
            for i, c in zip(ids, parsed.tool_calls, strict=True)
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message, ids


def tool_results(request: ChatRequest, new: int) -> list[dict[str, Any]]:
    """What the messages from index `new` on say of tool calls: `{"id", "name", "failed"}` for each result."""
    if not any(m.get("role") == "tool" for m in request.messages[new:]):
        return []
    return [
        {"id": m.get("tool_call_id"), "name": m.get("name"), "failed": m.get("tool_call_id") in request.failed_tools}
        for m in with_tool_names(request.messages)[new:]
        if m.get("role") == "tool"
    ]


def unknown_tools(request: ChatRequest, message: Mapping[str, Any]) -> list[str]:
    """The ids of an answer's tool calls that name a tool which was not offered."""
    offered = {t["function"]["name"] for t in request.tools or ()}
    return [c["id"] for c in message.get("tool_calls") or () if c["function"]["name"] not in offered]


def _json_text(text: str) -> str:
    """A model can write half a surrogate pair as an escape, which JSON text can hold and UTF-8 cannot."""
    return text if text.isascii() or _encodable(text) else json.dumps(json.loads(text))


def _text(text: str) -> str:
    return text if _encodable(text) else text.encode(errors="replace").decode()


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

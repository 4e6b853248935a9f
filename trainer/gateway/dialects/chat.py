"""OpenAI Chat Completions, as a dialect over the token-level call.

Source: OpenAI API reference, "Create chat completion", and its streaming form.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agl.trainer.engines.base import Completion, Sampling
from agl.trainer.gateway.calls import ChatRequest, Choice, Reply, cut_at_stop
from agl.trainer.gateway.dialects.bodies import validated
from agl.trainer.gateway.errors import RequestError
from agl.trainer.rendering.rendering import Rendering

TOOL_MARKER = 24
"""No text that opens a tool call is longer, in characters."""


class StreamOptions(BaseModel):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class ChatBody(BaseModel):
    """The fields of a request. Those under "no effect" are understood and do not concern sampling."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    return_token_ids: bool | None = None
    # Only their neutral values can be honoured exactly.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # No effect. Sampling is never constrained to a format: the policy has to learn it.
    response_format: dict[str, Any] | None = None
    user: Any = None
    store: Any = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    service_tier: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None


_RECORDED = frozenset(ChatBody.model_fields) - {
    "messages", "tools", "user", "store", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"
}  # fmt: skip
"""Fields that are kept with the call as they were sent: those that concern sampling."""

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def read(data: Any) -> tuple[ChatRequest, ChatBody]:
    """A request body as a `ChatRequest`.

    Raises:
        RequestError: 400, naming the field at fault.
    """
    body = validated(ChatBody, data)
    for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
        if getattr(body, name):
            raise RequestError(
                400,
                f"{name} would change what is sampled away from the policy being trained, so it is not supported; "
                "leave it out",
                code="unsupported_parameter",
                param=name,
            )
    for i, message in enumerate(body.messages):
        _check_message(message, f"messages.{i}")
    tools, force = _tools(body)
    asked = {k: v for k, v in data.items() if k in _RECORDED}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stop:
        raise RequestError(400, "stop: an empty text ends every answer", code="invalid_value", param="stop")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(400, "top_logprobs needs logprobs=true", code="invalid_value", param="top_logprobs")
    sampling = Sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        stop=stop,
        seed=body.seed or 0,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
    )
    return ChatRequest(body.messages, tools, force, sampling, body.n or 1, asked=asked), body


def _check_message(message: Mapping[str, Any], where: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(400, f"{where}.role is {role!r}", code="invalid_value", param=f"{where}.role")
    for name in ("name", "tool_call_id", "reasoning_content"):
        _expect(message.get(name), str | None, f"{where}.{name}", "is not a text")
    content = message.get("content")
    _expect(content, str | list | None, f"{where}.content", "is neither text nor parts")
    for part in content if isinstance(content, list) else ():
        _check_part(part, f"{where}.content")
    calls = message.get("tool_calls")
    _expect(calls, list | None, f"{where}.tool_calls", "is not a list")
    for k, call in enumerate(calls or ()):
        at = f"{where}.tool_calls.{k}"
        _expect(call, dict, at, "is not an object")
        _expect(call.get("id"), str | None, f"{at}.id", "is not a text")
        function = call.get("function")
        _expect(function, dict, f"{at}.function", "is missing")
        _expect(function.get("name"), str, f"{at}.function.name", "is missing")
        _expect(function.get("arguments"), str | dict | None, f"{at}.function.arguments", "is not JSON text")
    if role == "tool" and message.get("tool_call_id") is None:
        raise RequestError(400, f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id")


def _check_part(part: Any, where: str) -> None:
    if isinstance(part, str):
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" and kind != "refusal":
        raise RequestError(
            400,
            f"{where} has a part of type {kind!r}; only text can be trained",
            code="unsupported_value",
            param=where,
        )
    _expect(part.get(kind), str, where, f"has a {kind} part without a text")


def _tools(body: ChatBody) -> tuple[list[dict[str, Any]] | None, str | Literal[True] | None]:
    tools = body.tools or None
    names = []
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise RequestError(400, f"tools.{i} is not a function with a name", param=f"tools.{i}")
        _expect(function.get("name"), str, f"tools.{i}.function.name", "is missing")
        _expect(function.get("description"), str | None, f"tools.{i}.function.description", "is not a text")
        _expect(function.get("parameters"), dict | None, f"tools.{i}.function.parameters", "is not a JSON schema")
        names.append(function["name"])
    choice = body.tool_choice
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise RequestError(400, f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
        return tools, name
    if choice == "none":
        return None, None
    if choice in ("required", "any"):
        if not names:
            raise RequestError(400, "tool_choice requires a tool, but there are none", param="tool_choice")
        return tools, names[0] if len(names) == 1 else True
    if choice not in (None, "auto"):
        raise RequestError(400, f"tool_choice {choice!r} is unknown", code="invalid_value", param="tool_choice")
    return tools, None


def _expect(value: Any, kind: Any, where: str, otherwise: str) -> None:
    if not isinstance(value, kind):
        raise RequestError(400, f"{where} {otherwise}", code="invalid_value", param=where)


# -- answers ----------------------------------------------------------------------------------------------------------


def new_id() -> str:
    """An id for a response; the id of the call recorded for its first choice."""
    return f"chatcmpl-{uuid.uuid4().hex}"


def response(response_id: str, model: str, replies: Sequence[Reply], body: ChatBody, rendering: Rendering) -> Any:
    """The JSON answer to a request that does not stream."""
    choices = []
    for i, reply in enumerate(replies):
        choice: dict[str, Any] = {
            "index": i,
            "message": {"refusal": None, **reply.message},
            "finish_reason": reply.finish_reason,
            "logprobs": _logprobs(reply.completion, rendering) if body.logprobs else None,
        }
        if body.return_token_ids:
            choice["token_ids"] = reply.completion.token_ids.tolist()
        choices.append(choice)
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(replies),
    }


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """Token counts of all answers; cached tokens are those continued exactly from an earlier call."""
    prompt = replies[0].prompt_tokens
    sampled = sum(r.completion.token_ids.size for r in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
    }


def _logprobs(completion: Completion, rendering: Rendering) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = rendering.decode([token])
        # The bytes of a token that is part of a character cannot be told from its text.
        return {"token": text, "logprob": float(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}

    content = []
    for k, (token, logprob) in enumerate(zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True)):
        top = completion.top_logprobs[k] if k < len(completion.top_logprobs) else ()
        content.append({**entry(token, logprob), "top_logprobs": [entry(t, lp) for t, lp in top]})
    return {"content": content, "refusal": None}


class Streamer:
    """Turns tokens, as they come, into `chat.completion.chunk` objects.

    Invariant: the deltas of a choice add up to its message. Text is passed on as soon as it cannot become part of a
    tool call or a stop text any more; tool calls come whole at the end.
    """

    def __init__(
        self, response_id: str, model: str, body: ChatBody, request: ChatRequest, rendering: Rendering
    ) -> None:
        self._base = {"id": response_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._body, self._request, self._rendering = body, request, rendering
        self._hold = max((len(s) for s in request.sampling.stop), default=0)
        if request.tools:
            self._hold = max(self._hold, TOOL_MARKER)
        self._sent = [""] * request.n
        self._started = [False] * request.n
        self._reasoned = [False] * request.n
        self._read = [0] * request.n

    def push(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Chunks for what was sampled of a choice since the last call."""
        k, n = choice.number, len(choice.ids)
        if not self._started[k]:
            self._started[k] = True
            yield self._chunk(k, {"role": "assistant", "content": ""})
        # Reading the whole answer at each token would be quadratic; a long answer is read less often.
        if n - self._read[k] < 1 + n // 64 or self._request.force_tool:
            return
        self._read[k] = n
        parsed = self._rendering.parse(
            choice.ids, self._request.tools, forced_ids=choice.forced, prompt_ids=choice.prompt
        )
        if parsed.tool_calls or parsed.malformed:
            return
        text = cut_at_stop(parsed, self._request.sampling.stop).content
        text = text[: max(0, len(text) - self._hold)]
        if self._request.tools:
            # White space around the text is dropped when tool calls follow.
            text = "" if text[:1].isspace() else text.rstrip()
        # A character can end in the next token; what decodes to a replacement now may not then.
        text = text.rstrip("\ufffd")
        if text:
            yield from self._text(k, text, parsed.reasoning)

    def _text(self, k: int, text: str, reasoning: str | None) -> Iterator[dict[str, Any]]:
        """What is new in a choice's reasoning and text."""
        if reasoning and not self._reasoned[k]:
            self._reasoned[k] = True
            yield self._chunk(k, {"reasoning_content": reasoning})
        if text.startswith(self._sent[k]) and len(text) > len(self._sent[k]):
            yield self._chunk(k, {"content": text[len(self._sent[k]) :]})
            self._sent[k] = text

    def finish(self, replies: Sequence[Reply]) -> Iterator[dict[str, Any]]:
        """The chunks that complete every choice, and the usage if it was asked for."""
        for i, reply in enumerate(replies):
            if not self._started[i]:
                yield self._chunk(i, {"role": "assistant", "content": ""})
            yield from self._text(i, reply.message.get("content") or "", reply.message.get("reasoning_content"))
            for k, call in enumerate(reply.message.get("tool_calls") or ()):
                yield self._chunk(i, {"tool_calls": [{"index": k, **call}]})
            logprobs = _logprobs(reply.completion, self._rendering) if self._body.logprobs else None
            last = self._chunk(i, {}, finish=reply.finish_reason, logprobs=logprobs)
            if self._body.return_token_ids:
                last["choices"][0]["token_ids"] = reply.completion.token_ids.tolist()
            yield last
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**self._base, "choices": [], "usage": usage(replies)}

    def _chunk(
        self, choice: int, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        return {
            **self._base,
            "choices": [{"index": choice, "delta": dict(delta), "finish_reason": finish, "logprobs": logprobs}],
        }


def error_body(error: RequestError) -> dict[str, Any]:
    """The error as OpenAI shapes it."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}

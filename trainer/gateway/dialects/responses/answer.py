"""The JSON answer of the Responses API: response objects and their output items."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.calls import Reply, ServedPolicy, TokenCounts
from agl.trainer.gateway.dialects.common import service_tier
from agl.trainer.gateway.dialects.content_tokens import content_logprobs
from agl.trainer.gateway.dialects.responses.body import ResponsesBody, ResponsesRequest
from agl.trainer.gateway.dialects.responses.items import item_id, listed_items, sealed
from agl.trainer.gateway.stored_responses import Message

Status = Literal["in_progress", "completed", "incomplete", "failed"]

_TOOL = {"description": None, "parameters": None, "strict": False}
"""What is said of a tool where its request says nothing. Arguments are held to a schema only where `strict` says so."""


def answer(pending: PendingRequest, served: ServedPolicy, request: ResponsesRequest, replies: Sequence[Reply]) -> bytes:
    """The response object of the only reply."""
    (reply,) = replies
    return orjson.dumps(finished_response(pending, served, request, reply, created=pending.started_at))


def finished_response(
    pending: PendingRequest, served: ServedPolicy, request: ResponsesRequest, reply: Reply, *, created: float
) -> dict[str, Any]:
    """The response object of a reply, which is stored: later requests can continue it.

    Args:
        pending, request: what is answered.
        served: the policy that answered.
        reply: its answer.
        created: epoch seconds.
    """
    response_id = pending.response_id
    logprobs = content_logprobs(reply, served.rendering, request.chat) if request.logprobs else []
    items = _output(response_id, reply, logprobs, sealing=request.seals)
    cut_short = reply.finish_reason == "length"
    response = response_object(
        response_id,
        served.name,
        request.body,
        "incomplete" if cut_short else "completed",
        created,
        output=items,
        incomplete_details={"reason": "max_output_tokens"} if cut_short else None,
        usage=_usage(reply),
        completed_at=None if cut_short else time.time(),
    )
    store(pending, request, response, [*request.new, reply.message])
    return response


def store(
    pending: PendingRequest, request: ResponsesRequest, response: Mapping[str, Any], messages: Sequence[Message]
) -> None:
    """Keep a response, unless its request says not to.

    Args:
        pending, request: what is answered.
        response: the object.
        messages: those that it added to the conversation.
    """
    if request.body.store is not False:
        items = listed_items(pending.response_id, request.items)
        pending.access.responses.add(response, request.previous, messages, items)


def response_object(
    response_id: str,
    model: str,
    body: ResponsesBody,
    status: Status,
    created: float,
    *,
    output: Sequence[Mapping[str, Any]] = (),
    error: Mapping[str, Any] | None = None,
    incomplete_details: Mapping[str, Any] | None = None,
    usage: Mapping[str, Any] | None = None,
    completed_at: float | None = None,
) -> dict[str, Any]:
    """A response object: the request's fields as OpenAI repeats them, and the outcome."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(created),
        "completed_at": None if completed_at is None else int(completed_at),
        "status": status,
        "model": model,
        "output": list(output),
        "error": error,
        "incomplete_details": incomplete_details,
        "usage": usage,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_options": _cache_options(body.prompt_cache_options),
        "prompt_cache_retention": body.prompt_cache_retention and body.prompt_cache_retention.replace("-", "_"),
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "safety_identifier": body.safety_identifier,
        "service_tier": service_tier(body),
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": _text(body.text or {}),
        "tool_choice": body.tool_choice or "auto",
        "tools": [_TOOL | tool for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _cache_options(asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The options as OpenAI fills them in."""
    return None if asked is None else {"mode": "implicit", "ttl": "30m", **asked}


def _text(asked: Mapping[str, Any]) -> dict[str, Any]:
    form = asked.get("format") or {"type": "text"}
    if form.get("type") == "json_schema":
        form = {"description": None, **form, "strict": bool(form.get("strict"))}
    return {**asked, "format": form}


def _usage(reply: Reply) -> dict[str, Any]:
    counts = TokenCounts.of([reply])
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.sampled,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.sampled,
    }


# -- output items ------------------------------------------------------------------------------------------------------


def reasoning_item(response_id: str, text: str, *, sealing: bool) -> dict[str, Any]:
    """The item of an answer's whole reasoning. `sealing`: whether it has `encrypted_content`."""
    content = [{"type": "reasoning_text", "text": text}]
    item = {"id": item_id("rs", response_id), "type": "reasoning", "summary": [], "content": content}
    return item | {"encrypted_content": sealed(text)} if sealing else item


def message_item(response_id: str, text: str | None, status: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """The item of an answer's text; None for a message that has not begun."""
    content = [] if text is None else [text_part(text, logprobs)]
    own_id = item_id("msg", response_id)
    return {"id": own_id, "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """The part of a message that holds its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _output(response_id: str, reply: Reply, logprobs: Sequence[Any], *, sealing: bool) -> list[dict[str, Any]]:
    """The output items of an answer: reasoning, text, calls."""
    message = reply.message
    calls = message.get("tool_calls") or ()
    items = []
    if reasoning := message.get("reasoning_content"):
        items.append(reasoning_item(response_id, reasoning, sealing=sealing))
    # An answer without items would be nothing that a client can send back: it gets an empty text.
    if message.get("content") or not calls:
        items.append(message_item(response_id, message.get("content") or "", "completed", logprobs))
    for k, call in enumerate(calls):
        items.append(
            {
                "id": item_id("fc", response_id, k),
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    if reply.finish_reason == "length":
        texts = [item for item in items if item["type"] == "message" and reply.unfinished]
        (texts or items)[-1]["status"] = "incomplete"
    return items

"""The JSON answer of the Responses API: response objects and their output items."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.calls import Reply, ServedPolicy, TokenCounts
from agl.trainer.gateway.dialects.common import logprob_entries
from agl.trainer.gateway.dialects.responses.body import ResponsesBody, ResponsesRequest

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
        pending, request: what is answered. served: the policy that answered. reply: its answer.
        created: epoch seconds.
    """
    response_id = pending.response_id
    logprobs = logprob_entries(reply.completion, served.rendering) if request.logprobs else []
    items = _output(response_id, reply, logprobs)
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
    if request.body.store is not False:
        messages = [*request.new, reply.message]
        pending.access.responses.add(response, request.previous, messages, input_items(response_id, request.body.input))
    return response


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
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "safety_identifier": body.safety_identifier,
        # The one that a request without it, or with "auto", is said to be served by.
        "service_tier": "default" if body.service_tier in (None, "auto") else body.service_tier,
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


def reasoning_item(response_id: str, text: str) -> dict[str, Any]:
    """The item of an answer's whole reasoning."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": _item_id("rs", response_id), "type": "reasoning", "summary": [], "content": content}


def message_item(response_id: str, text: str | None, status: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """The item of an answer's text; None for a message that has not begun."""
    content = [] if text is None else [text_part(text, logprobs)]
    item_id = _item_id("msg", response_id)
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """The part of a message that holds its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _output(response_id: str, reply: Reply, logprobs: Sequence[Any]) -> list[dict[str, Any]]:
    """The output items of an answer: reasoning, text, calls."""
    message = reply.message
    calls = message.get("tool_calls") or ()
    items = []
    if reasoning := message.get("reasoning_content"):
        items.append(reasoning_item(response_id, reasoning))
    # An answer without items would be nothing that a client can send back: it gets an empty text.
    if message.get("content") or not calls:
        items.append(message_item(response_id, message.get("content") or "", "completed", logprobs))
    for k, call in enumerate(calls):
        items.append(
            {
                "id": f"{_item_id('fc', response_id)}_{k}",
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


def input_items(response_id: str, asked: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A request's input as `GET /responses/ID/input_items` lists it: items with ids, texts as parts."""
    listed: list[Mapping[str, Any]] = [{"role": "user", "content": asked}] if isinstance(asked, str) else [*asked]
    items = []
    for k, item in enumerate(listed):
        content = item.get("content")
        if isinstance(content, str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            content = [{"type": kind, "text": content, **({"annotations": []} if kind == "output_text" else {})}]
        message = {"content": content, "status": "completed"} if "role" in item else {}
        items.append({"type": "message", "id": f"{_item_id('in', response_id)}_{k}", **item, **message})
    return items


def _item_id(prefix: str, response_id: str) -> str:
    return f"{prefix}_{response_id.removeprefix('resp_')}"

"""One answer in the forms of every API: the body that is sent unstreamed, and the events of a stream.

An answer is a list of parts: ("text", text), ("reasoning", text), ("refusal", text), ("call", id, name, arguments),
("custom", id, name, text), ("function_call", name, arguments), ("audio", transcript, base64), ("cited", text),
("server", id, arguments).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Part = tuple[Any, ...]
Cut = Callable[[str], list[str]]

KINDS = {
    "chat": ("reasoning", "text", "refusal", "audio", "call", "custom", "function_call"),
    "responses": ("reasoning", "text", "refusal", "cited", "call", "custom", "server"),
    "messages": ("reasoning", "text", "cited", "call", "server"),
    "google": ("reasoning", "text", "call", "server"),
}
"""API -> the kinds of parts that its answers have; in Chat Completions in this order, and text, refusal, reasoning,
audio and function_call at most once."""

CALL_STREAMS = ("by index", "all index 0", "no index", "all index 0, one delta", "no index, one delta", "name repeated")
"""How servers number the parallel calls of a stream of Chat Completions."""


def cutter(seed: int) -> Cut:
    """What cuts a text into pieces, each time at other places."""
    dice = random.Random(seed)

    def cut(text: str) -> list[str]:
        places = sorted(dice.randint(0, len(text)) for _ in range(dice.randint(0, 4)))
        ends = [*places, len(text)]
        return [text[a:b] for a, b in zip([0, *places], ends, strict=True)]

    return cut


def whole(api: str, parts: list[Part]) -> dict[str, Any]:
    """The body."""
    return _WHOLE[api](parts)


def events(api: str, parts: list[Part], cut: Cut, calls: str = CALL_STREAMS[0]) -> list[dict[str, Any]]:
    """The stream's events; `calls` is one of `CALL_STREAMS`."""
    return _chat_events(parts, cut, calls) if api == "chat" else _EVENTS[api](parts, cut)


# -- Chat Completions -------------------------------------------------------------------------------------------------

_HEAD = {"id": "c", "created": 1, "model": "m"}


def _whole_chat(parts: list[Part]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    for kind, *values in parts:
        match kind:
            case "text":
                message["content"] = values[0]
            case "reasoning":
                message["reasoning_content"] = values[0]
            case "refusal":
                message["refusal"] = values[0]
            case "audio":
                message["audio"] = {"id": "audio_1", "expires_at": 9, "transcript": values[0], "data": values[1]}
            case "function_call":
                message["function_call"] = {"name": values[0], "arguments": json.dumps(values[1])}
            case _:
                calls.append(_chat_call(kind, *values))
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {**_HEAD, "object": "chat.completion", "choices": [choice]}


def _chat_call(kind: str, call_id: str, name: str, value: Any) -> dict[str, Any]:
    if kind == "custom":
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": value}}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(value)}}


def _chat_events(parts: list[Part], cut: Cut, calls: str) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    position = 0
    together: list[dict[str, Any]] = []
    for kind, *values in parts:
        match kind:
            case "text":
                deltas += [{"content": piece} for piece in cut(values[0])]
            case "reasoning":
                deltas += [{"reasoning_content": piece} for piece in cut(values[0])]
            case "refusal":
                deltas += [{"refusal": piece} for piece in cut(values[0])]
            case "audio":
                deltas.append({"audio": {"id": "audio_1"}})
                deltas += [{"audio": {"transcript": piece}} for piece in cut(values[0])]
                deltas += [{"audio": {"data": piece}} for piece in cut(values[1])]
                deltas.append({"audio": {"expires_at": 9}})
            case "function_call":
                deltas.append({"function_call": {"name": values[0], "arguments": ""}})
                deltas += [{"function_call": {"arguments": piece}} for piece in cut(json.dumps(values[1]))]
            case _:
                call = _chat_call(kind, *values)
                inner = "custom" if kind == "custom" else "function"
                field = "input" if kind == "custom" else "arguments"
                if calls.startswith("all index 0"):
                    together.append({"index": 0, **call})
                elif calls.startswith("no index"):
                    together.append(call)
                else:
                    pieces = cut(call[inner][field])
                    first = {**call, "index": position, inner: {**call[inner], field: ""}}
                    repeated = {"name": call[inner]["name"]} if calls == "name repeated" else {}
                    deltas.append({"tool_calls": [first]})
                    deltas += [
                        {"tool_calls": [{"index": position, inner: {**repeated, field: piece}}]} for piece in pieces
                    ]
                    position += 1
    if "one delta" in calls and together:
        deltas.append({"tool_calls": together})
    else:
        deltas += [{"tool_calls": [call]} for call in together]
    ends: list[Any] = [*((delta, None) for delta in deltas), ({}, "stop")]
    head = {**_HEAD, "object": "chat.completion.chunk"}
    return [{**head, "choices": [{"index": 0, "delta": d, "finish_reason": f}]} for d, f in ends]


# -- Responses --------------------------------------------------------------------------------------------------------


def _response_items(parts: list[Part]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for i, (kind, *values) in enumerate(parts):
        item: dict[str, Any] = {"id": f"item_{i}", "status": "completed"}
        match kind:
            case "text" | "cited":
                cited = [{"type": "url_citation", "url": "http://a", "title": "a", "start_index": 0, "end_index": 1}]
                text = {"type": "output_text", "text": values[0], "annotations": cited if kind == "cited" else []}
                item |= {"type": "message", "role": "assistant", "content": [text]}
            case "refusal":
                refusal = {"type": "refusal", "refusal": values[0]}
                item |= {"type": "message", "role": "assistant", "content": [refusal]}
            case "reasoning":
                # The summary of a model's reasoning, or the reasoning itself (open models).
                shown = i % 2 == 0
                summary = [{"type": "summary_text", "text": values[0]}] if shown else []
                item |= {"type": "reasoning", "summary": summary}
                item |= {} if shown else {"content": [{"type": "reasoning_text", "text": values[0]}]}
            case "call":
                called = {"call_id": values[0], "name": values[1], "arguments": json.dumps(values[2])}
                item |= {"type": "function_call", **called}
            case "custom":
                item |= {"type": "custom_tool_call", "call_id": values[0], "name": values[1], "input": values[2]}
            case "server":
                arguments = {"server_label": "s", "name": "search", "arguments": json.dumps(values[1])}
                item |= {"type": "mcp_call", **arguments, "output": "found"}
        items.append(item)
    return items


def _response(items: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    return {
        "id": "c", "object": "response", "created_at": 1, "model": "m", "status": status, "output": items,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def _response_events(parts: list[Part], cut: Cut) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response([], "in_progress")},
        {"type": "response.in_progress", "response": _response([], "in_progress")},
    ]
    items = _response_items(parts)
    for i, item in enumerate(items):
        at = {"output_index": i, "item_id": item["id"]}
        growing = next((name for name in ("arguments", "input") if name in item), None)
        of = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}
        begun = {**item, "status": "in_progress"}
        if growing is not None:
            begun |= {growing: ""}
        begun |= {name: [] for name in ("content", "summary") if name in item}
        begun.pop("output", None)
        found.append({"type": "response.output_item.added", "output_index": i, "item": begun})
        if growing is not None:
            kind = "response." + of.get(item["type"], "mcp_call_arguments")
            found += [{"type": f"{kind}.delta", **at, "delta": piece} for piece in cut(item[growing])]
            found.append({"type": f"{kind}.done", **at, growing: item[growing]})
        for part in item.get("summary", ()):
            place = {**at, "summary_index": 0}
            empty = {**part, "text": ""}
            found.append({"type": "response.reasoning_summary_part.added", **place, "part": empty})
            found += [
                {"type": "response.reasoning_summary_text.delta", **place, "delta": piece}
                for piece in cut(part["text"])
            ]
            found.append({"type": "response.reasoning_summary_part.done", **place, "part": part})
        for part in item.get("content", ()):
            place = {**at, "content_index": 0}
            field = "refusal" if part["type"] == "refusal" else "text"
            kind = {"refusal": "refusal", "reasoning_text": "reasoning_text"}.get(part["type"], "output_text")
            found.append({"type": "response.content_part.added", **place, "part": {**part, field: ""}})
            logprobs = {"logprobs": []} if kind == "output_text" else {}
            found += [
                {"type": f"response.{kind}.delta", **place, "delta": piece, **logprobs} for piece in cut(part[field])
            ]
            found.append({"type": "response.content_part.done", **place, "part": part})
        found.append({"type": "response.output_item.done", "output_index": i, "item": item})
    found.append({"type": "response.completed", "response": _response(items)})
    return [{**event, "sequence_number": n} for n, event in enumerate(found)]


# -- Anthropic's Messages ---------------------------------------------------------------------------------------------


def _blocks(parts: list[Part]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for kind, *values in parts:
        match kind:
            case "text":
                blocks.append({"type": "text", "text": values[0]})
            case "cited":
                cited = {"type": "char_location", "cited_text": "a", "document_index": 0, "document_title": "d",
                         "start_char_index": 0, "end_char_index": 1}  # fmt: skip
                blocks.append({"type": "text", "text": values[0], "citations": [cited]})
            case "reasoning":
                blocks.append({"type": "thinking", "thinking": values[0], "signature": "signed"})
            case "call":
                blocks.append({"type": "tool_use", "id": values[0], "name": values[1], "input": values[2]})
            case "server":
                call = f"srvtoolu_{values[0]}"
                blocks.append({"type": "server_tool_use", "id": call, "name": "web_search", "input": values[1]})
                blocks.append({"type": "web_search_tool_result", "tool_use_id": call, "content": []})
    return blocks


def _message(blocks: list[dict[str, Any]], stop: str | None = "end_turn") -> dict[str, Any]:
    return {
        "id": "c", "type": "message", "role": "assistant", "model": "m", "content": blocks, "stop_reason": stop,
        "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip


def _message_events(parts: list[Part], cut: Cut) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"type": "message_start", "message": _message([], None)}]
    for i, block in enumerate(_blocks(parts)):
        deltas: list[dict[str, Any]] = []
        begun = dict(block)
        match block["type"]:
            case "text":
                begun = {"type": "text", "text": ""}
                deltas = [{"type": "text_delta", "text": piece} for piece in cut(block["text"])]
                deltas += [{"type": "citations_delta", "citation": each} for each in block.get("citations", ())]
            case "thinking":
                begun |= {"thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": piece} for piece in cut(block["thinking"])]
                deltas.append({"type": "signature_delta", "signature": "signed"})
            case "tool_use" | "server_tool_use":
                begun |= {"input": {}}
                written = json.dumps(block["input"]) if block["input"] else ""
                deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in cut(written)]
        found.append({"type": "content_block_start", "index": i, "content_block": begun})
        found += [{"type": "content_block_delta", "index": i, "delta": delta} for delta in deltas]
        found.append({"type": "content_block_stop", "index": i})
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    return [*found, {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 1}}, {"type": "message_stop"}]


# -- Google's ---------------------------------------------------------------------------------------------------------


def _google_parts(parts: list[Part]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for kind, *values in parts:
        match kind:
            case "text":
                found.append({"text": values[0]})
            case "reasoning":
                found.append({"text": values[0], "thought": True})
            case "call":
                found.append({"functionCall": {"id": values[0], "name": values[1], "args": values[2]}})
            case "server":
                found.append({"executableCode": {"language": "PYTHON", "code": f"print({values[1]})"}})
                found.append({"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}})
    return found


def _google(parts: list[dict[str, Any]], **end: Any) -> dict[str, Any]:
    candidate = {"index": 0, "content": {"role": "model", "parts": parts}, **end}
    return {"responseId": "c", "modelVersion": "m", "candidates": [candidate]}


def _google_events(parts: list[Part], cut: Cut) -> list[dict[str, Any]]:
    found = []
    for part in _google_parts(parts):
        pieces = [{**part, "text": piece} for piece in cut(part["text"])] if "text" in part else [part]
        found += [_google([piece]) for piece in pieces]
    return [*found, _google([{"text": ""}], finishReason="STOP")]


_WHOLE: dict[str, Callable[[list[Part]], dict[str, Any]]] = {
    "chat": _whole_chat,
    "responses": lambda parts: _response(_response_items(parts)),
    "messages": lambda parts: _message(_blocks(parts)),
    "google": lambda parts: _google(_google_parts(parts), finishReason="STOP"),
}
_EVENTS: dict[str, Callable[[list[Part], Cut], list[dict[str, Any]]]] = {
    "responses": _response_events,
    "messages": _message_events,
    "google": _google_events,
}

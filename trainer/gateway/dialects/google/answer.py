"""The JSON answer of Google's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agl.messages.google import SIGNATURE
from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.calls import Reply, ServedPolicy, TokenCounts
from agl.trainer.gateway.dialects.google.body import GoogleRequest


def answer(pending: PendingRequest, served: ServedPolicy, request: GoogleRequest, replies: Sequence[Reply]) -> bytes:
    """The response with a candidate of each reply."""
    found = {i: parts(reply.message, request) for i, reply in enumerate(replies)}
    # Not orjson: a model writes integers of any length.
    return json.dumps(response(pending, served, found, replies)).encode()


def response(
    pending: PendingRequest, served: ServedPolicy, found: Any, replies: Sequence[Reply] = ()
) -> dict[str, Any]:
    """A response with new parts of candidates, by their number; with the replies, the one that completes them."""
    # Programs read `parts[0].text` unchecked; an empty answer must not break them.
    candidates = [{"content": {"role": "model", "parts": p or [{"text": ""}]}, "index": i} for i, p in found.items()]
    whole: dict[str, Any] = {"candidates": candidates, "modelVersion": served.name, "responseId": pending.response_id}
    for candidate, reply in zip(candidates, replies, strict=False):
        candidate["finishReason"] = "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"
    if replies:
        counts = TokenCounts.of(replies)
        whole["usageMetadata"] = {
            "promptTokenCount": counts.prompt,
            # As Google counts, thoughts are not among the candidates' tokens.
            "candidatesTokenCount": counts.sampled - counts.reasoning,
            "thoughtsTokenCount": counts.reasoning,
            "totalTokenCount": counts.prompt + counts.sampled,
            "cachedContentTokenCount": counts.cached,
        }
    return whole


def parts(message: Mapping[str, Any], request: GoogleRequest) -> list[dict[str, Any]]:
    """The parts of a message in OpenAI's form, or of a delta of one."""
    found: list[dict[str, Any]] = []
    if (reasoning := message.get("reasoning_content")) and request.body.get("includeThoughts"):
        found.append({"text": reasoning, "thought": True})
    if text := message.get("content"):
        found.append({"text": text})
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        function = {"id": call["id"], "name": call["function"]["name"], "args": arguments}
        found.append({"functionCall": function, "thoughtSignature": SIGNATURE + call["id"]})
    return found

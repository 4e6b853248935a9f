"""The JSON answer of Chat Completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.calls import Reply, ServedPolicy, TokenCounts
from agl.trainer.gateway.dialects.chat.body import ChatCompletionsRequest
from agl.trainer.gateway.dialects.common import service_tier
from agl.trainer.gateway.dialects.content_tokens import content_logprobs
from agl.trainer.rendering.rendering import Rendering


def answer(
    pending: PendingRequest, served: ServedPolicy, request: ChatCompletionsRequest, replies: Sequence[Reply]
) -> bytes:
    """The `chat.completion` object of the replies."""
    choices = []
    for i, reply in enumerate(replies):
        choice: dict[str, Any] = {
            "index": i,
            "message": {"refusal": None, **reply.message},
            "finish_reason": reply.finish_reason,
            "logprobs": logprobs(request, reply, served.rendering),
        }
        if request.body.return_token_ids:
            choice["token_ids"] = reply.completion.token_ids.tolist()
        choices.append(choice)
    completion = {
        "id": pending.response_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": served.name,
        "service_tier": service_tier(request.body),
        "choices": choices,
        "usage": usage(replies),
    }
    return orjson.dumps(completion)


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """Token counts of all answers."""
    counts = TokenCounts.of(replies)
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.sampled,
        "total_tokens": counts.prompt + counts.sampled,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }


def logprobs(request: ChatCompletionsRequest, reply: Reply, rendering: Rendering) -> dict[str, Any] | None:
    """A choice's log-probs, if the request has `logprobs`. With the ids of all tokens they are those of all tokens."""
    if not request.body.logprobs:
        return None
    every = bool(request.body.return_token_ids)
    return {"content": content_logprobs(reply, rendering, request.chat, every=every), "refusal": None}

"""`chat` spans of anthropic SDK calls that no framework span encloses.

Hook: `Anthropic.request` and `AsyncAnthropic.request` through `agl.routing` (anthropic >= 0.50, < 3); the SDK offers
none. The OpenTelemetry spans that anthropic 2 makes itself go to the user's provider as ever.
"""

from __future__ import annotations

import json
from typing import Any

from agl import routing, semconv
from agl.adapters.anthropic.wrap import handles, wrap
from agl.adapters.base import InstrumentedTracer
from agl.adapters.streams import CallObserver


class AnthropicTracer(InstrumentedTracer):
    """Traces bare `anthropic` clients, sync and async, streaming and not, inside rollouts."""

    modules = ("anthropic",)
    handles = staticmethod(handles)
    wrap = staticmethod(wrap)

    def _install(self) -> None:
        routing.observe("anthropic", CallObserver("anthropic", _facts, _added, silent=("/messages/count_tokens",)))

    def _restore(self) -> None:
        routing.observe("anthropic", None)


def _facts(message: Any, content: bool) -> dict[str, Any]:
    reason = getattr(message, "stop_reason", None)
    facts: dict[str, Any] = {
        semconv.RESPONSE_ID: getattr(message, "id", None),
        semconv.RESPONSE_MODEL: getattr(message, "model", None),
        semconv.FINISH_REASONS: None if reason is None else [reason],
        **_usage(getattr(message, "usage", None)),
    }
    blocks = getattr(message, "content", None)
    if content and blocks:
        said = [{"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in blocks]}]
        facts[semconv.OUTPUT_MESSAGES] = json.dumps(said, default=str)
    return facts


def _added(event: Any) -> dict[str, Any]:
    """What an event adds: the first one holds the message as it begins, the last but one how it ended."""
    match getattr(event, "type", None):
        case "message_start":
            return _facts(event.message, False)
        case "message_delta":
            reason = event.delta.stop_reason
            return {semconv.FINISH_REASONS: reason and [reason], **_usage(event.usage)}
    return {}


def _usage(usage: Any) -> dict[str, Any]:
    """Token counts. Anthropic's input leaves out what its cache holds; the attribute counts the whole prompt."""
    fresh = getattr(usage, "input_tokens", None)
    cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return {
        semconv.INPUT_TOKENS: None
        if fresh is None
        else fresh + sum(getattr(usage, name, None) or 0 for name in cached),
        semconv.OUTPUT_TOKENS: getattr(usage, "output_tokens", None),
    }

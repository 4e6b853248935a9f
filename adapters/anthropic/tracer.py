"""`chat` spans of anthropic SDK calls that no framework span encloses.

Hook: `Anthropic.request` and `AsyncAnthropic.request` by `tracing.sdk_hooks` (anthropic >= 0.50, < 3); the SDK offers
none. The OpenTelemetry spans that anthropic 2 makes itself go to the user's provider as ever.
"""

from __future__ import annotations

import json
from typing import Any

from agl import semconv
from agl.adapters.anthropic.runnable import handles, runnable
from agl.adapters.functions import ClientTracer
from agl.adapters.streams import CallObserver, fields
from agl.tracing import sdk_hooks


class AnthropicTracer(ClientTracer):
    """Traces bare `anthropic` clients, sync and async, streaming and not, inside rollouts."""

    modules = ("anthropic",)
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _install(self) -> None:
        sdk_hooks.observe("anthropic", CallObserver("anthropic", _facts, _added, silent=("/messages/count_tokens",)))

    def _restore(self) -> None:
        sdk_hooks.observe("anthropic", None)


def _facts(message: Any, content: bool) -> dict[str, Any]:
    held = fields(message)
    reason = held.get("stop_reason")
    facts: dict[str, Any] = {
        semconv.RESPONSE_ID: held.get("id"),
        semconv.RESPONSE_MODEL: held.get("model"),
        semconv.FINISH_REASONS: None if reason is None else [reason],
        **_usage(held.get("usage")),
    }
    blocks = held.get("content")
    if content and blocks:
        said = [{"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in blocks]}]
        facts[semconv.OUTPUT_MESSAGES] = json.dumps(said, default=str)
    return facts


def _added(event: Any, facts: dict[str, Any]) -> None:
    """Add what an event tells: the first one holds the message as it begins, the last but one how it ended."""
    match fields(event).get("type"):
        case "message_start":
            facts |= _facts(event.message, False)
        case "message_delta":
            if event.delta.stop_reason:
                facts[semconv.FINISH_REASONS] = [event.delta.stop_reason]
            facts |= {name: count for name, count in _usage(event.usage).items() if count is not None}


def _usage(usage: Any) -> dict[str, Any]:
    """Token counts. Anthropic's input leaves out what its cache holds; the attribute counts the whole prompt."""
    held = fields(usage)
    fresh = held.get("input_tokens")
    cached = (held.get("cache_read_input_tokens") or 0) + (held.get("cache_creation_input_tokens") or 0)
    return {
        semconv.INPUT_TOKENS: None if fresh is None else fresh + cached,
        semconv.OUTPUT_TOKENS: held.get("output_tokens"),
    }

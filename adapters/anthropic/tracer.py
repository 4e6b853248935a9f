"""`chat` spans of anthropic SDK calls that no framework span encloses.

Hook: `Anthropic.request` and `AsyncAnthropic.request` by `tracing.sdk_hooks` (anthropic >= 0.50, < 3); the SDK offers
none. The OpenTelemetry spans that anthropic 2 makes itself go to the user's provider, unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from agl import semconv
from agl.adapters.anthropic.runnable import handles, runnable
from agl.adapters.base import INVALID
from agl.adapters.functions import ClientTracer
from agl.adapters.streams import CallObserver, fields
from agl.messages import write
from agl.tracing import sdk_hooks


class AnthropicTracer(ClientTracer):
    """Traces bare `anthropic` clients, sync and async, streaming and not, inside rollouts."""

    modules = ("anthropic",)
    answer_errors: ClassVar[Mapping[str, str]] = INVALID
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _install(self) -> None:
        sdk_hooks.observe(
            "anthropic", CallObserver("anthropic", _facts, _add_event, silent=("/messages/count_tokens",))
        )

    def _restore(self) -> None:
        sdk_hooks.observe("anthropic", None)


def _facts(message: Any, content: bool) -> dict[str, Any]:
    values = fields(message)
    reason = values.get("stop_reason")
    facts: dict[str, Any] = {
        semconv.RESPONSE_ID: values.get("id"),
        semconv.RESPONSE_MODEL: values.get("model"),
        semconv.FINISH_REASONS: None if reason is None else [reason],
        **_usage(values.get("usage")),
    }
    blocks = values.get("content")
    if content and blocks:
        answer = {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in blocks]}
        facts[semconv.OUTPUT_MESSAGES] = write.answer_json(answer, facts[semconv.FINISH_REASONS] or ())
    return facts


def _add_event(event: Any, facts: dict[str, Any]) -> None:
    """Add an event's facts: the first one holds the message without content, the last but one its end."""
    match fields(event).get("type"):
        case "message_start":
            facts |= _facts(event.message, False)
        case "message_delta":
            if event.delta.stop_reason:
                facts[semconv.FINISH_REASONS] = [event.delta.stop_reason]
            facts |= {name: count for name, count in _usage(event.usage).items() if count is not None}


def _usage(usage: Any) -> dict[str, Any]:
    """Token counts. Anthropic's input count leaves out cached tokens; the attribute counts the whole prompt."""
    values = fields(usage)
    fresh = values.get("input_tokens")
    cached = (values.get("cache_read_input_tokens") or 0) + (values.get("cache_creation_input_tokens") or 0)
    return {
        semconv.INPUT_TOKENS: None if fresh is None else fresh + cached,
        semconv.OUTPUT_TOKENS: values.get("output_tokens"),
    }

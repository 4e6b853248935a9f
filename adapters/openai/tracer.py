"""`chat` spans of openai SDK calls that no framework span encloses.

Hook: `OpenAI.request` and `AsyncOpenAI.request` through `agl.routing` (openai >= 1.66, < 4); the SDK offers none.
"""

from __future__ import annotations

import json
from typing import Any

from agl import routing, semconv
from agl.adapters.base import InstrumentedTracer
from agl.adapters.openai.wrap import handles, wrap
from agl.adapters.responses import finish_reason
from agl.adapters.streams import CallObserver


class OpenAITracer(InstrumentedTracer):
    """Traces bare `openai` clients, sync and async, streaming and not, inside rollouts."""

    handles = staticmethod(handles)
    wrap = staticmethod(wrap)

    def _install(self) -> None:
        routing.install()
        routing.observe("openai", CallObserver("openai", _facts, _added))

    def _restore(self) -> None:
        routing.observe("openai", None)
        routing.uninstall()


def _added(chunk: Any) -> dict[str, Any]:
    """What a chunk adds; a Responses stream carries the whole response in its terminal event."""
    return _facts(getattr(chunk, "response", chunk), False)


def _facts(response: Any, content: bool) -> dict[str, Any]:
    usage = getattr(response, "usage", None)
    choices = getattr(response, "choices", None) or []
    reasons = [c.finish_reason for c in choices if getattr(c, "finish_reason", None)]
    output = getattr(response, "output", None) or []
    if not choices and (reason := _responses_reason(response, output)) is not None:
        reasons = [reason]
    facts: dict[str, Any] = {
        semconv.RESPONSE_ID: getattr(response, "id", None),
        semconv.RESPONSE_MODEL: getattr(response, "model", None),
        semconv.FINISH_REASONS: reasons or None,
        semconv.INPUT_TOKENS: getattr(usage, "prompt_tokens", None) or getattr(usage, "input_tokens", None),
        semconv.OUTPUT_TOKENS: getattr(usage, "completion_tokens", None) or getattr(usage, "output_tokens", None),
    }
    if content:
        messages = [c.message.model_dump(exclude_none=True) for c in choices if getattr(c, "message", None) is not None]
        messages += [item.model_dump(exclude_none=True) for item in output]
        if messages:
            facts[semconv.OUTPUT_MESSAGES] = json.dumps(messages, default=str)
    return facts


def _responses_reason(response: Any, output: list[Any]) -> str | None:
    incomplete = getattr(getattr(response, "incomplete_details", None), "reason", None)
    calls_tools = any(getattr(item, "type", None) == "function_call" for item in output)
    return finish_reason(getattr(response, "status", None), incomplete, calls_tools=calls_tools)

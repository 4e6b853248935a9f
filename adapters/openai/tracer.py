"""`chat` spans of openai SDK calls that no framework span encloses.

Hook: `OpenAI.request` and `AsyncOpenAI.request` through `agl.routing` (openai >= 1.66, < 4); the SDK offers none.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from agl import routing, semconv, tracing
from agl.adapters.base import InstrumentedTracer
from agl.adapters.openai.wrap import handles, wrap
from agl.tracing import Scope


class OpenAITracer(InstrumentedTracer):
    """Traces bare `openai` clients, sync and async, streaming and not, inside rollouts."""

    handles = staticmethod(handles)
    wrap = staticmethod(wrap)

    def _install(self) -> None:
        routing.install()
        routing.observe("openai", _Observer())

    def _restore(self) -> None:
        routing.observe("openai", None)
        routing.uninstall()


class _Observer:
    def started(self, client: Any, path: str, options: Any) -> Scope | None:
        body = options.json_data if isinstance(options.json_data, dict) else {}
        model = str(body.get("model", ""))
        return tracing.start(
            semconv.CHAT, model, attributes={semconv.PROVIDER_NAME: "openai", semconv.REQUEST_MODEL: model}
        )

    def finished(self, scope: Scope, result: Any) -> Any:
        if hasattr(result, "_iterator"):
            stream = result._iterator
            result._iterator = _read_async(scope, stream) if hasattr(stream, "__anext__") else _read(scope, stream)
            return result
        tracing.end(scope, attributes=_facts(result, scope.rollout.capture_content))
        return result

    def failed(self, scope: Scope, error: BaseException) -> None:
        tracing.end(scope, error=error)


def _read(scope: Scope, stream: Iterator[Any]) -> Iterator[Any]:
    facts: dict[str, Any] = {}
    try:
        for chunk in stream:
            _collect(facts, chunk)
            yield chunk
    except BaseException as error:
        tracing.end(scope, error=None if isinstance(error, GeneratorExit) else error, attributes=facts)
        raise
    tracing.end(scope, attributes=facts)


async def _read_async(scope: Scope, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    facts: dict[str, Any] = {}
    try:
        async for chunk in stream:
            _collect(facts, chunk)
            yield chunk
    except BaseException as error:
        tracing.end(scope, error=None if isinstance(error, GeneratorExit) else error, attributes=facts)
        raise
    tracing.end(scope, attributes=facts)


def _collect(facts: dict[str, Any], chunk: Any) -> None:
    """What a chunk adds; a Responses stream carries the whole response in its terminal event."""
    response = getattr(chunk, "response", chunk)
    facts.update(_facts(response, False))


def _facts(response: Any, content: bool) -> dict[str, Any]:
    usage = getattr(response, "usage", None)
    choices = getattr(response, "choices", None) or []
    reasons = [c.finish_reason for c in choices if getattr(c, "finish_reason", None)]
    facts = {
        semconv.RESPONSE_ID: getattr(response, "id", None),
        semconv.RESPONSE_MODEL: getattr(response, "model", None),
        semconv.FINISH_REASONS: reasons or None,
        semconv.INPUT_TOKENS: getattr(usage, "prompt_tokens", None) or getattr(usage, "input_tokens", None),
        semconv.OUTPUT_TOKENS: getattr(usage, "completion_tokens", None) or getattr(usage, "output_tokens", None),
    }
    if content:
        messages = [c.message.model_dump(exclude_none=True) for c in choices if getattr(c, "message", None) is not None]
        if messages:
            facts[semconv.OUTPUT_MESSAGES] = json.dumps(messages, default=str)
    return {k: v for k, v in facts.items() if v is not None}

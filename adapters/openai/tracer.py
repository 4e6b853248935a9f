"""`chat` spans of openai SDK calls that no framework span encloses.

Hook: `OpenAI.request` and `AsyncOpenAI.request` through `agl.routing` (openai >= 1.66, < 4); the SDK offers none.
"""

from __future__ import annotations

import functools
import inspect
import json
import weakref
from collections.abc import Callable
from typing import Any, Self

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
            reader = _AsyncReader if hasattr(result._iterator, "__anext__") else _Reader
            result._iterator = reader(scope, result._iterator, result.response)
            return result
        raw = getattr(result, "http_response", None)
        if raw is None:
            tracing.end(scope, attributes=_facts(result, scope.rollout.capture_content))
        elif raw.is_closed:
            tracing.end(scope, attributes=_facts(_parsed(result), scope.rollout.capture_content))
        else:
            _when_closed(raw, functools.partial(tracing.end, scope))
            weakref.finalize(raw, tracing.end, scope).atexit = False
        return result

    def failed(self, scope: Scope, error: BaseException) -> None:
        tracing.end(scope, error=error)


class _Reader:
    """A stream's chunks, unchanged; the span ends when they do, when the stream is closed, or when nobody holds it."""

    def __init__(self, scope: Scope, chunks: Any, response: Any) -> None:
        self.scope, self.chunks = scope, chunks
        self.facts: dict[str, Any] = {}
        self.reading = False
        _when_closed(response, self.closed)
        weakref.finalize(self, tracing.end, scope, attributes=self.facts).atexit = False

    def closed(self) -> None:
        # The SDK closes the response before it raises; then the reader below ends the span, with the error.
        if not self.reading:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        tracing.end(self.scope, error=error, attributes=self.facts)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self.reading = True
        try:
            chunk = next(self.chunks)
        except StopIteration:
            self.end()
            raise
        except BaseException as error:
            self.end(error)
            raise
        finally:
            self.reading = False
        _collect(self.facts, chunk)
        return chunk


class _AsyncReader(_Reader):
    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        self.reading = True
        try:
            chunk = await anext(self.chunks)
        except StopAsyncIteration:
            self.end()
            raise
        except BaseException as error:
            self.end(error)
            raise
        finally:
            self.reading = False
        _collect(self.facts, chunk)
        return chunk


def _when_closed(response: Any, then: Callable[[], None]) -> None:
    """Call `then` once the HTTP response is closed: read to its end, broken off, or failed."""
    close, aclose = response.close, response.aclose

    def closing() -> None:
        try:
            close()
        finally:
            then()

    async def aclosing() -> None:
        try:
            await aclose()
        finally:
            then()

    response.close, response.aclose = closing, aclosing


def _parsed(raw: Any) -> Any:
    """What a raw response that was read holds; the SDK keeps it for the caller's own `parse()`."""
    if inspect.iscoroutinefunction(raw.parse):
        return None
    try:
        return raw.parse()
    except Exception:
        return None


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

"""The `chat` span of an SDK's call, which ends with what the call returns: a result, a raw response, or a stream.

Nothing here keeps a stream or its response alive: a dropped stream is closed as early as without agl.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from agl import semconv, tracing
from agl.tracing import arrivals, background
from agl.tracing.context import Scope
from agl.tracing.provider_formats import ResponseAccumulator
from agl.tracing.sdk_hooks import COUNTS, parse_through, set_first_chunk

Facts = Mapping[str, Any]
"""Span attributes by name; those that are None are left out."""


def fields(of: Any) -> Mapping[str, Any]:
    """The instance attributes of an SDK's object. Its models take microseconds to raise AttributeError."""
    return getattr(of, "__dict__", {})


@dataclass(frozen=True)
class CallObserver:
    """Makes the spans of one SDK's calls, for `sdk_hooks.observe`.

    Attributes:
        provider: the SDK's `gen_ai.provider.name`.
    """

    provider: str

    def started(self, path: str, model: str, wire: Facts) -> Scope | None:
        """Open the span of a request."""
        if path.endswith(COUNTS):
            return None
        attributes = {semconv.PROVIDER_NAME: self.provider, semconv.REQUEST_MODEL: model, **wire}
        return tracing.start(semconv.CHAT, model, attributes=attributes)

    def finished(self, scope: Scope, result: Any) -> Any:
        """End it with its result; the span of a stream ends later, with the stream."""
        if hasattr(result, "_iterator"):
            self._observe_stream(scope, result)
            return result
        known = fields(result)
        raw = known.get("http_response")
        if known.get("status") in background.UNFINISHED and isinstance(known.get("id"), str):
            background.wait(scope, known["id"])
        elif raw is None:
            self._end(scope, result)
        elif raw.is_closed:
            self._end(scope, _parsed(result))
        else:
            _UnreadResponse(self, scope, result)
        return result

    def _observe_stream(self, scope: Scope, stream: Any) -> None:
        if not isinstance(stream._iterator, Reader):
            stream._iterator = Reader(scope, stream._iterator, stream.response)

    def _end(self, scope: Scope, result: Any) -> None:
        answer = ResponseAccumulator()
        answer.whole(_dumped(result))
        tracing.end(scope, error=answer.error, attributes=answer.facts(scope.rollout.capture_content))

    def failed(self, scope: Scope, error: BaseException) -> None:
        """End it with the error that the request raised."""
        tracing.end(scope, error=error)


class _UnreadResponse:
    """A raw response without its body: the span ends with the body, and has the facts of what `parse()` returns, else
    those of the bytes that the caller reads."""

    def __init__(self, observer: CallObserver, scope: Scope, raw: Any) -> None:
        self.observer = observer
        self.scope = scope
        self.parsing = self.streams = False
        self.response, self.chunks = weakref.ref(raw.http_response), list[bytes]()
        _when_closed(raw.http_response, self.closed)
        _keeping_chunks(raw.http_response, self.chunks)
        weakref.finalize(raw.http_response, tracing.end, scope).atexit = False
        parse_through(raw, self.parsing_of)

    def closed(self) -> None:
        # `parse()` reads the body, which closes the response, before it returns the result.
        if self.parsing or self.streams or self.scope.ended:
            return
        answer = ResponseAccumulator()
        if (response := self.response()) is not None:
            answer.received(response, b"".join(self.chunks))
        tracing.end(self.scope, error=answer.error, attributes=answer.facts(self.scope.rollout.capture_content))

    def parsed(self, result: Any) -> Any:
        """Record the result of `parse()` and return it."""
        if hasattr(result, "_iterator"):
            self.streams = True
            self.observer._observe_stream(self.scope, result)
        else:
            self.observer._end(self.scope, result)
        return result

    @contextlib.contextmanager
    def parsing_of(self) -> Iterator[Callable[[Any], Any]]:
        self.parsing = True
        try:
            yield self.parsed
        finally:
            self.parsing = False
            if (read := self.response()) is None or read.is_closed:
                self.closed()


class Reader:
    """A stream's chunks, unchanged. The span ends with them, when the stream is closed, or when it is garbage."""

    def __init__(self, scope: Scope, chunks: Any, response: Any) -> None:
        self.scope, self.chunks, self.answer = scope, chunks, ResponseAccumulator()
        self.reading = self.begun = False
        closed = weakref.WeakMethod(self.closed)
        if response is not None:
            _when_closed(response, lambda: _call(closed))
        weakref.finalize(self, _end_stream, scope, self.answer).atexit = False

    def closed(self) -> None:
        # The SDK closes the response before it raises; then the reader below ends the span, with the error.
        if not self.reading:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        whole = isinstance(error, StopIteration | StopAsyncIteration)
        _end_stream(self.scope, self.answer, None if whole else error)

    def take(self, chunk: Any) -> Any:
        if not self.begun:
            self.begun = True
            set_first_chunk(self.scope)
        self.answer.event(_dumped(chunk))
        return chunk

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self.reading = True
        try:
            return self.take(next(self.chunks))
        except BaseException as error:
            self.end(error)
            raise
        finally:
            self.reading = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        self.reading = True
        try:
            return self.take(await anext(self.chunks))
        except BaseException as error:
            self.end(error)
            raise
        finally:
            self.reading = False


def _end_stream(scope: Scope, answer: ResponseAccumulator, error: BaseException | None = None) -> None:
    if not scope.ended:
        arrivals.left(scope)
        # The gateway records the content of its answers itself.
        content = scope.rollout.prompts and scope.rollout.capture_content
        tracing.end(scope, error=error or answer.error, attributes=answer.facts(content))


def _dumped(value: Any) -> Any:
    """An SDK's object as JSON values; None for what is no such object."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_none=True, warnings=False)
    return value if isinstance(value, dict) else None


def _when_closed(response: Any, then: Callable[[], None]) -> None:
    """Call `then` once the HTTP response is closed: read to its end, broken off, or failed."""
    close, aclose = _weak(response.close), _weak(response.aclose)

    def closing() -> None:
        try:
            _call(close)
        finally:
            then()

    async def aclosing() -> None:
        try:
            if (method := aclose()) is not None:
                await method()
        finally:
            then()

    response.close = closing
    response.aclose = aclosing


def _keeping_chunks(response: Any, chunks: list[bytes]) -> None:
    """Keep the bytes of an HTTP response as they are read, in whatever way."""
    iter_raw, aiter_raw = _weak(response.iter_raw), _weak(response.aiter_raw)

    def reading(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        for chunk in iter_raw()(*args, **kwargs):  # type: ignore[misc]
            chunks.append(chunk)
            yield chunk

    async def areading(*args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        async for chunk in aiter_raw()(*args, **kwargs):  # type: ignore[misc]
            chunks.append(chunk)
            yield chunk

    response.iter_raw = reading
    response.aiter_raw = areading


def _weak(method: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """A weak reference to a method; a strong one to a function, which is another library's hook."""
    return weakref.WeakMethod(method) if inspect.ismethod(method) else lambda: method


def _call(reference: Callable[[], Callable[..., Any] | None]) -> None:
    if (method := reference()) is not None:
        method()


def _parsed(raw: Any) -> Any:
    """The parsed body of a raw response that was read; the SDK caches it for the caller's `parse()`."""
    try:
        parsed = raw.parse()
        if not inspect.iscoroutine(parsed):
            return parsed
        # The body is here, so the coroutine never waits.
        try:
            parsed.send(None)
        except StopIteration as done:
            return done.value
        parsed.close()
    except Exception:
        pass
    return None

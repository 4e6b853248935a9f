"""The `chat` span of an SDK's call, which ends with what the call returns: a result, a raw response, or a stream.

Nothing here keeps a stream or its response alive: one that is dropped is closed as early as without us.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from agl import semconv, tracing
from agl.tracing.context import Scope
from agl.tracing.provider_formats import ResponseAccumulator

Facts = Mapping[str, Any]
"""Span attributes by name; those that are None are left out."""

AddFacts = Callable[[Any, dict[str, Any]], None]


def fields(of: Any) -> Mapping[str, Any]:
    """What an SDK's object holds itself. Its models take microseconds to say that they lack an attribute."""
    return getattr(of, "__dict__", {})


@dataclass(frozen=True)
class CallObserver:
    """Makes the spans of one SDK's calls, for `routing.observe`.

    Attributes:
        provider: the SDK's `gen_ai.provider.name`.
        of_result: (result, whether to capture content) -> what a result tells.
        of_chunk: (chunk of a stream, what is known so far): adds what the chunk tells. It is called for every chunk.
        silent: paths that ask no model for an answer.
    """

    provider: str
    of_result: Callable[[Any, bool], Facts]
    of_chunk: AddFacts
    silent: tuple[str, ...] = ()

    def started(self, path: str, options: Any, wire: Facts) -> Scope | None:
        """Open the span of a request."""
        if path in self.silent:
            return None
        body = options.json_data if isinstance(options.json_data, dict) else {}
        model = str(body.get("model", ""))
        attributes = {semconv.PROVIDER_NAME: self.provider, semconv.REQUEST_MODEL: model, **wire}
        return tracing.start(semconv.CHAT, model, attributes=attributes)

    def finished(self, scope: Scope, result: Any) -> Any:
        """End it with its result; the span of a stream ends later, with the stream."""
        if hasattr(result, "_iterator"):
            self._read_by_us(scope, result)
            return result
        raw = fields(result).get("http_response")
        if raw is None:
            self._end(scope, result)
        elif raw.is_closed:
            self._end(scope, _parsed(result))
        else:
            _Unread(self, scope, result)
        return result

    def _read_by_us(self, scope: Scope, stream: Any) -> None:
        if not isinstance(stream._iterator, _Reader):
            reader = _AsyncReader if hasattr(stream._iterator, "__anext__") else _Reader
            stream._iterator = reader(scope, stream._iterator, stream.response, self.of_chunk)

    def _end(self, scope: Scope, result: Any) -> None:
        tracing.end(scope, attributes=self.of_result(result, scope.rollout.capture_content))

    def failed(self, scope: Scope, error: BaseException) -> None:
        """End it with the error that the request raised."""
        tracing.end(scope, error=error)


class _Unread:
    """A raw response whose body is still to come: the span ends with the body, and tells what `parse()` makes of it."""

    def __init__(self, observer: CallObserver, scope: Scope, raw: Any) -> None:
        self.observer, self.scope = observer, scope
        self.parsing = self.streams = False
        _when_closed(raw.http_response, self.closed)
        weakref.finalize(raw.http_response, tracing.end, scope).atexit = False
        # A class of its own, and no function on the object, which would keep the object alive or lose it too early.
        raw._agl_unread = self
        raw.__class__ = _telling(type(raw))

    def closed(self) -> None:
        # `parse()` reads the body, which closes the response, before there is a result to tell of.
        if not self.parsing and not self.streams:
            tracing.end(self.scope)

    def told(self, result: Any) -> Any:
        """Take note of what was parsed, which goes on unchanged."""
        if hasattr(result, "_iterator"):
            self.streams = True
            self.observer._read_by_us(self.scope, result)
        else:
            self.observer._end(self.scope, result)
        return result

    @contextlib.contextmanager
    def within(self, response: Any) -> Iterator[None]:
        self.parsing = True
        try:
            yield
        finally:
            self.parsing = False
            if response.is_closed:
                self.closed()


@functools.cache
def _telling(cls: Any) -> Any:
    """The class of a raw response, whose `parse()` also tells the `_Unread` of the object."""
    if inspect.iscoroutinefunction(cls.parse):

        async def parse_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._agl_unread.within(self.http_response):
                return self._agl_unread.told(await cls.parse(self, *args, **kwargs))

        parse: Any = functools.wraps(cls.parse)(parse_async)
    else:

        def parse_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._agl_unread.within(self.http_response):
                return self._agl_unread.told(cls.parse(self, *args, **kwargs))

        parse = functools.wraps(cls.parse)(parse_sync)
    return type(cls.__name__, (cls,), {"parse": parse, "__module__": cls.__module__, "__doc__": cls.__doc__})


class _Reader:
    """A stream's chunks, unchanged; the span ends when they do, when the stream is closed, or when nobody holds it."""

    def __init__(self, scope: Scope, chunks: Any, response: Any, of_chunk: AddFacts) -> None:
        self.scope, self.chunks, self.of_chunk = scope, chunks, of_chunk
        self.facts: dict[str, Any] = {}
        rollout = scope.rollout
        # What the gateway answers it records itself.
        self.answer = ResponseAccumulator() if rollout.prompts and rollout.capture_content else None
        self.reading = False
        closed = weakref.WeakMethod(self.closed)
        _when_closed(response, lambda: _call(closed))
        weakref.finalize(self, tracing.end, scope, attributes=self.facts).atexit = False

    def closed(self) -> None:
        # The SDK closes the response before it raises; then the reader below ends the span, with the error.
        if not self.reading:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        if self.answer is not None:
            self.facts.update(self.answer.facts(content=True))
        tracing.end(self.scope, error=error, attributes=self.facts)

    def take(self, chunk: Any) -> Any:
        self.of_chunk(chunk, self.facts)
        if self.answer is not None and hasattr(chunk, "model_dump"):
            self.answer.event(chunk.model_dump(mode="json", exclude_none=True, warnings=False))
        return chunk

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
        return self.take(chunk)


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
        return self.take(chunk)


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

    response.close, response.aclose = closing, aclosing


def _weak(method: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """A reference that does not keep the method's object alive; another's hook is no method, and is kept."""
    return weakref.WeakMethod(method) if inspect.ismethod(method) else lambda: method


def _call(reference: Callable[[], Callable[..., Any] | None]) -> None:
    if (method := reference()) is not None:
        method()


def _parsed(raw: Any) -> Any:
    """What a raw response that was read holds; the SDK keeps it for the caller's own `parse()`."""
    try:
        parsed = raw.parse()
        if not inspect.iscoroutine(parsed):
            return parsed
        # The body is here, so that nothing is left to wait for.
        try:
            parsed.send(None)
        except StopIteration as done:
            return done.value
        parsed.close()
    except Exception:
        pass
    return None

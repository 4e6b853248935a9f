"""Scopes for frameworks that make OpenTelemetry spans themselves, and for streams.

A scope opened here leaves OpenTelemetry's current span unchanged, so the framework's spans form the same tree as
without agl. In a generator it is current only while an item is produced: a generator runs in its reader's context, and
two streams that are read in turn would nest in one another.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from typing import Any

from agl import tracing
from agl.tracing import context
from agl.tracing.context import Scope


def start(
    kind: str,
    name: str,
    *,
    agent: str | None = None,
    parent: Scope | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Scope | None:
    """`tracing.start`; OpenTelemetry's current span stays unchanged."""
    with _otel_unchanged():
        return tracing.start(kind, name, agent=agent, parent=parent, attributes=attributes)


def end(scope: Scope, *, error: BaseException | str | None = None, attributes: Mapping[str, Any] | None = None) -> None:
    """`tracing.end`; OpenTelemetry's current span stays unchanged."""
    with _otel_unchanged():
        tracing.end(scope, error=error, attributes=attributes)


@contextlib.contextmanager
def _otel_unchanged() -> Iterator[None]:
    from opentelemetry import context as otel

    before = otel.get_current()
    try:
        yield
    finally:
        if otel.get_current() is not before:
            otel.attach(before)


class Aside:
    """A context for scopes that are current only inside `with aside:`, however often it is entered.

    Entered first, it starts from the current scope; entered again, it resumes with the scope that was current inside.
    """

    def __init__(self) -> None:
        self._entered = False
        self._inside: Scope | None = None
        self._outside: Scope | None = None

    def __enter__(self) -> None:
        self._outside = context.snapshot()
        if self._entered:
            context.restore(self._inside)
        self._entered = True

    def __exit__(self, *_: object) -> None:
        self._inside = context.snapshot()
        context.restore(self._outside)


async def traced(
    begin: Callable[[], Scope | None],
    events: Callable[[], AsyncIterator[Any]],
    finish: Callable[[Scope, BaseException | None], None],
    seen: Callable[[Any], None] = lambda event: None,
) -> AsyncGenerator[Any, None]:
    """Read `events()` within the scope that `begin()` opens; for the reader, its scope stays current.

    Args:
        begin: opens a scope; None when there is nothing to trace.
        events: makes the generator.
        finish: ends the scope, with the error that the generator raised. A reader that stops early is no error.
        seen: called with each event.
    """
    aside = Aside()
    with aside:
        scope = begin()
        source = events()
    error: BaseException | None = None
    try:
        while True:
            with aside:
                try:
                    event = await anext(source)
                except StopAsyncIteration:
                    break
                seen(event)
            yield event
    except GeneratorExit:
        raise
    except BaseException as raised:
        error = raised
        raise
    finally:
        with aside:
            try:
                if (close := getattr(source, "aclose", None)) is not None:
                    await close()
            finally:
                if scope is not None:
                    finish(scope, error)


def traced_sync(
    begin: Callable[[], Scope | None],
    items: Callable[[], Generator[Any, Any, Any]],
    finish: Callable[[Scope, BaseException | None], None],
) -> Generator[Any, Any, Any]:
    """`traced` of a generator that is not async; what it returns is returned."""
    aside = Aside()
    with aside:
        scope = begin()
        source = items()
    error: BaseException | None = None
    try:
        while True:
            with aside:
                try:
                    item = next(source)
                except StopIteration as stop:
                    return stop.value
            yield item
    except GeneratorExit:
        raise
    except BaseException as raised:
        error = raised
        raise
    finally:
        with aside:
            try:
                source.close()
            finally:
                if scope is not None:
                    finish(scope, error)

"""Scopes for frameworks with OpenTelemetry spans of their own, and for what is read piece by piece.

A scope opened here is agl's alone: OpenTelemetry's current span stays as it was, so the framework's own spans form the
tree that the user's provider gets without us. Within a generator it is current only while a piece is made: a generator
runs in its reader's context, and two streams read in turn would nest in one another.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
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
    """`tracing.start`, unseen by OpenTelemetry."""
    with _otel_kept():
        return tracing.start(kind, name, agent=agent, parent=parent, attributes=attributes)


def end(scope: Scope, *, error: BaseException | str | None = None, attributes: Mapping[str, Any] | None = None) -> None:
    """`tracing.end`, unseen by OpenTelemetry."""
    with _otel_kept():
        tracing.end(scope, error=error, attributes=attributes)


@contextlib.contextmanager
def _otel_kept() -> Iterator[None]:
    from opentelemetry import context as otel

    before = otel.get_current()
    try:
        yield
    finally:
        if otel.get_current() is not before:
            otel.attach(before)


class Aside:
    """A place for scopes that are current only between `with aside:` and its end, however often it is entered.

    Entered first, it starts from the scope that is current there; entered again, it goes on from where it was left.
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
    """Read `events()` within the scope that `begin()` opens; the reader's own scope stays current for the reader.

    Args:
        begin: opens a scope, or gives None when there is nothing to trace.
        events: makes the generator.
        finish: ends the scope, with the error that came out of the generator. A reader that stops early is no error.
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

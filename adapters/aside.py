"""Scopes of streams: current only while an item is produced.

A generator runs in its reader's context, and two streams that are read in turn would nest in one another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import Any

from agl.tracing import context
from agl.tracing.context import Scope


class Aside:
    """A context for scopes that are current only inside `with aside:`, however often it is entered.

    Entered first, it starts from the current scope; entered again, it resumes with the scope that was current inside.
    """

    def __init__(self) -> None:
        self._entered = False
        self._inside: Scope | None = None
        self._outside: Scope | None = None

    def __enter__(self) -> None:
        self._outside = context.restore(self._inside) if self._entered else context.snapshot()
        self._entered = True

    def __exit__(self, *_: object) -> None:
        self._inside = context.restore(self._outside)


async def traced(
    begin: Callable[[], Scope | None],
    events: Callable[[], AsyncIterator[Any]],
    finish: Callable[[Scope, BaseException | None], None],
    seen: Callable[[Any], None] | None = None,
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
                if seen is not None:
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

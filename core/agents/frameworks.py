"""The adapters that are installed, found by entry point, and which of them are on.

An adapter of a third party needs no change here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any, Protocol

from agl.tracing.import_hooks import when_imported
from agl.tracing.main_thread import watched
from agl.tracing.threads import carried_across_threads

log = logging.getLogger("agl")

GROUP = "agl.adapters"
CLIENTS = ("openai", "anthropic", "google_genai")
"""The adapters of SDKs' bare clients."""


class Tracer(Protocol):
    """An adapter's instrumentor, in OpenTelemetry's word; not OpenTelemetry's `Tracer`.

    While it is on, a framework's agent, tool and LLM calls become spans.
    """

    def instrument(self) -> Any:
        """Switch it on."""
        ...

    def uninstrument(self) -> Any:
        """Switch it off, and restore what it changed."""
        ...


broken: list[str] = []
"""Adapters that cannot be imported, and why."""


@functools.cache
def adapters() -> dict[str, Any]:
    """Name -> tracer class of every installed adapter, in order of name, without those that cannot be imported."""
    loaded: dict[str, Any] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        try:
            loaded[entry.name] = entry.load()
        except Exception as error:
            where = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
            broken.append(f"{entry.name}{where} ({type(error).__name__}: {error})")
            log.warning("an adapter cannot be imported: %s", broken[-1])
    return loaded


def switch_on(adapter: Any, report: Callable[[str], None] = log.warning) -> Tracer | None:
    """Switch on the adapter of an imported framework; None if it was on already, or cannot be.

    Args:
        report: gets the reason why it cannot.
    """
    try:
        recognises = getattr(adapter, "recognises", None)
        tracer = adapter()
        if (recognises is None or recognises()) and not getattr(tracer, "instrumented", False):
            tracer.instrument()
            return tracer
    except ImportError:
        pass  # part of the framework is missing, or another package has its name
    except Exception as error:
        report(f"{adapter.__name__} is off: {type(error).__name__}: {error}")
    return None


class ImportedFrameworks:
    """The tracer of functions: while it is on, so is the adapter of every framework that is imported, before or then.

    Pickling it leaves what is on behind.
    """

    def __init__(self) -> None:
        self._started: list[Tracer] = []
        self._forget: list[Callable[[], None]] = []

    def __reduce__(self) -> tuple[type[ImportedFrameworks], tuple[()]]:
        return type(self), ()

    @property
    def instrumented(self) -> bool:
        """Whether it is on."""
        return bool(self._forget)

    def instrument(self) -> None:
        """Switch it on."""
        for adapter in adapters().values():
            callback = functools.partial(self._imported, adapter)
            self._forget.append(when_imported(tuple(getattr(adapter, "modules", ())), callback))

    def _imported(self, adapter: Any, module: str) -> None:
        tracer = switch_on(adapter)
        if tracer is not None:
            self._started.append(tracer)

    def uninstrument(self) -> None:
        """Switch it off, and the adapters that it has switched on."""
        while self._forget:
            self._forget.pop()()
        while self._started:
            self._started.pop().uninstrument()


@contextlib.contextmanager
def switched_on(tracers: Iterable[Tracer]) -> Iterator[None]:
    """Switch these tracers and those of the bare clients on for a block; those that were on before stay on.

    Where a framework's tracer was chosen, functions switch on no other frameworks.
    """
    clients = tuple(cls for name, cls in adapters().items() if name in CLIENTS)
    wanted = list(tracers)
    if any(not isinstance(t, (ImportedFrameworks, *clients)) for t in wanted):
        wanted = [t for t in wanted if not isinstance(t, ImportedFrameworks)]
    started = []
    with carried_across_threads(), watched():
        try:
            for tracer in (*wanted, *(cls() for cls in clients)):
                if not getattr(tracer, "instrumented", False):
                    tracer.instrument()
                    started.append(tracer)
            yield
        finally:
            for tracer in reversed(started):
                tracer.uninstrument()

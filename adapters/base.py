"""What the adapters share: switching instrumentation on and off, and turning a task into a framework's input."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from agl.errors import ConfigError
from agl.tracing import sdk_hooks as routing

QUESTION_FIELDS = ("question", "input", "prompt", "query", "text", "task")
"""Fields of a dict task that hold what the user asks, in order of preference."""


class InstrumentedTracer:
    """Instrumentation that is on or off for the whole process, however many tracers ask for it.

    `instrument` and `uninstrument` are idempotent; usable as a context manager. A subclass says what to change in
    `_install` and how to restore it in `_restore`; that SDK requests are routed meanwhile is seen to here.

    Attributes:
        modules: a program that is traced without code gets this tracer when it imports one of these.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    _lock = threading.RLock()
    _active: InstrumentedTracer | None = None

    def __init_subclass__(cls) -> None:
        cls._active = None

    @classmethod
    def recognises(cls) -> bool:
        """Whether what was imported under one of `modules` is the framework, and no package of the user's own."""
        return True

    @property
    def instrumented(self) -> bool:
        """Whether this framework is instrumented in this process."""
        return type(self)._active is not None

    def instrument(self, **_: Any) -> Self:
        """Switch the hooks on. ImportError if the framework is not installed."""
        with self._lock:
            if type(self)._active is None:
                routing.install()
                try:
                    self._install()
                except BaseException:
                    routing.uninstall()
                    raise
                type(self)._active = self
        return self

    def uninstrument(self, **_: Any) -> None:
        """Restore everything that `instrument` changed."""
        with self._lock:
            active = type(self)._active
            if active is not None:
                active._restore()
                type(self)._active = None
                routing.uninstall()

    def __enter__(self) -> Self:
        return self.instrument()

    def __exit__(self, *_: object) -> None:
        self.uninstrument()

    def _install(self) -> None:
        raise NotImplementedError

    def _restore(self) -> None:
        raise NotImplementedError


def question(task: Any) -> str:
    """The text that a task asks.

    Raises:
        ConfigError: a task that holds no such text.
    """
    if isinstance(task, str):
        return task
    if isinstance(task, Mapping):
        for name in QUESTION_FIELDS:
            if isinstance(task.get(name), str):
                return task[name]
        raise ConfigError(
            f"cannot tell which field of the task is the question; it has {', '.join(map(repr, task))}",
            hint=f"name it one of {', '.join(QUESTION_FIELDS)}, or say how with agl.wrap(..., input=lambda task: ...)",
        )
    raise ConfigError(
        f"cannot make an input of a {type(task).__name__} task",
        hint="say how with agl.wrap(..., input=lambda task: ...)",
    )

"""Threads and thread pools that a rollout starts run inside it; by itself, a new thread has an empty context."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as _pool
from typing import Any, TypeVar

from agl.errors import AsException
from agl.surroundings import start_thread
from agl.tracing import context
from agl.tracing.context import Scope

T = TypeVar("T")

_lock = threading.Lock()
_users = 0
_patches: list[tuple[type, str, Any, Any]] = []
"""(class, attribute, original in the class's namespace (None: inherited), replacement)."""


@contextlib.contextmanager
def carried_across_threads() -> Iterator[None]:
    """While open, threads and thread pools started inside a rollout run inside it too.

    Only the scope is carried, never the rest of the caller's context. May be nested, in any thread.
    """
    global _users
    with _lock:
        _users += 1
        if not _patches:
            _patch_threads()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            # Where another library patched over ours, ours stays inside; outside a rollout it does nothing.
            if _users == 0 and all(cls.__dict__[name] is replacement for cls, name, _, replacement in _patches):
                for cls, name, original, _ in _patches:
                    if original is None:
                        delattr(cls, name)
                    else:
                        setattr(cls, name, original)
                _patches.clear()


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a daemon thread, with this context's variables; unlike a pool's, such a thread does not keep
    the process alive when it hangs."""
    import asyncio  # a third of the core's time to import

    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def resolve(set_value: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_value(value)

    def body() -> None:
        try:
            with AsException():
                outcome: tuple[Callable[[Any], None], Any] = (done.set_result, function())
        except BaseException as error:
            outcome = (done.set_exception, error)
        # The loop may have been closed meanwhile: nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, *outcome)

    start_thread(body, "agl-call")
    return await done


def _in_scope(scope: Scope, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context.inside(scope):
        return function(*args, **kwargs)


def _scope_to_carry() -> Scope | None:
    """The scope that a thread started here begins in."""
    scope = context.innermost()
    return scope if scope is not None and not scope.rollout.closed else None


def _is_pool_worker(thread: threading.Thread) -> bool:
    """Whether a thread outlives the task that started it: each of its tasks brings its own scope."""
    of_executor = getattr(thread, "_target", None) is _pool._worker  # type: ignore[attr-defined]
    return of_executor or type(thread).__module__.startswith("anyio.")


def _patch_threads() -> None:
    start_thread = threading.Thread.start
    submit = ThreadPoolExecutor.submit

    @functools.wraps(start_thread)
    def carried_start(self: threading.Thread) -> None:
        scope = _scope_to_carry()
        if scope is not None and not _is_pool_worker(self):
            self.run = functools.partial(_in_scope, scope, self.run)  # type: ignore[method-assign]
        start_thread(self)

    @functools.wraps(submit)
    def carried_submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        scope = _scope_to_carry()
        if scope is None:
            return submit(self, fn, *args, **kwargs)
        return submit(self, _in_scope, scope, fn, *args, **kwargs)

    replacements = ((threading.Thread, "start", carried_start), (ThreadPoolExecutor, "submit", carried_submit))
    for cls, name, replacement in replacements:
        _patches.append((cls, name, cls.__dict__.get(name), replacement))
        setattr(cls, name, replacement)

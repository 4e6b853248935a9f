"""Event loops in threads: for callers that have none, or a busy one, and for code that may block its loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from agl.surroundings import copied, start_thread

P = ParamSpec("P")
T = TypeVar("T")

STOP_SECONDS = 15.0
"""How long Ctrl-C waits for the coroutine to end."""


class LoopThread:
    """An event loop in a daemon thread. It runs from the start until `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there, in a copy of the caller's context. From any thread."""
        return copied().run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def settle(self) -> bool:
        """Cancel what runs there; False if some of it did not end within a second, or the loop is blocked."""

        async def cancel_all() -> bool:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            if not tasks:
                return True
            _, pending = await asyncio.wait(tasks, timeout=1.0)
            for task in pending:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            return not pending

        try:
            return self.alive and self.submit(cancel_all()).result(2.0)
        except Exception:
            return False

    def stop(self) -> None:
        """End the loop; tasks that cannot be cancelled within a second are left behind."""
        if self.settle():
            with contextlib.suppress(Exception):
                self.submit(self._loop.shutdown_asyncgens()).result(2.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._loop.close()


def run_in_thread(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a separate thread and event loop.

    It runs in a copy of the caller's context. So it works under a running loop too (notebooks), and Ctrl-C reaches the
    caller at once and ends the coroutine cleanly.
    """
    state: dict[str, Any] = {}
    ready, done = threading.Event(), threading.Event()

    async def body() -> None:
        state["loop"], state["task"] = asyncio.get_running_loop(), asyncio.current_task()
        ready.set()
        state["result"] = await main

    def thread() -> None:
        try:
            asyncio.run(body())
        except BaseException as error:
            state["error"] = error
        finally:
            ready.set()
            done.set()

    start_thread(thread, "agl-control")
    try:
        # Not Thread.join: after an interrupted join, CPython 3.11 regards the thread as ended (bpo-45274).
        while not done.wait(0.2):
            pass
    except KeyboardInterrupt:
        ready.wait(STOP_SECONDS)
        if "task" in state and not done.is_set():
            state["loop"].call_soon_threadsafe(state["task"].cancel)
        # A second Ctrl-C ends the wait.
        done.wait(STOP_SECONDS)
        raise
    if "error" in state:
        raise state["error"]
    return state["result"]


def blocking(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """The function for callers outside an event loop, by `run_in_thread`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_in_thread(function(*args, **kwargs))

    return call

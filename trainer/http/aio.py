"""Runs a coroutine for callers without an event loop, or with a busy one; Ctrl-C ends it cleanly."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

STOP_SECONDS = 15.0
"""How long Ctrl-C waits for the coroutine to end."""


def run_in_thread(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a separate thread and event loop.

    So it works under a running loop too (notebooks), and Ctrl-C reaches the caller at once and ends the coroutine
    cleanly.
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

    threading.Thread(target=thread, name="agl-control", daemon=True).start()
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

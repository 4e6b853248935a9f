"""Runs a coroutine for who has no event loop, or one that is busy; Ctrl-C ends it cleanly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

STOP_SECONDS = 15.0
"""How long Ctrl-C waits for a clean end."""


def run_in_thread(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop and thread of its own, so that it works under a running loop too (notebooks), and
    so that Ctrl-C reaches the caller at once and ends the coroutine cleanly."""
    box: dict[str, Any] = {}
    ready, done = threading.Event(), threading.Event()

    async def body() -> None:
        box["loop"], box["task"] = asyncio.get_running_loop(), asyncio.current_task()
        ready.set()
        box["result"] = await main

    def thread() -> None:
        try:
            asyncio.run(body())
        except BaseException as error:
            box["error"] = error
        finally:
            ready.set()
            done.set()

    threading.Thread(target=thread, name="agl-control", daemon=True).start()
    try:
        # Not Thread.join: CPython 3.11 takes a thread whose join was interrupted for ended (bpo-45274).
        while not done.wait(0.2):
            pass
    except KeyboardInterrupt:
        ready.wait(STOP_SECONDS)
        if "task" in box and not done.is_set():
            box["loop"].call_soon_threadsafe(box["task"].cancel)
        # A second Ctrl-C gives up waiting.
        done.wait(STOP_SECONDS)
        raise
    if "error" in box:
        raise box["error"]
    return box["result"]

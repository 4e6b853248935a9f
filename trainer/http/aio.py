"""Event loops in threads: for callers that have none, or a busy one, and for code that may block its loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from agl.stop_signals import stop_signals_to
from agl.surroundings import copied, start_thread

P = ParamSpec("P")
T = TypeVar("T")

STOP_SECONDS = 15.0
"""How long Ctrl-C waits for the coroutine to end, once nothing is being finished."""
IMPATIENT = 3
"""The Ctrl-C that ends the wait."""


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


def _keep_exit_status() -> None:
    """Import what torch would import as the program exits.

    CPython forgets that a KeyboardInterrupt ended the program once a string is compiled, as named tuples do when they
    are defined; the exit status is 1 then, instead of SIGINT's. `torch._dynamo` imports tabulate when it exits.
    """
    if "torch._dynamo" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("tabulate")


def run_in_thread(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a separate thread and event loop.

    It runs in a copy of the caller's context. So it works under a running loop too (notebooks), and Ctrl-C, SIGTERM and
    SIGHUP cancel it. What it finishes then (`unhurried`) is waited for; anything else for `STOP_SECONDS`.

    Raises:
        KeyboardInterrupt: one of these signals has come, which it names. The coroutine has ended, and its cause is the
            error that it ended with instead of its cancellation.
        BaseException: what a handler of the user's raised, such as SystemExit; the same holds then.
    """
    state: dict[str, Any] = {}
    ready, done = threading.Event(), threading.Event()
    received: list[signal.Signals] = []
    uncancelled = threading.Lock()
    of_the_users: BaseException | None = None

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

    def stop(number: signal.Signals = signal.SIGINT) -> None:
        received.append(number)
        # Further ones change nothing: many programs send two, and what is being saved is to be saved.
        if len(received) == 1 and ready.is_set():
            cancel()

    def cancel() -> None:
        # Once: a second cancellation would end what the coroutine does to end.
        if "task" in state and uncancelled.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                state["loop"].call_soon_threadsafe(state["task"].cancel)

    def is_awaited() -> bool:
        """Whether the coroutine still gets time to end."""
        nonlocal deadline
        if _unhurried[state["loop"]]:
            deadline = time.monotonic() + STOP_SECONDS
        impatient = received.count(signal.SIGINT) >= IMPATIENT
        return time.monotonic() < deadline and not impatient

    with stop_signals_to(stop):
        try:
            start_thread(thread, "agl-control")
            ready.wait()
            # Not Thread.join: after an interrupted join, CPython 3.11 regards the thread as ended (bpo-45274).
            while not done.is_set() and not received:
                done.wait(0.2)
        except BaseException as raised:  # by a handler of the user's
            of_the_users = raised
            stop()
        with contextlib.suppress(BaseException):  # by the same handler
            ready.wait(STOP_SECONDS)
        if received:
            cancel()
        deadline = time.monotonic() + STOP_SECONDS
        while ready.is_set() and not done.is_set() and is_awaited():
            with contextlib.suppress(BaseException):  # by the same handler
                done.wait(0.2)
    error = state.get("error")
    if received:
        _keep_exit_status()
        cause = error if isinstance(error, Exception) else None
        raise of_the_users or KeyboardInterrupt(received[0].name) from cause
    if error is not None:
        raise error
    return state["result"]


_unhurried: Counter[asyncio.AbstractEventLoop] = Counter()


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """In a coroutine: who stops the program waits for the block, however long it takes."""
    loop = asyncio.get_running_loop()
    _unhurried[loop] += 1
    try:
        yield
    finally:
        _unhurried[loop] -= 1
        if not _unhurried[loop]:
            del _unhurried[loop]


async def finish(work: Coroutine[Any, Any, T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Await work that must not be left halfway: a cancellation takes effect when it has ended, and calls `on_cancel`
    first."""
    task = asyncio.ensure_future(work)
    with unhurried():
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                on_cancel()
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error from None
            raise


def blocking(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """The function for callers outside an event loop, by `run_in_thread`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_in_thread(function(*args, **kwargs))

    return call

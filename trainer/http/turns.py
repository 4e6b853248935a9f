"""Work on large requests (parsing, hashing, rendering, tokenising): on a few threads, never on the event loop.

Invariant: an attempt has one large request worked on at a time, so no attempt takes the threads from the others. Of
requests that name no attempt, the same holds for a lease, or else for the machine that sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request

from agl.trainer.http.auth import LEASE_HEADER

T = TypeVar("T")

LARGE_BYTES = 16 * 1024
"""A body of this many bytes is large."""
LARGE_MESSAGES = 256
"""So is a conversation of this many messages, or with this many of `LARGE_BYTES` in characters."""

_POOL = ThreadPoolExecutor(max_workers=2, thread_name_prefix="agl-requests")
_SWITCH_SECONDS = 0.0002
"""How long the event loop waits for the interpreter while Python code runs on a thread; Python's default is 0.005."""


class Turns:
    """The turns of one attempt's large requests: `async with` waits for one, `run` works in it.

    Args:
        threads: where the work is done; None: where that of all other large requests is.
    """

    def __init__(self, threads: ThreadPoolExecutor | None = None) -> None:
        self._threads = threads or _POOL
        self._free = asyncio.Semaphore(1)
        self._job: Future[Any] | None = None

    async def __aenter__(self) -> Turns:
        await self._free.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        job, self._job = self._job, None
        if job is None or job.done():
            self._free.release()
            return
        # A request that was cancelled keeps its turn until its work has ended, so that cancelling gains nothing.
        loop = asyncio.get_running_loop()
        job.add_done_callback(lambda _: _call(loop, self._free.release))

    async def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """The result of the function, which runs on a thread."""
        self._job = self._threads.submit(_run, function, arguments, keywords)
        return await asyncio.wrap_future(self._job)


_of_senders: WeakValueDictionary[tuple[str, int], Turns] = WeakValueDictionary()


@contextlib.asynccontextmanager
async def body_in_turn(request: Request, *, large: bool = False) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Yields what runs a function of the body and arguments: on a thread where the body is long, or `large` when read.

    Such a request keeps its sender's turn until the block ends: what is read of many at once would fill the memory, and
    stop everything while Python looks through it.
    """
    body = await request.body()

    async def read(function: Callable[..., T], *arguments: Any) -> T:
        return function(body, *arguments) if turn is None else await turn.run(function, body, *arguments)

    turn, sender = None, request.headers.get(LEASE_HEADER) or (request.client.host if request.client else "")
    if large or len(body) >= LARGE_BYTES:
        turn = _of_senders.setdefault((sender, id(asyncio.get_running_loop())), Turns())
    async with turn or contextlib.nullcontext():
        yield read


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    # The loop can have been closed while the work went on.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _run(function: Callable[..., T], arguments: Any, keywords: Any) -> T:
    with _short_switches():
        return function(*arguments, **keywords)


_switching = threading.Lock()
_running = 0
_usual_seconds = 0.0


@contextlib.contextmanager
def _short_switches() -> Iterator[None]:
    """While a thread works, the event loop gets the interpreter soon after it asks for it."""
    global _running, _usual_seconds
    with _switching:
        if _running == 0:
            _usual_seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(_SWITCH_SECONDS, _usual_seconds))
        _running += 1
    try:
        yield
    finally:
        with _switching:
            _running -= 1
            if _running == 0:
                sys.setswitchinterval(_usual_seconds)

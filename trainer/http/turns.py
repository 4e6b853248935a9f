"""Work on large requests (parsing, hashing, rendering, tokenising): on a few threads, never on the event loop.

Invariant: an attempt has one large request worked on at a time, so no attempt takes the threads from the others. Of
requests that are no attempt's, the same holds for a lease that is open, or else for the key that was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request

from agl.trainer.http.auth import key_hash, lease_secrets

T = TypeVar("T")

LARGE_BYTES = 16 * 1024
"""A body of this many bytes is large."""
LARGE_MESSAGES = 256
"""So is a conversation of this many messages, or with this many of `LARGE_BYTES` in characters."""

_UPLOADS = 4
"""Large bodies of one sender that are held at a time."""
_MOST_LEASES = 10_000
"""Leases of which a server knows whose they are."""
_POOL = ThreadPoolExecutor(max_workers=2, thread_name_prefix="agl-requests")
_SWITCH_SECONDS = 0.0002
"""How long the event loop waits for the interpreter while Python code runs on a thread; Python's default is 0.005."""


class Turns:
    """The turns of one attempt's large requests: `async with` waits for one, `run` works in it.

    Args:
        threads: where the work is done; None: where that of all other large requests is.

    Attributes:
        uploads: of bodies that are received or held meanwhile. One over a slow line lets others of its sender pass.
    """

    def __init__(self, threads: ThreadPoolExecutor | None = None) -> None:
        self.uploads = asyncio.Semaphore(_UPLOADS)
        self._threads = threads or _POOL
        self._free = asyncio.Semaphore(1)
        self._job: Future[Any] | None = None

    async def __aenter__(self) -> Turns:
        await self._free.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        job = self._job
        self._job = None
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


class TurnsByName:
    """The turns of senders by their names, which live as long as somebody has or awaits one."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()

    def of(self, sender: str) -> Turns:
        """The turns of a sender that was authenticated as this."""
        return self._turns.setdefault(sender, Turns())


class TurnsByLease:
    """The turns of a server's senders: those of the lease whose secret a request shows, or else those of its key.

    A secret counts once the server knows whose it is (`know`), and only while its attempt is open: otherwise a sender
    would have as many turns as it can make up, or has ever had.

    Args:
        is_open: (rollout, attempt, secret) -> whether the secret is that of the attempt's lease, which has not ended.
    """

    def __init__(self, is_open: Callable[[str, int, str], Awaitable[bool]]) -> None:
        self._is_open, self._turns = is_open, TurnsByName()
        self._leases: OrderedDict[bytes, tuple[str, int]] = OrderedDict()

    def know(self, secret: str | None, rollout_id: str, attempt: int) -> None:
        """Remember the attempt of a lease's secret."""
        if secret is None:
            return
        digest = key_hash(secret)
        self._leases[digest] = rollout_id, attempt
        self._leases.move_to_end(digest)
        while len(self._leases) > _MOST_LEASES:
            self._leases.popitem(last=False)

    async def of(self, request: Request, key: str) -> Turns:
        """The turns of a request's sender. `key`: what its key makes it."""
        for secret in lease_secrets(request.headers):
            lease = self._leases.get(key_hash(secret))
            if lease is not None and await self._is_open(*lease, secret):
                return self._turns.of(f"lease of {lease[0]} {lease[1]}")
        return self._turns.of(key)


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

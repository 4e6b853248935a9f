"""Requests to a server of this process without a socket: its ASGI application runs on the server's own event loop.

Invariant: the application sees what it would see of the same request over HTTP, a client that hangs up included, and
the client gets what it would get.
"""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import logging
import os
import queue
import sys
import time
import urllib.parse
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

log = logging.getLogger("agl")

_servers: dict[tuple[str, int], _Server] = {}
_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()

# A forked child has the entries of its parent's servers, but not the threads that they run in.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_servers.clear)


def listen(host: str, port: int, app: Callable[..., Awaitable[None]], tasks: set[asyncio.Task[Any]]) -> None:
    """Serve an application on the running loop, until `close`.

    Args:
        host, port: where it listens for other processes. app: an ASGI application.
        tasks: gets the task of each running request.
    """
    _servers[host, port] = _Server((host, port), app, tasks)


def close(host: str, port: int) -> None:
    """Take no more requests; those that run go on."""
    _servers.pop((host, port), None)


def client_class(base: Any, *, is_async: bool, prepare: Callable[[Any], None]) -> Any:
    """A class of httpx clients that send to `listen`'s servers without a socket, and to all others as `base` does.

    Args:
        base: `httpx.Client` or `httpx.AsyncClient`, or of what an SDK has instead of httpx. is_async: which of them.
        prepare: called with each request before it is sent.
    """
    httpx: Any = sys.modules[base.__mro__[-2].__module__.partition(".")[0]]

    def server_of(request: Any) -> _Server | None:
        prepare(request)
        return _servers.get((request.url.host, request.url.port))

    def checked(request: Any, item: Any) -> Any:
        if isinstance(item, BaseException):
            raise httpx.RemoteProtocolError("the server ended without a response", request=request) from item
        return item

    def response(request: Any, item: tuple[int, Any, bytes, bool], stream: Any) -> Any:
        status, headers, body, more = item
        answer = httpx.Response(
            status, headers=headers, request=request, extensions={"http_version": b"HTTP/1.1"},
            **({"stream": stream} if more else {"content": body}),
        )  # fmt: skip
        stream.first = body
        answer.elapsed = datetime.timedelta(seconds=time.perf_counter() - stream.exchange.began)
        return answer

    def timed_out(request: Any) -> BaseException:
        return httpx.ReadTimeout("the server sent nothing in time", request=request)

    class Stream(httpx.SyncByteStream):
        """A response's body, read in a thread."""

        def __init__(self, server: _Server, request: Any) -> None:
            self.request, self.first = request, b""
            self.seconds = request.extensions.get("timeout", {}).get("read")
            self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self.exchange = _Exchange(server, request, self.inbox.put)

        def next_item(self) -> Any:
            try:
                return checked(self.request, self.inbox.get(timeout=self.seconds))
            except queue.Empty:
                raise timed_out(self.request) from None

        def __iter__(self) -> Iterator[bytes]:
            part = self.first
            while part is not None:
                yield part
                part = self.next_item()

        def close(self) -> None:
            self.exchange.hang_up()

    class AsyncStream(httpx.AsyncByteStream):
        """A response's body, read on an event loop."""

        def __init__(self, server: _Server, request: Any) -> None:
            self.request, self.first = request, b""
            self.seconds = request.extensions.get("timeout", {}).get("read")
            self.inbox: asyncio.Queue[Any] = asyncio.Queue()
            mailbox, put = _mailbox(asyncio.get_running_loop()), self.inbox.put_nowait
            self.exchange = _Exchange(server, request, lambda item: mailbox.post(put, item))

        async def next_item(self) -> Any:
            try:
                async with asyncio.timeout(self.seconds):
                    return checked(self.request, await self.inbox.get())
            except TimeoutError:
                raise timed_out(self.request) from None

        async def __aiter__(self) -> AsyncIterator[bytes]:
            part = self.first
            while part is not None:
                yield part
                part = await self.next_item()

        async def aclose(self) -> None:
            self.exchange.hang_up()

    class Client(base):
        def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            if (server := server_of(request)) is None:
                return super().send(request, stream=stream, **options)
            body = Stream(server, request)
            try:
                body.exchange.begin(httpx.ConnectError)
                answer = response(request, body.next_item(), body)
                if not stream:
                    answer.read()
                return answer
            except BaseException:
                body.close()
                raise

    class AsyncClient(base):
        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            if (server := server_of(request)) is None:
                return await super().send(request, stream=stream, **options)
            body = AsyncStream(server, request)
            try:
                body.exchange.begin(httpx.ConnectError)
                answer = response(request, await body.next_item(), body)
                if not stream:
                    await answer.aread()
                return answer
            except BaseException:
                await body.aclose()
                raise

    return AsyncClient if is_async else Client


class _Mailbox:
    """Calls functions on a loop, from any thread; those that come together wake it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        # A loop that has ended is collected.
        self._loop, self._context = weakref.ref(loop), context
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._waking = False

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the loop.

        Raises:
            RuntimeError: the loop is closed.
        """
        self._calls.append((function, arguments))
        if not self._waking:
            self._waking = True
            if (loop := self._loop()) is None:
                raise RuntimeError("the event loop is gone")
            loop.call_soon_threadsafe(self._deliver, context=self._context)

    def _deliver(self) -> None:
        self._waking = False
        while self._calls:
            function, arguments = self._calls.popleft()
            function(*arguments)


def _mailbox(loop: asyncio.AbstractEventLoop) -> _Mailbox:
    if (mailbox := _mailboxes.get(loop)) is None:
        mailbox = _mailboxes[loop] = _Mailbox(loop, contextvars.Context())
    return mailbox


class _Server:
    def __init__(
        self, address: tuple[str, int], app: Callable[..., Awaitable[None]], tasks: set[asyncio.Task[Any]]
    ) -> None:
        self.address, self.app, self.tasks = address, app, tasks
        # Requests run in the server's context, not in that of the rollout that sends them.
        self.mailbox = _Mailbox(asyncio.get_running_loop(), contextvars.copy_context())


class _Exchange:
    """One request and its response. `begin` and `hang_up` are called by the client, in any thread.

    Args:
        deliver: called on the server's loop with (status, headers, the body's first part, whether there is more), then
            with each further part, and with None after the last one; or with an exception if the application failed.
    """

    def __init__(self, server: _Server, request: Any, deliver: Callable[[Any], None]) -> None:
        self.began = time.perf_counter()
        self._server, self._request, self._client = server, request, deliver
        self._body: bytes | None = request.content
        self._start: Any = None
        self._complete = False
        self._gone = asyncio.Event()

    def begin(self, stopped: type[Exception]) -> None:
        """Send the request; raises `stopped` if the server's loop has ended."""
        try:
            self._server.mailbox.post(self._create_task)
        except RuntimeError as error:
            raise stopped(str(error)) from error

    def hang_up(self) -> None:
        """Tell the application that the client has gone, if it has not answered yet."""
        if not self._complete:
            try:
                self._server.mailbox.post(self._gone.set)
            except RuntimeError as error:
                log.debug("hanging up: %s", error)

    def _deliver(self, item: Any) -> None:
        try:
            self._client(item)
        except RuntimeError:  # its loop was closed, as a connection would be
            self._gone.set()

    def _create_task(self) -> None:
        task = asyncio.get_running_loop().create_task(self._run())
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _run(self) -> None:
        url = self._request.url
        path, _, query = url.raw_path.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self._server.address,
            "client": self._server.address,
            "scheme": "http",
            "method": self._request.method,
            "root_path": "",
            "path": urllib.parse.unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": [(name.lower(), value) for name, value in self._request.headers.raw],
            "state": {},
        }
        failure: BaseException = RuntimeError("the application sent no response")
        try:
            await self._server.app(scope, self._receive, self._send)
        except BaseException as error:
            failure = error
            if not self._gone.is_set() and isinstance(error, Exception):
                log.exception("a request to %s failed", url)
        finally:
            if not self._complete:
                self._complete = True
                self._deliver(failure)

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self._start = message["status"], message["headers"]
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._start is not None:
            self._deliver((*self._start, body, more))
            self._start = None
        else:
            if body:
                self._deliver(body)
            if not more:
                self._deliver(None)
        if not more:
            self._complete = True
            self._gone.set()

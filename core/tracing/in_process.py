"""Requests to a server of this process without a socket: its ASGI application runs on the server's own event loop.

Invariant: the application sees what it would see of the same request over HTTP, a client that hangs up included, and
the client gets what it would get.
"""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import functools
import importlib
import logging
import os
import queue
import sys
import threading
import time
import urllib.parse
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from agl import semconv
from agl.tracing import context

log = logging.getLogger("agl")

_LIBRARIES = {"httpx", "httpx2"}
"""Their own transports reach `listen`'s servers without a socket, too, from inside a rollout."""

_lock = threading.Lock()
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
    with _lock:
        _servers[host, port] = _Server((host, port), app, tasks)
        for name in _LIBRARIES & sys.modules.keys():
            _library(name).patch()


def close(host: str, port: int) -> None:
    """Take no more requests; those that run go on."""
    with _lock:
        _servers.pop((host, port), None)
        if not _servers:
            for name in _LIBRARIES & sys.modules.keys():
                _library(name).restore()


def client_class(base: Any, *, is_async: bool, prepare: Callable[[Any], None]) -> Any:
    """A class of httpx clients that send to `listen`'s servers without a socket, and to all others as `base` does.

    Args:
        base: `httpx.Client` or `httpx.AsyncClient`, or of what an SDK has instead of httpx. is_async: which of them.
        prepare: called with each request before it is sent.
    """
    library = _library(base.__mro__[-2].__module__.partition(".")[0])

    class Direct(base):
        def build_request(self, method: str, url: Any, **options: Any) -> Any:
            # The client's own headers, cookies and base URL are for other servers; to merge them takes as long as
            # everything else.
            parts = {name: value for name, value in options.items() if value is not None}
            timeout = parts.pop("timeout", None)
            if _servers and parts.keys() <= {"headers", "content"}:
                extensions = {"timeout": library.httpx.Timeout(timeout).as_dict()}
                request = library.httpx.Request(method, url, **parts, extensions=extensions)
                if _server_of(request) is not None:
                    return request
            return super().build_request(method, url, **options)

    class Client(Direct):
        def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            prepare(request)
            if (server := _server_of(request)) is None:
                return super().send(request, stream=stream, **options)
            answer = library.send(server, request)
            if not stream:
                answer.read()
            return answer

    class AsyncClient(Direct):
        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            prepare(request)
            if (server := _server_of(request)) is None:
                return await super().send(request, stream=stream, **options)
            answer = await library.send_async(server, request)
            if not stream:
                await answer.aread()
            return answer

    return AsyncClient if is_async else Client


def _server_of(request: Any) -> _Server | None:
    return _servers.get((request.url.host, request.url.port))


@functools.cache
def _library(name: str) -> _Library:
    return _Library(importlib.import_module(name))


class _Library:
    """Sends the requests of httpx, or of what an SDK has instead of it."""

    def __init__(self, httpx: Any) -> None:
        self.httpx = httpx
        self._patches: list[tuple[Any, str, Any, Any]] = []

        def checked(request: Any, item: Any) -> Any:
            if isinstance(item, BaseException):
                raise httpx.RemoteProtocolError("the server ended without a response", request=request) from item
            return item

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

        self._stream, self._async_stream = Stream, AsyncStream

    def send(self, server: _Server, request: Any) -> Any:
        """Send a request from a thread; the response's body may be still to come."""
        body = self._stream(server, request)
        try:
            body.exchange.begin(self.httpx.ConnectError)
            return self._response(request, body.next_item(), body)
        except BaseException:
            body.close()
            raise

    async def send_async(self, server: _Server, request: Any) -> Any:
        """`send` on an event loop."""
        body = self._async_stream(server, request)
        try:
            body.exchange.begin(self.httpx.ConnectError)
            return self._response(request, await body.next_item(), body)
        except BaseException:
            await body.aclose()
            raise

    def patch(self) -> None:
        """Have the library's transports send without a socket what a rollout sends to `listen`'s servers."""
        if self._patches:
            return
        sync, asynchronous = self.httpx.HTTPTransport, self.httpx.AsyncHTTPTransport
        over_http, over_http_async = sync.handle_request, asynchronous.handle_async_request

        @functools.wraps(over_http)
        def handle_request(transport: Any, request: Any) -> Any:
            server = self._server_of(request)
            return over_http(transport, request) if server is None else self.send(server, request)

        @functools.wraps(over_http_async)
        async def handle_async_request(transport: Any, request: Any) -> Any:
            server = self._server_of(request)
            if server is None or asyncio._get_running_loop() is None:  # as under trio
                return await over_http_async(transport, request)
            return await self.send_async(server, request)

        self._patches = [
            (sync, "handle_request", over_http, handle_request),
            (asynchronous, "handle_async_request", over_http_async, handle_async_request),
        ]
        for cls, name, _, replacement in self._patches:
            setattr(cls, name, replacement)

    def restore(self) -> None:
        """Undo `patch`, unless another library has patched over it: without servers it does nothing."""
        if all(getattr(cls, name) is replacement for cls, name, _, replacement in self._patches):
            for cls, name, original, _ in self._patches:
                setattr(cls, name, original)
            self._patches = []

    def _server_of(self, request: Any) -> _Server | None:
        if context.idle() or context.current() is None or not isinstance(request.stream, self.httpx.ByteStream):
            return None
        return _server_of(request)

    def _response(self, request: Any, item: tuple[int, Any, bytes, bool], stream: Any) -> Any:
        status, headers, body, more = item
        answer = self.httpx.Response(
            status, headers=headers, request=request, extensions={"http_version": b"HTTP/1.1"},
            **({"stream": stream} if more else {"content": body}),
        )  # fmt: skip
        stream.first = body
        answer.elapsed = datetime.timedelta(seconds=time.perf_counter() - stream.exchange.began)
        return answer


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
        self._when_gone: list[Callable[[], Any]] = []

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
                self._server.mailbox.post(self._set_gone)
            except RuntimeError as error:
                log.debug("hanging up: %s", error)

    def _call_when_gone(self, call: Callable[[], Any]) -> None:
        self._when_gone.append(call)
        if self._gone.is_set():
            call()

    def _set_gone(self) -> None:
        self._gone.set()
        for call in self._when_gone:
            call()

    def _deliver(self, item: Any) -> None:
        try:
            self._client(item)
        except RuntimeError:  # its loop was closed, as a connection would be
            self._set_gone()

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
            "extensions": {semconv.WHEN_GONE: self._call_when_gone},
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

"""`HttpStore`: a store that another process serves. What a method has returned, that store has acknowledged.

Requests run on one thread with a loop and a connection pool of its own, so any loop may ask. What waits is sent
together; what the server has not answered is sent again, which never does anything twice.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import threading
import time
import urllib.parse
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import tenacity

from agl.errors import AglError, ConfigError, StoreError
from agl.trainer.http.auth import CLIENT_VARIABLE
from agl.trainer.http.server import is_loopback
from agl.trainer.store.base import AttemptedRollout, AttemptStatus, NewRollout, Rollout, Store
from agl.trainer.store.http import protocol as wire
from agl.trainer.store.sql import codec

log = logging.getLogger("agl.store")

RETRY_SECONDS = 60.0
"""How long a server may be gone before its clients give up."""
_CONNECT_SECONDS, _ANSWER_SECONDS = 10.0, 60.0
_SENDERS = 4
"""Batches on their way at once."""
_BATCH_BYTES = 4 * 1024 * 1024
_AGAIN = frozenset({408, 429, 502, 503, 504})
"""Answers after which the same request can succeed."""
_POLL_SECONDS = 25.0
"""Of one long poll; less than the server's own bound."""


class _Unreachable(Exception):
    """No answer, or one that says to come again."""


@dataclass(slots=True, eq=False)
class _Operation:
    """A call of a method that waits to be sent, and who waits for it."""

    name: str
    body: bytes
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def deliver(self, result: Any, error: BaseException | None) -> None:
        """Hand the outcome over. On any thread."""
        try:
            self.loop.call_soon_threadsafe(self._deliver, result, error)
        except RuntimeError:
            # The loop was closed meanwhile, so nobody waits any more.
            pass

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class HttpStore(Store):
    """A `Store` behind a URL. Methods that are not written here send their arguments and return the server's result.

    Args:
        url: "http://host:4747" or "http://:KEY@host:4747". key: else from the environment's AGL_KEY.
        retry_seconds: how long the server may be gone.

    Raises:
        ConfigError: the URL is none of a store.
    """

    def __init__(self, url: str, *, key: str | None = None, retry_seconds: float = RETRY_SECONDS) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(
                "this is no store's URL", hint="http://HOST:4747, the key in AGL_KEY", store=parts.hostname
            )
        netloc = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{netloc}{parts.path.rstrip('/')}"
        in_url = urllib.parse.unquote(parts.password or parts.username or "")
        self._key = key or in_url or os.environ.get(CLIENT_VARIABLE) or ""
        self._trust_env = not is_loopback(parts.hostname)
        self.retry_seconds = retry_seconds
        self._pending: deque[_Operation] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._gone_since: float | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._http: httpx.AsyncClient | None = None
        self._thread = threading.Thread(target=self._work, name="agl-store-client", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, url: str, *, key: str | None = None, retry_seconds: float = RETRY_SECONDS) -> HttpStore:
        """Reach a store.

        Raises:
            ConfigError: the URL is none of a store.
            StoreError: nobody answers there, it is no store, or the key is not one of its keys.
        """
        store = cls(url, key=key, retry_seconds=retry_seconds)
        try:
            about = await store._on_thread(store._request("GET", f"{wire.PREFIX}/about"))
            if not isinstance(about, Mapping) or about.get("store") != "agl":
                raise StoreError("something else than an agl store answers there", store=store.url)
        except BaseException:
            await store.close()
            raise
        return store

    async def enqueue_rollouts(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        # Ids from here, so that a repeated request adds nothing.
        new = [r if r.rollout_id is not None else replace(r, rollout_id=uuid.uuid4().hex) for r in rollouts]
        return await self._call("enqueue_rollouts", rollouts=new)

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        *,
        run_id: str | None = None,
        wait: float = 0.0,
        request_id: str | None = None,
    ) -> AttemptedRollout | None:
        deadline = time.monotonic() + wait
        request_id = request_id or uuid.uuid4().hex
        lease = {"worker_id": worker_id, "run_id": run_id, "request_id": request_id}
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return await self._call("dequeue_rollout", **lease)
                leased = await self._poll("dequeue_rollout", min(left, _POLL_SECONDS), **lease)
                if leased is not None:
                    return leased
        except asyncio.CancelledError:
            # A lease that nobody receives would block its rollout.
            await asyncio.wait([asyncio.ensure_future(self._give_back_quietly(request_id))])
            raise

    async def _give_back_quietly(self, request_id: str) -> None:
        try:
            await asyncio.wait_for(self.give_back(request_id), _CONNECT_SECONDS)
        except (AglError, TimeoutError) as error:
            log.warning("a lease that was not wanted any more could not be given back: %s", error)

    async def update_attempt(
        self, rollout_id: str, attempt: int, status: AttemptStatus, *, error: str | None = None
    ) -> Rollout:
        text = codec.plain(error)
        return await self._call("update_attempt", rollout_id=rollout_id, attempt=attempt, status=status, error=text)

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        ids = list(rollout_ids)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _POLL_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            terminal = await self._poll("wait_for_rollouts", min(left, _POLL_SECONDS), rollout_ids=ids)
            if len({r.rollout_id for r in terminal}) == len({*ids}) or left <= 0:
                return terminal

    async def update_resources(self, resources: Mapping[str, Any], *, resources_id: str | None = None) -> str:
        new = resources_id or uuid.uuid4().hex
        return await self._call("update_resources", resources=dict(resources), resources_id=new)

    async def close(self) -> None:
        """Finish what was submitted, as far as the server answers, and end the thread. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))
        # Not in a worker thread: while the interpreter ends there are none to be had.
        while self._thread.is_alive():
            await asyncio.sleep(0.002)

    # -- on any thread --------------------------------------------------------------------------------------------
    async def _call(self, method: str, /, **arguments: Any) -> Any:
        """Call a method, in one request with whatever else is pending."""
        body = self._encode(arguments, method)
        loop = asyncio.get_running_loop()
        operation = _Operation(method, body, loop, loop.create_future())
        with self._lock:
            self._check_open()
            self._loop.call_soon_threadsafe(self._submit, operation)
        return wire.METHODS[method].result.validate_python(await operation.future)

    async def _poll(self, method: str, wait: float, /, **arguments: Any) -> Any:
        """Call a method that waits, on a separate connection."""
        body = self._encode({**arguments, wire.WAITING[method]: wait})
        response = await self._on_thread(self._request("POST", f"{wire.PREFIX}/{method}", body, wait))
        return wire.METHODS[method].result.validate_python(_result(response))

    def _encode(self, arguments: Mapping[str, Any], method: str | None = None) -> bytes:
        """A request's body: the arguments of a method, or with its name an operation of a batch."""
        portable = {name: wire.portable(value) for name, value in arguments.items()}
        try:
            return wire.dumps(portable if method is None else {"method": method, "arguments": portable})
        except (TypeError, ValueError) as error:
            wire.check_arguments(arguments)
            raise StoreError(f"an argument is not a JSON value: {error}", store=self.url) from error

    async def _on_thread(self, work: Any) -> Any:
        with self._lock:
            try:
                self._check_open()
            except StoreError:
                work.close()
                raise
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            # Either who waits was cancelled, or closing the store has cancelled what was on its way.
            task = asyncio.current_task()
            if self._closed and not (task is not None and task.cancelling()):
                self._check_open()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed", hint="open it again with open_store", store=self.url)

    # -- on the thread --------------------------------------------------------------------------------------------
    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=self._trust_env
        )
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._http.aclose())
            self._loop.close()

    async def _end(self) -> None:
        this = asyncio.current_task()
        while self._senders:
            await asyncio.wait(self._senders)
        others = asyncio.all_tasks() - {this}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()

    def _submit(self, operation: _Operation) -> None:
        self._pending.append(operation)
        if len(self._senders) < _SENDERS:
            sender = self._loop.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)

    async def _send(self) -> None:
        """Send what waits, in batches, until nothing does."""
        while self._pending:
            batch, size = [], 0
            while self._pending and len(batch) < wire.MOST_OPERATIONS:
                if batch and size + len(self._pending[0].body) > _BATCH_BYTES:
                    break
                operation = self._pending.popleft()
                if not operation.future.cancelled():
                    batch.append(operation)
                    size += len(operation.body)
            if not batch:
                continue
            body = b'{"operations":[' + b",".join(operation.body for operation in batch) + b"]}"
            try:
                answer = await self._request("POST", wire.BATCH_PATH, body)
                results = answer.get("results") if isinstance(answer, Mapping) else None
                if not isinstance(results, list) or len(results) != len(batch):
                    raise wire.to_error(answer)
            except BaseException as error:
                for operation in batch:
                    operation.deliver(None, error)
                if not isinstance(error, Exception):
                    raise
                continue
            for operation, result in zip(batch, results, strict=True):
                try:
                    operation.deliver(_result(result), None)
                except AglError as error:
                    operation.deliver(None, error)

    async def _request(self, method: str, path: str, body: bytes | None = None, wait: float = 0.0) -> Any:
        """Send a request until it is answered.

        Raises:
            AglError: what the store said, or that it is gone.
        """
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_Unreachable),
            stop=self._given_up,
            wait=tenacity.wait_exponential_jitter(initial=0.05, max=3.0, jitter=0.5),
            reraise=True,
        )
        try:
            return await retrying(self._once, method, path, body, wait)
        except _Unreachable as error:
            raise StoreError(
                f"the store does not answer: {error}", hint="is `agl store` running there?", store=self.url
            ) from None

    async def _once(self, method: str, path: str, body: bytes | None, wait: float) -> Any:
        assert self._http is not None
        headers = {"content-type": "application/json"}
        timeout = httpx.Timeout(_ANSWER_SECONDS + wait, connect=_CONNECT_SECONDS, pool=None)
        try:
            answer = await self._http.request(method, path, content=body, headers=headers, timeout=timeout)
        except httpx.TransportError as error:
            raise self._unreachable(str(error) or type(error).__name__) from None
        if answer.status_code in _AGAIN:
            raise self._unreachable(f"{answer.status_code} {answer.reason_phrase}")
        if self._gone_since is not None:
            log.warning("the store at %s is back after %.1f s", self.url, time.monotonic() - self._gone_since)
            self._gone_since = None
        try:
            data = wire.loads(answer.content, 250)
        except ValueError:
            data = None
        if answer.status_code == 200:
            return data
        if answer.status_code == 401:
            hint = "give it in AGL_KEY, or in the URL: http://:KEY@host" if not self._key else "is it this store's key?"
            raise StoreError("the store does not know this key", hint=hint, store=self.url)
        raise wire.to_error(data)

    def _unreachable(self, why: str) -> _Unreachable:
        if self._gone_since is None:
            self._gone_since = time.monotonic()
            log.warning(
                "the store at %s does not answer (%s); trying again for %g s", self.url, why, self.retry_seconds
            )
        return _Unreachable(why)

    def _given_up(self, _: tenacity.RetryCallState) -> bool:
        # Counted from when the server went, not per request: what waits behind others waits no longer than they.
        return self._gone_since is not None and time.monotonic() - self._gone_since >= self.retry_seconds


def _result(answer: Any) -> Any:
    if isinstance(answer, Mapping) and "result" in answer:
        return answer["result"]
    raise wire.to_error(answer)


def _forward(method: str) -> Any:
    """A method of `HttpStore` that does what the method of `Store` with that name does, at the server."""
    declared = getattr(Store, method)
    signature = inspect.signature(declared)

    @functools.wraps(declared)
    async def forward(self: HttpStore, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *arguments = bound.arguments.items()
        return await self._call(method, **dict(arguments))

    return forward


for _method in wire.METHODS:
    if _method not in vars(HttpStore):
        setattr(HttpStore, _method, _forward(_method))

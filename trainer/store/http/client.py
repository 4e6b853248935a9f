"""`HttpStore`: a store that another process serves. When a method returns, that store has acknowledged the operation.

Requests run on a separate thread with its own event loop and connection pool, so that any loop can use the store.
Pending operations are sent together. A request without an answer is repeated, which never has an effect twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import urllib.parse
import uuid
from collections import OrderedDict, deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from agl.errors import AglError, AttemptOverError, ForbiddenError, NotStoredError, StoreError
from agl.mdp.spans import Span
from agl.tracing.batches import Outbox
from agl.trainer.http.auth import CLIENT_VARIABLE, MOST_SECRETS
from agl.trainer.http.browsers import is_loopback
from agl.trainer.store.base import Store
from agl.trainer.store.http import protocol
from agl.trainer.store.types import AttemptedRollout, NewRollout, Rollout
from agl.trainer.wire.client import CONNECT_SECONDS, Connection
from agl.trainer.wire.forwarding import forwarding
from agl.trainer.wire.methods import dumps, portable

log = logging.getLogger("agl.store")

RETRY_SECONDS = 60.0
"""How long a server may be unreachable before its clients give up."""
_SENDERS = 4
"""Batches in flight at once."""
_MOST_LEASES = 10_000
"""Rollouts whose leases' secrets are kept."""
_BATCH_BYTES = 4 * 1024 * 1024
_POLL_SECONDS = 25.0
"""Of one long poll; less than the server's own bound."""


@dataclass(slots=True, eq=False)
class _Operation:
    """A pending call of a method, and its result."""

    body: bytes
    secrets: frozenset[str]
    future: Future[Any]


@forwarding(Store, protocol.METHODS)
class HttpStore(Store):
    """A `Store` behind a URL. Methods that are not written here send their arguments and return the server's result.

    Args:
        url: "http://host:4747" or "http://:KEY@host:4747".
        key: the default is the URL's, then AGL_KEY, then the
            one that a server of this user on this machine has made for itself.
        retry_seconds: how long the server may be unreachable.

    Raises:
        ConfigError: this is no URL of a store.
    """

    def __init__(self, url: str, *, key: str | None = None, retry_seconds: float = RETRY_SECONDS) -> None:
        self._connection = Connection(
            url,
            key,
            name="the store",
            error=StoreError,
            hint="is `agl store` running there?",
            hints={401: "give the store's key in AGL_KEY, or in the URL: http://:KEY@host"},
            log=log,
            retry_seconds=retry_seconds,
            default_key=os.environ.get(CLIENT_VARIABLE),
            proxied=not is_loopback(urllib.parse.urlsplit(url).hostname or ""),
        )
        self.url = self._connection.url
        self._pending: deque[_Operation] = deque()
        # Rollout -> the secrets of the leases of it that were got here, which a runner must show to report on them.
        self._secrets: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._senders: set[asyncio.Task[None]] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="agl-store-client", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, url: str, *, key: str | None = None, retry_seconds: float = RETRY_SECONDS) -> HttpStore:
        """Connect to a store.

        Raises:
            ConfigError: this is no URL of a store.
            StoreError: the server cannot be reached, it is no store, or it does not accept the key.
        """
        store = cls(url, key=key, retry_seconds=retry_seconds)
        try:
            about = await store._on_thread(store._connection.request("GET", f"{protocol.PREFIX}/about"))
            if not isinstance(about, Mapping) or about.get("store") != "agl":
                raise StoreError("something else than an agl store answers there", store=store.url)
        except BaseException:
            await store.close()
            raise
        return store

    async def enqueue_rollouts(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        # The client chooses ids, so that a repeated request adds nothing.
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
                    leased = await self._call("dequeue_rollout", **lease)
                else:
                    leased = await self._poll("dequeue_rollout", min(left, _POLL_SECONDS), **lease)
                if leased is not None:
                    self._keep_secret(leased)
                if leased is not None or left <= 0:
                    return leased
        except asyncio.CancelledError:
            # A lease that nobody receives would block its rollout.
            await asyncio.wait([asyncio.ensure_future(self._give_back_quietly(request_id))])
            raise

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, request_id: str | None = None
    ) -> AttemptedRollout:
        request = request_id or uuid.uuid4().hex
        started = await self._call("start_attempt", rollout_id=rollout_id, worker_id=worker_id, request_id=request)
        self._keep_secret(started)
        return started

    def _keep_secret(self, leased: AttemptedRollout) -> None:
        if leased.secret is not None:
            secrets = self._secrets.pop(leased.rollout.rollout_id, frozenset())
            self._secrets[leased.rollout.rollout_id] = secrets | {leased.secret}
            while len(self._secrets) > _MOST_LEASES:
                self._secrets.popitem(last=False)

    async def _give_back_quietly(self, request_id: str) -> None:
        try:
            await asyncio.wait_for(self.give_back(request_id), CONNECT_SECONDS)
        except (AglError, TimeoutError) as error:
            log.warning("a lease that is no longer needed could not be given back: %s", error)

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        ids = list(rollout_ids)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _POLL_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            terminal = await self._poll("wait_for_rollouts", min(left, _POLL_SECONDS), rollout_ids=ids)
            if len({r.rollout_id for r in terminal}) == len({*ids}) or left <= 0:
                return terminal

    async def add_spans(self, spans: Sequence[Span]) -> None:
        """As `Store.add_spans`, in batches: a span that the server refuses loses no other one, and is named."""
        outbox = Outbox(spans)
        refusal = None
        stored = False
        while batch := outbox.next():
            try:
                await self._call("add_spans", spans=batch)
                stored = True
            except StoreError as error:
                # No division of the batch helps.
                if isinstance(error, AttemptOverError | ForbiddenError | NotStoredError):
                    raise
                if self._connection.unreachable:
                    raise
                # What is no JSON value is the caller's error.
                self._encode({"spans": batch})
                outbox.refused(batch, error)
                refusal = error
        if refusal is not None and not stored:
            raise refusal
        for lost in outbox.lost:
            log.warning("the store does not take %s", lost)

    async def update_resources(self, resources: Mapping[str, Any], *, resources_id: str | None = None) -> str:
        new = resources_id or uuid.uuid4().hex
        return await self._call("update_resources", resources=dict(resources), resources_id=new)

    async def close(self) -> None:
        """Finish pending operations, as far as the server responds, and end the thread. Idempotent."""
        with self._lock:
            first = not self._closed
            self._closed = True
        if first:
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._stop()))
        # Not in a worker thread: at interpreter exit no thread can be started.
        while self._thread.is_alive():
            await asyncio.sleep(0.002)

    # -- on any thread --------------------------------------------------------------------------------------------
    async def _call(self, method: str, /, **arguments: Any) -> Any:
        """Call a method, in one request with whatever else is pending."""
        arguments = {k: list(v) if k in ("calls", "spans") else v for k, v in arguments.items()}
        body = self._encode(arguments, method)
        # The secrets of the leases that the arguments are about, as far as this client got them.
        rollouts = {item.rollout_id for name in ("calls", "spans") for item in arguments.get(name) or ()}
        rollouts.add(arguments.get("rollout_id"))
        secrets = frozenset[str]().union(*(self._secrets.get(rollout_id, ()) for rollout_id in rollouts))
        operation = _Operation(body, secrets, Future())
        with self._lock:
            self._check_open()
            self._loop.call_soon_threadsafe(self._submit, operation)
        return protocol.METHODS[method].result.validate_python(await asyncio.wrap_future(operation.future))

    async def _poll(self, method: str, wait: float, /, **arguments: Any) -> Any:
        """Call a method that waits, on a separate connection."""
        body = self._encode({**arguments, protocol.WAITING[method]: wait})
        path = f"{protocol.PREFIX}/{method}"
        response = await self._on_thread(self._connection.request("POST", path, body, wait=wait))
        return protocol.METHODS[method].result.validate_python(self._connection.result(response))

    def _encode(self, arguments: Mapping[str, Any], method: str | None = None) -> bytes:
        """A request's body: the arguments of a method, or with its name an operation of a batch."""
        sent = {name: portable(value) for name, value in arguments.items()}
        try:
            return dumps(sent if method is None else {"method": method, "arguments": sent})
        except (TypeError, ValueError) as error:
            protocol.check_arguments(arguments)
            raise StoreError(f"an argument is not a JSON value: {error}", store=self.url) from error

    async def _on_thread(self, request: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            try:
                self._check_open()
            except StoreError:
                request.close()
                raise
            future = asyncio.run_coroutine_threadsafe(request, self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # Either the caller was cancelled, or `close` has cancelled the request.
            task = asyncio.current_task()
            if self._closed and not (task is not None and task.cancelling()):
                self._check_open()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed", hint="open it again with open_store", store=self.url)

    # -- on the thread --------------------------------------------------------------------------------------------
    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._connection.open()
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._connection.close())
            self._loop.close()

    async def _stop(self) -> None:
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
        """Send pending operations in batches until there are none."""
        while self._pending:
            batch = []
            size = 0
            secrets = frozenset[str]()
            while self._pending and len(batch) < protocol.MOST_OPERATIONS:
                first = self._pending[0]
                if batch and (size + len(first.body) > _BATCH_BYTES or len(secrets | first.secrets) > MOST_SECRETS):
                    break
                operation = self._pending.popleft()
                if operation.future.set_running_or_notify_cancel():
                    batch.append(operation)
                    size += len(operation.body)
                    secrets |= operation.secrets
            if not batch:
                continue
            body = b'{"operations":[' + b",".join(operation.body for operation in batch) + b"]}"
            try:
                response = await self._connection.request("POST", protocol.BATCH_PATH, body, secrets=secrets)
                results = response.get("results") if isinstance(response, Mapping) else None
                if not isinstance(results, list) or len(results) != len(batch):
                    raise StoreError("the store's answer was not understood", hint="is this the URL of an agl store?")
            except BaseException as error:
                for operation in batch:
                    operation.future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                continue
            for operation, result in zip(batch, results, strict=True):
                try:
                    operation.future.set_result(self._connection.result(result))
                except AglError as error:
                    operation.future.set_exception(error)

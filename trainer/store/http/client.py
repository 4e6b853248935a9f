"""`HttpStore`: a store that another process serves. What a method has returned, that store has acknowledged.

Requests run on one thread with a loop and a connection pool of its own, so any loop may ask. What waits is sent
together; what the server has not answered is sent again, which never does anything twice.
"""

from __future__ import annotations

import asyncio
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
from agl.mdp.spans import Span
from agl.mdp.types import Call
from agl.trainer.http.auth import CLIENT_VARIABLE
from agl.trainer.http.server import is_loopback
from agl.trainer.store.base import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Mode,
    NewRollout,
    Pruned,
    Rollout,
    RolloutStatus,
    TrainedCall,
)
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
_WAIT = 25.0
"""Seconds of one long poll; less than the server's own bound."""


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


class HttpStore:
    """A `Store` behind a URL.

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
            about = await store._on_thread(store._ask("GET", f"{wire.PREFIX}/about"))
            if not isinstance(about, Mapping) or about.get("store") != "agl":
                raise StoreError("something else than an agl store answers there", store=store.url)
        except BaseException:
            await store.close()
            raise
        return store

    # -- rollouts and attempts ------------------------------------------------------------------------------------
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
        asked = {"worker_id": worker_id, "run_id": run_id, "request_id": request_id}
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return await self._call("dequeue_rollout", **asked)
                leased = await self._poll("dequeue_rollout", min(left, _WAIT), **asked)
                if leased is not None:
                    return leased
        except asyncio.CancelledError:
            # A lease that nobody hears of would hold its rollout back.
            await asyncio.wait([asyncio.ensure_future(self._give_back_quietly(request_id))])
            raise

    async def give_back(self, request_id: str) -> None:
        await self._call("give_back", request_id=request_id)

    async def _give_back_quietly(self, request_id: str) -> None:
        try:
            await asyncio.wait_for(self.give_back(request_id), _CONNECT_SECONDS)
        except (AglError, TimeoutError) as error:
            log.warning("a lease that was not wanted any more could not be given back: %s", error)

    async def update_attempt(
        self, rollout_id: str, attempt: int, status: AttemptStatus, *, error: str | None = None
    ) -> Rollout:
        said = codec.plain(error)
        return await self._call("update_attempt", rollout_id=rollout_id, attempt=attempt, status=status, error=said)

    async def heartbeat(self, rollout_id: str, attempt: int) -> None:
        await self._call("heartbeat", rollout_id=rollout_id, attempt=attempt)

    async def expire_attempts(self, now: float | None = None) -> list[Attempt]:
        return await self._call("expire_attempts", now=now)

    async def cancel_rollouts(self, rollout_ids: Sequence[str]) -> None:
        await self._call("cancel_rollouts", rollout_ids=list(rollout_ids))

    async def get_rollout(self, rollout_id: str) -> Rollout:
        return await self._call("get_rollout", rollout_id=rollout_id)

    async def query_rollouts(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        mode: Mode | None = None,
        status: Sequence[RolloutStatus] | None = None,
        since: float | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        states = None if status is None else list(status)
        return await self._call(
            "query_rollouts", run_id=run_id, step=step, mode=mode, status=states, since=since, after=after, limit=limit
        )

    async def count_rollouts(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        mode: Mode | None = None,
        status: Sequence[RolloutStatus] | None = None,
        since: float | None = None,
    ) -> int:
        states = None if status is None else list(status)
        return await self._call("count_rollouts", run_id=run_id, step=step, mode=mode, status=states, since=since)

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        return await self._call("query_attempts", rollout_id=rollout_id)

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        ids = list(rollout_ids)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _WAIT if deadline is None else max(0.0, deadline - time.monotonic())
            ended = await self._poll("wait_for_rollouts", min(left, _WAIT), rollout_ids=ids)
            if len({r.rollout_id for r in ended}) == len({*ids}) or left <= 0:
                return ended

    # -- calls and spans ------------------------------------------------------------------------------------------
    async def add_calls(self, calls: Sequence[Call]) -> None:
        await self._call("add_calls", calls=list(calls))

    async def query_calls(self, rollout_id: str, attempt: int | None = None) -> list[Call]:
        return await self._call("query_calls", rollout_id=rollout_id, attempt=attempt)

    async def add_spans(self, spans: Sequence[Span]) -> None:
        await self._call("add_spans", spans=list(spans))

    async def query_spans(self, rollout_id: str, attempt: int | None = None) -> list[Span]:
        return await self._call("query_spans", rollout_id=rollout_id, attempt=attempt)

    # -- resources, policies, training ----------------------------------------------------------------------------
    async def update_resources(self, resources: Mapping[str, Any], *, resources_id: str | None = None) -> str:
        new = resources_id or uuid.uuid4().hex
        return await self._call("update_resources", resources=dict(resources), resources_id=new)

    async def get_resources(self, resources_id: str | None = None) -> tuple[str, Mapping[str, Any]] | None:
        return await self._call("get_resources", resources_id=resources_id)

    async def add_policy_version(
        self, run_id: str, policy: str, version: int, step: int, checkpoint: str | None = None
    ) -> None:
        await self._call(
            "add_policy_version", run_id=run_id, policy=policy, version=version, step=step, checkpoint=checkpoint
        )

    async def add_trained_calls(self, run_id: str, rows: Sequence[TrainedCall]) -> None:
        await self._call("add_trained_calls", run_id=run_id, rows=list(rows))

    async def query_trained_calls(self, rollout_id: str) -> list[TrainedCall]:
        return await self._call("query_trained_calls", rollout_id=rollout_id)

    async def prune(self, before: float, *, run_ids: Sequence[str] | None = None) -> Pruned:
        return await self._call("prune", before=before, run_ids=None if run_ids is None else list(run_ids))

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
    async def _call(self, name: str, **arguments: Any) -> Any:
        """Call a method, together with whatever else waits to be sent."""
        body = self._encoded({"method": name, "arguments": arguments}, arguments)
        loop = asyncio.get_running_loop()
        operation = _Operation(name, body, loop, loop.create_future())
        with self._lock:
            self._check_open()
            self._loop.call_soon_threadsafe(self._submit, operation)
        return wire.METHODS[name].result.validate_python(await operation.future)

    async def _poll(self, name: str, wait: float, **arguments: Any) -> Any:
        """Call a method that waits, on a connection of its own."""
        arguments[wire.WAITING[name]] = wait
        body = self._encoded(arguments, arguments)
        answer = await self._on_thread(self._ask("POST", f"{wire.PREFIX}/{name}", body, wait))
        return wire.METHODS[name].result.validate_python(_result(answer))

    def _encoded(self, value: Any, arguments: dict[str, Any]) -> bytes:
        for name, given in arguments.items():
            arguments[name] = wire.portable(given)
        try:
            return wire.dumps(value)
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
                answer = await self._ask("POST", wire.BATCH_PATH, body)
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

    async def _ask(self, method: str, path: str, body: bytes | None = None, wait: float = 0.0) -> Any:
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

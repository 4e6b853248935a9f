"""The worker's side of a coordinator in another process.

A request that cannot be delivered is kept and tried again; the server does no harm by handling one twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from agl.errors import AglError, RolloutError
from agl.mdp.selection import Selection
from agl.mdp.spans import Span
from agl.tracing import otlp
from agl.trainer.http.auth import LEASE_HEADER
from agl.trainer.http.local_key import KeyAuth, split_key
from agl.trainer.runners.protocol import LEASE_WAIT_SECONDS, Coordinator, Lease, Report
from agl.trainer.runners.remote.serialization import lease_from_json, report_to_json

log = logging.getLogger("agl.runner")

LOST_SECONDS = 600.0
"""How long a worker tries to reach its server before it gives up."""
FORGET_SECONDS = 2.0
"""How long a cancelled request for work may take to be withdrawn."""


class _Unreachable(Exception):
    """The server could not be reached, or is not ready."""


class CoordinatorClient:
    """A `Coordinator` at another process's address. Lives on one event loop.

    Args:
        url: the server's address. key: a runner's or the operator's key, if the server asks for one.
        lost_seconds: how long to try to reach the server.
        selection, resources: used for leases that come without them.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        lost_seconds: float = LOST_SECONDS,
        selection: Selection | None = None,
        resources: Mapping[str, Any] | None = None,
    ) -> None:
        address, key_in_url = split_key(url)
        self.url, self.lost_seconds = address.rstrip("/"), lost_seconds
        self.selection, self.resources = selection, resources
        auth = KeyAuth(self.url, (key or key_in_url or "").strip() or None)
        timeout = httpx.Timeout(LEASE_WAIT_SECONDS + 30.0, connect=10.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(auth=auth, timeout=timeout, limits=limits, trust_env=False)
        self._lost_since: float | None = None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def lease(self, worker_id: str, wait: float = LEASE_WAIT_SECONDS) -> Lease | None:
        body = {"worker": worker_id, "wait": wait, "request": uuid.uuid4().hex}
        try:
            data = await self._request("lease", body)
        except asyncio.CancelledError:
            # Nobody would execute a lease that the server hands out now.
            with contextlib.suppress(TimeoutError, _Unreachable, AglError):
                await asyncio.wait_for(self._send("forget", orjson.dumps(body)), FORGET_SECONDS)
            raise
        return None if data is None else lease_from_json(data, self.url, self.selection, self.resources)

    async def heartbeat(self, lease: Lease) -> bool:
        data = await self._request("heartbeat", _lease_id(lease), lease)
        return data is not None and bool(data["wanted"])

    async def deliver(self, lease: Lease, spans: Sequence[Span]) -> None:
        await self._request("deliver", {**_lease_id(lease), "spans": otlp.encode(spans)}, lease)

    async def remember(self, lease: Lease, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return await self._request("remember", {**_lease_id(lease), "request": dict(request)}, lease)

    async def finish(self, lease: Lease, report: Report) -> None:
        await self._request("finish", {**_lease_id(lease), "report": report_to_json(report)}, lease)

    async def abandon(self, lease: Lease, why: str) -> None:
        await self._request("abandon", {**_lease_id(lease), "why": why}, lease)

    async def _request(self, route: str, body: Any, lease: Lease | None = None) -> Any:
        """The response's JSON; None where it has none, or the coordinator no longer wants the attempt (logged).

        Raises:
            RolloutError: the server could not be reached for too long, or refuses this worker.
        """
        content = orjson.dumps(body)
        secret = None if lease is None else lease.attempted_rollout.secret
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Unreachable),
            wait=wait_random_exponential(multiplier=0.1, max=10.0),
            stop=stop_after_delay(self.lost_seconds),
            reraise=True,
        )
        try:
            return await retrying(self._send, route, content, secret)
        except _Unreachable as error:
            raise RolloutError(
                f"the server at {self.url} could not be reached for {self.lost_seconds:g} s: {error}",
                hint="check that it runs and that its address and port are right; start this runner again then",
            ) from None

    async def _send(self, route: str, content: bytes, secret: str | None = None) -> Any:
        headers = {"content-type": "application/json"} | ({} if secret is None else {LEASE_HEADER: secret})
        try:
            response = await self._client.post(f"{self.url}/runner/{route}", content=content, headers=headers)
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            raise RolloutError(f"{self.url} cannot be asked: {error}", hint="check the address and the key") from error
        except httpx.TransportError as error:
            raise self._unreachable(f"{type(error).__name__}: {error}") from error
        status = response.status_code
        if status >= 500 or status in (408, 425, 429):
            # Whatever failed in the server, this worker's report must not be lost by it.
            raise self._unreachable(f"it answers {status}: {_message(response)}")
        if self._lost_since is not None:
            log.warning("the server at %s is back after %.0f s", self.url, time.monotonic() - self._lost_since)
            self._lost_since = None
        if status == 204:
            return None
        if status == 200:
            return orjson.loads(response.content)
        message = _message(response)
        if status == 409:
            log.warning("%s: the server no longer accepts it: %s", route, message)
            return None
        if status in (401, 403):
            raise RolloutError(
                f"the server at {self.url} refuses this runner: {message}",
                hint="give its runner key: --key-file, or AGL_RUNNER_KEY in the environment",
            )
        if status == 404:
            raise RolloutError(
                f"{self.url} answers, but hands out no rollouts ({message})",
                hint="give the address of `agl store`, `agl serve` or a Trainer(runners=...)",
            )
        raise RolloutError(f"the server at {self.url} failed on {route!r} ({status}): {message}")

    def _unreachable(self, why: str) -> _Unreachable:
        """The error to raise; the first one since the server was last reached is logged."""
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            log.warning("lost the server at %s (%s); reports are kept, trying again", self.url, why)
        return _Unreachable(why)


def _lease_id(lease: Lease) -> dict[str, Any]:
    rollout_id, attempt = lease.id
    return {"rollout_id": rollout_id, "attempt": attempt}


def _message(response: httpx.Response) -> str:
    """The message of an error response."""
    try:
        return str(orjson.loads(response.content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


_: type[Coordinator] = CoordinatorClient

"""A desk over HTTP: `coordinator_routes` serve one, `CoordinatorClient` is the worker's side of it.

What a worker could not bring back it keeps and tries again; a request that was answered unheard does no harm when it
is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from agl.errors import AglError, AttemptOverError, NotStoredError, RolloutError, StoreError
from agl.mdp.selection import Selection
from agl.mdp.spans import Span
from agl.tracing import otlp
from agl.trainer.http.auth import Keys
from agl.trainer.http.limits import Limits, Refused, parse_json
from agl.trainer.http.responses import answer
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.protocol import LEASE_WAIT_SECONDS, Coordinator, Lease, Report
from agl.trainer.runners.remote import serialization as wire

log = logging.getLogger("agl.runner")

LOST_SECONDS = 600.0
"""How long a worker tries to reach its desk before it gives up."""
SILENT_SECONDS = 60.0
"""How long a runner may be silent before its rollouts are run again."""
FORGET_SECONDS = 2.0
_REMEMBERED = 4096


class _Away(Exception):
    """The desk could not be reached, or says that it is not ready."""


# -- the desk's side -----------------------------------------------------------------------------------------------


def coordinator_routes(
    desk: Callable[[], RunCoordinator | None], check: Callable[[Request], None], *, own_workers: bool = False
) -> list[Route]:
    """The routes of a desk.

    Args:
        desk: the present one; None while no run goes on, when workers wait.
        check: raises `Refused` for who may not run rollouts.
        own_workers: whether the workers were given the selection and the run's resources when they were started.
    """
    told: OrderedDict[str, asyncio.Task[Lease | None]] = OrderedDict()

    async def lease(request: Request) -> Response:
        check(request)
        body = await _body(request, "worker", "request", "wait")
        with _refusals():
            wait = min(max(float(body["wait"]), 0.0), LEASE_WAIT_SECONDS)
        present = desk()
        if present is None:
            await asyncio.sleep(min(wait, 1.0))
            return Response(status_code=204)
        # A worker whose connection broke asks again with the same id, and gets the same lease.
        asked = str(body["request"])
        taking = told.pop(asked, None) or asyncio.ensure_future(present.lease(str(body["worker"]), wait))
        told[asked] = taking
        while len(told) > _REMEMBERED and told[next(iter(told))].done():
            told.popitem(last=False)
        try:
            with _refusals():
                leased = await asyncio.shield(taking)
        except Refused:
            told.pop(asked, None)
            raise
        except asyncio.CancelledError:
            if not taking.cancelled():
                raise
            # The run has ended, or does not want this worker any more.
            return Response(status_code=204)
        if leased is None:
            return Response(status_code=204)
        known = own_workers and present.resources is not None
        return answer(wire.lease_to_json(leased, selection=not own_workers, resources=not known))

    async def forget(request: Request) -> Response:
        check(request)
        body = await _body(request, "request")
        taking, here = told.pop(str(body["request"]), None), desk()
        if taking is not None:
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError, StoreError):
                leased = await taking
                if leased is not None and here is not None:
                    await here.abandon(leased, "its worker left before it began")
        return answer({})

    async def heartbeat(request: Request) -> Response:
        here, lease, _ = await leased_before(request)
        with _refusals():
            return answer({"wanted": await here.heartbeat(lease)})

    async def deliver(request: Request) -> Response:
        here, lease, body = await leased_before(request, "spans")
        with _refusals():
            rollout_id, attempt = lease.id
            await here.deliver(lease, otlp.decode(body["spans"], rollout_id=rollout_id, attempt=attempt))
        return answer({})

    async def finish(request: Request) -> Response:
        here, lease, body = await leased_before(request, "report")
        with _refusals():
            await here.finish(lease, wire.report_from_json(body["report"], lease))
        return answer({})

    async def abandon(request: Request) -> Response:
        here, lease, body = await leased_before(request, "why")
        with _refusals():
            await here.abandon(lease, str(body["why"]))
        return answer({})

    async def leased_before(request: Request, *names: str) -> tuple[RunCoordinator, Lease, dict[str, Any]]:
        check(request)
        body = await _body(request, "rollout_id", "attempt", *names)
        here = desk()
        if here is None:
            raise Refused(409, "no run goes on here any more", "attempt_over")
        with _refusals():
            rollout_id, attempt = str(body["rollout_id"]), int(body["attempt"])
            if "\0" in rollout_id or not 0 < attempt < 2**31:
                raise ValueError(f"no attempt has the name {rollout_id!r}, {attempt}")
            return here, await here.find(rollout_id, attempt), body

    return [
        Route(f"/runner/{route.__name__}", route, methods=["POST"])
        for route in (lease, forget, heartbeat, deliver, finish, abandon)
    ]


def key_check(keys: Keys) -> Callable[[Request], None]:
    """A check that lets in whom these keys know."""

    def check(request: Request) -> None:
        if keys.role(request.headers) is None:
            raise Refused(401, "this server asks its runners for a key", "invalid_api_key")

    return check


async def _body(request: Request, *names: str) -> dict[str, Any]:
    try:
        body = parse_json(await request.body(), Limits().json_depth)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON that can be read: {error}", "invalid_json") from None
    missing = [n for n in names if n not in body] if isinstance(body, dict) else names
    if missing:
        raise Refused(400, f"the body needs {', '.join(missing)}", "invalid_request")
    return body


@contextlib.contextmanager
def _refusals() -> Any:
    """What the desk refuses, as HTTP has it: 409 is final, 503 may be tried again."""
    try:
        yield
    except (AttemptOverError, NotStoredError) as error:
        raise Refused(409, str(error), "attempt_over") from error
    except StoreError as error:
        raise Refused(503, str(error), "store_unavailable") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(400, f"not what a runner sends: {type(error).__name__}: {error}", "invalid_request") from error


# -- the worker's side ---------------------------------------------------------------------------------------------


class CoordinatorClient:
    """A `Coordinator` at another process's address. Lives on one event loop.

    Args:
        url: the server's. key: a runner's or the operator's, if it asks for one.
        lost_seconds: how long it is tried again to reach the server.
        selection, resources: of leases that come without.
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
        self.url, self.lost_seconds = url.rstrip("/"), lost_seconds
        self.selection, self.resources = selection, resources
        headers = {} if key is None else {"authorization": f"Bearer {key.strip()}"}
        timeout = httpx.Timeout(LEASE_WAIT_SECONDS + 30.0, connect=10.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False)
        self._lost_since: float | None = None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def lease(self, worker_id: str, wait: float = LEASE_WAIT_SECONDS) -> Lease | None:
        asked = {"worker": worker_id, "wait": wait, "request": uuid.uuid4().hex}
        try:
            data = await self._ask("lease", asked)
        except asyncio.CancelledError:
            # What it may have leased meanwhile, nobody would execute.
            with contextlib.suppress(TimeoutError, _Away, AglError):
                await asyncio.wait_for(self._send("forget", orjson.dumps(asked)), FORGET_SECONDS)
            raise
        return None if data is None else wire.lease_from_json(data, self.url, self.selection, self.resources)

    async def heartbeat(self, lease: Lease) -> bool:
        data = await self._ask("heartbeat", _named(lease))
        return data is not None and bool(data["wanted"])

    async def deliver(self, lease: Lease, spans: Sequence[Span]) -> None:
        await self._ask("deliver", {**_named(lease), "spans": otlp.encode(spans)})

    async def finish(self, lease: Lease, report: Report) -> None:
        await self._ask("finish", {**_named(lease), "report": wire.report_to_json(report)})

    async def abandon(self, lease: Lease, why: str) -> None:
        await self._ask("abandon", {**_named(lease), "why": why})

    async def _ask(self, what: str, body: Any) -> Any:
        """The answer; None where there is none, or the desk does not want it any more (which is logged).

        Raises:
            RolloutError: the server was out of reach for too long, or refuses this worker.
        """
        content = orjson.dumps(body)
        tries = AsyncRetrying(
            retry=retry_if_exception_type(_Away),
            wait=wait_random_exponential(multiplier=0.1, max=10.0),
            stop=stop_after_delay(self.lost_seconds),
            reraise=True,
        )
        got = None
        try:
            async for one in tries:
                with one:
                    got = await self._send(what, content)
        except _Away as away:
            raise RolloutError(
                f"the server at {self.url} could not be reached for {self.lost_seconds:g} s: {away}",
                hint="check that it runs and that its address and port are right; start this runner again then",
            ) from None
        return got

    async def _send(self, what: str, content: bytes) -> Any:
        try:
            got = await self._client.post(
                f"{self.url}/runner/{what}", content=content, headers={"content-type": "application/json"}
            )
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            raise RolloutError(f"{self.url} cannot be asked: {error}", hint="check the address and the key") from error
        except httpx.TransportError as error:
            self._lost(f"{type(error).__name__}: {error}")
            raise _Away(f"{type(error).__name__}: {error}") from error
        if got.status_code >= 500 or got.status_code in (408, 425, 429):
            # Whatever went wrong there, what this worker has to bring back is not to be lost by it.
            self._lost(f"it answers {got.status_code}: {_message(got)}")
            raise _Away(f"it answers {got.status_code}: {_message(got)}")
        if self._lost_since is not None:
            log.warning("the server at %s is back after %.0f s", self.url, time.monotonic() - self._lost_since)
            self._lost_since = None
        if got.status_code == 204:
            return None
        if got.status_code == 200:
            return orjson.loads(got.content)
        why = _message(got)
        if got.status_code == 409:
            log.warning("%s: the server does not want it any more: %s", what, why)
            return None
        if got.status_code in (401, 403):
            raise RolloutError(
                f"the server at {self.url} refuses this runner: {why}",
                hint="give its runner key: --key-file, or AGL_RUNNER_KEY in the environment",
            )
        if got.status_code == 404:
            raise RolloutError(
                f"{self.url} answers, but hands out no rollouts ({why})",
                hint="give the address of `agl store`, `agl serve` or a Trainer(runners=...)",
            )
        raise RolloutError(f"the server at {self.url} failed on {what!r} ({got.status_code}): {why}")

    def _lost(self, why: str) -> None:
        """Say so once."""
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            log.warning("lost the server at %s (%s); what there is to bring back is kept, trying again", self.url, why)


def _named(lease: Lease) -> dict[str, Any]:
    rollout_id, attempt = lease.id
    return {"rollout_id": rollout_id, "attempt": attempt}


def _message(answer: httpx.Response) -> str:
    try:
        return str(orjson.loads(answer.content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


_: type[Coordinator] = CoordinatorClient

"""The server's side of runners in other processes: a coordinator as HTTP routes.

Invariant: each route may be called again with the same request, for a worker whose connection broke repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from agl.errors import AglError, AttemptOverError, ConfigError, NotStoredError, RewardError, StoreError
from agl.trainer.http.auth import Keys, lease_secrets
from agl.trainer.http.limits import Refused
from agl.trainer.http.turns import Turns, TurnsByLease
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.protocol import LEASE_WAIT_SECONDS, Lease
from agl.trainer.runners.remote.serialization import METHODS, PREFIX, sent_lease
from agl.trainer.store.leases import is_open_lease
from agl.trainer.wire.methods import Method
from agl.trainer.wire.server import method_routes

SILENT_SECONDS = 30.0
"""How long a runner may be silent before its rollouts are run again."""
_MAX_LEASE_REQUESTS = 4096
"""How many answers to lease requests are remembered."""


def coordinator_routes(
    current: Callable[[], RunCoordinator | None], check: Callable[[Request], None], *, own_workers: bool = False
) -> list[Route]:
    """The routes of a coordinator.

    Args:
        current: returns the coordinator; None while there is no run, when workers wait.
        check: raises `Refused` for requests without the right to run rollouts.
        own_workers: whether the workers got the selection and the run's resources when they were started.
    """
    leases: OrderedDict[str, asyncio.Task[Lease | None]] = OrderedDict()

    async def is_open(rollout_id: str, attempt: int, secret: str) -> bool:
        coordinator = current()
        return coordinator is not None and await is_open_lease(coordinator.store, rollout_id, attempt, secret)

    turns = TurnsByLease(is_open)

    async def lease(worker_id: str, wait: float, request_id: str) -> Lease | None:
        wait, coordinator = min(max(wait, 0.0), LEASE_WAIT_SECONDS), current()
        if coordinator is None:
            await asyncio.sleep(min(wait, 1.0))
            return None
        # A worker whose connection broke asks again with the same id, and gets the same lease.
        task = leases.pop(request_id, None) or asyncio.ensure_future(coordinator.lease(worker_id, wait))
        leases[request_id] = task
        while len(leases) > _MAX_LEASE_REQUESTS and leases[next(iter(leases))].done():
            leases.popitem(last=False)
        try:
            lease = await asyncio.shield(task)
        except AglError:
            leases.pop(request_id, None)
            raise
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            # The run has ended, or has dismissed this worker.
            return None
        if lease is not None:
            turns.know(lease.attempted_rollout.secret, *lease.id)
        known = (coordinator.resources or {}) if own_workers else {}
        return None if lease is None else sent_lease(lease, selection=not own_workers, known=known)

    async def forget(request_id: str) -> None:
        task, coordinator = leases.pop(request_id, None), current()
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, StoreError):
                lease = await task
                if lease is not None and coordinator is not None:
                    await coordinator.give_back(lease)

    async def call(request: Request, method: Method, arguments: dict[str, Any]) -> Any:
        if method.name in ("lease", "forget"):
            return await (lease if method.name == "lease" else forget)(**arguments)
        coordinator, named = current(), arguments.pop("lease")
        if coordinator is None:
            raise AttemptOverError("there is no run here any more")
        try:
            secrets = lease_secrets(request.headers)
            of = await coordinator.find(named.rollout_id, named.attempt, secrets)
            if len(secrets) == 1:
                turns.know(secrets[0], *of.id)
            # A report is on its own attempt, whatever its spans say.
            rollout_id, attempt = of.id
            report = arguments.get("report")
            spans = arguments.get("spans", () if report is None else report.spans)
            spans = [replace(span, rollout_id=rollout_id, attempt=attempt) for span in spans]
            if report is not None:
                arguments["report"] = replace(report, spans=spans)
            elif "spans" in arguments:
                arguments["spans"] = spans
            return await getattr(coordinator, method.name)(of, **arguments)
        except (KeyError, TypeError, ValueError, AttributeError, RewardError) as error:
            raise ConfigError(f"not what a runner sends: {type(error).__name__}: {error}") from error

    async def turns_of(request: Request) -> Turns:
        return await turns.of(request, "runner")

    return method_routes(METHODS, PREFIX, call, admit=check, turns=turns_of, status=_status)


def key_check(keys: Keys) -> Callable[[Request], None]:
    """A check that admits requests with one of these keys."""

    def check(request: Request) -> None:
        if keys.role(request.headers) is None:
            raise Refused(401, "this server asks its runners for a key", "invalid_api_key")

    return check


def _status(error: AglError) -> int:
    """409 and 400 are final; after 500 and 503 a worker tries again."""
    match error:
        case AttemptOverError() | NotStoredError():
            return 409
        case StoreError():
            return 503
        case ConfigError():
            return 400
    return 500

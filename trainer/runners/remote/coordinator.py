"""The server's side of runners in other processes: a coordinator as HTTP routes.

Invariant: each route may be called again with the same request, for a worker whose connection broke repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl.errors import AttemptOverError, NotStoredError, StoreError
from agl.tracing import otlp
from agl.trainer.http.auth import Keys, lease_secrets
from agl.trainer.http.limits import Limits, Refused, json_body
from agl.trainer.http.responses import answer
from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.protocol import LEASE_WAIT_SECONDS, Lease
from agl.trainer.runners.remote.serialization import lease_to_json, report_from_json

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

    async def lease(request: Request) -> Response:
        check(request)
        body = await _body(request, "worker", "request", "wait")
        with _refusals():
            wait = min(max(float(body["wait"]), 0.0), LEASE_WAIT_SECONDS)
        coordinator = current()
        if coordinator is None:
            await asyncio.sleep(min(wait, 1.0))
            return Response(status_code=204)
        # A worker whose connection broke asks again with the same id, and gets the same lease.
        request_id = str(body["request"])
        task = leases.pop(request_id, None) or asyncio.ensure_future(coordinator.lease(str(body["worker"]), wait))
        leases[request_id] = task
        while len(leases) > _MAX_LEASE_REQUESTS and leases[next(iter(leases))].done():
            leases.popitem(last=False)
        try:
            with _refusals():
                lease = await asyncio.shield(task)
        except Refused:
            leases.pop(request_id, None)
            raise
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            # The run has ended, or has dismissed this worker.
            return Response(status_code=204)
        if lease is None:
            return Response(status_code=204)
        known = (coordinator.resources or {}) if own_workers else {}
        return answer(lease_to_json(lease, selection=not own_workers, known=known))

    async def forget(request: Request) -> Response:
        check(request)
        body = await _body(request, "request")
        task, coordinator = leases.pop(str(body["request"]), None), current()
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, StoreError):
                lease = await task
                if lease is not None and coordinator is not None:
                    await coordinator.abandon(lease, "its worker left before it began")
        return answer({})

    async def heartbeat(request: Request) -> Response:
        coordinator, lease, _ = await of_lease(request)
        with _refusals():
            return answer({"wanted": await coordinator.heartbeat(lease)})

    async def deliver(request: Request) -> Response:
        coordinator, lease, body = await of_lease(request, "spans")
        with _refusals():
            rollout_id, attempt = lease.id
            await coordinator.deliver(lease, otlp.decode(body["spans"], rollout_id=rollout_id, attempt=attempt))
        return answer({})

    async def remember(request: Request) -> Response:
        coordinator, lease, body = await of_lease(request, "request")
        with _refusals():
            return answer(await coordinator.remember(lease, body["request"]))

    async def finish(request: Request) -> Response:
        coordinator, lease, body = await of_lease(request, "report")
        with _refusals():
            await coordinator.finish(lease, report_from_json(body["report"], lease))
        return answer({})

    async def abandon(request: Request) -> Response:
        coordinator, lease, body = await of_lease(request, "why")
        with _refusals():
            await coordinator.abandon(lease, str(body["why"]))
        return answer({})

    async def of_lease(request: Request, *names: str) -> tuple[RunCoordinator, Lease, dict[str, Any]]:
        """The coordinator, the lease that a request names and shows the secret of, and the body with these names."""
        check(request)
        body = await _body(request, "rollout_id", "attempt", *names)
        coordinator = current()
        if coordinator is None:
            raise Refused(409, "there is no run here any more", "attempt_over")
        with _refusals():
            rollout_id, attempt = str(body["rollout_id"]), int(body["attempt"])
            if "\0" in rollout_id or not 0 < attempt < 2**31:
                raise ValueError(f"there is no attempt {rollout_id!r}, {attempt}")
            return coordinator, await coordinator.find(rollout_id, attempt, lease_secrets(request.headers)), body

    return [
        Route(f"/runner/{route.__name__}", route, methods=["POST"])
        for route in (lease, forget, heartbeat, deliver, remember, finish, abandon)
    ]


def key_check(keys: Keys) -> Callable[[Request], None]:
    """A check that admits requests with one of these keys."""

    def check(request: Request) -> None:
        if keys.role(request.headers) is None:
            raise Refused(401, "this server asks its runners for a key", "invalid_api_key")

    return check


async def _body(request: Request, *names: str) -> dict[str, Any]:
    body = await json_body(request, Limits().json_depth)
    missing = [n for n in names if n not in body] if isinstance(body, dict) else names
    if missing:
        raise Refused(400, f"the body needs {', '.join(missing)}", "invalid_request")
    return body


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turns the coordinator's errors into HTTP statuses: 409 is final, after 503 a worker tries again."""
    try:
        yield
    except (AttemptOverError, NotStoredError) as error:
        raise Refused(409, str(error), "attempt_over") from error
    except StoreError as error:
        raise Refused(503, str(error), "store_unavailable") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(400, f"not what a runner sends: {type(error).__name__}: {error}", "invalid_request") from error

"""The worker's side of a coordinator in another process.

A request that cannot be delivered is kept and tried again; the server does no harm by handling one twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl._version import __version__
from agl.errors import AglError, AttemptOverError, NotStoredError, RolloutError
from agl.mdp.selection import Selection
from agl.mdp.spans import Span
from agl.tracing.batches import Outbox, batches
from agl.trainer.runners.protocol import LEASE_WAIT_SECONDS, Lease, Report
from agl.trainer.runners.remote.serialization import METHODS, PREFIX, RemoteCoordinator, received_lease
from agl.trainer.wire.client import RETRIED, Connection, Unreachable
from agl.trainer.wire.methods import dumps, portable

log = logging.getLogger("agl.runner")

LOST_SECONDS = 600.0
"""How long a worker tries to reach its server before it gives up."""
FORGET_SECONDS = 2.0
"""How long a cancelled request for work may take to be withdrawn."""
_KEY = "give its runner key: --key-file, or AGL_RUNNER_KEY in the environment"


class CoordinatorClient(RemoteCoordinator):
    """A `Coordinator` at another process's address. Lives on one event loop.

    Methods raise `RolloutError` where the server could not be reached for too long, or refuses this worker. What the
    coordinator no longer wants is logged.

    Args:
        url: the server's address.
        key: a runner's or the operator's key, if the server asks for one.
        lost_seconds: how long to try to reach the server.
        selection, resources: used for leases that come without rules and resources.
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
        self._connection = Connection(
            url,
            key,
            name="the server",
            error=RolloutError,
            hint="check that it runs and that its address and port are right; start this runner again then",
            hints={
                400: f"runner and server need the same release of agl; this runner has {__version__}",
                401: _KEY,
                403: _KEY,
                404: "it hands out no rollouts: give the address of `agl store`, `agl serve` or a Trainer(runners=...)",
            },
            log=log,
            retry_seconds=lost_seconds,
            # Whatever failed in the server, this worker's report must not be lost by it.
            retried=RETRIED | set(range(500, 600)),
        )
        self._connection.open()
        self.url = self._connection.url
        self.selection = selection
        self.resources = resources or {}

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def lease(self, worker_id: str, wait: float = LEASE_WAIT_SECONDS, *, request_id: str = "") -> Lease | None:
        request_id = request_id or uuid.uuid4().hex
        try:
            lease = await self._call("lease", worker_id=worker_id, wait=wait, request_id=request_id)
        except asyncio.CancelledError:
            # Nobody would execute a lease that the server hands out now.
            with contextlib.suppress(TimeoutError, Unreachable, AglError):
                await asyncio.wait_for(self.forget(request_id), FORGET_SECONDS)
            raise
        return None if lease is None else received_lease(lease, self.url, self.selection, self.resources)

    async def heartbeat(self, lease: Lease) -> bool:
        return bool(await self._call("heartbeat", lease))

    async def forget(self, request_id: str) -> None:
        await self._connection.send("POST", f"{PREFIX}/forget", dumps({"request_id": request_id}))

    async def deliver(self, lease: Lease, spans: Sequence[Span]) -> None:
        outbox = Outbox(spans)
        while batch := outbox.next():
            try:
                await self._call("deliver", lease, spans=batch)
            except AglError as error:
                if self._connection.unreachable:
                    raise
                outbox.refused(batch, error)
        for lost in outbox.lost:
            log.warning("rollout %s attempt %d: the server does not take %s", *lease.id, lost)

    async def remember(self, lease: Lease, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return await self._call("remember", lease, request=request)

    async def abandon(self, lease: Lease, why: str) -> None:
        await self._call("abandon", lease, why=why)

    async def finish(self, lease: Lease, report: Report) -> None:
        error = report.error
        if error is not None and not isinstance(error, AglError):
            error = RolloutError(f"{type(error).__name__}: {error}")
        text = report.traceback(content=lease.capture_content)
        if next((batch for batch in batches(report.spans)), []) != [*report.spans]:
            # Too much for one request: the coordinator keeps what is delivered for the report.
            await self.deliver(lease, report.spans)
            report = replace(report, spans=())
        await self._call("finish", lease, report=replace(report, error=error, text=text))

    async def _call(self, method: str, /, lease: Lease | None = None, **arguments: Any) -> Any:
        """Call a method; None if the coordinator no longer wants the attempt."""
        secret = None
        if lease is not None:
            rollout_id, attempt = lease.id
            arguments["lease"] = {"rollout_id": rollout_id, "attempt": attempt}
            secret = lease.attempted_rollout.secret
        try:
            body = dumps({name: portable(value) for name, value in arguments.items()})
        except TypeError as error:
            raise RolloutError(f"{method}: what is sent to the server is not JSON: {error}") from error
        secrets = frozenset[str]() if secret is None else frozenset({secret})
        try:
            response = await self._connection.request("POST", f"{PREFIX}/{method}", body, secrets=secrets)
        except (AttemptOverError, NotStoredError) as error:
            log.warning("%s: the server no longer accepts it: %s", method, error)
            return None
        return METHODS[method].result.validate_python(self._connection.result(response))

"""Holds requests while a policy's weights change: none is refused, and none runs across an update."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from agl.errors import GatewayError
from agl.trainer.gateway.access import PendingRequest
from agl.trainer.gateway.errors import RequestError

log = logging.getLogger("agl.gateway")

CANCEL_SECONDS = 10.0
"""How long cancelled requests may take to end."""


class Gate:
    """Between requests and the engine."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight: set[PendingRequest] = set()

    @contextlib.asynccontextmanager
    async def passing(self, pending: PendingRequest) -> AsyncIterator[None]:
        """Wait until the gate is open; the request counts as in flight while the block runs."""
        # An update can begin between the gate's opening and this task's turn.
        while not self._open.is_set():
            await self._open.wait()
        self._in_flight.add(pending)
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight.discard(pending)
            if not self._in_flight:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def hold(self, timeout: float) -> AsyncIterator[None]:
        """Close the gate, wait for the requests in flight, and keep it closed while the block runs.

        Args:
            timeout: seconds after which requests in flight are cancelled.

        Raises:
            GatewayError: cancelled requests did not end.
        """
        self._open.clear()
        try:
            if not await self._idle_within(timeout):
                log.warning("cancelling %d request(s) that outlasted the wait for an update", len(self._in_flight))
                for pending in list(self._in_flight):
                    pending.cancel(RequestError(503, "the policy is being updated; try again", code="policy_update"))
                if not await self._idle_within(CANCEL_SECONDS):
                    raise GatewayError(
                        f"{len(self._in_flight)} request(s) neither ended nor could be cancelled",
                        hint="the engine hangs, or ignores cancellation",
                    )
            yield
        finally:
            self._open.set()

    async def _idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()

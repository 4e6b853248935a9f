"""Holds requests while a policy's weights change: none is refused, and none runs across an update."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from agl.errors import GatewayError
from agl.trainer.gateway.calls import PendingRequest
from agl.trainer.gateway.errors import RequestError

log = logging.getLogger("agl.gateway")

CANCEL_SECONDS = 10.0
"""How long cancelled requests may take to end."""


class Gate:
    """What requests pass through to the engine."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._inside: set[PendingRequest] = set()

    @contextlib.asynccontextmanager
    async def passing(self, wire: PendingRequest) -> AsyncIterator[None]:
        """Wait until the gate is open and be counted as in flight while the block runs."""
        # An update can begin between the gate's opening and this task's turn.
        while not self._open.is_set():
            await self._open.wait()
        self._inside.add(wire)
        self._idle.clear()
        try:
            yield
        finally:
            self._inside.discard(wire)
            if not self._inside:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def hold(self, timeout: float) -> AsyncIterator[None]:
        """Keep the gate closed while the block runs, after those in flight have ended; see `Gateway.hold`."""
        self._open.clear()
        try:
            if not await self._idle_within(timeout):
                log.warning("cancelling %d request(s) that outlasted the wait for an update", len(self._inside))
                for wire in list(self._inside):
                    wire.cancel(RequestError(503, "the policy is being updated; try again", code="policy_update"))
                if not await self._idle_within(CANCEL_SECONDS):
                    raise GatewayError(
                        f"{len(self._inside)} request(s) neither ended nor let themselves be cancelled",
                        hint="the engine hangs, or ignores cancellation",
                    )
            yield
        finally:
            self._open.set()

    async def _idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()

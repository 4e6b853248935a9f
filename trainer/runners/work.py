"""A runner by itself: executes one agent's rollouts for a server elsewhere, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

from agl.agents import Agent
from agl.plugins import switched_on
from agl.trainer.runners.base import Desk, Lease, Report
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.remote import RemoteDesk


class _Counting:
    """A desk that tells of each report on its way."""

    def __init__(self, desk: Desk, told: Callable[[Lease, Report], None]) -> None:
        self._desk, self._told = desk, told

    async def finish(self, lease: Lease, report: Report) -> None:
        await self._desk.finish(lease, report)
        self._told(lease, report)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._desk, name)


async def work(
    agent: Agent,
    url: str,
    *,
    key: str | None = None,
    n_workers: int = 1,
    name: str | None = None,
    told: Callable[[Lease, Report], None] = lambda lease, report: None,
    until: asyncio.Event | None = None,
) -> None:
    """Execute rollouts until `until` is set or the task is cancelled.

    Args:
        agent: what to run. url: of the server that hands out rollouts. key: a runner's.
        n_workers: rollouts at once. name: of this runner; host and process if None. told: of each attempt that ended.

    Raises:
        RolloutError: the server was out of reach for too long, or refuses this runner.
    """
    desk = RemoteDesk(url, key)
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(error: BaseException) -> None:
        if not broken.done():
            broken.set_exception(error)

    runner = LocalRunner(
        agent, _Counting(desk, told), n_workers=n_workers, broken=fail,
        name=name or f"{socket.gethostname()}-{os.getpid()}",
    )  # fmt: skip
    with switched_on(agent.tracers):
        await runner.start()
        stopped = asyncio.ensure_future((until or asyncio.Event()).wait())
        try:
            await asyncio.wait((broken, stopped), return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                broken.result()
        finally:
            stopped.cancel()
            broken.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await runner.stop()
            await desk.close()

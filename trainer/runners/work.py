"""A runner by itself: executes one agent's rollouts for a server elsewhere, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from agl.agents import Agent
from agl.plugins import switched_on
from agl.trainer.runners.base import Lease, Report
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.remote import RemoteDesk


class _Telling(RemoteDesk):
    """A desk elsewhere, that tells of each report it took."""

    def __init__(self, url: str, key: str | None, told: Callable[[Lease, Report], None]) -> None:
        super().__init__(url, key)
        self._told = told

    async def finish(self, lease: Lease, report: Report) -> None:
        await super().finish(lease, report)
        self._told(lease, report)


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
    desk = _Telling(url, key, told)
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(error: BaseException) -> None:
        if not broken.done():
            broken.set_exception(error)

    runner = LocalRunner(
        agent, desk, n_workers=n_workers, broken=fail,
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

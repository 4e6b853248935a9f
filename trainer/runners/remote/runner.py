"""A runner by itself: executes one agent's rollouts for a server elsewhere, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from agl import semconv
from agl.agents.agent import Agent
from agl.agents.registry import switched_on
from agl.errors import AglError
from agl.mdp.builder import build_trajectory
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.rewards.air import AIR, reward_spans
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.protocol import Lease, Report
from agl.trainer.runners.remote.coordinator import CoordinatorClient


class _Between(CoordinatorClient):
    """A desk elsewhere; adds AIR's rewards to each report on its way, and tells of it."""

    def __init__(self, url: str, key: str | None, told: Callable[[Lease, Report], None], air: AIR | None) -> None:
        super().__init__(url, key)
        self._told, self._air = told, air

    async def finish(self, lease: Lease, report: Report) -> None:
        if self._air is not None and report.error is None:
            try:
                index = SpanIndex((), report.spans)
                trajectory = build_trajectory(*lease.id, lease.rollout.group, index, lease.selection)
                credited = self._air.rewards(trajectory, index, lease.selection)
                report = replace(report, spans=[*report.spans, *_uncredited(reward_spans(credited, index))])
            except AglError as error:
                report = replace(report, error=error)
        await super().finish(lease, report)
        self._told(lease, report)


def _uncredited(spans: Sequence[Span]) -> list[Span]:
    """Rewards whose calls are known where the gateway is; they are credited there by the spans that they lie in."""
    return [replace(s, attributes={k: v for k, v in s.attributes.items() if k != semconv.REWARD_CALL}) for s in spans]


async def work(
    agent: Agent,
    url: str,
    *,
    key: str | None = None,
    n_workers: int = 1,
    name: str | None = None,
    told: Callable[[Lease, Report], None] = lambda lease, report: None,
    air: AIR | None = None,
    until: asyncio.Event | None = None,
) -> None:
    """Execute rollouts until `until` is set or the task is cancelled.

    Args:
        agent: what to run. url: of the server that hands out rollouts. key: a runner's.
        n_workers: rollouts at once. name: of this runner; host and process if None. told: of each attempt that ended.
        air: rules for tool outcomes and handoffs that are applied here, because the server does not know them.

    Raises:
        RolloutError: the server was out of reach for too long, or refuses this runner.
    """
    desk = _Between(url, key, told, air)
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

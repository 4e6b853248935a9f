"""The worker's side of remote rollouts: executes one agent's rollouts for a server until it is stopped."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from agl import semconv
from agl.agents.agent import Agent
from agl.agents.frameworks import switched_on
from agl.errors import AglError
from agl.mdp.builder import build_trajectory
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.rewards.air import AIR, reward_spans
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.protocol import Lease, Report
from agl.trainer.runners.remote.client import CoordinatorClient


async def run_worker(
    agent: Agent,
    url: str,
    *,
    key: str | None = None,
    n_workers: int = 1,
    name: str | None = None,
    on_report: Callable[[Lease, Report], None] = lambda lease, report: None,
    air: AIR | None = None,
    until: asyncio.Event | None = None,
) -> None:
    """Execute rollouts until `until` is set or the task is cancelled.

    Args:
        agent: what to run.
        url: the server that hands out rollouts.
        key: a runner's key.
        n_workers: rollouts at once.
        name: of this runner; host and process id if None.
        on_report: called after each attempt.
        air: rules for tool outcomes and handoffs that the server does not know,
            applied here.

    Raises:
        RolloutError: the server could not be reached for too long, or refuses this runner.
    """
    coordinator = _ReportingClient(url, key, on_report, air)
    failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(error: BaseException) -> None:
        if not failure.done():
            failure.set_exception(error)

    name = name or f"{socket.gethostname()}-{os.getpid()}"
    runner = LocalRunner(agent, coordinator, n_workers=n_workers, on_failure=fail, name=name)
    with switched_on(agent.tracers):
        try:
            await runner.run(failure, until or asyncio.Event())
        finally:
            await coordinator.close()


class _ReportingClient(CoordinatorClient):
    """Adds AIR's rewards to each report before it is sent, and passes it to `on_report` afterwards."""

    def __init__(self, url: str, key: str | None, on_report: Callable[[Lease, Report], None], air: AIR | None) -> None:
        super().__init__(url, key)
        self._on_report = on_report
        self._air = air

    async def finish(self, lease: Lease, report: Report) -> None:
        if self._air is not None and report.error is None:
            try:
                index = SpanIndex((), report.spans)
                trajectory = build_trajectory(*lease.id, lease.rollout.group, index, lease.selection)
                rewards = self._air.rewards(trajectory, index, lease.selection)
                report = replace(report, spans=[*report.spans, *_uncredited(reward_spans(rewards, index))])
            except AglError as error:
                report = replace(report, error=error)
        await super().finish(lease, report)
        self._on_report(lease, report)


def _uncredited(spans: Sequence[Span]) -> list[Span]:
    """Reward spans without their calls, which only the gateway knows; there the enclosing spans credit the rewards."""
    return [replace(s, attributes={k: v for k, v in s.attributes.items() if k != semconv.REWARD_CALL}) for s in spans]

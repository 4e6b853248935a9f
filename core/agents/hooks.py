"""Callbacks of the user around every attempt of every rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Hook:
    """Called around every attempt of every rollout; override the methods you need. Each is a coroutine.

    A hook that raises fails the attempt, since its own task (a reward, a check) is not done. `on_trace_*` run inside
    the attempt, so `agl.emit_reward` in them counts; around a sync agent each runs on a separate event loop.

    Arguments, all by keyword:
        agent: the `agl.Agent`.
        runner: the object that executes it.
        tracer: the attempt's `agl.tracing.RolloutContext`; its `spans` are those that have ended.
        rollout: the leased rollout: `rollout.rollout` (task, mode, step, ...) and `rollout.attempt`.
        spans: every span of the attempt, as stored.
    """

    @property
    def name(self) -> str:
        """Its name in errors."""
        return type(self).__name__

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        """Before the attempt begins."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Inside the attempt, before the agent."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Inside the attempt, after the agent has returned, before its reward is recorded."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Sequence[Any]) -> None:
        """After the attempt, failed or not, with its spans in the store."""

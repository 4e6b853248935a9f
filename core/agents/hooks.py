"""What a user may hang onto the course of every rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Hook:
    """Called around every attempt of every rollout; override what you need. Each method is a coroutine.

    A hook that raises fails the attempt: what it was to do (a reward, a check) has not been done. `on_trace_*` run
    inside the attempt, so `agl.emit_reward` in them counts; around a sync agent each runs on a loop of its own.

    Arguments, all by keyword:
        agent: the `agl.Agent`. runner: what runs it.
        tracer: the attempt's `agl.tracing.RolloutContext`; its `spans` are those that have ended.
        rollout: the leased rollout: `rollout.rollout` (task, mode, step, ...) and `rollout.attempt`.
        spans: every span of the attempt, as stored.
    """

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        """Before the attempt begins."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Inside the attempt, before the agent."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Inside the attempt, after the agent has returned, before its reward is recorded."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Sequence[Any]) -> None:
        """After the attempt, failed or not, with its spans in the store."""

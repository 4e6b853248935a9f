"""tinyagents traced by patching, as if it had no listeners: agents have spans, tools have none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from agl import tracing
from agl.adapters import aside, scopes
from agl.adapters.patching import Patches, PatchingTracer
from agl.tracing import Scope
from agl.tracing.context import within


class PatchedTracer(PatchingTracer):
    """Traces tinyagents agents inside rollouts."""

    def _patch(self, patches: Patches) -> None:
        from tinyagents import Agent

        calls = {"run": scopes.around(_turn), "arun": scopes.around_async(_turn)}
        patches.tree(Agent, {**calls, "stream": _stream, "astream": _astream})


def _turn(agent: Any, question: str) -> Any:
    return within(scopes.agent_turn(agent.name))


def _stream(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def stream(self: Any, question: str) -> Any:
        return aside.traced_sync(lambda: scopes.agent_turn(self.name), lambda: method(self, question), _end)

    return stream


def _astream(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def astream(self: Any, question: str) -> Any:
        return aside.traced(lambda: scopes.agent_turn(self.name), lambda: method(self, question), _end)

    return astream


def _end(scope: Scope, error: BaseException | None) -> None:
    tracing.end(scope, error=error)

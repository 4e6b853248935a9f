"""tinyagents traced by patching, as if it had no listeners: agents have spans, tools have none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from agl import tracing
from agl.adapters import aside, scopes
from agl.adapters.base import InstrumentedTracer
from agl.adapters.patching import Patches
from agl.tracing import Scope


class PatchingTracer(InstrumentedTracer):
    """Traces tinyagents agents inside rollouts."""

    def _install(self) -> None:
        from tinyagents import Agent

        self._patches = Patches()
        self._patches.tree(Agent, {"run": _run, "arun": _arun, "stream": _stream, "astream": _astream})

    def _restore(self) -> None:
        self._patches.restore()


def _run(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, question: str) -> str:
        with _turn(self.name):
            return method(self, question)

    return run


def _arun(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def arun(self: Any, question: str) -> str:
        with _turn(self.name):
            return await method(self, question)

    return arun


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


@contextlib.contextmanager
def _turn(name: str) -> Iterator[None]:
    scope = scopes.agent_turn(name)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if scope is not None:
            _end(scope, error)


def _end(scope: Scope, error: BaseException | None) -> None:
    tracing.end(scope, error=error)

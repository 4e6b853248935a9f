"""Hooks of ag2 (>= 1.0, < 2).

Its hook for tools is a middleware, but each agent has a separate list. So `Agent._turn_scope`, through which every turn
of every agent goes (`ask`, `run`, subtasks), is replaced, to add a middleware and to open the agent's scope.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from agl import semconv, tracing
from agl.adapters.patching import Patches
from agl.adapters.scopes import agent_turn, tool_end, tool_run
from agl.tracing.context import within


def install(patches: Patches) -> None:
    """Hook `ag2.Agent`."""
    # Below 1.0 a module of this name may exist without these hooks.
    if importlib.util.find_spec("ag2.middleware") is None:
        return
    from ag2 import Agent

    patches.method(Agent, "_turn_scope", _turn_scope)


def _turn_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def turn_scope(self: Any, *args: Any, **kwargs: Any) -> contextlib.AbstractAsyncContextManager[Any]:
        if tracing.current() is None:
            return original(self, *args, **kwargs)
        kwargs["additional_middleware"] = (*kwargs.get("additional_middleware", ()), _middleware())
        return _traced(self.name, original(self, *args, **kwargs))

    return turn_scope


@contextlib.asynccontextmanager
async def _traced(
    name: str, turn: contextlib.AbstractAsyncContextManager[Callable[..., Any]]
) -> AsyncIterator[Callable[..., Any]]:
    """A turn that runs in its agent's scope."""
    async with turn as drive:

        async def driven() -> Any:
            with within(agent_turn(name)):
                return await drive()

        yield driven


@functools.cache
def _middleware() -> Any:
    """The middleware's class. Made late, so that importing the adapter does not import the framework."""
    from ag2.middleware import BaseMiddleware

    class ToolSpans(BaseMiddleware):
        async def on_tool_execution(self, call_next: Any, event: Any, context: Any) -> Any:
            with within(tool_run(event.name, event.arguments, event.id), _end) as returns:
                returns(result := await call_next(event, context))
            return result

    return ToolSpans


def _end(scope: Any, result: Any) -> None:
    error = getattr(result, "error", None)
    if error is not None:
        tracing.end(scope, error=error)
    elif hasattr(result, "result"):
        tool_end(scope, "\n".join(_text(part) for part in result.result.parts))
    else:
        # A client-side tool: it has not run, and its result comes with the client's next request.
        tracing.end(scope, attributes={semconv.PAUSED: True})


def _text(part: Any) -> str:
    content = getattr(part, "content", None)
    return content if isinstance(content, str) else json.dumps(getattr(part, "data", repr(part)), default=str)

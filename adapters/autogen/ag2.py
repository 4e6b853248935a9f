"""Hooks of ag2 (>= 1.0, < 2), and of `autogen.beta`, which it was in classic AutoGen from 0.11 on.

Its hook for tools is a middleware, but each agent has a separate list. So `Agent._turn_scope`, through which every turn
of every agent goes (`ask`, `run`, subtasks), is replaced, to add a middleware and to open the agent's scope. What
`approval_required` answers for a person is a result like a tool's; so that object's call is replaced, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from agl import semconv, tracing
from agl.adapters.failed_calls import record_failed_call
from agl.adapters.patching import Patches
from agl.adapters.scopes import agent_turn, tool_end, tool_run
from agl.messages.tool_output import tool_output
from agl.tracing.context import within
from agl.tracing.import_hooks import when_imported

_refused: ContextVar[set[str] | None] = ContextVar("agl_ag2_refused", default=None)
"""The ids of tool calls that a person has refused, within the call that is made here."""


def install(patches: Patches) -> None:
    """Hook `ag2.Agent`."""
    # Below 1.0 a module of this name may exist without these hooks.
    if importlib.util.find_spec("ag2.middleware") is not None:
        _install(patches, "ag2")


def install_beta(patches: Patches) -> None:
    """Hook `autogen.beta.Agent` once a program imports it, which most users of classic AutoGen never do."""
    patches.also(when_imported(["autogen.beta"], functools.partial(_install, patches)))


def _install(patches: Patches, package: str) -> None:
    agents = importlib.import_module(package)
    middleware = importlib.import_module(f"{package}.middleware")
    patches.method(agents.Agent, "_turn_scope", functools.partial(_turn_scope, _middleware(middleware.BaseMiddleware)))
    # The first releases make a function of it.
    if (approval := getattr(middleware, "ApprovalRequired", None)) is not None:
        patches.method(approval, "__call__", _approval)


def _turn_scope(middleware: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def turn_scope(self: Any, *args: Any, **kwargs: Any) -> contextlib.AbstractAsyncContextManager[Any]:
        if tracing.current() is None:
            return original(self, *args, **kwargs)
        kwargs["additional_middleware"] = (*kwargs.get("additional_middleware", ()), middleware)
        return _traced(self.name, original(self, *args, **kwargs))

    return turn_scope


def _approval(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def ask(self: Any, call_next: Any, event: Any, context: Any) -> Any:
        allowed: list[Any] = []

        def proceed(event: Any, context: Any) -> Any:
            allowed.append(event)
            return call_next(event, context)

        result = await original(self, proceed, event, context)
        if not allowed and (refused := _refused.get()) is not None:
            refused.add(event.id)
        return result

    return ask


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


def _middleware(base: Any) -> Any:
    """The middleware's class, of the framework's own base class."""

    class ToolSpans(base):
        async def on_tool_execution(self, call_next: Any, event: Any, context: Any) -> Any:
            refused: set[str] = set()
            _refused.set(refused)

            def end(scope: Any, result: Any) -> None:
                _end(scope, result, refused=event.id in refused)

            with within(tool_run(event.name, event.arguments, event.id), end) as returns:
                returns(result := await call_next(event, context))
            return result

        async def on_llm_call(self, call_next: Any, events: Any, context: Any) -> Any:
            _refusals(events)
            return await call_next(events, context)

    return ToolSpans


def _refusals(events: Sequence[Any]) -> None:
    """Record the failed tool calls of the last answer for which no tool ran."""
    failed: dict[str, str] = {}
    for event in reversed(events):
        for result in getattr(event, "results", None) or ():
            if (error := getattr(result, "error", None)) is not None:
                failed[result.parent_id] = str(error)
        if (answered := getattr(event, "tool_calls", None)) is not None:
            for call in answered.calls:
                if call.id in failed:
                    record_failed_call(call.name, call.id, call.arguments, failed[call.id])
            return


def _end(scope: Any, result: Any, *, refused: bool) -> None:
    error = getattr(result, "error", None)
    if error is not None:
        tracing.end(scope, error=error)
    elif hasattr(result, "result"):
        values = [_value(part) for part in result.result.parts]
        whole = values[0] if len(values) == 1 else "\n".join(tool_output(value).text for value in values)
        tool_end(scope, whole, failed=refused)
    else:
        # A client-side tool: it has not run, and its result comes with the client's next request.
        tracing.end(scope, attributes={semconv.PAUSED: True})


def _value(part: Any) -> Any:
    content = getattr(part, "content", None)
    return content if isinstance(content, str) else getattr(part, "data", repr(part))

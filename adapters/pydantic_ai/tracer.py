"""Spans of Pydantic AI agents: `invoke_agent` for named agents, `execute_tool` for tools.

Hook: a capability (pydantic-ai >= 2, < 3), which wraps a run and its tools. Pydantic AI takes capabilities per agent or
per run only, so `Agent.iter`, which every way of running an agent goes through, is patched to add one; agents made
earlier are traced too. A model call has no span of this adapter: the hook around it runs in another task than a
stream's request, so the SDK's tracer makes it. Pydantic AI's OpenTelemetry spans are the user's and stay unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from agl import tracing
from agl.adapters.aside import end, start
from agl.adapters.base import InstrumentedTracer
from agl.adapters.failed_calls import record_failed_call
from agl.adapters.patching import Patches
from agl.adapters.pydantic_ai.runnable import handles, runnable
from agl.adapters.scopes import agent_turn, place, tool_end, tool_run
from agl.tracing.context import Scope


class PydanticAITracer(InstrumentedTracer):
    """Traces every way of running a Pydantic AI agent inside rollouts."""

    modules = ("pydantic_ai",)
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _install(self) -> None:
        from pydantic_ai import Agent

        self._patches = Patches()
        self._patches.replace(Agent, "iter", _iterating(Agent.iter))

    def _restore(self) -> None:
        self._patches.restore()


def _iterating(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def iterating(self: Any, *args: Any, capabilities: Any = None, **kwargs: Any) -> Any:
        if tracing.current() is not None:
            capabilities = [*(capabilities or ()), _capability_class()()]
        return method(self, *args, capabilities=capabilities, **kwargs)

    return iterating


@functools.cache
def _capability_class() -> Any:
    """Made late, so that importing the adapter does not import the framework."""
    from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering
    from pydantic_ai.exceptions import (
        ApprovalRequired,
        CallDeferred,
        SkipToolExecution,
        ToolFailedError,
        ToolRetryError,
    )

    class Tracing(AbstractCapability[Any]):
        """The spans of one run."""

        _safe_at_runtime: ClassVar[bool] = True

        def __init__(self) -> None:
            self.id = "agl"
            self.around = tracing.current()
            """The parent of the run's scopes: the agent's, or the one in which the run began."""

        def get_ordering(self) -> CapabilityOrdering:
            # A result of the user's own capability is no tool's run, and its changes of a call are recorded.
            return CapabilityOrdering(position="innermost")

        async def wrap_run(self, ctx: Any, *, handler: Callable[[], Awaitable[Any]]) -> Any:
            name = ctx.agent.name if ctx.agent is not None else None
            scope = agent_turn(name, parent=place(self.around), start=start) if name else None
            self.around = scope or self.around
            try:
                result = await handler()
            except BaseException as error:
                _end(scope, error)
                raise
            _end(scope)
            return result

        async def wrap_tool_execute(
            self, ctx: Any, *, call: Any, tool_def: Any, args: Any, handler: Callable[..., Any]
        ) -> Any:
            arguments, parent = call.args_as_json_str(), place(self.around)
            scope = tool_run(call.tool_name, arguments, call.tool_call_id, parent=parent, start=start)
            try:
                result = await handler(args)
            except (CallDeferred, ApprovalRequired):
                _end(scope)
                raise
            except SkipToolExecution as skipped:
                _returned(scope, skipped.result)
                raise
            except (ToolRetryError, ToolFailedError) as told:
                # `ModelRetry` and `ToolFailed` of the tool, which the model reads. MCP tools fail by them.
                _returned(scope, str(told), failed=True)
                raise
            except BaseException as error:
                _end(scope, error)
                raise
            _returned(scope, result)
            return result

        async def on_tool_validate_error(self, ctx: Any, *, call: Any, tool_def: Any, args: Any, error: Any) -> Any:
            record_failed_call(call.tool_name, call.tool_call_id, str(error), parent=place(self.around))
            raise error

    return Tracing


def _end(scope: Scope | None, error: BaseException | None = None) -> None:
    if scope is not None:
        end(scope, error=error)


def _returned(scope: Scope | None, result: Any, *, failed: bool = False) -> None:
    if scope is not None:
        tool_end(scope, _text(getattr(result, "return_value", result)), failed=failed, end=end)


def _text(value: Any) -> str:
    from pydantic_core import to_json

    return value if isinstance(value, str) else to_json(value, fallback=str, serialize_unknown=True).decode()

"""Spans of crewai: `invoke_agent` for each agent's turn, `execute_tool` for tools, `chat` for each request.

Hook: crewai's event bus runs its handlers in threads of its own, where no scope can be opened for the agent, so methods
of its base classes are replaced while instrumented (crewai >= 1.15.30, < 2): `execute_task`, `aexecute_task`, `kickoff`
and `kickoff_async` of `BaseAgent`; `_execute_single_native_tool_call` of its executors, and the function of that name
that plans use; `ToolUsage.use` and `ause`, by which calls in text are run. A tool's exception never leaves these: it is
seen where the tool runs (`BaseTool.run`, `CrewStructuredTool.invoke` and their async forms). The `chat` spans are the
SDK's, through `agl.adapters.openai`: crewai's results drop the response's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agl import tracing
from agl.adapters.aside import end, start
from agl.adapters.base import InstrumentedTracer
from agl.adapters.crewai.runnable import agent_name, handles, runnable
from agl.adapters.openai.tracer import switched_on
from agl.adapters.patching import Patches
from agl.adapters.scopes import agent_turn, last_chat, tool_end, tool_run


class CrewAITracer(InstrumentedTracer):
    """Traces crewai's agents, crews, flows and tools inside rollouts."""

    modules = ("crewai",)
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _install(self) -> None:
        from crewai.agents import step_executor  # pyright: ignore
        from crewai.agents.agent_builder.base_agent import BaseAgent  # pyright: ignore
        from crewai.agents.agent_builder.base_agent_executor import BaseAgentExecutor  # pyright: ignore
        from crewai.tools.base_tool import BaseTool  # pyright: ignore
        from crewai.tools.structured_tool import CrewStructuredTool  # pyright: ignore
        from crewai.tools.tool_usage import ToolUsage  # pyright: ignore

        self._patches = Patches()
        turn, aturn = _turn, _aturn
        agents = {"execute_task": turn, "aexecute_task": aturn, "kickoff": turn, "kickoff_async": aturn}
        self._patches.tree(BaseAgent, agents)
        self._patches.tree(BaseAgentExecutor, {"_execute_single_native_tool_call": _native_call})
        name = "execute_single_native_tool_call"
        self._patches.replace(step_executor, name, _native_call(getattr(step_executor, name)))
        self._patches.method(ToolUsage, "use", _use)
        self._patches.method(ToolUsage, "ause", _ause)
        self._patches.tree(BaseTool, {"run": _watched, "arun": _awatched})
        self._patches.method(CrewStructuredTool, "invoke", _watched)
        self._patches.method(CrewStructuredTool, "ainvoke", _awatched)
        self._openai = switched_on()

    def _restore(self) -> None:
        self._patches.restore()
        if self._openai is not None:
            self._openai.uninstrument()


# -- agents -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _within_turn(agent: Any) -> Iterator[None]:
    scope = agent_turn(agent_name(agent), start=start)
    try:
        yield
    except BaseException as error:
        if scope is not None:
            end(scope, error=error)
        raise
    if scope is not None:
        end(scope)


def _turn(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tracing.current() is None or _in_event_loop():
            # In an event loop, `kickoff` returns the coroutine of `kickoff_async`.
            return original(self, *args, **kwargs)
        with _within_turn(self):
            return original(self, *args, **kwargs)

    return turn


def _aturn(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tracing.current() is None:
            return await original(self, *args, **kwargs)
        with _within_turn(self):
            return await original(self, *args, **kwargs)

    return turn


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# -- tools ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Run:
    """What the tool of one call did last: crewai tries some calls again.

    Attributes:
        error: the exception that it raised.
    """

    error: BaseException | None = None


_run: ContextVar[_Run | None] = ContextVar("agl.crewai.run", default=None)
"""The call whose tool runs. crewai runs tools in copies of the context."""


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _watching():
            return original(self, *args, **kwargs)

    return run


def _awatched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _watching():
            return await original(self, *args, **kwargs)

    return run


@contextlib.contextmanager
def _watching() -> Iterator[None]:
    here = _run.get()
    if here is not None:
        here.error = None
    try:
        yield
    except BaseException as error:
        if here is not None:
            here.error = error
        raise


@contextlib.contextmanager
def _tool_span(name: str, arguments: Any, call_id: str | None) -> Iterator[Callable[[str, Any], None]]:
    """A call's span; what is given is to be called with the result and what crewai knows of its failure."""
    scope = tool_run(name, arguments, call_id, issued_by=last_chat(tracing.current()), start=start)
    run = _Run()
    token = _run.set(run)

    def finish(result: str, failure: Any) -> None:
        if scope is None:
            return
        if run.error is not None:
            end(scope, error=run.error)
        else:
            tool_end(scope, result, failed=failure is not None, end=end)

    try:
        yield finish
    except BaseException as error:
        if scope is not None:
            end(scope, error=run.error or error)
        raise
    finally:
        _run.reset(token)


def _native_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        known = None if tracing.current() is None else _call_info(args, kwargs)
        if known is None:
            return original(*args, **kwargs)
        call_id, name, arguments = known
        with _tool_span(name, arguments, call_id) as finish:
            result = original(*args, **kwargs)
            # A dict from an executor, an object from the function that plans use.
            facts = result if isinstance(result, dict) else vars(result)
            finish(str(facts["result"]), facts.get("tool_failure"))
        return result

    return call


def _call_info(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, Any] | None:
    """Id, name and arguments of a call: a method's or a function's first argument, or three named ones."""
    from crewai.utilities.agent_utils import extract_tool_call_info  # pyright: ignore

    if "call_id" in kwargs:
        return kwargs["call_id"], kwargs["func_name"], kwargs["func_args"]
    return extract_tool_call_info(kwargs["tool_call"] if "tool_call" in kwargs else args[-1])


def _use(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def use(self: Any, calling: Any, *args: Any, **kwargs: Any) -> Any:
        # A call that is tried again comes here again.
        if tracing.current() is None or _run.get() is not None or not hasattr(calling, "tool_name"):
            return original(self, calling, *args, **kwargs)
        with _tool_span(calling.tool_name, calling.arguments or {}, None) as finish:
            result = original(self, calling, *args, **kwargs)
            finish(str(result), getattr(self, "last_failure", None))
        return result

    return use


def _ause(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def use(self: Any, calling: Any, *args: Any, **kwargs: Any) -> Any:
        if tracing.current() is None or _run.get() is not None or not hasattr(calling, "tool_name"):
            return await original(self, calling, *args, **kwargs)
        with _tool_span(calling.tool_name, calling.arguments or {}, None) as finish:
            result = await original(self, calling, *args, **kwargs)
            finish(str(result), getattr(self, "last_failure", None))
        return result

    return use

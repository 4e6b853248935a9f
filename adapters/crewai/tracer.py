"""Spans of crewai: `invoke_agent` for each agent's turn, `execute_tool` for tools, `chat` for each request.

Hook: crewai's event bus runs its handlers in separate threads, where no scope can be opened for the agent, so methods
of its base classes are replaced while instrumented (crewai >= 1.15.30, < 2): `execute_task`, `aexecute_task`, `kickoff`
and `kickoff_async` of `BaseAgent`; `_execute_single_native_tool_call` of its executors, and the function of that name
that plans use; `ToolUsage.use` and `ause`, by which calls in text are run. A tool's exception never leaves these: it is
seen where the tool runs (`BaseTool.run`, `CrewStructuredTool.invoke` and their async forms). The `chat` spans are the
SDK's, through `agl.adapters.openai`: crewai's results drop the response's id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agl import tracing
from agl.adapters.crewai.runnable import agent_name, handles, runnable
from agl.adapters.patching import Patches, PatchingTracer
from agl.adapters.scopes import agent_turn, around, around_async, last_chat, tool_end, tool_run
from agl.tracing.context import Scope, within


class CrewAITracer(PatchingTracer):
    """Traces crewai's agents, crews, flows and tools inside rollouts."""

    modules = ("crewai",)
    with_openai = True
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _patch(self, patches: Patches) -> None:
        from crewai.agents import step_executor  # pyright: ignore
        from crewai.agents.agent_builder.base_agent import BaseAgent  # pyright: ignore
        from crewai.agents.agent_builder.base_agent_executor import BaseAgentExecutor  # pyright: ignore
        from crewai.tools.base_tool import BaseTool  # pyright: ignore
        from crewai.tools.structured_tool import CrewStructuredTool  # pyright: ignore
        from crewai.tools.tool_usage import ToolUsage  # pyright: ignore

        turn = around(_sync_turn)
        aturn = around_async(_turn)
        agents = {"execute_task": turn, "aexecute_task": aturn, "kickoff": turn, "kickoff_async": aturn}
        patches.tree(BaseAgent, agents)
        patches.tree(BaseAgentExecutor, {"_execute_single_native_tool_call": around(_native_call)})
        name = "execute_single_native_tool_call"
        patches.replace(step_executor, name, around(_native_call)(getattr(step_executor, name)))
        patches.method(ToolUsage, "use", around(_use))
        patches.method(ToolUsage, "ause", around_async(_use))
        patches.tree(BaseTool, {"run": around(_watched), "arun": around_async(_watched)})
        patches.method(CrewStructuredTool, "invoke", around(_watched))
        patches.method(CrewStructuredTool, "ainvoke", around_async(_watched))


# -- agents -----------------------------------------------------------------------------------------------------------


def _turn(agent: Any, *_: Any, **__: Any) -> Any:
    return within(agent_turn(agent_name(agent), of=agent))


def _sync_turn(agent: Any, *_: Any, **__: Any) -> Any:
    # In an event loop, `kickoff` returns the coroutine of `kickoff_async`.
    return within(None) if _in_event_loop() else _turn(agent)


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
        returned: what it returned, of which crewai makes a text.
    """

    error: BaseException | None = None
    returned: Any = None


_run: ContextVar[_Run | None] = ContextVar("agl.crewai.run", default=None)
"""The call that runs its tool. crewai runs tools in copies of the context."""


@contextlib.contextmanager
def _watched(*_: Any, **__: Any) -> Iterator[Callable[[Any], None]]:
    here = _run.get()
    if here is not None:
        here.error = None
        here.returned = None
    try:
        yield lambda result: None if here is None else setattr(here, "returned", result)
    except BaseException as error:
        if here is not None:
            here.error = error
        raise


@contextlib.contextmanager
def _tool_span(
    name: str, arguments: Any, call_id: str | None, outcome: Callable[[Any], tuple[Any, Any]]
) -> Iterator[Callable[[Any], None]]:
    """A call's span. `outcome`: what the method returns -> the tool's result, and what crewai knows of its failure."""
    scope = tool_run(name, arguments, call_id, issued_by=last_chat(tracing.current()))
    run = _Run()
    token = _run.set(run)

    def finish(scope: Scope, returned: Any) -> None:
        result, failure = outcome(returned)
        if run.error is not None:
            tracing.end(scope, error=run.error)
        else:
            # A failure that crewai knows, or a result that it kept from an earlier run, is its text.
            known = failure is not None or run.returned is None
            tool_end(scope, str(result) if known else run.returned, failed=failure is not None)

    def failed(scope: Scope, *, error: BaseException | None = None) -> None:
        tracing.end(scope, error=run.error or error)

    try:
        with within(scope, finish, end=failed) as returns:
            yield returns
    finally:
        _run.reset(token)


def _native_call(*args: Any, **kwargs: Any) -> Any:
    known = _call_info(args, kwargs)
    if known is None:
        return within(None)

    def outcome(result: Any) -> tuple[Any, Any]:
        # A dict from an executor, an object from the function that plans use.
        facts = result if isinstance(result, dict) else vars(result)
        return facts["result"], facts.get("tool_failure")

    call_id, name, arguments = known
    return _tool_span(name, arguments, call_id, outcome)


def _call_info(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, Any] | None:
    """Id, name and arguments of a call: a method's or a function's first argument, or three named ones."""
    from crewai.utilities.agent_utils import extract_tool_call_info  # pyright: ignore

    if "call_id" in kwargs:
        return kwargs["call_id"], kwargs["func_name"], kwargs["func_args"]
    return extract_tool_call_info(kwargs["tool_call"] if "tool_call" in kwargs else args[-1])


def _use(usage: Any, calling: Any, *_: Any, **__: Any) -> Any:
    # A call that is tried again comes here again.
    if _run.get() is not None or not hasattr(calling, "tool_name"):
        return within(None)
    return _tool_span(
        calling.tool_name, calling.arguments or {}, None, lambda result: (result, getattr(usage, "last_failure", None))
    )

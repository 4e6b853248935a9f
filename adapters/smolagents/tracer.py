"""Spans of smolagents: `invoke_agent` for named agents, `execute_tool` for tools, managed agents and executed code.

Hook: smolagents has only callbacks after a step, and one list of them for each agent, so methods of its base classes
are replaced while instrumented (smolagents >= 1.24, < 2): `MultiStepAgent._run_stream` (an agent's run, streamed or
not) and `__call__` (a managed agent's task), `Tool.__call__`, `PythonExecutor.__call__` (a `CodeAgent`'s code), and
`process_tool_calls` and `execute_tool_call` of `ToolCallingAgent`. smolagents does not pass a call's id to its tool: a
tool's run is joined to the call with its name and arguments in the answer that the same agent acts on. Code, and tool
calls that smolagents reads out of a text, have no id that the model gave: they are joined to the `chat` span of their
answer. The `chat` spans are the SDK's, through `agl.adapters.openai`: a stream's messages drop the response's id.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from agl import tracing
from agl.adapters.aside import traced_sync
from agl.adapters.failed_calls import record_failed_call
from agl.adapters.patching import Patches, PatchingTracer
from agl.adapters.scopes import agent_turn, around, last_chat, tool_end, tool_run
from agl.adapters.smolagents.runnable import handles, runnable
from agl.messages.tool_output import tool_output
from agl.tracing.context import within


class SmolagentsTracer(PatchingTracer):
    """Traces smolagents agents, the agents that they manage, and their tools inside rollouts."""

    modules = ("smolagents",)
    with_openai = True
    answer_errors: ClassVar[Mapping[str, str]] = {
        "smolagents.utils.AgentParsingError": "unparsable",
        "smolagents.utils.AgentMaxStepsError": "turns",
    }
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _patch(self, patches: Patches) -> None:
        from smolagents import MultiStepAgent, Tool
        from smolagents.local_python_executor import PythonExecutor

        agents: dict[str, Callable[..., Any]] = {
            "_run_stream": _run_stream,
            "__call__": around(_calling),
            "process_tool_calls": _process_tool_calls,
            "execute_tool_call": _execute_tool_call,
        }
        patches.tree(MultiStepAgent, agents)
        patches.tree(Tool, {"__call__": around(_calling)})
        patches.tree(PythonExecutor, {"__call__": around(_code)})
        if importlib.util.find_spec("mcpadapt") is not None:
            from mcp import ClientSession

            patches.method(ClientSession, "call_tool", _mcp_result)


@dataclass(eq=False)
class _ToolCall:
    """A tool call of the answer that an agent acts on.

    Attributes:
        issued_by: id of the `chat` span of that answer.
    """

    id: str | None
    name: str
    arguments: Any
    issued_by: str | None


_calls: WeakKeyDictionary[Any, list[_ToolCall]] = WeakKeyDictionary()
"""Agent -> the tool calls of its last answer that no tool's run has claimed. An agent runs once at a time."""
_claiming = threading.Lock()
_call: ContextVar[_ToolCall | None] = ContextVar("agl.smolagents.call", default=None)
"""The call that is about to run its tool."""


@dataclass(eq=False)
class _Running:
    """The tool that runs: a subclass's `__call__` calls that of its base class.

    Attributes:
        failed: whether it is an MCP server's, which marked its result as failed; mcpadapt passes the text alone on.
    """

    tool: Any
    failed: bool = False


_running: ContextVar[_Running | None] = ContextVar("agl.smolagents.running", default=None)


def _run_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_stream(self: Any, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return traced_sync(
            lambda: agent_turn(self.name, of=self) if self.name else None,
            lambda: original(self, *args, **kwargs),
            lambda scope, error: tracing.end(scope, error=error),
        )

    return run_stream


def _process_tool_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_tool_calls(self: Any, chat_message: Any, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        issued_by = last_chat(tracing.current())
        _calls[self] = [
            _ToolCall(call.id, call.function.name, call.function.arguments, issued_by)
            for call in chat_message.tool_calls or ()
        ]
        yield from original(self, chat_message, *args, **kwargs)

    return process_tool_calls


def _claim(agent: Any, name: str, arguments: Any) -> _ToolCall | None:
    with _claiming:
        calls = _calls.get(agent, [])
        # Of two calls that are the same in all but their id, either may run first.
        call = next((c for c in calls if c.name == name and (c.arguments or {}) == arguments), None)
        if call is not None:
            calls.remove(call)
        return call


def _execute_tool_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute_tool_call(self: Any, tool_name: str, arguments: Any) -> Any:
        if tracing.current() is None:
            return original(self, tool_name, arguments)
        call = _claim(self, tool_name, arguments)
        token = _call.set(call)
        try:
            return original(self, tool_name, arguments)
        except Exception as error:
            # Where the tool ran, it has its span, with the error that it raised.
            if call is not None:
                record_failed_call(tool_name, call.id, arguments, str(error), issued_by=call.issued_by)
            raise
        finally:
            _call.reset(token)

    return execute_tool_call


@contextlib.contextmanager
def _calling(tool: Any, *args: Any, **kwargs: Any) -> Iterator[Callable[[Any], None]]:
    outer = _running.get()
    if (outer is not None and outer.tool is tool) or _gives_the_answer(tool):
        yield lambda result: None
        return
    issued = _call.get()
    here = _Running(tool)
    running = _running.set(here)
    claimed = _call.set(None)
    try:
        scope = tool_run(
            tool.name or "agent",
            _arguments(tool, args, kwargs),
            issued.id if issued else None,
            issued_by=issued.issued_by if issued else None,
            tool=tool,
        )
        with within(scope, lambda scope, result: tool_end(scope, result, failed=here.failed)) as returns:
            yield returns
    finally:
        _call.reset(claimed)
        _running.reset(running)


def _mcp_result(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note of a tool of mcpadapt that its server marked the result as failed. It is awaited in a copy of the tool's
    context."""

    @functools.wraps(original)
    async def call_tool(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = await original(self, *args, **kwargs)
        here = _running.get()
        if here is not None and type(here.tool).__module__.startswith("mcpadapt."):
            here.failed = here.failed or tool_output(result).marked
        return result

    return call_tool


def _gives_the_answer(tool: Any) -> bool:
    """Whether it is smolagents' own `final_answer`, by which an agent ends; nothing is executed."""
    return any(
        (c.__module__, c.__name__) == ("smolagents.default_tools", "FinalAnswerTool") for c in type(tool).__mro__
    )


def _arguments(tool: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name; smolagents also takes them as one dict."""
    if len(args) == 1 and not kwargs and isinstance(args[0], dict):
        return args[0]
    named = {**dict(zip(getattr(tool, "inputs", ()), args, strict=False)), **kwargs}
    named.pop("sanitize_inputs_outputs", None)
    return named


def _code(executor: Any, code_action: str) -> Any:
    scope = tool_run("python_interpreter", {"code": code_action}, None, issued_by=last_chat(tracing.current()))
    return within(scope, lambda scope, output: tool_end(scope, f"{output.logs}{output.output}"))

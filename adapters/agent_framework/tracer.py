"""Spans of Agent Framework runs: `invoke_agent` for named agents, `chat` for model calls, `execute_tool` for tools.

Hook: the three places where the framework makes its own OpenTelemetry spans (agent-framework-core >= 1.21, < 2):
`AgentTelemetryLayer.run`, `ChatTelemetryLayer.get_response` and `FunctionTool.invoke`; `RawAgent.run` for agents
without telemetry; `Executor.execute`, because in a workflow an agent may go by its executor's id;
`SummarizationStrategy`, whose calls get a name of their own; and the middleware with which `HandoffBuilder` answers a
handoff's tool call (agent-framework-orchestrations >= 1.4, < 2).
They are patched: the framework's middleware is registered per agent or client, and its spans carry
content only with a flag, stop when the user switches telemetry off, and belong to the user's provider, where they stay
unchanged. Streams are followed by the framework's `with_pull_context_manager` and hooks.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from agl import semconv, tracing
from agl.adapters.agent_framework.answers import facts, streamed_facts
from agl.adapters.agent_framework.runnable import handles, runnable
from agl.adapters.aside import Aside
from agl.adapters.failed_calls import issued_call, record_failed_call
from agl.adapters.patching import Patches, PatchingTracer
from agl.adapters.scopes import agent_turn, handoff, model_call, note_returned, summariser, tool_end, tool_run
from agl.mdp.selection import Selection
from agl.tracing.context import Scope, within

_executor: ContextVar[Any] = ContextVar("agl_agent_framework_executor", default=None)
"""The workflow's executor that is running here."""
_summarising: ContextVar[bool] = ContextVar("agl_agent_framework_summarising", default=False)
"""Whether a model is called here to summarise the history."""


class AgentFrameworkTracer(PatchingTracer):
    """Traces Agent Framework agents and workflows inside rollouts."""

    modules = ("agent_framework",)
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _patch(self, patches: Patches) -> None:
        from agent_framework import Executor, FunctionTool, RawAgent, SummarizationStrategy
        from agent_framework.observability import AgentTelemetryLayer, ChatTelemetryLayer

        for cls, name, around in (
            (AgentTelemetryLayer, "run", _running),
            (RawAgent, "run", _running),
            (ChatTelemetryLayer, "get_response", _answering),
            (FunctionTool, "invoke", _invoking),
            (Executor, "execute", _during(_executor, lambda executor: executor)),
            (SummarizationStrategy, "__call__", _during(_summarising, lambda _: True)),
        ):
            patches.replace(cls, name, around(cls.__dict__[name]))
        patches.method(FunctionTool, "_invoke_function", _noting)
        # A package of its own. Its middleware answers a handoff's tool call itself, so that no tool is invoked.
        with contextlib.suppress(ImportError, AttributeError):
            from agent_framework_orchestrations import _handoff

            patches.method(_handoff._AutoHandoffMiddleware, "process", _handing_off)


def _running(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def traced_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = tracing.current()
        name = None if here is None else _name(self, here.rollout.selection)
        if here is None or not name or name == here.agent:
            return run(self, *args, **kwargs)

        def begin() -> Scope | None:
            return agent_turn(name, of=self)

        call = functools.partial(run, self, *args, **kwargs)
        return _stream(begin, call) if kwargs.get("stream") else _awaited(begin, call)

    return traced_run


def _during(variable: ContextVar[Any], value: Callable[[Any], Any]) -> Callable[..., Any]:
    """What sets a variable to a value of `self` while a method runs."""

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        async def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = variable.set(value(self))
            try:
                return await method(self, *args, **kwargs)
            finally:
                variable.reset(before)

        return traced

    return around


def _handing_off(process: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(process)
    async def traced_process(self: Any, context: Any, call_next: Any) -> Any:
        here, target = tracing.current(), self._handoff_functions.get(context.function.name)
        if here is not None and target is not None:
            handoff(here.agent, str(target), context.metadata.get("call_id"))
        return await process(self, context, call_next)

    return traced_process


def _name(agent: Any, selection: Selection) -> str | None:
    """The agent's own name; in a workflow its executor's id, where it has none or the selection names that id alone."""
    own = getattr(agent, "name", None)
    id = _name_in_workflow(agent)
    if own and id and selection.policy_for(own) is None and selection.policy_for(id) is not None:
        return id
    return own or id


def _name_in_workflow(agent: Any) -> str | None:
    """The id of this agent's executor, if the workflow's author chose it."""
    executor = _executor.get()
    if executor is None or getattr(executor, "agent", None) is not agent or executor.id == getattr(agent, "id", None):
        return None
    return executor.id


def _answering(get_response: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_response)
    def traced_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = tracing.current()
        if here is None:
            return get_response(self, *args, **kwargs)
        _refusals(args[0] if args else kwargs.get("messages"))
        chosen = (kwargs.get("client_kwargs") or {}).get("model") or (kwargs.get("options") or {}).get("model")
        model = str(chosen or getattr(self, "model", None) or "")

        def begin() -> Scope | None:
            agent = summariser(here.agent) if _summarising.get() else None
            return model_call(model, str(getattr(self, "otel_provider_name", "unknown")), agent=agent)

        call = functools.partial(get_response, self, *args, **kwargs)
        return _stream(begin, call) if kwargs.get("stream") else _awaited(begin, call, _answered)

    return traced_response


def _noting(invoke_function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a tool's object of which the framework makes a text."""
    from agent_framework import Content

    @functools.wraps(invoke_function)
    async def invoked(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = await invoke_function(self, *args, **kwargs)
        if not isinstance(result, Content):
            note_returned(result)
        return result

    return invoked


def _invoking(invoke: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(invoke)
    async def traced_invoke(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tracing.current() is None:
            return await invoke(self, *args, **kwargs)
        arguments: Any = kwargs.get("arguments")
        if arguments is None and (context := kwargs.get("context")) is not None:
            arguments = context.arguments
        if (dump := getattr(arguments, "model_dump", None)) is not None:
            arguments = dump()

        def begin() -> Scope | None:
            return tool_run(self.name, arguments, kwargs.get("tool_call_id"), tool=self)

        return await _awaited(begin, functools.partial(invoke, self, *args, **kwargs), _returned)

    return traced_invoke


async def _awaited(
    begin: Callable[[], Scope | None],
    call: Callable[[], Any],
    finish: Callable[[Scope, Any], None] | None = None,
) -> Any:
    with within(begin(), finish) as returns:
        returns(result := await call())
    return result


def _answered(scope: Scope, response: Any) -> None:
    tracing.end(scope, attributes=facts(scope, response, scope.rollout.capture_content))


def _stream(begin: Callable[[], Scope | None], call: Callable[[], Any]) -> Any:
    """The framework's stream, with the scope current while it is pulled; it ends with the stream, or when the stream is
    dropped."""
    aside = Aside()
    with aside:
        scope = begin()
        try:
            stream = call()
        except BaseException as error:
            if scope is not None:
                tracing.end(scope, error=error)
            raise
    if scope is None or not hasattr(stream, "with_pull_context_manager"):
        return stream
    updates: list[Any] = []

    def end(error: BaseException | None = None) -> None:
        content = scope.rollout.capture_content
        attributes = streamed_facts(scope, updates, content) if scope.kind == semconv.CHAT else None
        with aside:
            tracing.end(scope, error=error, attributes=attributes)

    stream = stream.with_pull_context_manager(lambda: aside).with_update_transform(updates.append)
    # Without a reference to the stream, which would live on with its hooks.
    known = weakref.ref(stream)
    weakref.finalize(stream, end).atexit = False
    return stream.with_cleanup_hook(lambda: end(getattr(known(), "_stream_error", None)))


def _returned(scope: Scope, result: Any) -> None:
    text = "\n".join(str(_part_text(part)) for part in _parts(result))
    failure = _failure(result)
    tool_end(scope, text, failed=False if failure is None else failure)


def _failure(result: Any) -> str | None:
    """The failure that a tool's result reports: an error, or a function's result with an exception."""
    for part in _parts(result):
        if getattr(part, "type", None) == "error":
            return str(part.message or "the tool failed")
        if getattr(part, "type", None) == "function_result" and part.exception is not None:
            return str(part.exception or part.result or "the tool failed")
    return None


def _parts(result: Any) -> list[Any]:
    return result if isinstance(result, list) else [result]


def _part_text(part: Any) -> Any:
    match getattr(part, "type", None):
        case "text":
            return part.text
        case "function_result":
            return part.result
    return part


def _refusals(messages: Any) -> None:
    """Record the failed tool calls of the last answer for which no tool ran."""
    if not isinstance(messages, list | tuple):
        return
    failed: dict[str, str] = {}
    for message in reversed(messages):
        parts = getattr(message, "contents", None) or ()
        for part in parts:
            if part.type == "function_result" and part.exception is not None:
                failed[str(part.call_id)] = str(part.result or part.exception)
        called = [part for part in parts if part.type == "function_call"]
        for part in called:
            if str(part.call_id) in failed:
                record_failed_call(part.name, part.call_id, part.arguments, failed.pop(str(part.call_id)))
        if called or str(getattr(message, "role", "")) == "assistant":
            break
    # A request that continues a response does not repeat the answer.
    for call_id, text in failed.items():
        if (call := issued_call(call_id)) is not None:
            record_failed_call(call.name, call_id, call.arguments, text)

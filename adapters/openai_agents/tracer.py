"""Spans of OpenAI Agents runs: `invoke_agent` for agents, `chat` for model calls, `execute_tool` for tools.

Hook: `start`, `finish` and `set_error` of the SDK's spans (openai-agents >= 0.20, < 1), of those that record nothing,
too: users without an OpenAI key switch the SDK's tracing off. Such a span stays what it is to the SDK and to the user's
processors, and no provider is set. A run whose tracing is off makes no spans for tools and puts no answers into its
spans: `with_tool_function_span` and `ModelTracing.include_data` are patched, and `create_trace_for_run`, to keep the
group.

The SDK's tool spans carry no call id: `ToolContext.from_agent_context`, which makes what a tool is called with, is
patched to read it. Tools that get no such context (the shell, patches) are joined to the call with their name and
arguments in the last answer of the same agent's run. A tool that needs an approval has a span before it has run, and
another one afterwards: `_maybe_execute_tool_approval`, `with_tool_function_span` and, for agents as tools,
`record_agent_tool_run_result` tell the two apart. A tool that a guardrail refuses has a span like one that has run:
`_execute_tool_input_guardrails` tells. The spans carry no MCP `isError` either:
`MCPUtil._extract_custom_data`, which every MCP result passes where it exists, is patched to read it. Of an exception
that a tool's failure handler turns into a result, its spans keep no more than that there was one: `set_error`, which is
called while it is handled, keeps it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from agl import semconv, tracing
from agl.adapters.base import InstrumentedTracer
from agl.adapters.failed_calls import record_failed_call
from agl.adapters.openai_agents.runnable import handles, runnable
from agl.adapters.patching import Patches
from agl.adapters.scopes import place, tool_run
from agl.messages import ToolCall
from agl.messages.tool_output import ToolOutput, tool_output
from agl.tracing.context import Scope
from agl.tracing.provider_formats import ResponseAccumulator

_log = logging.getLogger(__name__)
_NOOP = "no-op"
"""The id of spans and traces that record nothing."""


class OpenAIAgentsTracer(InstrumentedTracer):
    """Traces every `Runner.run`, `run_sync` and `run_streamed` inside rollouts."""

    modules = ("agents",)
    answer_errors: ClassVar[Mapping[str, str]] = {
        "agents.exceptions.ModelBehaviorError": "unparsable",
        "agents.exceptions.MaxTurnsExceeded": "turns",
    }
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    @classmethod
    def recognises(cls) -> bool:
        # Many users have a package of the name "agents", too.
        return hasattr(sys.modules.get("agents"), "set_trace_processors")

    def _install(self) -> None:
        from agents import agent, exceptions, run
        from agents.models.interface import ModelTracing
        from agents.run_internal import run_loop, tool_actions, tool_execution, turn_resolution
        from agents.tool_context import ToolContext
        from agents.tracing import context
        from agents.tracing.spans import NoOpSpan, SpanImpl

        spans = _Spans()
        self._unwatch = _watch_mcp(spans)
        self._patches = Patches()
        for cls in (SpanImpl, NoOpSpan):
            self._patches.method(cls, "start", spans.starting)
            self._patches.method(cls, "finish", spans.finishing)
            self._patches.method(cls, "set_error", spans.failing)
        self._patches.method(run_loop, "get_model_tracing_impl", _as_configured)
        self._patches.method(ModelTracing, "include_data", _including)
        for module in (context, run):
            self._patches.method(module, "create_trace_for_run", _grouped)
        for module in (tool_execution, tool_actions):
            self._patches.method(module, "with_tool_function_span", spans.with_tool_span)
        self._patches.method(agent, "record_agent_tool_run_result", spans.nested_approval)
        self._patches.method(tool_execution._FunctionToolBatchExecutor, "_maybe_execute_tool_approval", spans.approval)
        self._patches.method(tool_execution, "_execute_tool_input_guardrails", spans.guarded)
        self._patches.method(turn_resolution, "function_rejection_item", spans.rejected)
        # The first releases have no limits of tools.
        if (timeout := getattr(exceptions, "ToolTimeoutError", None)) is not None:
            self._patches.method(timeout, "__init__", spans.timed_out)
        self._patches.replace(ToolContext, "from_agent_context", spans.tool_context(ToolContext.from_agent_context))

    def _restore(self) -> None:
        self._unwatch()
        self._patches.restore()


@dataclass(eq=False)
class _Run:
    """One agent's run: the tool calls of its last answer that no tool span has claimed."""

    calls: list[ToolCall] = field(default_factory=list)

    def claim(self, name: str, arguments: Any, call_id: str | None) -> str | None:
        """The id of the call of a tool's run, `call_id` where it is known; no other run claims it."""
        if call_id is not None:
            self.calls = [call for call in self.calls if call.id != call_id]
            return call_id
        for call in self.calls:
            if call.arguments == arguments and (name == call.name or name.endswith(f".{call.name}")):
                self.calls.remove(call)
                return call.id
        return None

    def claim_handoff(self, to_agent: str) -> str | None:
        """The tool call of a handoff, which the SDK makes after the tools have run: the call of the target's default
        tool name, else the first unclaimed one. All of them are of one answer."""
        from agents import Handoff

        usual = Handoff.default_tool_name(_Named(to_agent))  # type: ignore[arg-type]
        call = next((c for c in self.calls if c.name == usual), self.calls[0] if self.calls else None)
        if call is not None:
            self.calls.remove(call)
        return call.id if call is not None else None


class _Named(NamedTuple):
    name: str


@dataclass(eq=False)
class _Open:
    """A span of the SDK that has not ended.

    Attributes:
        around: the parent scope of its children: its scope, or the one that it was started in.
        scope: the scope that it opened, if any.
        run: the run of the surrounding agent.
        handled: the exception that was being handled when it started, which is not an error of this span.
        call_id: the id of its tool call, where the SDK passes it to the tool.
        paused: whether its tool waits for an approval, so that it has not run.
        failed: whether its tool reported a failure that the SDK does not record.
        error: what the SDK recorded as its error.
        reported: the exception of its tool that the SDK reported to the model.
        failed_by_result: whether nothing but what its tool returned says that it failed.
    """

    around: Scope
    scope: Scope | None
    run: _Run
    handled: BaseException | None
    call_id: str | None = None
    paused: bool = False
    failed: bool = False
    error: Any = None
    reported: BaseException | None = None
    failed_by_result: bool = False


class _Spans:
    """The SDK's spans that are open inside rollouts."""

    def __init__(self) -> None:
        self._open: dict[Any, _Open] = {}

    def get(self, span: Any) -> _Open | None:
        """What is known of a span, or of the span with that id."""
        return self._open.get(_key(span))

    def starting(self, start: Callable[..., None]) -> Callable[..., None]:
        """Make a scope of each span that starts."""
        from agents.tracing.scope import Scope as Current

        @functools.wraps(start)
        def begin(span: Any, *args: Any, **kwargs: Any) -> None:
            new, outer = span.started_at is None and self.get(span) is None, Current.get_current_span()
            start(span, *args, **kwargs)
            # Spans outside of a trace are nobody's; a program may use the SDK's models by themselves.
            if new and not (tracing.idle() and not self._open) and (trace := Current.get_current_trace()) is not None:
                with _undisturbed():
                    self._start(span, outer if span.span_id == _NOOP else span.parent_id, trace)

        return begin

    def finishing(self, finish: Callable[..., None]) -> Callable[..., None]:
        """End the scope of each span that ends."""

        @functools.wraps(finish)
        def end(span: Any, *args: Any, **kwargs: Any) -> None:
            if self._open:
                self._end(span)
            finish(span, *args, **kwargs)

        return end

    def failing(self, set_error: Callable[..., None]) -> Callable[..., None]:
        """Keep the error of a span, and of a tool's span the exception that is being handled meanwhile."""

        @functools.wraps(set_error)
        def recorded(span: Any, error: Any, *args: Any, **kwargs: Any) -> None:
            if (opened := self.get(span)) is not None:
                opened.error, exception = error, sys.exception()
                if span.span_data.type == "function" and exception is not opened.handled:
                    opened.reported = exception
            set_error(span, error, *args, **kwargs)

        return recorded

    def with_tool_span(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Have spans for tools in runs that are not traced, and mark those whose tool waits for an approval."""

        @functools.wraps(original)
        async def with_span(*, config: Any, fn: Callable[[Any], Any], **kwargs: Any) -> Any:
            if tracing.current() is None:
                return await original(config=config, fn=fn, **kwargs)

            async def run(span: Any) -> Any:
                result = fn(span)
                result = await result if inspect.isawaitable(result) else result
                self._mark(span, result)
                return result

            if config.tracing_disabled:
                config = dataclasses.replace(config, tracing_disabled=False)
            return await original(config=config, fn=run, **kwargs)

        return with_span

    def approval(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Mark a function tool's span while the tool waits for an approval."""

        @functools.wraps(original)
        async def asked(*args: Any, **kwargs: Any) -> Any:
            result = await original(*args, **kwargs)
            self._mark(kwargs.get("span_fn"), result)
            return result

        return asked

    def guarded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Mark the span of a tool that a guardrail refuses: its text is in the place of the tool's result."""
        from agents.tracing import get_current_span

        @functools.wraps(original)
        async def checked(*args: Any, **kwargs: Any) -> Any:
            refusal = await original(*args, **kwargs)
            if refusal is not None and self._open and (opened := self.get(get_current_span())) is not None:
                opened.failed = True
            return refusal

        return checked

    def rejected(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Record a call that a person has refused, once the run is resumed: then it has no span of the SDK's."""
        from agents.tracing import get_current_span

        @functools.wraps(original)
        def item(agent: Any, tool_call: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(agent, tool_call, *args, **kwargs)
            opened = self.get(get_current_span()) if self._open else None
            with _undisturbed():
                parent = None if opened is None else opened.around
                record_failed_call(
                    tool_call.name, tool_call.call_id, tool_call.arguments, str(made.output), parent=parent
                )
            return made

        return item

    def timed_out(self, original: Callable[..., None]) -> Callable[..., None]:
        """Keep the error of a tool that took too long, of which the SDK makes a text for the model."""
        from agents.tracing import get_current_span

        @functools.wraps(original)
        def made(error: Any, *args: Any, **kwargs: Any) -> None:
            original(error, *args, **kwargs)
            opened = self.get(get_current_span()) if self._open else None
            if opened is not None:
                opened.reported = error

        return made

    def nested_approval(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Mark the span of an agent that is a tool while one of its own tools waits for an approval."""
        from agents.tracing import get_current_span

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._open and (opened := self.get(get_current_span())) is not None:
                opened.paused = True
            return original(*args, **kwargs)

        return recorded

    def tool_context(self, original: Any) -> classmethod[Any, ..., Any]:
        """Keep the id of the tool call for which a context is made, in the span of the tool."""
        from agents.tracing import get_current_span

        @functools.wraps(original)
        def make(cls: Any, context: Any, tool_call_id: str, *args: Any, **kwargs: Any) -> Any:
            span = get_current_span() if self._open else None
            opened = None if span is None or span.span_data.type != "function" else self.get(span)
            if opened is not None and opened.call_id is None:
                opened.call_id = tool_call_id
            return original.__func__(cls, context, tool_call_id, *args, **kwargs)

        return classmethod(make)

    def _mark(self, span: Any, result: Any) -> None:
        """Whether a tool waits, by its result: an approval that is asked for, by itself or within the SDK's result."""
        from agents.items import ToolApprovalItem

        opened = None if span is None else self.get(span)
        if opened is not None and isinstance(getattr(result, "run_item", result), ToolApprovalItem):
            opened.paused = True

    def _start(self, span: Any, outer: Any, trace: Any) -> None:
        around = self.get(outer)
        if around is None:
            for key in [key for key, opened in list(self._open.items()) if opened.around.rollout.closed]:
                self._open.pop(key, None)
        parent = place(around.around if around else None, [opened.scope for opened in list(self._open.values())])
        if parent is None:
            return
        data = span.span_data
        scope = None
        run = around.run if around is not None else _Run()
        if data.type == "agent":
            run = _Run()
            # The rollout's root span already stands for the wrapped agent.
            if parent.parent is not None or parent.agent != data.name:
                scope = tracing.start(semconv.INVOKE_AGENT, data.name, agent=data.name, parent=parent)
            (scope or parent).span.set_attribute(semconv.WORKFLOW_NAME, _workflow_name(trace))
        elif data.type in ("response", "generation"):
            facts = _request_facts(data) | {semconv.CONVERSATION_ID: getattr(trace, "group_id", None)}
            scope = tracing.start(semconv.CHAT, _model(data), parent=parent, attributes=facts)
        elif data.type == "handoff":
            scope = tracing.start(semconv.HANDOFF, "", parent=parent)
        elif data.type == "function":
            scope = tool_run(data.name, None, None, parent=parent)
        self._open[_key(span)] = _Open(scope or parent, scope, run, sys.exception())

    def _end(self, span: Any) -> None:
        opened = self._open.pop(_key(span), None)
        if opened is None or opened.scope is None:
            return
        attributes: dict[str, Any] = {}
        error = None
        with _undisturbed():
            error = _error(span, opened)
        with _undisturbed():
            attributes = self._facts(span.span_data, opened, opened.scope)
        tracing.end(opened.scope, error=error, attributes=attributes)

    def _facts(self, data: Any, opened: _Open, scope: Scope) -> dict[str, Any]:
        """What a span that ends says of the work."""
        attributes: dict[str, Any] = {}
        content = scope.rollout.capture_content
        if data.type == "function":
            attributes = {
                semconv.TOOL_CALL_ID: opened.run.claim(data.name, data.input, opened.call_id),
                semconv.FAILED_BY_RESULT: opened.failed_by_result or None,
                semconv.PAUSED: opened.paused or None,
            }
            if content:
                attributes[semconv.TOOL_CALL_ARGUMENTS] = data.input
                attributes[semconv.TOOL_CALL_RESULT] = None if data.output is None else tool_output(data.output).text
        elif data.type == "handoff" and data.to_agent:
            scope.span.update_name(f"{semconv.HANDOFF} {data.to_agent}")
            attributes = {
                semconv.HANDOFF_FROM: data.from_agent,
                semconv.HANDOFF_TO: data.to_agent,
                semconv.TOOL_CALL_ID: opened.run.claim_handoff(data.to_agent),
            }
        elif data.type in ("response", "generation"):
            answer = _answer(data)
            opened.run.calls = [*answer.tool_calls()]
            attributes = answer.facts(content)
        return attributes


def _key(span: Any) -> Any:
    """A span's id, or the span itself where it records nothing: all those have the same id. An id stays as it is."""
    id = span if isinstance(span, str | None) else span.span_id
    return span if id == _NOOP else id


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """What the SDK's objects do not have, such as those of a program's own model, is not recorded."""
    try:
        yield
    except Exception:
        _log.warning("a span of the Agents SDK could not be read", exc_info=True)


def _watch_mcp(spans: _Spans) -> Callable[[], None]:
    """Record the failures that MCP servers report, which the SDK passes to the model like other results.

    Returns a function that removes the hook. Releases without the patched method do not report such failures.
    """
    from agents.mcp.util import MCPUtil
    from agents.tracing import get_current_span

    original = MCPUtil.__dict__.get("_extract_custom_data")
    if original is None:
        return lambda: None

    @functools.wraps(original.__func__)
    async def extract(cls: Any, *args: Any, result: Any, **kwargs: Any) -> Any:
        span = get_current_span()
        opened = spans.get(span)
        if opened is not None and (getattr(result, "is_error", None) or getattr(result, "isError", None)):
            opened.failed = True
        return await original.__get__(None, cls)(*args, result=result, **kwargs)

    replacement = classmethod(extract)
    MCPUtil._extract_custom_data = replacement  # type: ignore[method-assign]

    def unwatch() -> None:
        if MCPUtil.__dict__["_extract_custom_data"] is replacement:
            MCPUtil._extract_custom_data = original

    return unwatch


_with_texts: contextvars.ContextVar[bool] = contextvars.ContextVar("agl_openai_agents_with_texts", default=True)


def _as_configured(get_model_tracing_impl: Callable[[bool, bool], Any]) -> Callable[[bool, bool], Any]:
    """Keep whether the run's spans may have texts, which a run that is not traced does not pass on."""

    @functools.wraps(get_model_tracing_impl)
    def get(tracing_disabled: bool, trace_include_sensitive_data: bool) -> Any:
        _with_texts.set(trace_include_sensitive_data)
        return get_model_tracing_impl(tracing_disabled, trace_include_sensitive_data)

    return get


def _including(include_data: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Have answers in the spans of runs that are not traced, which nobody else reads."""

    @functools.wraps(include_data)
    def includes(self: Any) -> bool:
        return include_data(self) or (self.is_disabled() and tracing.current() is not None and _with_texts.get())

    return includes


def _workflow_name(trace: Any) -> str | None:
    """The run's workflow; a trace that records nothing has another name."""
    return getattr(trace, "workflow_name", None) or getattr(trace, "name", None)


def _grouped(create_trace_for_run: Callable[..., Any]) -> Callable[..., Any]:
    """Have the run's group on a trace that records nothing."""
    from agents.tracing.traces import NoOpTrace

    @functools.wraps(create_trace_for_run)
    def create(**kwargs: Any) -> Any:
        trace = create_trace_for_run(**kwargs)
        if tracing.current() is not None and isinstance(trace, NoOpTrace):
            vars(trace).update(group_id=kwargs["group_id"], workflow_name=kwargs["workflow_name"])
        return trace

    return create


def _error(span: Any, opened: _Open) -> BaseException | str | None:
    """A span's error: the exception that leaves it, else the one that the SDK recorded on it."""
    content = opened.around.rollout.capture_content
    error = sys.exception()
    if error is not None and error is not opened.handled and not isinstance(error, GeneratorExit):
        # A tool's exception leaves the run as the cause of a UserError.
        wrapped = type(error).__name__ == "UserError" and isinstance(error.__cause__, Exception)
        return error.__cause__ if wrapped else error
    if opened.failed:
        output = _output(span)
        return output.text if content and output is not None and output.text else "the tool failed"
    if opened.reported is not None:
        return opened.reported
    if opened.error is None:
        output = _output(span)
        if output is None or not output.failed:
            return None
        opened.failed_by_result = not output.marked
        return output.text if content else "the tool failed"
    detail = (opened.error.get("data") or {}).get("error") if content else None
    return str(detail or opened.error["message"])


# -- the SDK's span data ----------------------------------------------------------------------------------------------


def _output(span: Any) -> ToolOutput | None:
    """What the tool of a span returned; None of other spans, and where the SDK does not record it."""
    output = getattr(span.span_data, "output", None) if span.span_data.type == "function" else None
    return None if output is None else tool_output(output)


def _model(data: Any) -> str:
    return str(getattr(data, "model", None) or "")


def _request_facts(data: Any) -> dict[str, Any]:
    config = getattr(data, "model_config", None) or {}
    return {
        semconv.RUNS_TOOLS: True,
        semconv.REQUEST_MODEL: _model(data) or None,
        # Clients other than the openai SDK are named in `model_impl`.
        semconv.PROVIDER_NAME: config.get("model_impl", "openai"),
        semconv.URL: config.get("base_url"),
    }


def _answer(data: Any) -> ResponseAccumulator:
    """A model call's answer: a response, or what a generation has of one."""
    answer = ResponseAccumulator()
    if data.type == "response":
        answer.whole(data.response.model_dump(mode="json", exclude_none=True) if data.response else None)
        return answer
    for output in data.output or ():
        # A stream's response has an id that the SDK makes up.
        items = output["output"] if output.get("object") == "response" else None
        answer.whole({"choices": [{"message": output}]} if items is None else {"output": items})
        known = (p["response_id"] for m in items or [output] if (p := m.get("provider_data")))
        answer.id = next(known, answer.id)
    # For a stream without usage the SDK reports zeros.
    usage = data.usage or {}
    answer.whole({"usage": usage if usage.get("input_tokens") or usage.get("output_tokens") else None})
    return answer

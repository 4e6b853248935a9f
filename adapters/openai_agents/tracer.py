"""Spans of OpenAI Agents runs: `invoke_agent` for agents, `chat` for model calls, `execute_tool` for tools.

Hook: a `TracingProcessor` next to the user's, and `set_trace_provider` so that switching the SDK's tracing off does
not switch the processor off (openai-agents >= 0.20, < 1). The SDK's tool spans carry no call id: a tool's run is
joined to the call with its name and arguments in the last answer of the same agent's run. They carry no MCP `isError`
either: `MCPUtil._extract_custom_data`, which every MCP result passes where it exists, is patched to read it. Of an
exception that a tool's failure handler turns into a result, its spans keep no more than that there was one:
`SpanImpl.set_error`, which is called while it is handled, is patched to keep it. `AgentRunner.run` and `run_streamed`
are patched to find a trace provider that the program has set in the meantime.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from agl import semconv, tracing
from agl.adapters.base import InstrumentedTracer
from agl.adapters.openai_agents.runnable import handles, runnable
from agl.adapters.patching import Around, Patches
from agl.adapters.scopes import place
from agl.messages import ToolCall
from agl.tracing.context import Scope
from agl.tracing.provider_formats import ResponseAccumulator


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
        from agents.run import AgentRunner
        from agents.tracing.spans import SpanImpl

        from agl.adapters.openai_agents import provider

        processor = _processor_class()()
        self._provider = processor.provider = provider.install(processor)
        self._unwatch = _watch_mcp(processor)
        self._patches = Patches()
        self._patches.method(SpanImpl, "set_error", _keeping_exceptions(processor))
        # `run_sync` calls the first.
        self._patches.method(AgentRunner, "run", _behind(self._provider, _hidden))
        self._patches.method(AgentRunner, "run_streamed", _behind(self._provider, _hidden_stream))

    def _restore(self) -> None:
        from agl.adapters.openai_agents import provider

        self._unwatch()
        self._patches.restore()
        provider.uninstall(self._provider)


@dataclass(eq=False)
class _Run:
    """One agent's run: the tool calls of its last answer that no tool span has claimed."""

    calls: list[ToolCall] = field(default_factory=list)

    def claim(self, name: str, arguments: Any) -> str | None:
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
        failed: whether its tool reported a failure that the SDK does not record.
        told: the exception of its tool that the SDK told the model.
    """

    around: Scope
    scope: Scope | None
    run: _Run
    handled: BaseException | None
    failed: bool = False
    told: BaseException | None = None


@functools.cache
def _processor_class() -> Any:
    """Made late, so that importing the adapter does not import the framework."""
    from agents.tracing import TracingProcessor

    class Processor(TracingProcessor):
        def __init__(self) -> None:
            self.open: dict[str, _Open] = {}
            self.groups: dict[str, str | None] = {}
            """Trace id -> its group, which stands for a conversation."""
            self.provider: Any = None

        def on_trace_start(self, trace: Any) -> None:
            for span_id in [i for i, o in list(self.open.items()) if o.around.rollout.closed]:
                self.open.pop(span_id, None)
            self.groups[trace.trace_id] = getattr(trace, "group_id", None)

        def on_trace_end(self, trace: Any) -> None:
            self.provider.forget(trace.trace_id)
            self.groups.pop(trace.trace_id, None)

        def on_span_start(self, span: Any) -> None:
            if not self.open and tracing.idle():
                return
            outer = self.open.get(span.parent_id)
            parent = place(outer.around if outer is not None else None, [o.scope for o in list(self.open.values())])
            if parent is None:
                return
            data = span.span_data
            scope, run = None, outer.run if outer is not None else _Run()
            if data.type == "agent":
                run = _Run()
                # The rollout's root span already stands for the wrapped agent.
                if parent.parent is not None or parent.agent != data.name:
                    scope = tracing.start(semconv.INVOKE_AGENT, data.name, agent=data.name, parent=parent)
            elif data.type in ("response", "generation"):
                facts = _request_facts(data) | {semconv.CONVERSATION_ID: self.groups.get(span.trace_id)}
                scope = tracing.start(semconv.CHAT, _model(data), parent=parent, attributes=facts)
            elif data.type == "handoff":
                scope = tracing.start(semconv.HANDOFF, "", parent=parent)
            elif data.type == "function":
                attributes = {semconv.TOOL_NAME: data.name}
                scope = tracing.start(semconv.EXECUTE_TOOL, data.name, parent=parent, attributes=attributes)
            self.open[span.span_id] = _Open(scope or parent, scope, run, sys.exception())

        def on_span_end(self, span: Any) -> None:
            self.provider.forget(span.span_id)
            opened = self.open.pop(span.span_id, None)
            if opened is None or opened.scope is None:
                return
            data, content = span.span_data, opened.scope.rollout.capture_content
            attributes: dict[str, Any] = {}
            if data.type == "function":
                attributes = {semconv.TOOL_CALL_ID: opened.run.claim(data.name, data.input)}
                if content:
                    attributes[semconv.TOOL_CALL_ARGUMENTS] = data.input
                    attributes[semconv.TOOL_CALL_RESULT] = None if data.output is None else _output_text(data.output)
            elif data.type == "handoff" and data.to_agent:
                opened.scope.span.update_name(f"{semconv.HANDOFF} {data.to_agent}")
                attributes = {
                    semconv.HANDOFF_FROM: data.from_agent,
                    semconv.HANDOFF_TO: data.to_agent,
                    semconv.TOOL_CALL_ID: opened.run.claim_handoff(data.to_agent),
                }
            elif data.type in ("response", "generation"):
                answer = _answer(data)
                opened.run.calls = [*answer.tool_calls()]
                attributes = answer.facts(content)
            tracing.end(opened.scope, error=_error(span, opened, content), attributes=attributes)

        def shutdown(self) -> None:
            pass

        def force_flush(self) -> None:
            pass

    return Processor


def _watch_mcp(processor: Any) -> Callable[[], None]:
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
        opened = processor.open.get(span.span_id) if span is not None else None
        if opened is not None and (getattr(result, "is_error", None) or getattr(result, "isError", None)):
            opened.failed = True
        return await original.__get__(None, cls)(*args, result=result, **kwargs)

    replacement = classmethod(extract)
    MCPUtil._extract_custom_data = replacement  # type: ignore[method-assign]

    def unwatch() -> None:
        if MCPUtil.__dict__["_extract_custom_data"] is replacement:
            MCPUtil._extract_custom_data = original

    return unwatch


def _behind(provider: Any, hidden: Callable[[Any, Callable[[], Any]], Any]) -> Around:
    """Have the program's own trace provider behind the adapter's when a run begins, whenever it was set. A run whose
    own `RunConfig` switches tracing off is traced for the adapter alone, by `hidden`."""
    from agents.tracing import get_current_trace
    from agents.version import __version__ as version

    # Before, a run inside of a trace is traced whatever its configuration says.
    masks = [*map(int, re.findall(r"\d+", version)[:2])] >= [0, 24]

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def begin(*args: Any, **kwargs: Any) -> Any:
            if tracing.idle():
                return run(*args, **kwargs)
            provider.stay()
            config = kwargs.get("run_config")
            if config is None or not config.tracing_disabled or not (masks or get_current_trace() is None):
                return run(*args, **kwargs)
            kwargs["run_config"] = dataclasses.replace(config, tracing_disabled=False)
            trace = provider.hidden_trace(config.workflow_name, group_id=config.group_id)
            return hidden(trace, lambda: run(*args, **kwargs))

        return begin

    return around


async def _hidden(trace: Any, run: Callable[[], Any]) -> Any:
    with trace:
        return await run()


def _hidden_stream(trace: Any, run: Callable[[], Any]) -> Any:
    def begin() -> Any:
        trace.start(mark_as_current=True)
        return run()

    streamed = contextvars.copy_context().run(begin)
    streamed.run_loop_task.add_done_callback(lambda _: trace.finish())
    return streamed


def _keeping_exceptions(processor: Any) -> Around:
    """Keep the exception that is being handled while the SDK records an error on a tool's span."""

    def around(set_error: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(set_error)
        def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
            opened = processor.open.get(self.span_id)
            error = sys.exception()
            if opened is not None and self.span_data.type == "function" and error is not opened.handled:
                opened.told = error
            return set_error(self, *args, **kwargs)

        return recorded

    return around


def _error(span: Any, opened: _Open, content: bool) -> BaseException | str | None:
    """A span's error: the exception that leaves it, else the one that the SDK recorded on it."""
    error = sys.exception()
    if error is not None and error is not opened.handled and not isinstance(error, GeneratorExit):
        # A tool's exception leaves the run as the cause of a UserError.
        wrapped = type(error).__name__ == "UserError" and isinstance(error.__cause__, Exception)
        return error.__cause__ if wrapped else error
    if opened.failed:
        return _output_text(span.span_data.output) if content and span.span_data.output else "the tool failed"
    if opened.told is not None and content:
        return opened.told
    if span.error is None:
        return None
    detail = (span.error.get("data") or {}).get("error") if content else None
    return str(detail or span.error["message"])


# -- the SDK's span data ----------------------------------------------------------------------------------------------


def _output_text(output: Any) -> str:
    """A tool's output as text; MCP tools give parts."""
    parts = output if isinstance(output, list) else [output]
    return "\n".join(str(p["text"]) if isinstance(p, dict) and "text" in p else str(p) for p in parts)


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
    answer.whole({"usage": {name: n for name, n in (data.usage or {}).items() if n}})
    return answer

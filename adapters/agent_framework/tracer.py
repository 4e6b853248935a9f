"""Spans of Agent Framework runs: `invoke_agent` for named agents, `chat` for model calls, `execute_tool` for tools.

Hook: the three places where the framework makes its own OpenTelemetry spans (agent-framework-core >= 1.21, < 2):
`AgentTelemetryLayer.run`, `ChatTelemetryLayer.get_response` and `FunctionTool.invoke`; `RawAgent.run` for agents
without telemetry. They are patched: the framework's middleware is registered per agent or client, and its spans carry
content only with a flag, stop when the user switches telemetry off, and belong to the user's provider, where they stay
as they are. Streams are followed by the framework's own `with_pull_context_manager` and hooks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from agl import routing, semconv, tracing
from agl.adapters.agent_framework.answers import Collected, facts
from agl.adapters.agent_framework.wrap import handles, wrap
from agl.adapters.aside import Aside, end, start
from agl.adapters.base import InstrumentedTracer
from agl.tracing import Scope


class AgentFrameworkTracer(InstrumentedTracer):
    """Traces Agent Framework agents and workflows inside rollouts."""

    handles = staticmethod(handles)
    wrap = staticmethod(wrap)

    def _install(self) -> None:
        from agent_framework import FunctionTool, RawAgent
        from agent_framework.observability import AgentTelemetryLayer, ChatTelemetryLayer

        routing.install()
        self._originals: list[tuple[Any, str, Any]] = []
        for cls, name, hook in (
            (AgentTelemetryLayer, "run", _running),
            (RawAgent, "run", _running),
            (ChatTelemetryLayer, "get_response", _answering),
            (FunctionTool, "invoke", _invoking),
        ):
            original = cls.__dict__[name]
            self._originals.append((cls, name, original))
            setattr(cls, name, hook(original))

    def _restore(self) -> None:
        for cls, name, original in self._originals:
            setattr(cls, name, original)
        routing.uninstall()


def _running(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def traced_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = tracing.current()
        name = getattr(self, "name", None)
        if here is None or not name or name == here.agent:
            return run(self, *args, **kwargs)

        def begin() -> Scope | None:
            return start(semconv.INVOKE_AGENT, name, agent=name)

        call = functools.partial(run, self, *args, **kwargs)
        return _stream(begin, call) if kwargs.get("stream") else _awaited(begin, call)

    return traced_run


def _answering(get_response: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_response)
    def traced_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tracing.current() is None:
            return get_response(self, *args, **kwargs)
        chosen = (kwargs.get("client_kwargs") or {}).get("model") or (kwargs.get("options") or {}).get("model")
        model = str(chosen or getattr(self, "model", None) or "")

        def begin() -> Scope | None:
            attributes = {
                semconv.REQUEST_MODEL: model,
                semconv.PROVIDER_NAME: str(getattr(self, "otel_provider_name", "unknown")),
            }
            return start(semconv.CHAT, model, attributes=attributes)

        call = functools.partial(get_response, self, *args, **kwargs)
        return _stream(begin, call) if kwargs.get("stream") else _awaited(begin, call, facts)

    return traced_response


def _invoking(invoke: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(invoke)
    async def traced_invoke(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = tracing.current()
        if here is None:
            return await invoke(self, *args, **kwargs)
        given: Any = kwargs.get("arguments")
        if given is None and (context := kwargs.get("context")) is not None:
            given = context.arguments
        if (dump := getattr(given, "model_dump", None)) is not None:
            given = dump()

        def begin() -> Scope | None:
            arguments = json.dumps(given, default=str) if here.rollout.capture_content else None
            return start(
                semconv.EXECUTE_TOOL,
                self.name,
                attributes={
                    semconv.TOOL_NAME: self.name,
                    semconv.TOOL_CALL_ID: kwargs.get("tool_call_id"),
                    semconv.TOOL_CALL_ARGUMENTS: arguments,
                },
            )

        return await _awaited(begin, functools.partial(invoke, self, *args, **kwargs), _returned)

    return traced_invoke


async def _awaited(
    begin: Callable[[], Scope | None],
    call: Callable[[], Any],
    tell: Callable[[Any, bool], dict[str, Any]] = lambda result, content: {},
) -> Any:
    scope = begin()
    try:
        result = await call()
    except BaseException as error:
        if scope is not None:
            end(scope, error=error)
        raise
    if scope is not None:
        end(scope, attributes=tell(result, scope.rollout.capture_content))
    return result


def _stream(begin: Callable[[], Scope | None], call: Callable[[], Any]) -> Any:
    """The framework's stream, with the scope current while it is pulled; it ends with the stream."""
    aside = Aside()
    with aside:
        scope = begin()
        try:
            stream = call()
        except BaseException as error:
            if scope is not None:
                end(scope, error=error)
            raise
    if scope is None or not hasattr(stream, "with_pull_context_manager"):
        return stream
    collected = Collected()

    def finish() -> None:
        said = collected.facts(scope.rollout.capture_content) if scope.kind == semconv.CHAT else None
        with aside:
            end(scope, error=stream._stream_error, attributes=said)

    return (
        stream.with_pull_context_manager(lambda: aside)
        .with_update_transform(collected.add)
        .with_cleanup_hook(finish)
    )  # fmt: skip


def _returned(result: Any, content: bool) -> dict[str, Any]:
    if not content:
        return {}
    parts = result if isinstance(result, list) else [result]
    texts = [part.text if getattr(part, "type", None) == "text" else str(part) for part in parts]
    return {semconv.TOOL_CALL_RESULT: "\n".join(str(text) for text in texts)}

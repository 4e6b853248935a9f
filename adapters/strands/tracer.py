"""Spans of Strands agents: `invoke_agent` for named agents, `chat` for model calls, `execute_tool` for tools.

Hook: the three middleware stages that every agent runs through (strands-agents >= 1.62, < 2). Strands registers hooks
and middleware per agent only, so `MiddlewareRegistry.compose`, where each stage's chain is made, is patched; agents
made earlier are traced too. Its OpenTelemetry spans are the user's and stay unchanged.
`Agent.structured_output_async` (deprecated) and the manager that summarises call the model past the stages and are
patched as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from agl import semconv, tracing
from agl.adapters.aside import traced
from agl.adapters.failed_calls import record_failed_call
from agl.adapters.patching import Patches, PatchingTracer
from agl.adapters.scopes import (
    agent_turn,
    around,
    around_async,
    counted,
    model_call,
    note_returned,
    summariser,
    tool_end,
    tool_run,
)
from agl.adapters.strands.runnable import agent_name, handles, runnable
from agl.messages import write
from agl.messages.tool_output import tool_output
from agl.tracing.context import Scope, within

_PROVIDERS = {"openai_responses": "openai"}
_OPENAI_REASONS = {
    "end_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "content_filtered": "content_filter",
}
"""Strands' stop reasons -> the provider's, which spans carry."""

Chain = Callable[[Any], AsyncGenerator[Any, None]]


class StrandsTracer(PatchingTracer):
    """Traces Strands agents, graphs and swarms inside rollouts."""

    modules = ("strands",)
    answer_errors: ClassVar[Mapping[str, str]] = {
        "strands.types.exceptions.MaxTokensReachedException": "length",
        "strands.types.exceptions.StructuredOutputException": "unparsable",
    }
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _patch(self, patches: Patches) -> None:
        from strands import Agent
        from strands.agent.conversation_manager import SummarizingConversationManager
        from strands.middleware._registry import MiddlewareRegistry
        from strands.tools.decorator import DecoratedFunctionTool

        patches.method(DecoratedFunctionTool, "_wrap_tool_result", _noting)
        patches.replace(MiddlewareRegistry, "compose", _composing(MiddlewareRegistry.compose))
        patches.replace(Agent, "structured_output_async", around_async(_structured)(Agent.structured_output_async))
        patches.method(SummarizingConversationManager, "_generate_summary_with_model", around(_summarising))


def _noting(wrap_tool_result: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a tool's object of which Strands makes a text."""

    @functools.wraps(wrap_tool_result)
    def wrapped(self: Any, tool_use_id: str, result: Any, *args: Any, **kwargs: Any) -> Any:
        note_returned(result)
        return wrap_tool_result(self, tool_use_id, result, *args, **kwargs)

    return wrapped


def _composing(compose: Callable[..., Chain]) -> Callable[..., Chain]:
    @functools.wraps(compose)
    def composed(self: Any, stage: Any, terminal: Chain) -> Chain:
        if tracing.current() is None:
            return compose(self, stage, terminal)
        if stage.name == "agentStream":
            chain = compose(self, stage, terminal)
            return lambda context: traced(
                lambda: _start_agent(context.agent),
                lambda: chain(context),
                lambda scope, error: tracing.end(scope, error=_failure(error)),
            )
        # Innermost: an answer of the user's middleware is no call, and its changes of a call are recorded.
        inner = {"invokeModel": _model_stage, "executeTool": _tool_stage}.get(stage.name)
        return compose(self, stage, inner(terminal) if inner else terminal)

    return composed


@contextlib.contextmanager
def _structured(agent: Any, *_: Any, **__: Any) -> Iterator[Callable[[Any], None]]:
    with within(_start_agent(agent)), within(_start_chat(agent.model, agent)) as returns:
        yield returns


def _summarising(manager: Any, messages: Any, agent: Any) -> AbstractContextManager[Callable[[Any], None]]:
    here = tracing.current()
    return within(_start_chat(agent.aux_model, agent, summariser(here and here.agent)))


def _failure(error: BaseException | None) -> BaseException | None:
    """The error, unless Strands raised it to pause an agent for a human."""
    from strands.interrupt import InterruptException

    return None if isinstance(error, InterruptException) else error


def _start_agent(agent: Any) -> Scope | None:
    name = agent_name(agent)
    return None if name is None else agent_turn(name, of=agent)


def _start_chat(model: Any, agent: Any, name: str | None = None) -> Scope | None:
    config = model.get_config()
    model_id = config.get("model_id") if hasattr(config, "get") else None
    session = getattr(getattr(agent, "_session_manager", None), "session_id", None)
    conversation = {semconv.CONVERSATION_ID: session}
    return model_call(str(model_id or ""), _provider(model), agent=name, attributes=conversation)


def _model_stage(terminal: Chain) -> Chain:
    def run(context: Any) -> AsyncGenerator[Any, None]:
        stops: list[Any] = []

        def seen(event: Any) -> None:
            if "stop" in event:
                stops[:] = [event["stop"]]

        def begin() -> Scope | None:
            _refusals(context.messages)
            return _start_chat(context.model, context.agent)

        def finish(scope: Scope, error: BaseException | None) -> None:
            facts = _response_facts(scope, context.model, stops[0], scope.rollout.capture_content) if stops else None
            tracing.end(scope, error=error, attributes=facts)

        return traced(begin, lambda: terminal(context), finish, seen)

    return run


def _tool_stage(terminal: Chain) -> Chain:
    def run(context: Any) -> AsyncGenerator[Any, None]:
        results: list[Any] = []
        interrupts: list[Any] = []

        def seen(event: Any) -> None:
            if hasattr(event, "tool_result"):
                results[:] = [event]
            elif "tool_interrupt_event" in event:
                interrupts.append(event)

        def begin() -> Scope | None:
            use = context.tool_use
            return tool_run(use["name"], use.get("input"), _issued_id(use.get("toolUseId"), context.agent))

        def finish(scope: Scope, error: BaseException | None) -> None:
            attributes: dict[str, Any] = {}
            failure = _failure(error)
            # A hook raises to ask a person; a tool that asks ends with an event.
            if (error is not None and failure is None) or interrupts:
                attributes[semconv.PAUSED] = True
            if not results:
                tracing.end(scope, error=failure, attributes=attributes)
                return
            [event] = results
            if event.tool_result.get("status") != "error" and context.tool_use["name"] == "handoff_to_agent":
                attributes[semconv.HANDOFF_TO] = (context.tool_use.get("input") or {}).get("agent_name")
            tool_end(scope, event.tool_result, error=failure or event.exception, attributes=attributes)

        return traced(begin, lambda: terminal(context), finish, seen)

    return run


def _issued_id(call_id: str | None, agent: Any) -> str | None:
    """The id of a model's tool call; None where the program runs the tool, `agent.tool.add(...)`, and Strands makes one
    up: the run is joined to the call that it answers."""
    blocks = (block for message in reversed(agent.messages) for block in message["content"])
    issued = any(block["toolUse"]["toolUseId"] == call_id for block in blocks if "toolUse" in block)
    return call_id if issued else None


def _refusals(messages: Any) -> None:
    """Record the failed tool calls of the last answer for which no tool ran."""
    if len(messages) < 2:
        return
    uses = {b["toolUse"]["toolUseId"]: b["toolUse"] for b in messages[-2]["content"] if "toolUse" in b}
    for block in messages[-1]["content"]:
        result = block.get("toolResult")
        if result and result.get("status") == "error" and (use := uses.get(result["toolUseId"])) is not None:
            record_failed_call(use["name"], use["toolUseId"], use.get("input"), tool_output(result).text)


def _provider(model: Any) -> str:
    module = type(model).__module__.rpartition(".")[2]
    return _PROVIDERS.get(module, module)


def _response_facts(scope: Scope, model: Any, stop: Any, content: bool) -> dict[str, Any]:
    reason, message, usage, _ = stop
    facts: dict[str, Any] = {
        semconv.FINISH_REASONS: [_OPENAI_REASONS.get(reason, reason) if _provider(model) == "openai" else reason]
    }
    # Strands counts 0 tokens where the provider reports none.
    if usage.get("totalTokens"):
        facts |= counted(scope, usage)
    if content:
        facts[semconv.OUTPUT_MESSAGES] = write.answer_json(message, facts[semconv.FINISH_REASONS])
    return facts

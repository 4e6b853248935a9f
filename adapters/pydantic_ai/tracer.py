"""Spans of Pydantic AI agents: `invoke_agent` for named agents, `chat` for model calls, `execute_tool` for tools.

Hook: a capability (pydantic-ai >= 2.30, < 3), which wraps a run and its tools. Pydantic AI takes capabilities per agent
or per run only, so `Agent.iter`, which every way of running an agent goes through, is patched to add one; agents made
earlier are traced too. The capability's hook around a model call runs in another task than a stream's request, so it
has the model wrapped instead. Pydantic AI's OpenTelemetry spans are the user's and stay unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from agl import semconv, tracing
from agl.adapters.aside import Aside
from agl.adapters.failed_calls import record_failed_call
from agl.adapters.patching import Patches, PatchingTracer
from agl.adapters.pydantic_ai.runnable import handles, runnable
from agl.adapters.scopes import agent_turn, counted, model_call, place, tool_end, tool_run
from agl.messages import write
from agl.tracing.context import Scope
from agl.tracing.usage import usage_fields

_REASONS = {"tool_call": "tool_calls"}
"""Pydantic AI's finish reasons -> OpenAI's, where they differ."""


class PydanticAITracer(PatchingTracer):
    """Traces every way of running a Pydantic AI agent inside rollouts."""

    modules = ("pydantic_ai",)
    answer_errors: ClassVar[Mapping[str, str]] = {
        "pydantic_ai.exceptions.UnexpectedModelBehavior": "unparsable",
        "pydantic_ai.exceptions.UsageLimitExceeded": "turns",
    }
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _patch(self, patches: Patches) -> None:
        from pydantic_ai import Agent

        patches.replace(Agent, "iter", _iterating(Agent.iter))


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
    from pydantic_ai.models.wrapper import WrapperModel

    class TracedModel(WrapperModel):
        """A model whose calls lie in the scope that `begin` opens; calls of its `output_tools` are answers."""

        def __init__(self, wrapped: Any, begin: Callable[[], Scope | None], output_tools: frozenset[str]) -> None:
            super().__init__(wrapped)
            self.begin = begin
            self.output_tools = output_tools

        async def request(self, *args: Any, **kwargs: Any) -> Any:
            with Aside():
                scope = self.begin()
                try:
                    response = await self.wrapped.request(*args, **kwargs)
                except BaseException as error:
                    _end(scope, error)
                    raise
                _end(scope, response=response, output_tools=self.output_tools)
                return response

        @contextlib.asynccontextmanager
        async def request_stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            aside = Aside()
            with aside:
                scope = self.begin()
            try:
                async with contextlib.AsyncExitStack() as stack:
                    with aside:
                        stream = await stack.enter_async_context(self.wrapped.request_stream(*args, **kwargs))
                    yield stream
            except GeneratorExit:
                _end(scope)
                raise
            except BaseException as error:
                _end(scope, error)
                raise
            _end(scope, response=stream.get(), output_tools=self.output_tools)

    class Tracing(AbstractCapability[Any]):
        """The spans of one run."""

        _safe_at_runtime: ClassVar[bool] = True

        def __init__(self) -> None:
            self.id = "agl"
            self.around = tracing.current()
            """The parent of the run's scopes: the agent's, or the one in which the run began."""
            self.error: BaseException | None = None

        def get_ordering(self) -> CapabilityOrdering:
            # A result of the user's own capability is no tool's run, and its changes of a call are recorded.
            return CapabilityOrdering(position="innermost")

        def parent(self) -> Scope | None:
            return place(self.around)

        async def wrap_run(self, ctx: Any, *, handler: Callable[[], Awaitable[Any]]) -> Any:
            name = ctx.agent.name if ctx.agent is not None else None
            # What is current here becomes current in the caller's task, who may only read the answer.
            with Aside():
                scope = agent_turn(name, parent=self.parent(), of=ctx.agent) if name else None
            if scope is None:
                return await handler()
            self.around = scope
            try:
                result = await handler()
            except asyncio.CancelledError:
                # Also how it tells that a reader stopped early: then no error was reported before.
                _end(scope, self.error)
                raise
            except BaseException as error:
                _end(scope, error)
                raise
            _end(scope)
            return result

        async def on_run_error(self, ctx: Any, *, error: BaseException) -> Any:
            self.error = error
            raise error

        async def wrap_node_run(self, ctx: Any, *, node: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
            if self.around is None or self.around.ended:
                return await handler(node)
            with tracing.inside(self.around):
                return await handler(node)

        async def before_model_request(self, ctx: Any, request_context: Any) -> Any:
            last = request_context.messages[-1:]  # an empty history is the framework's own error
            for part in last[0].parts if last else ():
                # The model's feedback on a call that ran no tool: an unknown tool, arguments that do not fit.
                retried = part.part_kind == "retry-prompt" and part.tool_name
                if retried or getattr(part, "outcome", "success") not in ("success", "interrupted"):
                    text = part.model_response() if retried else part.model_response_str()
                    arguments = _arguments(request_context.messages, part.tool_call_id)
                    record_failed_call(part.tool_name, part.tool_call_id, arguments, text, parent=self.parent())
            model = request_context.model

            def begin() -> Scope | None:
                conversation = {semconv.CONVERSATION_ID: ctx.conversation_id}
                return model_call(model.model_name, model.system, parent=self.parent(), attributes=conversation)

            output_tools = request_context.model_request_parameters.output_tools
            request_context.model = TracedModel(model, begin, frozenset(tool.name for tool in output_tools))
            return request_context

        async def wrap_tool_execute(
            self, ctx: Any, *, call: Any, tool_def: Any, args: Any, handler: Callable[..., Any]
        ) -> Any:
            scope = tool_run(call.tool_name, args, call.tool_call_id, parent=self.parent(), tool=tool_def)
            try:
                result = await handler(args)
            except (CallDeferred, ApprovalRequired):
                # Somebody is to approve the call, or to run it elsewhere: the tool has not run.
                if scope is not None:
                    tracing.end(scope, attributes={semconv.PAUSED: True})
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

    return Tracing


def _arguments(messages: Sequence[Any], call_id: str) -> Any:
    """The arguments of a tool call of the last answer."""
    answer = next((m for m in reversed(messages) if m.kind == "response"), None)
    calls = () if answer is None else answer.tool_calls
    return next((call.args for call in calls if call.tool_call_id == call_id), None)


def _end(
    scope: Scope | None,
    error: BaseException | None = None,
    *,
    response: Any = None,
    output_tools: Collection[str] = (),
) -> None:
    if scope is not None:
        facts = None
        if response is not None:
            answers = [c.tool_call_id for c in response.tool_calls if c.tool_name in output_tools]
            facts = _facts(scope, response, scope.rollout.capture_content)
            facts[semconv.STRUCTURED_ANSWERS] = answers or None
        tracing.end(scope, error=error, attributes=facts)


def _returned(scope: Scope | None, result: Any, *, failed: bool = False) -> None:
    if scope is not None:
        tool_end(scope, getattr(result, "return_value", result), failed=failed)


def _facts(scope: Scope, response: Any, content: bool) -> dict[str, Any]:
    """The attributes of a `ModelResponse`; texts only where they are captured."""
    from pydantic_ai.messages import ModelMessagesTypeAdapter

    # The Responses API tells a status in its place.
    reason = (response.provider_details or {}).get("finish_reason")
    if reason in (None, "completed", "incomplete"):
        asks = response.finish_reason == "stop" and response.tool_calls
        reason = "tool_calls" if asks else _REASONS.get(response.finish_reason, response.finish_reason)
    usage = response.usage
    return {
        semconv.RESPONSE_ID: response.provider_response_id,
        semconv.RESPONSE_MODEL: response.model_name,
        semconv.FINISH_REASONS: [reason] if reason else None,
        # It counts 0 tokens where the provider reports none.
        **counted(scope, {name: n for name, n in usage_fields(usage).items() if n}),
        semconv.OUTPUT_MESSAGES: write.answer_json(
            ModelMessagesTypeAdapter.dump_python([response], mode="json"), [reason] if reason else ()
        )
        if content
        else None,
    }

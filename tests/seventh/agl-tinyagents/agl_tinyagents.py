"""The agl adapter of tinyagents: agents, model calls and tools become spans, and `agl.wrap` makes agents trainable.

Hook: `tinyagents.add_listener` (tinyagents >= 0.1, < 0.2); nothing is patched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl import semconv, tracing
from agl.adapters import scopes
from agl.adapters.base import InstrumentedTracer, Runnable, question
from agl.messages import write
from agl.tracing import Scope

if TYPE_CHECKING:
    from tinyagents import Step


def handles(agent: object) -> bool:
    """Whether `agent` is a tinyagents agent."""
    return any((cls.__module__, cls.__name__) == ("tinyagents", "Agent") for cls in type(agent).__mro__)


def runnable(agent: Any) -> Runnable:
    """How an agent is run: `arun`, which gets the task's question; its answer is scored."""

    async def invoke(value: Any) -> Any:
        return await agent.arun(value)

    return Runnable(agent.name, invoke, input=question, output=lambda answer: answer)


class TinyAgentsTracer(InstrumentedTracer):
    """Traces tinyagents agents inside rollouts."""

    modules = ("tinyagents",)
    handles = staticmethod(handles)
    runnable = staticmethod(runnable)

    def _install(self) -> None:
        import tinyagents

        self._listener = _Listener()
        tinyagents.add_listener(self._listener)

    def _restore(self) -> None:
        import tinyagents

        tinyagents.remove_listener(self._listener)


class _Listener:
    """Opens and ends the scopes of steps, nested by tinyagents' ids."""

    def __init__(self) -> None:
        self._own: dict[str, Scope] = {}
        """Step id -> the scope that it opened."""
        self._around: dict[str, Scope] = {}
        """Step id -> the parent scope of its steps: the scope that it opened, or the one that it was started in."""

    def started(self, step: Step) -> None:
        parent = scopes.place(self._around.get(step.parent_id or ""), [*self._own.values()])
        if parent is None:
            return
        match step.kind:
            case "agent":
                scope = scopes.agent_turn(step.name, parent=parent)
            case "model":
                scope = scopes.model_call(step.name, "openai", parent=parent)
            case "tool":
                scope = scopes.tool_run(step.name, step.input.function.arguments, step.input.id, parent=parent)
            case _:
                scope = None
        if scope is not None:
            self._own[step.id] = scope
        self._around[step.id] = scope or parent

    def ended(self, step: Step) -> None:
        self._around.pop(step.id, None)
        scope = self._own.pop(step.id, None)
        if scope is None:
            return
        if step.error is None and step.kind == "tool":
            scopes.tool_end(scope, step.output)
            return
        has_answer = step.kind == "model" and step.output is not None
        facts = _facts(step.output, scope.rollout.capture_content) if has_answer else None
        tracing.end(scope, error=step.error, attributes=facts)


def _facts(completion: Any, content: bool) -> dict[str, Any]:
    """The attributes of a model's answer; texts only where they are captured."""
    usage = completion.usage
    messages = [choice.message.model_dump(exclude_none=True) for choice in completion.choices]
    reasons = [choice.finish_reason for choice in completion.choices]
    return {
        semconv.RESPONSE_ID: completion.id,
        semconv.RESPONSE_MODEL: completion.model,
        semconv.FINISH_REASONS: reasons,
        semconv.INPUT_TOKENS: usage.prompt_tokens if usage else None,
        semconv.OUTPUT_TOKENS: usage.completion_tokens if usage else None,
        semconv.OUTPUT_MESSAGES: write.answer_json(messages, reasons) if content else None,
    }

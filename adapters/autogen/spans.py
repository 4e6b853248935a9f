"""The scopes of an agent's turn and of a tool's run, as every family of AutoGen opens and ends them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from agl import semconv, tracing
from agl.tracing import Scope


def speaks(name: str) -> Scope | None:
    """A scope in which `name` speaks; None where it does already, or outside a rollout."""
    here = tracing.current()
    if here is None or here.agent == name:
        return None
    return tracing.start(semconv.INVOKE_AGENT, name, agent=name)


def tool(name: str, arguments: Any, call_id: str | None) -> Scope | None:
    """A tool's scope; None outside a rollout, or where the call has one already."""
    here = tracing.current()
    if here is None:
        return None
    outer = tracing.enclosing(semconv.EXECUTE_TOOL)
    if call_id and outer is not None and outer.span.attributes.get(semconv.TOOL_CALL_ID) == call_id:
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    attributes = {
        semconv.TOOL_NAME: name,
        semconv.TOOL_CALL_ID: call_id,
        semconv.TOOL_CALL_ARGUMENTS: text if here.rollout.capture_content else None,
    }
    return tracing.start(semconv.EXECUTE_TOOL, name, attributes=attributes)


def tool_end(scope: Scope, result: str, *, failed: bool = False) -> None:
    """End a tool's scope with what the model is told."""
    content = scope.rollout.capture_content
    error = None if not failed else result if content else "the tool failed"
    tracing.end(scope, error=error, attributes={semconv.TOOL_CALL_RESULT: result if content else None})


def handed_over(giver: str, taker: str, call_id: str | None) -> None:
    """A span for a handoff that the tool call `call_id` brought about, if one did."""
    here = tracing.current()
    done = () if here is None else (s for s in here.rollout.spans if s.operation == semconv.HANDOFF)
    if call_id is not None and any(s.attributes.get(semconv.TOOL_CALL_ID) == call_id for s in done):
        return
    attributes = {semconv.HANDOFF_FROM: giver, semconv.HANDOFF_TO: taker, semconv.TOOL_CALL_ID: call_id}
    scope = tracing.start(semconv.HANDOFF, taker, attributes=attributes)
    if scope is not None:
        tracing.end(scope)


async def within(scope: Scope | None, awaitable: Awaitable[Any], end: Callable[[Any], None] | None = None) -> Any:
    """The awaitable's result; the scope ends with it, by `end(result)` if given."""
    try:
        result = await awaitable
    except BaseException as error:
        if scope is not None:
            tracing.end(scope, error=error)
        raise
    if scope is not None:
        (end or (lambda _: tracing.end(scope)))(result)
    return result

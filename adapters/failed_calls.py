"""Spans of tool calls that failed before a tool ran: an unknown tool, arguments that do not fit, a refused call."""

from __future__ import annotations

from agl import semconv, tracing
from agl.adapters.aside import Aside
from agl.adapters.scopes import tool_end
from agl.tracing.context import Scope


def record_failed_call(
    name: str,
    call_id: str | None,
    text: str,
    *,
    parent: Scope | None = None,
    agent: str | None = None,
    issued_by: str | None = None,
) -> None:
    """Record that a tool call failed, unless it has a span already.

    Args:
        text: the result that the model got. parent: the calling agent's scope; the current one if None.
        agent: the calling agent; the scope's agent if None. issued_by: as of `scopes.tool_run`.
    """
    here = parent or tracing.current()
    if here is None or not call_id or _has_span(here.rollout, call_id):
        return
    attributes = {semconv.TOOL_NAME: name, semconv.TOOL_CALL_ID: call_id, semconv.ISSUED_BY: issued_by}
    with Aside():
        scope = tracing.start(semconv.EXECUTE_TOOL, name, parent=here, agent=agent, attributes=attributes)
        if scope is not None:
            tool_end(scope, text, failed=True)


def _has_span(rollout: tracing.RolloutContext, call_id: str) -> bool:
    spans = (s.attributes for s in reversed(rollout.spans))
    open_ = (s.span.attributes for s in [*rollout.open] if s.kind == semconv.EXECUTE_TOOL)
    return any(a.get(semconv.TOOL_CALL_ID) == call_id for attributes in (spans, open_) for a in attributes)

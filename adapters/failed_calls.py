"""Spans of tool calls that failed before a tool ran: an unknown tool, arguments that do not fit, a refused call."""

from __future__ import annotations

import contextlib
from typing import Any

from agl import semconv, tracing
from agl.adapters.aside import Aside
from agl.adapters.scopes import tool_end, tool_run
from agl.errors import UnreadableMessageError
from agl.messages import ToolCall, read
from agl.tracing.context import Scope


def record_failed_call(
    name: str,
    call_id: str | None,
    arguments: Any,
    text: str,
    *,
    parent: Scope | None = None,
    agent: str | None = None,
    issued_by: str | None = None,
) -> None:
    """Record that a tool call failed, unless it has a span already other than of waiting for a person.

    Args:
        arguments: of the tool call, as for `scopes.tool_run`; None if unknown.
        text: the result that the model got.
        parent: the calling agent's scope; the current one if None.
        agent: the calling agent; the scope's agent if None.
        issued_by: as of `scopes.tool_run`.
    """
    here = parent or tracing.current()
    if here is None or not call_id or _has_span(here.rollout, call_id):
        return
    with Aside():
        scope = tool_run(name, arguments, call_id, parent=here, agent=agent, issued_by=issued_by)
        if scope is not None:
            tool_end(scope, text, failed=True)


def _has_span(rollout: tracing.RolloutContext, call_id: str) -> bool:
    spans = (s.attributes for s in reversed(rollout.spans) if not s.attributes.get(semconv.PAUSED))
    open_ = (s.span.attributes for s in [*rollout.open] if s.kind == semconv.EXECUTE_TOOL)
    return any(a.get(semconv.TOOL_CALL_ID) == call_id for attributes in (spans, open_) for a in attributes)


def issued_call(call_id: str) -> ToolCall | None:
    """The tool call of that id in an answer of this rollout; None where there is none, or none is recorded."""
    here = tracing.current()
    chats = () if here is None else (s for s in reversed(here.rollout.spans) if s.operation == semconv.CHAT)
    for chat in chats:
        with contextlib.suppress(UnreadableMessageError):
            for call in (call for message in read.said(chat) for call in message.tool_calls):
                if call.id == call_id:
                    return call
    return None

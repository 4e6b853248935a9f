"""What came of an attempt's tool calls and handoffs, each told once, with the LLM call that asked for it.

A tool's run is told by its span. A result that the gateway was sent for a tool call without a span is an outcome too:
the tool is the program's own (a bare client's loop, another language), or the framework refused to run it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agl import semconv
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.types import Call

TOOL_RESULTS = "tool_results"
"""In `Call.request`: what the request says of tool calls, as `[{"id", "name", "failed"}]`."""
UNKNOWN_TOOLS = "unknown_tools"
"""In `Call.request`: the ids of the answer's tool calls that name a tool which the request did not offer."""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """How one run of a tool ended.

    Attributes:
        tool: its name. tool_call_id: None where the framework does not tell.
        agent: who asked for it. call: the LLM call that did; None if that is unknown.
        span_id: of the run, or of the call's `chat` span where there is no run.
        arguments: JSON values, the text where it is no JSON, None if not recorded.
        output: what the model was told; None if not recorded. error: why it failed; None when it succeeded.
    """

    tool: str
    tool_call_id: str | None
    agent: str
    call: Call | None
    span_id: str | None
    arguments: Any
    output: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Handoff:
    """One agent gave over to another; `call` is the LLM call that decided so, None if unknown."""

    from_agent: str
    to_agent: str
    call: Call | None
    span_id: str


def tool_outcomes(join: SpanIndex) -> list[ToolOutcome]:
    """Every tool outcome of an attempt, in the order of the calls that asked, whatever order the tools ended in.

    The call is the one that issued the tool call id. Where the span has no id, it is the one in whose `chat` span or
    tool call the tool ran, within the same agent's span; else unknown. A tool that hands over is a handoff, unless it
    failed. Runs that lie in one another under one id are one run, seen by two layers.
    """
    tools = [
        s for s in join.spans.values() if s.operation == semconv.EXECUTE_TOOL and not s.attributes.get(semconv.PAUSED)
    ]
    handed_over = {_id(s) for s in join.spans.values() if semconv.HANDOFF_TO in s.attributes} - {None}
    told = {_id(s) for s in tools} | handed_over
    unnamed = {_tool(s) for s in tools if _id(s) is None}
    ran = [s for s in tools if _failed(s) or (semconv.HANDOFF_TO not in s.attributes and _id(s) not in handed_over)]
    outcomes = [_of_span(s, join) for s in ran if not _is_inner(s, join)]
    # A run whose call the framework does not tell may be the one that a result is of.
    outcomes += [o for o in _of_results(join) if o.tool_call_id not in told and o.tool not in unnamed]
    when = {s.span_id: s.start for s in tools}

    def place(outcome: ToolOutcome) -> tuple[Any, ...]:
        call = outcome.call
        asked = (call.index, call.id, call.tool_call_ids.index(outcome.tool_call_id or "")) if (
            call is not None and outcome.tool_call_id in call.tool_call_ids
        ) else (len(join.calls), "", 0)  # fmt: skip
        # The time orders the runs of one tool call for the reader alone.
        return (*asked, when.get(outcome.span_id or "", 0.0), outcome.span_id or "")

    return sorted(outcomes, key=place)


def handoffs(join: SpanIndex) -> list[Handoff]:
    """Every handoff of an attempt, in the order of the calls that decided them.

    The call is the one that issued the tool call by which an agent hands over; where there is none, the last one that
    this agent made in the span around the handoff.
    """
    found = []
    for span in join.spans.values():
        to = span.attributes.get(semconv.HANDOFF_TO)
        if to is None or (span.operation == semconv.EXECUTE_TOOL and (_failed(span) or _is_inner(span, join))):
            continue
        giver = str(span.attributes.get(semconv.HANDOFF_FROM) or span.agent or "")
        call = join.issuing_call(span)
        if call is None and _id(span) is None and span.parent_id is not None:
            call = join.last_call(span.parent_id, giver)
        found.append((Handoff(giver, str(to), call, span.span_id), span.start))
    found.sort(key=lambda f: (f[0].call.index if f[0].call else len(join.calls), f[1], f[0].span_id))
    return [handoff for handoff, _ in found]


def _of_span(span: Span, join: SpanIndex) -> ToolOutcome:
    call = join.issuing_call(span)
    if call is None and _id(span) is None:
        call = _around(span, join)
    result = span.attributes.get(semconv.TOOL_CALL_RESULT)
    return ToolOutcome(
        tool=_tool(span),
        tool_call_id=_id(span),
        agent=call.agent if call is not None else span.agent or "",
        call=call,
        span_id=span.span_id,
        arguments=_parsed(span.attributes.get(semconv.TOOL_CALL_ARGUMENTS)),
        output=None if result is None else str(result),
        error=(span.status_message or "the tool failed") if _failed(span) else None,
    )


def _of_results(join: SpanIndex) -> Iterator[ToolOutcome]:
    """Outcomes that requests tell of, the first time that each is told."""
    seen: set[str] = set()
    for request in join.calls:
        texts = {
            str(m.get("tool_call_id")): _text(m.get("content"))
            for m in request.request.get("messages") or ()
            if m.get("role") == "tool"
        }
        for result in request.request.get(TOOL_RESULTS) or ():
            call = join.issuers.get(result["id"])
            if call is None or result["id"] in seen:
                continue
            seen.add(result["id"])
            text = texts.get(result["id"])
            refused = result["id"] in (call.request.get(UNKNOWN_TOOLS) or ()) or _runs_tools(call, join)
            yield ToolOutcome(
                tool=str(result["name"] or ""),
                tool_call_id=result["id"],
                agent=call.agent,
                call=call,
                span_id=call.span_id,
                arguments=_arguments(call, result["id"]),
                output=text,
                error=(text or "the tool failed") if result["failed"] or refused else None,
            )


def _around(span: Span, join: SpanIndex) -> Call | None:
    """The call in whose `chat` span or tool call a span of the same agent lies, within that agent's span."""
    for outer in join.upwards(span.parent_id):
        if outer.operation == semconv.INVOKE_AGENT or outer.agent != span.agent:
            return None
        call = join.by_span.get(outer.span_id) if outer.operation == semconv.CHAT else None
        if outer.operation == semconv.EXECUTE_TOOL:
            call = join.issuing_call(outer)
        if call is not None:
            return call
    return None


def _is_inner(span: Span, join: SpanIndex) -> bool:
    for outer in join.upwards(span.parent_id):
        if outer.operation == semconv.INVOKE_AGENT:
            return False
        if outer.operation == semconv.EXECUTE_TOOL and _id(outer) is not None and _id(outer) == _id(span):
            return True
    return False


def _runs_tools(call: Call, join: SpanIndex) -> bool:
    chat = join.spans.get(call.span_id or "")
    return chat is not None and bool(chat.attributes.get(semconv.RUNS_TOOLS))


def _tool(span: Span) -> str:
    return str(span.attributes.get(semconv.TOOL_NAME) or span.name.removeprefix(f"{semconv.EXECUTE_TOOL} "))


def _id(span: Span) -> str | None:
    value = span.attributes.get(semconv.TOOL_CALL_ID)
    return None if value is None else str(value)


def _failed(span: Span) -> bool:
    return span.status == "error"


def _arguments(call: Call, tool_call_id: str) -> Any:
    for tool_call in call.response.get("tool_calls") or ():
        if tool_call.get("id") == tool_call_id:
            return _parsed(tool_call["function"]["arguments"])
    return None


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _text(content: Any) -> str:
    """The text of a message: OpenAI's content is a text or parts."""
    if isinstance(content, str):
        return content
    return "".join(str(p.get("text", "")) for p in content or () if isinstance(p, Mapping))

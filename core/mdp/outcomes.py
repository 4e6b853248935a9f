"""The outcome of each tool call and handoff of an attempt, once, with the LLM call that asked for it.

A tool's run is known by its span. A tool call without a span has an outcome, too, where a later request to the gateway
holds its result: the tool is the program's own (a bare client's loop, another language), or the framework refused to
run it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agl import semconv
from agl.mdp.order import in_order
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.tool_runs import is_answered, persons_answers, tool_name
from agl.mdp.types import Call
from agl.messages.tool_output import reports_failure

TOOL_RESULTS = "tool_results"
"""Key of `Call.request`: the results of tool calls in the request, as `[{"id", "name", "failed"}]`."""
UNKNOWN_TOOLS = "unknown_tools"
"""Key of `Call.request`: ids of tool calls in the response that name a tool which the request did not offer."""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """How one run of a tool ended.

    Attributes:
        tool: its name.
        tool_call_id: the id minted for the tool call; None where the framework does not pass it on.
        agent: the agent that called the tool.
        call: the LLM call that issued the tool call; None if unknown.
        span_id: of the tool's span, or of the call's `chat` span where the tool has none.
        arguments: JSON values; the text where it is not JSON; None if not recorded.
        output: what the tool returned, as a text or as JSON; None if not recorded.
        error: why it failed; None if it succeeded.
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
    """One agent handed over to another; `call` is the LLM call that decided it, None if unknown."""

    from_agent: str
    to_agent: str
    call: Call | None
    span_id: str


def tool_outcomes(index: SpanIndex) -> list[ToolOutcome]:
    """Every tool outcome of an attempt, in the order of the calls that issued them, whatever order the tools ended in.

    The call is the one that issued the tool call id. Where the span has no id and was not `joined` to a call, it is the
    one in whose `chat` span or tool call the tool ran, within the same agent's span; else unknown. A tool that hands
    over is a handoff, unless it failed. Spans of one tool call id that lie in one another are one run, seen by two
    layers.
    """
    tools = [s for s in index.spans.values() if s.is_tool_run]
    handoff_ids = {_id(s) for s in index.spans.values() if semconv.HANDOFF_TO in s.attributes} - {None}
    known_ids = {_id(s) for s in tools} | handoff_ids | index.answers
    tools_without_id = {tool_name(s) for s in tools if _id(s) is None}
    runs = [s for s in tools if _failed(s) or (semconv.HANDOFF_TO not in s.attributes and _id(s) not in handoff_ids)]
    outcomes = [_of_span(s, index) for s in runs if not _is_inner(s, index)]
    # A result of a tool that has spans without ids may belong to one of these: it is counted once.
    outcomes += [o for o in _of_results(index) if o.tool_call_id not in known_ids and o.tool not in tools_without_id]
    place = {s.span_id: i for i, s in enumerate(in_order(tools))}

    def order(outcome: ToolOutcome) -> tuple[Any, ...]:
        call, issued = outcome.call, (len(index.calls), "", 0)
        if call is not None and outcome.tool_call_id in call.tool_call_ids:
            issued = (call.index, call.id, call.tool_call_ids.index(outcome.tool_call_id))
        return (*issued, place.get(outcome.span_id or "", 0), outcome.span_id or "")

    return sorted(outcomes, key=order)


def handoffs(index: SpanIndex) -> list[Handoff]:
    """Every handoff of an attempt, in the order of the calls that decided them.

    The call is the one that issued the tool call by which an agent hands over; where there is none, the last one that
    this agent made in the span around the handoff.
    """
    matches = []
    for span in in_order(index.spans.values()):
        to = span.attributes.get(semconv.HANDOFF_TO)
        if to is None or (span.operation == semconv.EXECUTE_TOOL and (_failed(span) or _is_inner(span, index))):
            continue
        from_agent = str(span.attributes.get(semconv.HANDOFF_FROM) or span.agent or "")
        call = index.issuing_call(span)
        if call is None and _id(span) is None and span.parent_id is not None:
            call = index.last_call(span.parent_id, from_agent)
        matches.append(Handoff(from_agent, str(to), call, span.span_id))
    return sorted(matches, key=lambda handoff: handoff.call.index if handoff.call else len(index.calls))


def _of_span(span: Span, index: SpanIndex) -> ToolOutcome:
    call = index.issuing_call(span)
    if call is None and _id(span) is None:
        call = _enclosing_call(span, index)
    result = span.attributes.get(semconv.TOOL_CALL_RESULT)
    failed = _failed(span) or (result is not None and reports_failure(str(result)))
    return ToolOutcome(
        tool=tool_name(span),
        tool_call_id=_id(span),
        agent=call.agent if call is not None else span.agent or "",
        call=call,
        span_id=span.span_id,
        arguments=_json_or_text(span.attributes.get(semconv.TOOL_CALL_ARGUMENTS)),
        output=None if result is None else str(result),
        error=(span.status_message or str(result or "the tool failed")) if failed else None,
    )


def _of_results(index: SpanIndex) -> Iterator[ToolOutcome]:
    """Outcomes of the tool results in requests; a result that later requests repeat counts once, as failed if any of
    them says so: what asks for the policy's answers, a tool perhaps, may tell it another result first."""
    answers = persons_answers(index.spans.values())
    texts: dict[tuple[str, bool], str] = {}
    names: dict[str, str] = {}
    failed: set[str] = set()
    for request in index.calls:
        sent = {
            str(m.get("tool_call_id")): _text(m.get("content"))
            for m in request.request.get("messages") or ()
            if m.get("role") == "tool"
        }
        for result in request.request.get(TOOL_RESULTS) or ():
            names.setdefault(result["id"], str(result["name"] or ""))
            if result["id"] in sent:
                texts.setdefault((result["id"], bool(result["failed"])), sent[result["id"]])
            if result["failed"]:
                failed.add(result["id"])
    for tool_call_id, name in names.items():
        call = index.issuers.get(tool_call_id)
        if call is None:
            continue
        text = texts.get((tool_call_id, tool_call_id in failed))
        if is_answered(text or "", answers):
            continue
        chat = index.spans.get(call.span_id or "")
        # A framework that runs the tools itself and left no span did not run this one.
        runs_tools = chat is not None and bool(chat.attributes.get(semconv.RUNS_TOOLS))
        refused = runs_tools or tool_call_id in (call.request.get(UNKNOWN_TOOLS) or ())
        says_so = text is not None and reports_failure(text)
        yield ToolOutcome(
            tool=name,
            tool_call_id=tool_call_id,
            agent=call.agent,
            call=call,
            span_id=call.span_id,
            arguments=_arguments(call, tool_call_id),
            output=text,
            error=(text or "the tool failed") if tool_call_id in failed or refused or says_so else None,
        )


def _enclosing_call(span: Span, index: SpanIndex) -> Call | None:
    """The call with the `chat` span or tool call around a span of the same agent, within that agent's span."""
    for outer in index.upwards(span.parent_id):
        if outer.operation == semconv.INVOKE_AGENT or outer.agent != span.agent:
            return None
        call = index.by_span.get(outer.span_id) if outer.operation == semconv.CHAT else None
        if outer.operation == semconv.EXECUTE_TOOL:
            call = index.issuing_call(outer)
        if call is not None:
            return call
    return None


def _is_inner(span: Span, index: SpanIndex) -> bool:
    for outer in index.upwards(span.parent_id):
        if outer.operation == semconv.INVOKE_AGENT:
            return False
        if outer.operation == semconv.EXECUTE_TOOL and _id(outer) is not None and _id(outer) == _id(span):
            return True
    return False


def _id(span: Span) -> str | None:
    value = span.attributes.get(semconv.TOOL_CALL_ID)
    return None if value is None else str(value)


def _failed(span: Span) -> bool:
    return span.status == "error"


def _arguments(call: Call, tool_call_id: str) -> Any:
    for tool_call in call.response.get("tool_calls") or ():
        if tool_call.get("id") == tool_call_id:
            return _json_or_text(tool_call["function"]["arguments"])
    return None


def _json_or_text(arguments: Any) -> Any:
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

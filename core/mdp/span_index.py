"""Which LLM call a span belongs to: by the ids that spans and calls carry, then by how spans nest, never by time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from agl import semconv
from agl.mdp.order import beginnings
from agl.mdp.spans import Span
from agl.mdp.tool_runs import joined
from agl.mdp.types import Call


class SpanIndex:
    """The calls and spans of one attempt, by their ids.

    Attributes:
        calls: in order of arrival.
        spans: span id -> span, in the order of the argument; tools that a program runs by hand `joined` to their calls.
        root: the outermost span; None if it is missing.
        by_span: id of a `chat` span -> the call made in it; of several calls, one that did not fail.
        issuers: tool call id -> the call that issued it.
    """

    def __init__(self, calls: Sequence[Call], spans: Sequence[Span]) -> None:
        self.calls = sorted(calls, key=lambda c: (c.index, c.id))
        self.spans = {s.span_id: s for s in joined(spans, self.calls)}
        self.root = next((s for s in spans if s.parent_id is None), None)
        self.by_span: dict[str, Call] = {}
        for call in self.calls:
            if call.span_id and (call.error is None or call.span_id not in self.by_span):
                self.by_span[call.span_id] = call
        self.answers = {call_id for s in spans for call_id in s.attributes.get(semconv.STRUCTURED_ANSWERS, ())}
        """The ids of tool calls that are structured answers."""
        self.issuers = {tool_call: c for c in self.calls for tool_call in c.tool_call_ids}

    @property
    def agents(self) -> set[str]:
        """Every agent's name, of those without a call too."""
        return {call.agent for call in self.calls} | {s.agent for s in self.spans.values() if s.agent is not None}

    def upwards(self, span_id: str | None) -> Iterator[Span]:
        """A span and the spans around it, innermost first."""
        while span_id is not None and (span := self.spans.get(span_id)) is not None:
            yield span
            span_id = span.parent_id

    def issuing_call(self, tool: Span) -> Call | None:
        """The call whose response asked for a tool's run, by the tool call id on the span, else by the `chat` span."""
        issuer = self.issuers.get(str(tool.attributes.get(semconv.TOOL_CALL_ID, "")))
        return issuer or self.by_span.get(str(tool.attributes.get(semconv.ISSUED_BY, "")))

    def rewarded_call(self, span_id: str | None) -> Call | None:
        """The call that earns the rewards emitted in a span.

        That is the call whose `chat` span this is or lies in; else the call that issued the tool call this span lies
        in; else, in the span of an agent other than the outermost, the last call made within that span; else None.
        """
        for span in self.upwards(span_id):
            if span.operation == semconv.CHAT and span.span_id in self.by_span:
                return self.by_span[span.span_id]
            if span.operation == semconv.EXECUTE_TOOL and (issuer := self.issuing_call(span)) is not None:
                return issuer
            if span.operation == semconv.INVOKE_AGENT and span.parent_id is not None:
                last = self.last_call(span.span_id)
                if last is not None:
                    return last
        return None

    def last_call(self, span_id: str, agent: str | None = None) -> Call | None:
        """The last call made within a span, by one agent if `agent` is set; None if there is none or all failed."""
        for call in reversed(self.calls):
            if call.error is None and (agent is None or call.agent == agent) and self.within(call.span_id, span_id):
                return call
        return None

    def seconds(self) -> dict[str, float]:
        """Where the attempt's wall time went, in seconds; nothing without a root span.

        Returns:
            "models": at least one call to a model was open. "tools": else, at least one tool ran. "grading": the reward
            function; of an agent that rewards itself, its judges. "agent": the rest of the root span.
        """
        if self.root is None:
            return {}
        spans = self.spans.values()
        judges = [s for s in spans if s.attributes.get(semconv.UNTRAINED)]
        chats = [s for s in spans if s.operation == semconv.CHAT and not s.attributes.get(semconv.UNTRAINED)]
        models = _covered(chats)
        tools = _covered([*chats, *(s for s in spans if s.operation == semconv.EXECUTE_TOOL)]) - models
        grading = float(self.root.attributes.get(semconv.GRADING_SECONDS, _covered(judges)))
        agent = max(0.0, self.root.seconds - models - tools - grading)
        return {"models": models, "tools": tools, "grading": grading, "agent": agent}

    def within(self, span_id: str | None, ancestor: str) -> bool:
        """Whether a span is `ancestor` or lies in it."""
        return any(span.span_id == ancestor for span in self.upwards(span_id))


def _covered(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of the spans was open."""
    seconds = 0.0
    until = -math.inf
    for start, duration in sorted((b, s.seconds) for b, s in zip(beginnings(spans), spans, strict=True)):
        seconds += max(0.0, start + duration - max(start, until))
        until = max(until, start + duration)
    return seconds

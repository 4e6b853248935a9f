"""A trace provider that keeps our hooks alive where the user has switched the SDK's own tracing off.

Without it `set_tracing_disabled(True)`, which everyone sets who has no OpenAI key, would also switch off agent names.
What the user's provider makes goes to the user's processors as ever; what it refuses to make inside a rollout is made
by a second provider, whose only processor is ours.
"""

from __future__ import annotations

from typing import Any

from agents.tracing import Span, Trace, TracingProcessor, get_trace_provider, set_trace_provider
from agents.tracing.provider import DefaultTraceProvider, TraceProvider

from agl import tracing

_NOOP = "no-op"


class Provider(TraceProvider):
    """The user's provider, and ours for what it refuses."""

    def __init__(self, users: TraceProvider, processor: TracingProcessor) -> None:
        self.users = users
        self.processor = processor
        self._own = DefaultTraceProvider()
        self._own.set_disabled(False)
        self._own.register_processor(processor)
        self._hidden: set[str] = set()
        """Ids of traces and spans that only we may see."""

    def create_trace(self, *args: Any, **kwargs: Any) -> Trace:
        trace = self.users.create_trace(*args, **kwargs)
        if trace.trace_id != _NOOP or tracing.current() is None:
            return trace
        hidden = self._own.create_trace(*args, **kwargs | {"disabled": False, "trace_id": None})
        self._hidden.add(hidden.trace_id)
        return hidden

    def create_span(
        self, span_data: Any, span_id: str | None = None, parent: Any = None, disabled: bool = False
    ) -> Span[Any]:
        if not self._hidden and tracing.idle():
            return self.users.create_span(span_data, span_id, parent, disabled)
        around = [a for a in (parent,) if a is not None] or [self.get_current_span(), self.get_current_trace()]
        if not any(a is not None and self._is_hidden(a) for a in around):
            span = self.users.create_span(span_data, span_id, parent, disabled)
            if span.span_id != _NOOP or tracing.current() is None or self.get_current_trace() is None:
                return span
        hidden = self._own.create_span(span_data, None if span_id == _NOOP else span_id, parent, False)
        if hidden.span_id != _NOOP:
            self._hidden.add(hidden.span_id)
        return hidden

    def _is_hidden(self, of: Any) -> bool:
        return of.trace_id in self._hidden or getattr(of, "span_id", None) in self._hidden

    def forget(self, id: str) -> None:
        """Of a trace or a span that has ended."""
        self._hidden.discard(id)

    def register_processor(self, processor: TracingProcessor) -> None:
        self.users.register_processor(processor)

    def set_processors(self, processors: list[TracingProcessor]) -> None:
        self.users.set_processors([*processors, self.processor])

    def get_current_trace(self) -> Trace | None:
        return self.users.get_current_trace()

    def get_current_span(self) -> Span[Any] | None:
        return self.users.get_current_span()

    def set_disabled(self, disabled: bool) -> None:
        self.users.set_disabled(disabled)

    def time_iso(self) -> str:
        return self.users.time_iso()

    def gen_trace_id(self) -> str:
        return self.users.gen_trace_id()

    def gen_span_id(self) -> str:
        return self.users.gen_span_id()

    def gen_group_id(self) -> str:
        return self.users.gen_group_id()

    def force_flush(self) -> None:
        self.users.force_flush()

    def shutdown(self) -> None:
        self.users.shutdown()


def put(processor: TracingProcessor) -> Provider:
    """Add `processor` beside the user's own, and our provider in front of the user's."""
    users = get_trace_provider()
    users.register_processor(processor)
    ours = Provider(users, processor)
    set_trace_provider(ours)
    return ours


def take_back(ours: Provider) -> None:
    """Undo `put`."""
    if get_trace_provider() is ours:
        set_trace_provider(ours.users)
    # There is no public way to take one processor back; in a provider of the user's own ours stays, idle.
    of_users = getattr(ours.users, "_multi_processor", None)
    if of_users is not None:
        of_users.set_processors([p for p in of_users._processors if p is not ours.processor])

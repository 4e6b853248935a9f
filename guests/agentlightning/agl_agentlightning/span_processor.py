"""Records the spans of a program's own in agl's rollouts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import SpanProcessor

from agl import tracing
from agl.mdp.spans import from_otel, without_texts
from agl.tracing.open_span import OpenSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider


class LightningSpanProcessor(SpanProcessor):
    """Records the spans that a program makes itself with agl's tracer provider in the rollout that they begin in."""

    _added: bool = False

    def __init__(self) -> None:
        self._scopes: dict[int, tracing.Scope] = {}

    @classmethod
    def add_to(cls, provider: TracerProvider) -> None:
        """Add one to agl's provider, once in a process."""
        if not cls._added:
            cls._added = True
            provider.add_span_processor(cls())

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        scope = tracing.current()
        # agl's own spans are recorded by what opened them.
        if scope is not None and not isinstance(span, OpenSpan):
            self._scopes[span.context.span_id] = scope

    def on_end(self, span: ReadableSpan) -> None:
        scope = self._scopes.pop(span.context.span_id, None) if span.context else None
        if scope is not None and not scope.rollout.closed:
            rollout = scope.rollout
            own = from_otel(span)
            # In the program's own tracing it may be of another trace: agl sets no current span there.
            recorded = dataclasses.replace(
                own,
                rollout_id=rollout.rollout_id,
                attempt=rollout.attempt,
                trace_id=f"{scope.span.get_span_context().trace_id:032x}",
                parent_id=own.parent_id or scope.span_id,
            )
            if not rollout.capture_content:
                recorded = without_texts(recorded)
            rollout.spans.append(recorded)
            if rollout.on_span_end is not None:
                rollout.on_span_end(recorded)

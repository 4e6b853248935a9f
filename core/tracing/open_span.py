"""An open span of agl's: OpenTelemetry's SDK span with its attributes in a plain dict, without limits and samplers.

Everything that reads an SDK span reads this one. A call is traced with a third of the SDK's work, which would check,
copy and lock each attribute on its way in and out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from agl import semconv
from agl.mdp import spans as plain

_SCOPE = InstrumentationScope("agl")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_PLAIN = frozenset({str, bool, int, float})
_LOCK = threading.RLock()
"""For what the SDK's span does under its lock: names, statuses and events, which are rare."""
UNLIMITED = SpanLimits(
    **{
        name: SpanLimits.UNSET
        for name in (
            "max_attributes",
            "max_span_attributes",
            "max_events",
            "max_links",
            "max_attribute_length",
            "max_span_attribute_length",
            "max_event_attributes",
            "max_link_attributes",
        )
    }
)


class OpenSpan(Span):
    """A span of `provider`; the provider's processors see it start and end.

    Args:
        parent: of the parent span; None for a root.
        attributes: as for `set_attributes`.
        content: whether texts are recorded. Without it neither attributes nor events hold any of `semconv.TEXTS`, and
            the status of an error is described by the error's type alone, whoever sets them.
    """

    def __init__(
        self,
        provider: TracerProvider,
        name: str,
        parent: SpanContext | None,
        attributes: Mapping[str, Any],
        *,
        content: bool = True,
    ) -> None:
        self._content = content
        ids = provider.id_generator
        trace_id = ids.generate_trace_id() if parent is None else parent.trace_id
        ReadableSpan.__init__(
            self,
            name,
            SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=_SAMPLED),
            parent,
            provider.resource,
            attributes=_checked(attributes if content else _without_texts(attributes)),
            events=[],
            instrumentation_scope=_SCOPE,
        )
        self._lock = _LOCK
        self._limits = UNLIMITED
        self._span_processor = provider._active_span_processor
        self._start_time = time.time_ns()
        self._epoch = self._start_time - time.monotonic_ns()
        self._span_processor.on_start(self)

    def begin_at(self, began: float) -> None:
        """Date the beginning back, to a time of the monotonic clock: of a process, before it had a span."""
        self._start_time = self._epoch + int(began * 1e9)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes. Those that are None are left out; so are values that OpenTelemetry has no type for, which it
        reports."""
        if self._end_time is None:
            kept = attributes if self._content else _without_texts(attributes)
            self._attributes.update(_checked(kept))  # type: ignore[union-attr]

    def set_attribute(self, key: str, value: Any) -> None:
        """Add an attribute."""
        self.set_attributes({key: value})

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """Add an event."""
        kept = attributes if self._content else _without_texts(attributes or {})
        super().add_event(name, kept, timestamp)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the status."""
        if not self._content:
            code = status.status_code if isinstance(status, Status) else status
            kind = (self._attributes or {}).get(semconv.ERROR_TYPE) if code is StatusCode.ERROR else None
            status = Status(code, None if kind is None else str(kind))
            description = None
        super().set_status(status, description)

    def end(self, end_time: int | None = None) -> None:
        """End the span; a second call does nothing."""
        if self._end_time is None:
            # By the monotonic clock: the wall clock may have been set since.
            self._end_time = end_time or max(self._start_time or 0, self._epoch + time.monotonic_ns())
            self._span_processor.on_end(self)

    def finished(self, rollout_id: str, attempt: int) -> plain.Span:
        """The plain form of this span, which has ended; equal to `agl.mdp.spans.from_otel` of it."""
        trace_id, span_id, *_ = self._context  # type: ignore[misc]
        parent = self._parent
        status = self._status
        start = self._start_time
        end = self._end_time
        assert start is not None
        assert end is not None
        return plain.Span(
            f"{trace_id:032x}",
            f"{span_id:016x}",
            f"{parent.span_id:016x}" if parent else None,
            rollout_id,
            attempt,
            self._name,
            start / 1e9,
            end / 1e9,
            "unset" if status.is_unset else status.status_code.name.lower(),
            status.description,
            self._attributes,  # type: ignore[arg-type]
            tuple(plain.Event(e.name, e.timestamp / 1e9, dict(e.attributes or {})) for e in self._events),
        )


class EndedSpan(NonRecordingSpan):
    """What a scope keeps of a span that has ended: its ids, its name and its resource, and none of its texts."""

    attributes: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, span: OpenSpan) -> None:
        super().__init__(span.get_span_context())
        self.name = span.name
        self.parent = span.parent
        self.resource = span.resource


def _without_texts(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in attributes.items() if name not in semconv.TEXTS}


def _checked(attributes: Mapping[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, value in attributes.items():
        if value.__class__ in _PLAIN:
            checked[key] = value
        elif value.__class__ in (list, tuple) and {v.__class__ for v in value} <= {str}:
            checked[key] = tuple(value)
        elif value is not None:
            checked.update(BoundedAttributes(attributes={key: value}, immutable=False))
    return checked

"""0.3's data classes of OpenTelemetry's records; times are seconds since the epoch, ids hex."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from agl_agentlightning.models import PydanticMethods

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk import resources
    from opentelemetry.sdk import trace as sdk

__all__ = [
    "AttributeValue",
    "Attributes",
    "Event",
    "Link",
    "OtelResource",
    "SpanAttributeNames",
    "SpanContext",
    "SpanCoreFields",
    "SpanLike",
    "SpanNames",
    "SpanRecordingContext",
    "StatusCode",
    "TraceState",
    "TraceStatus",
]

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
Attributes = dict[str, AttributeValue]
TraceState = dict[str, str]
StatusCode = Literal["UNSET", "OK", "ERROR"]
SpanLike = Any
"""An SDK span, or a `Span`."""


@dataclass(kw_only=True)
class SpanContext(PydanticMethods):
    """Which span of which trace."""

    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: TraceState = field(default_factory=dict)

    @classmethod
    def from_opentelemetry(cls, src: trace.SpanContext) -> SpanContext:
        return cls(
            trace_id=f"{src.trace_id:032x}",
            span_id=f"{src.span_id:016x}",
            is_remote=src.is_remote,
            trace_state=dict(src.trace_state or {}),
        )


@dataclass(kw_only=True)
class TraceStatus(PydanticMethods):
    """`status_code`: "UNSET", "OK" or "ERROR"."""

    status_code: str = "UNSET"
    description: str | None = None

    @classmethod
    def from_opentelemetry(cls, src: trace.Status) -> TraceStatus:
        return cls(status_code=src.status_code.name, description=src.description)


@dataclass(kw_only=True)
class Event(PydanticMethods):
    """An event of a span."""

    name: str
    attributes: dict[str, Any] = field(default_factory=dict)
    timestamp: float | None = None

    @classmethod
    def from_opentelemetry(cls, src: sdk.Event) -> Event:
        return cls(name=src.name, attributes=dict(src.attributes or {}), timestamp=src.timestamp / 1e9)


@dataclass(kw_only=True)
class Link(PydanticMethods):
    """A link of a span to another."""

    context: SpanContext
    attributes: dict[str, Any] | None = None

    @classmethod
    def from_opentelemetry(cls, src: trace.Link) -> Link:
        return cls(context=SpanContext.from_opentelemetry(src.context), attributes=dict(src.attributes or {}) or None)


@dataclass(kw_only=True)
class OtelResource(PydanticMethods):
    """What produced a span."""

    attributes: dict[str, Any] = field(default_factory=dict)
    schema_url: str = ""

    @classmethod
    def from_opentelemetry(cls, src: resources.Resource) -> OtelResource:
        return cls(attributes=dict(src.attributes), schema_url=src.schema_url)


@dataclass(kw_only=True)
class SpanCoreFields(PydanticMethods):
    """A span without its ids: what tracers and emitters return, and what an agent may return as its result."""

    name: str
    status: TraceStatus
    attributes: dict[str, Any]
    start_time: float | None
    end_time: float | None


class SpanRecordingContext(Protocol):
    """What `Tracer.operation_context` gives: records on the span while it is open."""

    def record_exception(self, exception: BaseException) -> None: ...

    def record_attributes(self, attributes: Attributes) -> None: ...

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None: ...

    def get_recorded_span(self) -> SpanCoreFields: ...


class SpanNames(StrEnum):
    """Names of 0.2; `agl.compat.semconv` has those of 0.3."""

    REWARD = "agentlightning.reward"
    MESSAGE = "agentlightning.message"
    OBJECT = "agentlightning.object"
    EXCEPTION = "agentlightning.exception"
    VIRTUAL = "agentlightning.virtual"
    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"


class SpanAttributeNames(StrEnum):
    """Attributes of 0.2."""

    MESSAGE = "message"
    OBJECT = "object"

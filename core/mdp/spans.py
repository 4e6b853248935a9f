"""A finished OpenTelemetry span as plain data: what is stored, and what every reader gets."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from agl import semconv

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


@dataclass(frozen=True, slots=True)
class Event:
    """An event within a span. `time` is seconds since the epoch."""

    name: str
    time: float
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span.

    Attributes:
        trace_id, span_id, parent_id: hex (32, 16, 16 digits); `parent_id` None for a root.
        rollout_id, attempt: identify the attempt.
        name: as OTel GenAI names it: `invoke_agent writer`, `chat gpt-x`, `execute_tool calculator`.
        start, end: seconds since the epoch, for readers; `agl.mdp.order` says which span began first.
        status: "unset", "ok" or "error".
        status_message: what went wrong.
        attributes: OTel GenAI attributes plus `agl.*`.
        events: mostly exceptions.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    rollout_id: str
    attempt: int
    name: str
    start: float
    end: float
    status: str = "unset"
    status_message: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()

    @property
    def seconds(self) -> float:
        """How long it was open; 0 where its sender's clock was set back meanwhile."""
        return max(0.0, self.end - self.start)

    @property
    def operation(self) -> str:
        """`gen_ai.operation.name` ("invoke_agent", "chat", "execute_tool"), "reward", or ""."""
        return str(self.attributes.get(semconv.OPERATION_NAME, ""))

    @property
    def is_tool_run(self) -> bool:
        """Whether a tool ran here to its end. One that waits for a person has not run."""
        return self.operation == semconv.EXECUTE_TOOL and not self.attributes.get(semconv.PAUSED)

    @property
    def sequence(self) -> int | None:
        """`agl.sequence`: its place among the attempt's spans; None if it has none."""
        return sequence_of(self.attributes)

    @property
    def agent(self) -> str | None:
        """`gen_ai.agent.name`."""
        name = self.attributes.get(semconv.AGENT_NAME)
        return None if name is None else str(name)


def sequence_of(attributes: Mapping[str, Any]) -> int | None:
    """`agl.sequence` of a span with these attributes; None if it has none."""
    number = attributes.get(semconv.SEQUENCE)
    return number if type(number) is int else None


class Attempt(Protocol):
    """What names an attempt: one of its spans, for example."""

    @property
    def trace_id(self) -> str: ...

    @property
    def rollout_id(self) -> str: ...

    @property
    def attempt(self) -> int: ...


def recorded(
    of: Attempt,
    kind: str,
    name: str,
    agent: str,
    attributes: Mapping[str, Any],
    *,
    parent_id: str | None,
    start: float,
    end: float,
    error: str | None = None,
    span_id: str | None = None,
    events: Sequence[Event] = (),
) -> Span:
    """A span that agl makes of what it knows of an attempt, without OpenTelemetry's SDK.

    Args:
        kind: `gen_ai.operation.name`.
        name: the rest of the span's name.
        attributes: those that are None are left out.
        error: why it failed.
        span_id: a random one if None.
    """
    facts = {
        semconv.OPERATION_NAME: kind,
        semconv.AGENT_NAME: agent,
        semconv.ROLLOUT_ID: of.rollout_id,
        semconv.ATTEMPT: of.attempt,
        **{key: value for key, value in attributes.items() if value is not None},
    }
    ids = of.trace_id, span_id or secrets.token_hex(8), parent_id, of.rollout_id, of.attempt
    status = "unset" if error is None else "error"
    return Span(*ids, f"{kind} {name}".strip(), start, end, status, error, facts, events)


def without_texts(span: Span) -> Span:
    """The span without what a rollout with `capture_content=False` does not record; its events are left out."""
    kept = {name: value for name, value in span.attributes.items() if name not in semconv.TEXTS}
    kind = kept.get(semconv.ERROR_TYPE)
    return replace(span, status_message=None if kind is None else str(kind), attributes=kept, events=())


_FACTS = {value for name, value in vars(semconv).items() if name.isupper() and isinstance(value, str)} - semconv.TEXTS


def facts_alone(span: Span) -> Span:
    """The span of another tracer without what may be content: under names that are not known, anything may be."""

    def facts(attributes: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in attributes.items()
            if name in _FACTS or (name.startswith("gen_ai.") and isinstance(value, int | float))
        }

    scores = (event for event in span.events if event.name == semconv.EVALUATION)
    events = tuple(replace(event, attributes=facts(event.attributes)) for event in scores)
    return replace(without_texts(span), attributes=facts(span.attributes), events=events)


def from_otel(span: ReadableSpan) -> Span:
    """The plain form of an SDK span.

    Raises:
        ValueError: the span has no context or is not finished.
    """
    context = span.get_span_context()
    if context is None or span.start_time is None or span.end_time is None:
        raise ValueError(f"span {span.name!r} is not finished")
    # The mapping's `copy` takes its lock once; `dict(mapping)` takes it for every key.
    attributes: dict[str, Any] = (span.attributes or {}).copy()  # type: ignore[attr-defined]
    return Span(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent else None,
        rollout_id=str(attributes.get(semconv.ROLLOUT_ID, "")),
        attempt=int(attributes.get(semconv.ATTEMPT, 0)),  # type: ignore[arg-type]
        name=span.name,
        start=span.start_time / 1e9,
        end=span.end_time / 1e9,
        status=span.status.status_code.name.lower(),
        status_message=span.status.description,
        attributes=attributes,
        events=tuple(Event(e.name, e.timestamp / 1e9, dict(e.attributes or {})) for e in span.events),
    )

"""Agent Lightning 0.3's data classes: agl's records under the field names that 0.3's users know."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agl import semconv
from agl.agents.hooks import Hook
from agl.agents.resources import LLM, Dataset, NamedResources, PromptTemplate, resource_from_json, resource_to_json
from agl.errors import ConfigError
from agl.mdp import spans as agl_spans
from agl.tracing.inferred import with_messages
from agl_agentlightning.models import PydanticMethods as _PydanticMethods
from agl_agentlightning.otel_types import (
    Attributes,
    AttributeValue,
    Event,
    Link,
    OtelResource,
    SpanAttributeNames,
    SpanContext,
    SpanCoreFields,
    SpanLike,
    SpanNames,
    SpanRecordingContext,
    StatusCode,
    TraceState,
    TraceStatus,
)
from agl_agentlightning.semconv import AGL_ANNOTATION, AGL_VIRTUAL, LightningResourceAttributes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from agl.mdp.types import Call
    from agl.trainer.store import types as stored

__all__ = [
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "AttributeValue",
    "Attributes",
    "Dataset",
    "EnqueueRolloutRequest",
    "Event",
    "Hook",
    "LLM",
    "Link",
    "NamedResources",
    "OtelResource",
    "PaginatedResult",
    "PromptTemplate",
    "ProxyLLM",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutStatus",
    "Span",
    "SpanAttributeNames",
    "SpanContext",
    "SpanCoreFields",
    "SpanLike",
    "SpanNames",
    "SpanRecordingContext",
    "StatusCode",
    "TaskInput",
    "TraceState",
    "TraceStatus",
    "Triplet",
    "Worker",
    "WorkerStatus",
]

V = TypeVar("V")
RolloutStatus = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
WorkerStatus = Literal["idle", "busy", "unknown"]
RolloutMode = Literal["train", "val", "test"]
TaskInput = Any
log = logging.getLogger("agl.compat")

MODE = "agl.compat.mode"
"""Key in a rollout's metadata: the mode as requested ("test" and None are stored as "dev")."""
SEQUENCE_ID = "agl.compat.sequence_id"
PROMPT_TOKEN_IDS = "prompt_token_ids"
RESPONSE_TOKEN_IDS = "response_token_ids"


@dataclass(kw_only=True)
class RolloutConfig(_PydanticMethods):
    """Retries and time limits of a rollout; seconds, None for no limit."""

    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None
    max_attempts: int = 1
    retry_condition: list[AttemptStatus] = field(default_factory=list)

    def to_agl(self) -> stored.RolloutConfig:
        from agl.trainer.store.types import RolloutConfig as StoredConfig

        return StoredConfig(
            self.max_attempts, tuple(self.retry_condition), self.timeout_seconds, self.unresponsive_seconds
        )


@dataclass(kw_only=True)
class Attempt(_PydanticMethods):
    """One try of a rollout; `sequence_id` counts from 1, times are seconds since the epoch."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None

    @classmethod
    def of(cls, attempt: stored.Attempt) -> Attempt:
        return cls(
            rollout_id=attempt.rollout_id,
            attempt_id=attempt_id(attempt.rollout_id, attempt.attempt),
            sequence_id=attempt.attempt,
            start_time=attempt.started_at,
            end_time=attempt.ended_at,
            status=attempt.status,
            worker_id=attempt.worker_id,
            last_heartbeat_time=attempt.last_heartbeat_at if attempt.last_heartbeat_at != attempt.started_at else None,
            metadata={"error": attempt.error} if attempt.error else None,
        )


@dataclass(kw_only=True)
class Rollout(_PydanticMethods):
    """A rollout: `input` is the task."""

    rollout_id: str
    input: TaskInput
    start_time: float
    end_time: float | None = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None

    @classmethod
    def of(cls, rollout: stored.Rollout) -> Rollout:
        return cls(**_facts(rollout))


@dataclass(kw_only=True)
class AttemptedRollout(Rollout):
    """A rollout with the attempt that runs it."""

    attempt: Attempt

    @classmethod
    def of_leased(cls, leased: stored.AttemptedRollout) -> AttemptedRollout:
        return cls(**_facts(leased.rollout), attempt=Attempt.of(leased.attempt))


@dataclass(frozen=True, slots=True)
class ProxyLLM(LLM):
    """The endpoint of an `LLMProxy`: `get_base_url` gives the address at which a rollout's calls are recorded as its
    own. The trainer's own resources are an `LLM`, whose address is the rollout's already."""

    resource_type: str = field(default="proxy_llm", kw_only=True, repr=False)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name == "endpoint" and sys._getframe(1).f_globals is not globals():
            log.warning(
                "Accessing 'endpoint' directly on ProxyLLM is discouraged: calls to it belong to no rollout; "
                "use get_base_url(rollout_id, attempt_id)"
            )
        return value

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None, *_: Any) -> str:
        """The address for the calls of one attempt; the proxy's own without ids.

        Raises:
            ValueError: one of the ids alone, or one that is no string.
        """
        if rollout_id is None and attempt_id is None:
            return self.endpoint
        if not (isinstance(rollout_id, str) and isinstance(attempt_id, str)):
            raise ValueError("rollout_id and attempt_id must be strings or all be empty")
        address = self.endpoint.rstrip("/")
        version = "/v1" if address.endswith("/v1") else ""
        return f"{address.removesuffix('/v1')}/rollout/{rollout_id}/attempt/{attempt_id}{version}"

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """The `LLM` for the calls of that attempt."""
        url = self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        return LLM(url, self.model, self.api_key, self.sampling_parameters)


def _facts(rollout: stored.Rollout) -> dict[str, Any]:
    config = rollout.config
    return {
        "rollout_id": rollout.rollout_id,
        "input": rollout.task,
        "start_time": rollout.created_at,
        "end_time": rollout.ended_at,
        "mode": rollout.metadata[MODE] if MODE in rollout.metadata else {"dev": None}.get(rollout.mode, rollout.mode),
        "resources_id": rollout.resources_id and resources_name(rollout.resources_id),
        "status": "requeuing" if rollout.status == "queuing" and rollout.attempts else rollout.status,
        "config": RolloutConfig(
            timeout_seconds=config.timeout_seconds,
            unresponsive_seconds=config.unresponsive_seconds,
            max_attempts=config.max_attempts,
            retry_condition=list(config.retry_on),  # type: ignore[arg-type]
        ),
        "metadata": {k: v for k, v in rollout.metadata.items() if k != MODE},
    }


@dataclass(kw_only=True)
class EnqueueRolloutRequest(_PydanticMethods):
    """A rollout to enqueue."""

    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None


@dataclass(kw_only=True)
class ResourcesUpdate(_PydanticMethods):
    """A version of the named resources."""

    resources_id: str
    create_time: float
    update_time: float
    version: int
    resources: NamedResources

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {**vars(self), "resources": {k: resource_to_json(v) for k, v in self.resources.items()}}


@dataclass(kw_only=True)
class Worker(_PydanticMethods):
    """A process that runs attempts; times are seconds since the epoch, None for what has not happened."""

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: dict[str, Any] | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None


class PaginatedResult(list[V]):
    """A page of a query's results: a list that knows its `limit` (-1 is none), its `offset`, and the `total` number."""

    def __init__(self, items: Iterable[V], limit: int, offset: int, total: int) -> None:
        super().__init__(items)
        self.limit = limit
        self.offset = offset
        self.total = total

    @property
    def items(self) -> list[V]:
        """The page itself."""
        return list(self)


@dataclass(kw_only=True)
class Triplet(_PydanticMethods):
    """One LLM call: its prompt, its response, its reward."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Span(_PydanticMethods):
    """A finished span; ids are hex, times seconds since the epoch."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    status: TraceStatus = field(default_factory=TraceStatus)
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    start_time: float | None = None
    end_time: float | None = None
    context: SpanContext | None = None
    parent: SpanContext | None = None
    resource: OtelResource = field(default_factory=OtelResource)

    @classmethod
    def of(cls, span: agl_spans.Span, sequence_id: int) -> Span:
        attributes = dict(span.attributes)
        name = span.name
        if span.operation == semconv.REWARD and attributes.get(semconv.REWARD_PRIMARY, True) and name != AGL_ANNOTATION:
            # What an agent returned, as 0.3 recorded it.
            name = AGL_ANNOTATION
            attributes |= {
                "agentlightning.reward.0.name": attributes.get(semconv.REWARD_NAME, "primary"),
                "agentlightning.reward.0.value": attributes[semconv.REWARD_VALUE],
            }
        sequence_id = int(attributes.pop(SEQUENCE_ID, sequence_id))
        attempt = attempt_id(span.rollout_id, span.attempt)
        keys = LightningResourceAttributes
        where = {
            keys.ROLLOUT_ID.value: span.rollout_id,
            keys.ATTEMPT_ID.value: attempt,
            keys.SPAN_SEQUENCE_ID.value: sequence_id,
        }
        return cls(
            rollout_id=span.rollout_id,
            attempt_id=attempt,
            sequence_id=sequence_id,
            resource=OtelResource(attributes=where),
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_id=span.parent_id,
            name=name,
            status=TraceStatus(status_code=span.status.upper(), description=span.status_message),
            attributes=attributes,
            events=[Event(name=e.name, attributes=dict(e.attributes), timestamp=e.time) for e in span.events],
            start_time=span.start,
            end_time=span.end,
        )

    def to_agl(self) -> agl_spans.Span:
        now = time.time()
        return agl_spans.Span(
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_id=self.parent_id,
            rollout_id=self.rollout_id,
            attempt=attempt_number(self.attempt_id),
            name=self.name,
            start=now if self.start_time is None else self.start_time,
            end=now if self.end_time is None else self.end_time,
            status=self.status.status_code.lower(),
            status_message=self.status.description,
            attributes={**self.attributes, SEQUENCE_ID: self.sequence_id},
            events=tuple(agl_spans.Event(e.name, e.timestamp or now, e.attributes) for e in self.events),
        )

    @classmethod
    def from_opentelemetry(cls, src: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
        """An SDK span as a span of that attempt."""
        span = dataclasses.replace(agl_spans.from_otel(_ended(src)), rollout_id=rollout_id)
        return dataclasses.replace(
            cls.of(span, sequence_id),
            attempt_id=attempt_id,
            links=[Link.from_opentelemetry(link) for link in src.links],
            context=SpanContext.from_opentelemetry(src.get_span_context()),  # type: ignore[arg-type]
            parent=SpanContext.from_opentelemetry(src.parent) if src.parent else None,
            resource=OtelResource.from_opentelemetry(src.resource),
        )

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Mapping[str, Any],
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        name: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        resource: OtelResource | None = None,
        status: TraceStatus | None = None,
    ) -> Span:
        """A span from its attributes; trace and span ids are random where None."""
        now = time.time()
        trace_id = trace_id or secrets.token_hex(16)
        span_id = span_id or secrets.token_hex(8)
        return cls(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or "",
            sequence_id=sequence_id or 0,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            name=name or AGL_VIRTUAL,
            status=status or TraceStatus(status_code="OK"),
            attributes=dict(attributes),
            start_time=now if start_time is None else start_time,
            end_time=now if end_time is None else end_time,
            context=SpanContext(trace_id=trace_id, span_id=span_id),
            parent=SpanContext(trace_id=trace_id, span_id=parent_id) if parent_id else None,
            resource=resource or OtelResource(),
        )

    @classmethod
    def from_core_fields(
        cls,
        core: SpanCoreFields,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
    ) -> Span:
        """A span of that attempt, with random ids, from what an emitter returned."""
        return cls.from_attributes(rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=sequence_id, **vars(core))

    @property
    def operation(self) -> str:
        """As `agl.Span.operation`."""
        return str(self.attributes.get(semconv.OPERATION_NAME, ""))


def _ended(span: ReadableSpan) -> ReadableSpan:
    """The span; one without times has those of now."""
    from opentelemetry.sdk.trace import ReadableSpan as SdkSpan

    if span.start_time is not None and span.end_time is not None:
        return span
    now = time.time_ns()
    return SdkSpan(
        span.name,
        span.get_span_context(),
        span.parent,
        span.resource,
        span.attributes,
        span.events,
        span.links,
        status=span.status,
        start_time=span.start_time or now,
        end_time=span.end_time or now,
    )


def without_root(spans: Sequence[agl_spans.Span]) -> list[agl_spans.Span]:
    """The spans without that of the whole attempt, which 0.3 did not have."""
    roots = {s.span_id for s in spans if s.parent_id is None and s.operation == semconv.INVOKE_AGENT}
    return [
        dataclasses.replace(s, parent_id=None) if s.parent_id in roots else s for s in spans if s.span_id not in roots
    ]


def numbered(spans: Sequence[agl_spans.Span]) -> list[Span]:
    """agl's spans as 0.3's, in order; a span that was stored with a sequence id keeps it."""
    return sorted((Span.of(s, i) for i, s in enumerate(spans, start=1)), key=lambda s: s.sequence_id)


def with_calls(spans: Sequence[agl_spans.Span], calls: Sequence[Call]) -> list[agl_spans.Span]:
    """The spans; those of sampled calls have the tokens and messages of their call added."""
    by_span = {call.span_id: call for call in calls if call.span_id}
    result = []
    for span in with_messages(spans, calls):
        call = by_span.get(span.span_id)
        if call is not None and span.operation == semconv.CHAT:
            tokens = {
                PROMPT_TOKEN_IDS: call.prompt_ids.tolist(),
                RESPONSE_TOKEN_IDS: call.response_ids.tolist(),
            }
            span = dataclasses.replace(span, attributes={**span.attributes, **tokens})
        result.append(span)
    return result


def resource_json(value: Any) -> Any:
    """`resource_to_json`, for a proxy's resource too: agl reads it as the `LLM` at the proxy's own address."""
    if isinstance(value, ProxyLLM):
        return {**resource_to_json(LLM(value.endpoint, value.model, None, value.sampling_parameters)), "proxy": True}
    return resource_to_json(value)


def resource_of_json(value: Mapping[str, Any]) -> Any:
    """The resource that `resource_json` wrote."""
    resource = resource_from_json(value)
    if isinstance(resource, LLM) and value.get("proxy"):
        return ProxyLLM(resource.endpoint, resource.model, None, resource.sampling_parameters)
    return resource


def version_id(name: str) -> str:
    """The store's id of a later version of the resources with that id."""
    return f"{name}#{secrets.token_hex(8)}"


def resources_name(stored_id: str) -> str:
    """The id of the resources of which `stored_id` is a version."""
    return stored_id.partition("#")[0]


def attempt_id(rollout_id: str, attempt: int) -> str:
    """0.3's id of an attempt."""
    return f"at-{rollout_id}-{attempt}"


def attempt_number(id: str) -> int:
    """The number, from 1, of the attempt with an id of `attempt_id`.

    Raises:
        ConfigError: another id.
    """
    tail = id.rpartition("-")[2]
    if not (id.startswith("at-") and tail.isdecimal()):
        raise ConfigError(f"{id!r} is not an attempt's id", hint="take it from rollout.attempt.attempt_id")
    return int(tail)

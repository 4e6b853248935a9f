"""The rollout that is running here and now, and the spans opened in it.

A `Scope` is one open span in one rollout. The innermost one is in a context variable. Frameworks often end a call in
another context than the one that began it, so nothing is ever reset by token: an ended scope is marked, and readers
step over ended scopes to the parent.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel
from opentelemetry.trace import INVALID_SPAN, Status, StatusCode, get_current_span, set_span_in_context

from agl import semconv
from agl.errors import ConfigError
from agl.mdp.selection import Selection
from agl.mdp.spans import Span, from_otel

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

log = logging.getLogger("agl")

_NAME = "agl"


@dataclass(eq=False)
class RolloutContext:
    """One attempt of a rollout, while it runs.

    Attributes:
        rollout_id, attempt: which.
        agent: the name for calls that no adapter names.
        selection: which agents go to the gateway.
        gateway_url: base URL of the gateway; None when nothing is routed (collect only).
        key: the attempt's own key for the gateway.
        capture_content: whether texts are recorded. prompts: whether what a call asks is recorded too, unless it is
            routed; the gateway records that.
        spans: finished spans, in the order in which they ended.
        ended: called with each finished span, in the thread that ended it.
        open: scopes that have not ended.
        closed: set at the end of the attempt (`close`); what ends later is dropped.
    """

    rollout_id: str
    attempt: int
    agent: str
    selection: Selection
    gateway_url: str | None = None
    key: str = ""
    capture_content: bool = True
    prompts: bool = False
    spans: MutableSequence[Span] = field(default_factory=list)
    ended: Callable[[Span], None] | None = None
    open: dict[Scope, bool] = field(default_factory=dict)
    closed: bool = False


class Scope:
    """An open span in a rollout: who is speaking, and whose child the next span will be."""

    __slots__ = (
        "__weakref__", "agent", "ended", "kind", "outer", "parent", "rollout", "span", "untrained", "visible",
        "wire_calls",
    )  # fmt: skip

    def __init__(
        self,
        rollout: RolloutContext,
        kind: str,
        agent: str,
        span: Any,
        parent: Scope | None,
        outer: Any,
        untrained: bool = False,
    ) -> None:
        self.rollout = rollout
        self.kind = kind
        self.agent = agent
        self.span = span
        self.parent = parent
        self.outer = outer
        """OpenTelemetry's current span when this one was opened, perhaps one of the user's own."""
        self.untrained = untrained
        """Whether calls made here stay with their own provider and are no transitions, whoever is selected."""
        self.ended = False
        self.visible = True
        """Whether OpenTelemetry has this span for its current one; the root of a whole process is ours alone."""
        self.wire_calls = 0

    def within(self, other: Scope) -> bool:
        """Whether this is `other` or lies in it."""
        scope: Scope | None = self
        while scope is not None and scope is not other:
            scope = scope.parent
        return scope is not None

    @property
    def traceparent(self) -> str:
        """W3C trace context of this span."""
        context = self.span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    @property
    def span_id(self) -> str:
        """Hex, 16 digits."""
        return f"{self.span.get_span_context().span_id:016x}"


_current: ContextVar[Scope | None] = ContextVar("agl_scope", default=None)
_of_process: Callable[[], Scope | None] | None = None
"""Gives the scope of every place in this process that lies in no other."""


def idle() -> bool:
    """Whether no rollout runs here. The whole cost of a hook that nothing asks for: a context variable is read."""
    return _current.get() is None and _of_process is None


def current() -> Scope | None:
    """The innermost open scope here; None outside a rollout."""
    scope = innermost()
    if scope is None and _of_process is not None:
        scope = _of_process()
    if scope is not None and scope.rollout.closed:
        return None
    return scope


def innermost() -> Scope | None:
    """The innermost open scope that was entered here, whole process or not, closed rollout or not."""
    scope = _current.get()
    while scope is not None and scope.ended:
        scope = scope.parent
    return scope


def whole_process(scope: Callable[[], Scope | None] | None) -> None:
    """Let what `scope()` gives be current wherever no other scope is, in every thread and task; None ends that."""
    global _of_process
    _of_process = scope


def has_process_scope() -> bool:
    """Whether the whole process runs in a rollout (`whole_process`)."""
    return _of_process is not None


def snapshot() -> Scope | None:
    """The scope that this context holds, open or ended, for `restore`."""
    return _current.get()


def restore(scope: Scope | None) -> None:
    """Make this context hold a `snapshot`, without OpenTelemetry's knowledge."""
    _current.set(scope)


def enclosing(kind: str) -> Scope | None:
    """The innermost open scope of one kind ("chat", "execute_tool", "invoke_agent")."""
    scope = current()
    while scope is not None and (scope.ended or scope.kind != kind):
        scope = scope.parent
    return scope


@functools.cache
def provider() -> TracerProvider:
    """agl's own tracer provider. It samples everything and cuts nothing, whatever the environment says; add span
    processors to it to see agl's spans elsewhere."""
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    unlimited = SpanLimits(
        max_span_attributes=SpanLimits.UNSET,
        max_events=SpanLimits.UNSET,
        max_links=SpanLimits.UNSET,
        max_attribute_length=SpanLimits.UNSET,
        max_span_attribute_length=SpanLimits.UNSET,
    )
    own = TracerProvider(sampler=ALWAYS_ON, span_limits=unlimited, shutdown_on_exit=False)
    # OTEL_SDK_DISABLED is meant for the user's telemetry; rewards and tool calls travel in these spans.
    own._disabled = False
    return own


@functools.cache
def _tracer() -> Tracer:
    return provider().get_tracer(_NAME)


def start(
    kind: str,
    name: str,
    *,
    agent: str | None = None,
    parent: Scope | None = None,
    attributes: Mapping[str, Any] | None = None,
    rollout: RolloutContext | None = None,
    untrained: bool = False,
) -> Scope | None:
    """Open a span and make it the current scope.

    Args:
        kind: `gen_ai.operation.name`. name: what follows it in the span's name.
        agent: who is speaking from here on; the parent's agent if None.
        parent: the scope it belongs to; the current one if None.
        attributes: OTel attribute values.
        rollout: opens a rollout's root span; otherwise it comes from the parent.
        untrained: as `untrained`; a child of such a scope is one too.

    Returns:
        The scope, or None outside a rollout.
    """
    if parent is None:
        # A rollout that a whole process runs in is not the parent of another one.
        parent = current() if rollout is None else innermost()
    if rollout is None:
        if parent is None or parent.rollout.closed:
            return None
        rollout = parent.rollout
    who = agent or (parent.agent if parent else rollout.agent)
    untrained = untrained or (parent is not None and parent.untrained)
    if untrained:
        attributes = {semconv.UNTRAINED: True, **(attributes or {})}
    context = set_span_in_context(parent.span, otel.Context()) if parent else otel.Context()
    span = _start_span(rollout, kind, name, who, context, attributes)
    scope = Scope(rollout, kind, who, span, parent, get_current_span(), untrained)
    rollout.open[scope] = True
    activate(scope)
    return scope


def _start_span(
    rollout: RolloutContext, kind: str, name: str, agent: str, context: Any, attributes: Mapping[str, Any] | None
) -> Any:
    return _tracer().start_span(
        f"{kind} {name}".strip(),
        context=context,
        attributes={
            semconv.OPERATION_NAME: kind,
            semconv.AGENT_NAME: agent,
            semconv.ROLLOUT_ID: rollout.rollout_id,
            semconv.ATTEMPT: rollout.attempt,
            **{k: v for k, v in (attributes or {}).items() if v is not None},
        },
    )


def root(rollout: RolloutContext, traceparent: str | None = None) -> Scope:
    """A rollout's root scope, current nowhere and unseen by OpenTelemetry, for `whole_process`.

    Args:
        traceparent: of the root that another process opened and will end; None opens it here.

    Raises:
        ValueError: `traceparent` is none.
    """
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    if traceparent is None:
        span = _start_span(rollout, semconv.INVOKE_AGENT, rollout.agent, rollout.agent, otel.Context(), None)
    else:
        _, trace_id, span_id, _ = traceparent.split("-")
        span = NonRecordingSpan(SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(1)))
    scope = Scope(rollout, semconv.INVOKE_AGENT, rollout.agent, span, None, INVALID_SPAN)
    scope.visible = False
    if traceparent is None:
        rollout.open[scope] = True
    return scope


def activate(scope: Scope) -> None:
    """Make `scope` the current one in this context, for OpenTelemetry too."""
    _current.set(scope)
    otel.attach(set_span_in_context(scope.span))


@contextlib.contextmanager
def inside(scope: Scope) -> Iterator[None]:
    """Make `scope` the current one for a block that ends in the context it began in, such as a thread's."""
    previous = _current.set(scope)
    attached = otel.attach(set_span_in_context(scope.span))
    try:
        yield
    finally:
        _current.reset(previous)
        otel.detach(attached)


def end(scope: Scope, *, error: BaseException | str | None = None, attributes: Mapping[str, Any] | None = None) -> None:
    """Close a scope, from any context. A second call does nothing.

    Args:
        error: recorded as an exception event and as the span's status.
        attributes: set before the span ends.
    """
    rollout = scope.rollout
    if not rollout.open.pop(scope, False):  # one operation, so that of two threads only one ends the span
        return
    scope.ended = True
    span = scope.span
    if attributes:
        span.set_attributes({k: v for k, v in attributes.items() if v is not None})
    if error is not None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        span.set_status(Status(StatusCode.ERROR, text))
        if isinstance(error, BaseException):
            span.set_attribute(semconv.ERROR_TYPE, type(error).__qualname__)
            span.record_exception(error)
    span.end()
    if rollout.closed:
        log.debug("span %s ended after its attempt (rollout %s)", span.name, rollout.rollout_id)
    else:
        finished = from_otel(span)
        rollout.spans.append(finished)
        if rollout.ended is not None:
            rollout.ended(finished)
    _step_back()


def _step_back() -> None:
    """Make the innermost open scope current here, and give OpenTelemetry back the span that it had before."""
    scope = _current.get()
    if scope is None or not scope.ended:
        return
    before = span = get_current_span()
    while scope is not None and scope.ended:
        if _is_ours(span):
            span = scope.outer
        scope = scope.parent
    _current.set(scope)
    if not span.is_recording():
        ours = scope is not None and scope.visible
        span = scope.span if ours and scope is not None else INVALID_SPAN if _is_ours(span) else span
    if span is not before:
        otel.attach(set_span_in_context(span))


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Within the block OpenTelemetry's current span is the user's own, as if we were not there: no propagator sends our
    ids to a third party."""
    span, scope = get_current_span(), _current.get()
    if not _is_ours(span):
        yield
        return
    while _is_ours(span) and scope is not None:
        span, scope = scope.outer, scope.parent
    attached = otel.attach(set_span_in_context(INVALID_SPAN if _is_ours(span) else span))
    try:
        yield
    finally:
        otel.detach(attached)


def _is_ours(span: Any) -> bool:
    scope = getattr(span, "instrumentation_scope", None)
    return scope is not None and scope.name == _NAME


def close(rollout: RolloutContext) -> None:
    """End an attempt: what is still open (a stream nobody read to its end) ends now, what comes later is dropped."""
    while (scope := next(reversed(rollout.open), None)) is not None:
        end(scope)
    rollout.closed = True


@contextlib.contextmanager
def span(kind: str, name: str, **kwargs: Any) -> Iterator[Scope | None]:
    """`start` and `end` around a block; an exception is recorded and goes on unchanged."""
    scope = start(kind, name, **kwargs)
    try:
        yield scope
    except BaseException as error:
        if scope is not None:
            end(scope, error=error)
        raise
    if scope is not None:
        end(scope)


@contextlib.contextmanager
def untrained(name: str) -> Iterator[Scope | None]:
    """A block outside of what is trained: its calls go to their own provider, whatever `agents=` says, and become no
    transitions. It is traced as an operation, by an agent of this name. For a judge, a user simulator, a check.

    A client that is pointed at the gateway (the `LLM` resource) is refused here with a `ConfigError`.
    """
    with span(semconv.OPERATION, name, agent=name, untrained=True) as scope:
        yield scope


def refuse_gateway(scope: Scope, url: object) -> None:
    """Refuse a request that an untrained block would send to the gateway, where it would be sampled and trained.

    Raises:
        ConfigError: `url` is the gateway's.
    """
    gateway = scope.rollout.gateway_url
    if gateway is not None and str(url).startswith(gateway):
        raise ConfigError(
            f"{scope.agent!r} runs outside of what is trained, but its client is pointed at the gateway",
            hint="give it an endpoint of its own, not the rollout's LLM resource",
            rollout=scope.rollout.rollout_id,
            attempt=scope.rollout.attempt,
            agent=scope.agent,
        )

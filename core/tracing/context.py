"""The rollout that runs in the current context, and the spans that are open in it.

A `Scope` is one open span of one rollout; a context variable holds the innermost one. Frameworks often end a call in
another context than the one that began it. So the variable is never reset by token: an ended scope is marked as ended,
and readers step over it to its parent.

OpenTelemetry's own current span is never set: it is the user's, and so are the parents of the user's spans.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Status, StatusCode

from agl import semconv
from agl.errors import ConfigError, described
from agl.mdp.order import next_number
from agl.mdp.selection import Selection
from agl.mdp.spans import Span
from agl.tracing import otel_sdk
from agl.tracing.system_prompts import SystemPrompts

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanContext

    from agl.tracing.open_span import EndedSpan, OpenSpan

log = logging.getLogger("agl")


@dataclass(eq=False)
class RolloutContext:
    """One attempt of a rollout, while it runs.

    Attributes:
        rollout_id, attempt: identify the attempt.
        agent: the agent of calls for which no adapter gives a name.
        selection: which agents are routed to the gateway, by the names that are known so far.
        gateway_url: base URL of the gateway; None when nothing is routed (collect only).
        key: this attempt's key for the gateway.
        capture_content: whether texts are recorded.
        prompts: whether the messages of requests that are not routed are recorded, too; the gateway records the others.
        recorder: (agent, environment) -> variables that lead a command's calls past who records them; None without one.
        system_prompts: what replaces the agents' system prompts; None when nothing is replaced.
        memory: searches the agent's memory; None without one.
        spans: finished spans, in the order in which they ended.
        on_span_end: called with each finished span, in the thread that ended it.
        open: scopes that have not ended.
        offered: agent -> the tools of its last request (`agl.tracing.offered_tools`).
        offered_names: without content, the names of the tools of all requests.
        refused: what only a main thread may do and was tried in the attempt (`agl.tracing.main_thread`).
        closed: set at the end of the attempt (`close`); spans that end later are dropped.
    """

    rollout_id: str
    attempt: int
    agent: str
    selection: Selection
    gateway_url: str | None = None
    key: str = ""
    capture_content: bool = True
    prompts: bool = False
    system_prompts: SystemPrompts | None = None
    recorder: Callable[[str, Mapping[str, str]], Mapping[str, str]] | None = None
    memory: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    spans: MutableSequence[Span] = field(default_factory=list)
    on_span_end: Callable[[Span], None] | None = None
    open: dict[Scope, bool] = field(default_factory=dict)
    offered: dict[str, Any] = field(default_factory=dict)
    offered_names: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    closed: bool = False


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Scope:
    """An open span in a rollout: it names the agent that acts, and is the parent of the next span.

    Attributes:
        untrained: whether calls made here go to their own provider and become no transitions, whatever agents are
            selected.
        wire_calls: requests of an SDK that were made in it.
        requested: when the last of them was made, on the monotonic clock, in seconds; 0 for none.
    """

    rollout: RolloutContext
    kind: str
    agent: str
    span: Any
    parent: Scope | None
    untrained: bool = False
    ended: bool = False
    wire_calls: int = 0
    requested: float = 0.0

    def within(self, other: Scope) -> bool:
        """Whether this scope is `other` or lies in it."""
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
_process_scope: Callable[[], Scope | None] | None = None
"""Returns the scope of all code in this process that runs in no other scope."""


def idle() -> bool:
    """Whether no rollout runs here. Reads one context variable: the whole cost of a patch outside a rollout."""
    return _current.get() is None and _process_scope is None


def current() -> Scope | None:
    """The innermost open scope in this context; None outside a rollout."""
    scope = innermost()
    if scope is None and _process_scope is not None:
        scope = _process_scope()
    if scope is not None and scope.rollout.closed:
        return None
    return scope


def innermost() -> Scope | None:
    """The innermost open scope of this context alone: without a whole process's scope, even of a closed rollout."""
    scope = _current.get()
    while scope is not None and scope.ended:
        scope = scope.parent
    return scope


def whole_process(scope: Callable[[], Scope | None] | None) -> None:
    """Make the result of `scope()` current wherever no other scope is, in every thread and task; None ends that."""
    global _process_scope
    _process_scope = scope


def has_process_scope() -> bool:
    """Whether the whole process runs in a rollout (`whole_process`)."""
    return _process_scope is not None


def snapshot() -> Scope | None:
    """The scope that this context holds, open or ended; for `restore`."""
    return _current.get()


def restore(scope: Scope | None) -> Scope | None:
    """Make this context hold a scope, such as that of a `snapshot`; the result is the one that it held before."""
    before = _current.get()
    _current.set(scope)
    return before


_ACTORS = (semconv.CHAT, semconv.EXECUTE_TOOL, semconv.INVOKE_AGENT)


def model_call() -> Scope | None:
    """The `chat` scope of the model call in which this code runs; None outside of one.

    An agent or a tool that runs within a model call makes calls of its own.
    """
    scope = current()
    while scope is not None and (scope.ended or scope.kind not in _ACTORS):
        scope = scope.parent
    return scope if scope is not None and scope.kind == semconv.CHAT else None


@functools.cache
def provider() -> TracerProvider:
    """agl's tracer provider, of the spans that `start` opens.

    Add span processors to it to export agl's spans elsewhere.
    """
    return otel_sdk.tracer_provider()


@functools.cache
def _open_span() -> type[OpenSpan]:
    """`OpenSpan`; OpenTelemetry's SDK is loaded with the first span."""
    otel_sdk.load()
    from agl.tracing.open_span import OpenSpan

    return OpenSpan


@functools.cache
def _ended_span() -> type[EndedSpan]:
    from agl.tracing.open_span import EndedSpan

    return EndedSpan


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
        kind: `gen_ai.operation.name`.
        name: the rest of the span's name.
        agent: the agent that acts in the scope; the parent's agent if None.
        parent: the enclosing scope; the current one if None.
        attributes: OTel attribute values.
        rollout: set to open the root span of this rollout; otherwise the parent's rollout.
        untrained: as in `untrained`; children of such a scope are untrained, too.

    Returns:
        The scope, or None outside a rollout.
    """
    if parent is None:
        # A whole process's rollout is not the parent of another rollout.
        parent = current() if rollout is None else innermost()
    if rollout is None:
        if parent is None or parent.rollout.closed:
            return None
        rollout = parent.rollout
    agent = agent or (parent.agent if parent else rollout.agent)
    known = rollout.selection.knowing((agent,))
    if known is not rollout.selection:  # so that no thread undoes what another has learned
        rollout.selection = known
    untrained = untrained or (parent is not None and parent.untrained)
    if untrained:
        attributes = {semconv.UNTRAINED: True, **(attributes or {})}
    span = _start_span(rollout, kind, name, agent, parent.span.get_span_context() if parent else None, attributes)
    scope = Scope(rollout, kind, agent, span, parent, untrained)
    rollout.open[scope] = True
    _current.set(scope)
    return scope


def _start_span(
    rollout: RolloutContext,
    kind: str,
    name: str,
    agent: str,
    parent: SpanContext | None,
    attributes: Mapping[str, Any] | None,
) -> OpenSpan:
    # Making these takes a while the first time, and the number is a time, too: when the span begins.
    span_type = _open_span()
    tracer_provider = provider()
    facts = {
        semconv.OPERATION_NAME: kind,
        semconv.AGENT_NAME: agent,
        semconv.ROLLOUT_ID: rollout.rollout_id,
        semconv.ATTEMPT: rollout.attempt,
        semconv.SEQUENCE: next_number(),
        **(attributes or {}),
    }
    return span_type(tracer_provider, f"{kind} {name}".strip(), parent, facts, content=rollout.capture_content)


def root(rollout: RolloutContext, traceparent: str | None = None, *, began: float | None = None) -> Scope:
    """A rollout's root scope for `whole_process`: current in no context.

    Args:
        rollout: the rollout of the process.
        traceparent: of the root span that another process opened and will end; None opens a root span here.
        began: when it began, by the monotonic clock; now if None.

    Raises:
        ValueError: `traceparent` is malformed.
    """
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    if traceparent is None:
        span: Any = _start_span(rollout, semconv.INVOKE_AGENT, rollout.agent, rollout.agent, None, None)
        if began is not None:
            span.begin_at(began)
    else:
        _, trace_id, span_id, _ = traceparent.split("-")
        span = NonRecordingSpan(SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(1)))
    scope = Scope(rollout, semconv.INVOKE_AGENT, rollout.agent, span, None)
    if traceparent is None:
        rollout.open[scope] = True
    return scope


@contextlib.contextmanager
def inside(scope: Scope) -> Iterator[None]:
    """Make `scope` the current one for a block that begins and ends in one context, such as a thread's."""
    previous = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(previous)


def end(scope: Scope, *, error: BaseException | str | None = None, attributes: Mapping[str, Any] | None = None) -> None:
    """End a scope, from any context. A second call does nothing.

    Args:
        scope: the scope to end.
        error: recorded as an exception event and as the span's status; its type alone without `capture_content`.
        attributes: set before the span ends.
    """
    rollout = scope.rollout
    if not rollout.open.pop(scope, False):  # atomic: of two threads, only one ends the span
        return
    scope.ended = True
    span = scope.span
    if attributes:
        span.set_attributes(attributes)
    if error is not None:
        if isinstance(error, BaseException):
            span.set_attribute(semconv.ERROR_TYPE, type(error).__qualname__)
        span.set_status(Status(StatusCode.ERROR, error if isinstance(error, str) else described(error)))
        if isinstance(error, BaseException):
            # Some exceptions have no message that can be had.
            with contextlib.suppress(Exception):
                span.record_exception(error)
    span.end()
    if rollout.closed:
        log.debug("span %s ended after its attempt (rollout %s)", span.name, rollout.rollout_id)
    else:
        finished = span.finished(rollout.rollout_id, rollout.attempt)
        rollout.spans.append(finished)
        if rollout.on_span_end is not None:
            rollout.on_span_end(finished)
    # A context may hold the scope for as long as a connection or a pooled thread lives.
    scope.span = _ended_span()(span)
    held = _current.get()
    if held is not None and held.ended:
        _current.set(innermost())


def close(rollout: RolloutContext) -> None:
    """End an attempt. Open scopes (such as a stream that was not read to its end) end now; later spans are dropped."""
    while (scope := next(reversed(rollout.open), None)) is not None:
        end(scope)
    rollout.closed = True


@contextlib.contextmanager
def span(kind: str, name: str, **kwargs: Any) -> Iterator[Scope | None]:
    """`start` and `end` around a block; an exception is recorded and re-raised unchanged."""
    scope = start(kind, name, **kwargs)
    with within(scope):
        yield scope


@contextlib.contextmanager
def within(
    scope: Scope | None, finish: Callable[[Scope, Any], None] | None = None, *, end: Callable[..., None] = end
) -> Iterator[Callable[[Any], None]]:
    """A block within a scope, which ends with it: with its error, or else by `finish(scope, result)`.

    The block calls the value with its result, where there is one; otherwise `end` ends the scope.
    """
    results: list[Any] = []
    try:
        yield results.append
    except BaseException as error:
        if scope is not None:
            end(scope, error=error)
        raise
    if scope is None:
        return
    if finish is not None and results:
        finish(scope, results[0])
    else:
        end(scope)


@contextlib.contextmanager
def untrained(name: str) -> Iterator[Scope | None]:
    """A block that is never trained, for a judge, a user simulator or a check.

    Its calls go to their own provider, whatever `agents=` says, and become no transitions. It is traced as an operation
    of an agent of this name. A client that points at the gateway (the `LLM` resource) is refused with a `ConfigError`.
    """
    with span(semconv.OPERATION, name, agent=name, untrained=True) as scope:
        yield scope


def refuse_gateway(scope: Scope, url: object) -> None:
    """Refuse a request from an untrained block to the gateway, where it would be sampled by the policy and trained.

    Raises:
        ConfigError: `url` is the gateway's.
    """
    gateway = scope.rollout.gateway_url
    if gateway is not None and str(url).startswith(gateway):
        raise ConfigError(
            f"{scope.agent!r} runs outside training, but its client points at the gateway",
            hint="give it a separate endpoint, not the rollout's LLM resource",
            rollout=scope.rollout.rollout_id,
            attempt=scope.rollout.attempt,
            agent=scope.agent,
        )

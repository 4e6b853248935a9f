"""0.3's tracers: switching one on switches on the adapters of every framework that the program uses."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from agl import semconv, tracing
from agl.agents.frameworks import adapters
from agl.errors import ConfigError
from agl.mdp.order import in_order
from agl.mdp.selection import select
from agl.tracing.context import RolloutContext
from agl_agentlightning import semconv as names
from agl_agentlightning import types as T
from agl_agentlightning.attributes import filter_and_unflatten_attributes, format_exception_attributes, get_tracer
from agl_agentlightning.lightning_store import LightningStore
from agl_agentlightning.missing import MissingClass
from agl_agentlightning.span_processor import LightningSpanProcessor

if TYPE_CHECKING:
    pass

__all__ = [
    "AgentOpsTracer",
    "DummySpanRecordingContext",
    "DummyTracer",
    "LightningSpanProcessor",
    "OtelTracer",
    "Tracer",
    "WeaveTracer",
    "clear_active_tracer",
    "get_active_tracer",
    "set_active_tracer",
]

_CLIENTS = ("openai", "anthropic")
"""Bare SDKs, traced wherever they are installed: a function may import them when it first runs."""


class Tracer:
    """0.3's interface over agl's spans.

    Every framework imported by the time it is switched on is traced, and so are bare `openai` and `anthropic` clients.
    Subclasses may override `init` and `teardown` and call `super()`.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.worker_id: int | None = None
        self._store: LightningStore | None = None
        self._switched: list[Any] = []
        self._on = False
        self._last: RolloutContext | None = None

    # -- what the trainer calls ----------------------------------------------------------------------------------
    @property
    def instrumented(self) -> bool:
        """Whether this tracer is on."""
        return getattr(self, "_on", False)

    def instrument(self, **_: Any) -> Tracer:
        """Switch on; a second call does nothing."""
        if not self.instrumented:
            self.init()
            self.init_worker(0)
        return self

    def uninstrument(self, **_: Any) -> None:
        """Switch off what `instrument` switched on."""
        if self.instrumented:
            self.teardown_worker(0)
            self.teardown()

    # -- 0.3's life cycle ----------------------------------------------------------------------------------------
    def init(self, *_: Any, **__: Any) -> None:
        """Switch the adapters on."""
        if self.instrumented:
            return
        self._on = True
        self._switched = []
        for name, adapter in adapters().items():
            used = importlib.util.find_spec(name) is not None if name in _CLIENTS else _imported(name, adapter)
            tracer = adapter() if used else None
            if tracer is not None and not getattr(tracer, "instrumented", False):
                tracer.instrument()
                self._switched.append(tracer)

    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        self.worker_id = worker_id
        self._store = store

    def teardown_worker(self, worker_id: int, *_: Any, **__: Any) -> None:
        self.worker_id = None

    def teardown(self, *_: Any, **__: Any) -> None:
        """Switch them off again."""
        self._on = False
        while self._switched:
            self._switched.pop().uninstrument()

    @contextlib.contextmanager
    def lifespan(self, store: LightningStore | None = None) -> Iterator[None]:
        """On inside the block."""
        self.init()
        self.init_worker(0, store)
        try:
            yield
        finally:
            self.teardown_worker(0)
            self.teardown()

    # -- a trace outside a trainer -------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncIterator[Tracer]:
        """Trace the block; nothing is sent to a gateway. The spans go to `get_last_trace`, and to the store if
        `rollout_id` is set."""
        number = T.attempt_number(attempt_id) if attempt_id else 1
        context = RolloutContext(
            rollout_id or f"trace-{uuid.uuid4().hex[:12]}", number, name or "agent", select(None), prompts=True
        )
        self._last = context
        outer = _tracing.set(self)
        try:
            with tracing.running(context):
                yield self
        finally:
            _tracing.reset(outer)
            target = store or self._store
            if target is not None and rollout_id is not None:
                await target.agl_store.add_spans(context.spans)

    def get_last_trace(self) -> list[T.Span]:
        """The spans of the latest `trace_context`, or of the attempt that is running here."""
        here = tracing.current()
        context = here.rollout if here is not None else self._last
        if context is None:
            return []
        return T.numbered(T.with_calls(in_order(context.spans), ()))

    def trace_run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function inside `trace_context`."""

        async def run() -> Any:
            async with self.trace_context(name=func.__name__):
                return func(*args, **kwargs)

        return asyncio.run(run())

    async def trace_run_async(self, func: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Run a coroutine function inside `trace_context`."""
        async with self.trace_context(name=func.__name__):
            return await func(*args, **kwargs)

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: T.TraceStatus | None = None,
    ) -> T.SpanCoreFields:
        """A span without a duration, in the rollout or the trace that runs here; outside of them it is not recorded.

        Spans with 0.3's names (`agl.compat.semconv`) become agl's rewards, messages, objects, exceptions and
        operations.
        """
        core = _core(name, attributes, timestamp, status)
        kind, translated = _translated(name, core.attributes)
        scope = tracing.start(kind, name, attributes=_recorded({**core.attributes, **translated}))
        if scope is not None:
            scope.span.update_name(name)
            error = (core.status.description or "") if core.status.status_code == "ERROR" else None
            if kind == semconv.EXCEPTION:
                error = ": ".join(str(core.attributes.get(f"exception.{k}", "")) for k in ("type", "message"))
            tracing.end(scope, error=error)
        return core

    @contextlib.contextmanager
    def operation_context(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Iterator[SpanRecorder]:
        """A span around the block, which the block records on; an exception is recorded and raised again."""
        kind, translated = _translated(name, attributes or {})
        scope = tracing.start(kind, name, attributes=_recorded({**(attributes or {}), **translated}))
        recorder = SpanRecorder(name, attributes, start_time)
        try:
            yield recorder
        except BaseException as error:
            recorder.record_exception(error)
            raise
        finally:
            recorder.finalize(end_time)
            if scope is not None:
                scope.span.update_name(name)
                failed = recorder.status.status_code == "ERROR"
                tracing.end(
                    scope,
                    error=(recorder.exception or recorder.status.description or "") if failed else None,
                    attributes=_recorded(recorder.attributes),
                )

    def start_as_current_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """OpenTelemetry's, for what 0.3's `trace_context` yielded: a span of the program around the block."""
        return get_tracer().start_as_current_span(name, *args, **kwargs)

    def start_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """OpenTelemetry's, which the caller ends."""
        return get_tracer().start_span(name, *args, **kwargs)

    def get_langchain_handler(self) -> Any:
        """None: LangChain is traced without a handler."""
        return None


class OtelTracer(Tracer):
    """As `Tracer`."""


class AgentOpsTracer(Tracer):
    """As `Tracer`; AgentOps itself is not used."""

    def __init__(self, *, agentops_managed: bool = True, instrument_managed: bool = True, daemon: bool = True) -> None:
        super().__init__()


class DummyTracer(Tracer):
    """Traces nothing but the bare clients' calls, which the trainer does; its own spans are recorded nowhere."""

    def init(self, *_: Any, **__: Any) -> None:
        self._on = True

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: T.TraceStatus | None = None,
    ) -> T.SpanCoreFields:
        """The span's fields."""
        return _core(name, attributes, timestamp, status)

    @contextlib.contextmanager
    def operation_context(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Iterator[SpanRecorder]:
        """As `Tracer.operation_context`."""
        recorder = SpanRecorder(name, attributes, start_time)
        try:
            yield recorder
        except BaseException as error:
            recorder.record_exception(error)
            raise
        finally:
            recorder.finalize(end_time)


class SpanRecorder:
    """0.3's `DummySpanRecordingContext`: what is recorded on a span while it is open."""

    def __init__(self, name: str, attributes: Mapping[str, Any] | None = None, start_time: float | None = None) -> None:
        self.name = name
        self.attributes = dict(attributes or {})
        self.start_time = time.time() if start_time is None else start_time
        self._steady = time.monotonic() - (0.0 if start_time is None else time.time() - start_time)
        self.end_time: float | None = None
        self.status = T.TraceStatus(status_code="OK")
        self.exception: BaseException | None = None

    def record_exception(self, exception: BaseException) -> None:
        """Add the exception's attributes; the span's status becomes an error."""
        self.exception = exception
        self.record_status("ERROR", str(exception))
        self.record_attributes(format_exception_attributes(exception))

    def record_attributes(self, attributes: Mapping[str, Any]) -> None:
        self.attributes.update(attributes)

    def record_status(self, status_code: T.StatusCode, description: str | None = None) -> None:
        self.status = T.TraceStatus(status_code=status_code, description=description)

    def finalize(self, end_time: float | None = None) -> None:
        """Set the end of the span; now if None, by the monotonic clock: the wall clock may have been set since."""
        self.end_time = self.start_time + time.monotonic() - self._steady if end_time is None else end_time

    def get_recorded_span(self) -> T.SpanCoreFields:
        """What was recorded; ValueError while the span is open."""
        if self.end_time is None:
            raise ValueError("the span has not ended yet")
        return T.SpanCoreFields(
            name=self.name,
            status=self.status,
            attributes=self.attributes,
            start_time=self.start_time,
            end_time=self.end_time,
        )


DummySpanRecordingContext = SpanRecorder


class WeaveTracer(MissingClass, instead="use OtelTracer; agl.tracing.provider() takes span processors"):
    """Weave's tracer."""


_active: Tracer | None = None
_tracing: ContextVar[Tracer | None] = ContextVar("agl_compat_tracer", default=None)
"""The tracer whose `trace_context` is open here; several may be open at once, in several tasks."""
_of_rollouts = Tracer()
"""Records in whichever rollout runs here."""


def get_active_tracer() -> Tracer | None:
    """The tracer that was set, or whose `trace_context` is open here, or that of the rollout that runs here."""
    return _active or _tracing.get() or (None if tracing.idle() else _of_rollouts)


def set_active_tracer(tracer: Tracer) -> None:
    """Make it the tracer of the whole process.

    Raises:
        ConfigError: there is one (a ValueError, as in 0.3).
    """
    global _active
    if _active is not None:
        raise ActiveTracerError("there is an active tracer already", hint="call clear_active_tracer() first")
    _active = tracer


def clear_active_tracer() -> None:
    """Undo `set_active_tracer`."""
    global _active
    _active = None


class ActiveTracerError(ConfigError, ValueError):
    """A second active tracer; 0.3 raised a ValueError."""


def _core(
    name: str, attributes: Mapping[str, Any] | None, timestamp: float | None, status: T.TraceStatus | None
) -> T.SpanCoreFields:
    now = time.time() if timestamp is None else timestamp
    status = status or T.TraceStatus(status_code="OK")
    return T.SpanCoreFields(name=name, status=status, attributes=dict(attributes or {}), start_time=now, end_time=now)


_KINDS = {
    names.AGL_MESSAGE: semconv.MESSAGE,
    names.AGL_OBJECT: semconv.OBJECT,
    names.AGL_EXCEPTION: semconv.EXCEPTION,
    names.AGL_OPERATION: semconv.OPERATION,
    names.AGL_ANNOTATION: "annotation",
}
"""0.3's name of a span -> agl's operation."""


_PREFIXES = tuple(
    getattr(names.LightningSpanAttributes, name).value
    for name in ("MESSAGE_BODY", "OBJECT_LITERAL", "OBJECT_JSON", "OPERATION_INPUT", "OPERATION_OUTPUT")
)
"""How 0.3's names of attributes that hold texts begin."""


def _recorded(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes; where no texts are recorded, those alone that are not texts."""
    scope = tracing.current()
    if scope is None or scope.rollout.capture_content:
        return attributes
    return {name: value for name, value in attributes.items() if not name.startswith(_PREFIXES)}


def _translated(name: str, attributes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """agl's operation for one of 0.3's spans, and the attributes that agl reads."""
    kind = _KINDS.get(name, semconv.OPERATION)
    key = names.LightningSpanAttributes
    if f"{key.REWARD.value}.0.value" in attributes:
        named = str(attributes.get(f"{key.REWARD.value}.0.name", "primary"))
        reward: dict[str, Any] = {
            semconv.REWARD_NAME: "reward" if named == "primary" else named,
            semconv.REWARD_VALUE: float(attributes[f"{key.REWARD.value}.0.value"]),
            semconv.REWARD_PRIMARY: True,
            semconv.REWARD_SOURCE: "emit",
            semconv.REWARD_LAST: True,
        }
        for link in filter_and_unflatten_attributes(attributes, key.LINK.value) or ():
            if link.get("key_match") == semconv.RESPONSE_ID:
                reward[semconv.REWARD_CALL] = link["value_match"]
        return semconv.REWARD, reward
    if kind == semconv.MESSAGE:
        return kind, {semconv.VALUE: attributes.get(key.MESSAGE_BODY.value)}
    if kind == semconv.OBJECT:
        literal = attributes.get(key.OBJECT_LITERAL.value)
        return kind, {semconv.VALUE: attributes.get(key.OBJECT_JSON.value, json.dumps(literal))}
    return kind, {}


def _imported(name: str, adapter: Any) -> bool:
    """Whether the program has imported the framework of an adapter."""
    imported = any(module in sys.modules for module in (name, *getattr(adapter, "modules", ())))
    return imported and getattr(adapter, "recognises", lambda: True)()

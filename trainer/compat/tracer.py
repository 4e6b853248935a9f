"""0.3's tracers: switching one on switches on the adapters of every framework that the program uses."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from agl import semconv, tracing
from agl.agents.registry import adapters
from agl.mdp.selection import select
from agl.tracing.context import RolloutContext
from agl.trainer.compat import types as T
from agl.trainer.compat.missing import MissingClass
from agl.trainer.compat.store import LightningStore

__all__ = [
    "AgentOpsTracer",
    "DummyTracer",
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
        self.worker_id, self._store = worker_id, store

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
        before = get_active_tracer()
        set_active_tracer(self)
        try:
            with tracing.running(context):
                yield self
        finally:
            set_active_tracer(before)
            target = store or self._store
            if target is not None and rollout_id is not None:
                await target.agl_store.add_spans(context.spans)

    def get_last_trace(self) -> list[T.Span]:
        """The spans of the latest `trace_context`, or of the attempt that is running here."""
        here = tracing.current()
        context = here.rollout if here is not None else self._last
        if context is None:
            return []
        return T.numbered(T.with_calls(sorted(context.spans, key=lambda s: s.start), ()))

    async def trace_run_async(self, func: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Run a coroutine function inside `trace_context`."""
        async with self.trace_context(name=func.__name__):
            return await func(*args, **kwargs)

    def create_span(
        self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: float | None = None, status: Any = None
    ) -> None:
        """An `operation` span without a duration."""
        scope = tracing.start(semconv.OPERATION, name, attributes=attributes)
        if scope is not None:
            tracing.end(scope)

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
    """Traces nothing but the bare clients' calls, which the trainer does."""

    def init(self, *_: Any, **__: Any) -> None:
        self._on = True


class WeaveTracer(MissingClass, instead="use OtelTracer; agl.tracing.provider() takes span processors"):
    """Weave's tracer."""


_active: Tracer | None = None


def get_active_tracer() -> Tracer | None:
    """The tracer whose `trace_context` is open."""
    return _active


def set_active_tracer(tracer: Tracer | None) -> None:
    global _active
    _active = tracer


def clear_active_tracer() -> None:
    set_active_tracer(None)


def _imported(name: str, adapter: Any) -> bool:
    """Whether the program has imported the framework of an adapter."""
    imported = any(module in sys.modules for module in (name, *getattr(adapter, "modules", ())))
    return imported and getattr(adapter, "recognises", lambda: True)()

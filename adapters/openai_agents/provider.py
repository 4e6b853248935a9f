"""A trace provider that keeps the adapter's hooks on where the user has switched the SDK's tracing off.

Without it `set_tracing_disabled(True)`, which users without an OpenAI key set, would also switch off agent names.
Traces and spans of the user's provider go to the user's processors, unchanged. Those that it refuses to make inside a
rollout are made by a second provider that has only the adapter's processor. The SDK's own provider, with its exporter,
is made when the program first needs it, as without agl.
"""

from __future__ import annotations

import threading
from typing import Any

from agents.tracing import Span, Trace, TracingProcessor, get_trace_provider, processors, set_trace_provider, setup
from agents.tracing.provider import DefaultTraceProvider, TraceProvider

from agl import tracing

_NOOP = "no-op"


class Provider(DefaultTraceProvider):
    """The user's provider, and a second one for what it refuses.

    At exit the SDK gives only providers of its own class a time limit, which is passed on.
    """

    def __init__(self, users: TraceProvider | None, processor: TracingProcessor) -> None:
        self.known = users
        """The user's provider; None until it is made."""
        self.processor = processor
        self._making = threading.Lock()
        self._second = DefaultTraceProvider()
        self._second.set_disabled(False)
        self._second.register_processor(processor)
        self._hidden: set[str] = set()
        """Ids of the second provider's traces and spans, which the user's processors must not get."""

    @property
    def users(self) -> TraceProvider:
        if self.known is None:
            with self._making:
                if self.known is None:
                    made = DefaultTraceProvider()
                    made.register_processor(processors.default_processor())
                    made.register_processor(self.processor)
                    self.known = made
        return self.known

    @property
    def _multi_processor(self) -> Any:  # type: ignore[override]
        users: Any = self.users
        return users._multi_processor

    def create_trace(self, *args: Any, **kwargs: Any) -> Trace:
        trace = self.users.create_trace(*args, **kwargs)
        if trace.trace_id != _NOOP or tracing.current() is None:
            return trace
        return self.hidden_trace(*args, **kwargs | {"disabled": False, "trace_id": None})

    def hidden_trace(self, *args: Any, **kwargs: Any) -> Trace:
        """A trace of the second provider. While it is the current one, spans are, too."""
        hidden = self._second.create_trace(*args, **kwargs)
        self._hidden.add(hidden.trace_id)
        return hidden

    def create_span(
        self, span_data: Any, span_id: str | None = None, parent: Any = None, disabled: bool = False
    ) -> Span[Any]:
        if not self._hidden and tracing.idle():
            return self.users.create_span(span_data, span_id, parent, disabled)
        around = [a for a in (parent,) if a is not None] or [self.get_current_span(), self.get_current_trace()]
        ids = {id for a in around if a is not None for id in (a.trace_id, getattr(a, "span_id", None))}
        if not ids & self._hidden:
            span = self.users.create_span(span_data, span_id, parent, disabled)
            if span.span_id != _NOOP or tracing.current() is None or self.get_current_trace() is None:
                return span
        hidden = self._second.create_span(span_data, None if span_id == _NOOP else span_id, parent, False)
        if hidden.span_id != _NOOP:
            self._hidden.add(hidden.span_id)
        return hidden

    def stay(self) -> None:
        """Come in front again, if the program has set a provider of its own since."""
        users = get_trace_provider()
        if users is not self:
            if users is not self.known:
                users.register_processor(self.processor)
            self.known = users
            set_trace_provider(self)

    def forget(self, id: str) -> None:
        """Forget the id of a trace or a span that has ended."""
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

    def shutdown(self, timeout: float | None = None) -> None:
        if isinstance(self.known, DefaultTraceProvider):
            self.known.shutdown(timeout)
        elif self.known is not None:
            self.known.shutdown()


def install(processor: TracingProcessor) -> Provider:
    """Add `processor` to the user's processors, and a `Provider` in front of the user's provider."""
    users = setup.GLOBAL_TRACE_PROVIDER
    if users is not None:
        users.register_processor(processor)
    provider = Provider(users, processor)
    set_trace_provider(provider)
    return provider


def uninstall(provider: Provider) -> None:
    """Undo `install`."""
    if get_trace_provider() is provider:
        set_trace_provider(provider.known)  # type: ignore[arg-type]
    # There is no public way to remove one processor; in a provider of a user's class it stays, idle.
    users_processors = getattr(provider.known, "_multi_processor", None)
    if users_processors is not None:
        users_processors.set_processors([p for p in users_processors._processors if p is not provider.processor])

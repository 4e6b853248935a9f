"""Traces a program without code: switches adapters on as their frameworks are imported, and sends spans as they end.

Under `agl run` the attempt is passed by environment. Otherwise (`opentelemetry-instrument python my_agent.py`) the
process is a separate rollout, in the store that AGL_STORE names.

Invariant: nothing here breaks the program; a failure is reported in one line on stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import importlib
import json
import os
import sys
import threading
import time
import urllib.parse
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from agl import semconv, tracing
from agl.agents.frameworks import adapters, switch_on
from agl.agents.prompts import load_prompts, replacements
from agl.errors import described
from agl.extras import install_line
from agl.mdp.selection import select
from agl.mdp.spans import Span, without_texts
from agl.texts import printable
from agl.tracing import otlp
from agl.tracing.batches import text_bytes
from agl.tracing.exporter import BackgroundSpanExporter, SpanSink
from agl.tracing.import_hooks import when_imported
from agl.tracing.propagation import AttemptEnvironment, from_environment
from agl.tracing.threads import carried_across_threads

SEND_SECONDS = 10.0
KEPT_SPANS = 1000
KEPT_BYTES = 8 * 1024 * 1024
"""Finished spans of the process that adapters can look up, and the bytes of the texts that they still have."""
TRY_LATER = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses after which the same request can succeed."""


class Instrumentor:
    """The entry point `opentelemetry_instrumentor`: switches every adapter on as its framework is imported."""

    def instrument(self, **_: Any) -> None:
        """Start tracing this process. Idempotent."""
        begin()

    def uninstrument(self, **_: Any) -> None:
        """Stop tracing; the program continues."""
        tracing.whole_process(None)


_program: _Program | None = None


def begin() -> None:
    """Trace this process from here on. Idempotent; never raises."""
    global _program
    if _program is not None:
        return
    try:
        _program = _Program(from_environment())
        _program.begin()
    except Exception as error:
        _report(f"this program is not traced: {error}")


class _Program:
    """This process, as an attempt of a rollout or a part of one. Its root scope is made on first use."""

    def __init__(self, attempt: AttemptEnvironment | None) -> None:
        self.attempt = attempt
        self.began = time.monotonic()
        self.error: BaseException | None = None
        self._lock = threading.RLock()
        self._root: tracing.Scope | None = None
        self.exporter = BackgroundSpanExporter(
            self._open_sink, lambda why: _report(f"spans of this program are lost: {why}")
        )
        if attempt is None:
            self.rollout = tracing.RolloutContext(f"ro-{uuid.uuid4().hex[:12]}", 1, "agent", select())
            self.rollout.capture_content = os.environ.get("AGL_CAPTURE_CONTENT", "1") != "0"
        else:
            self.rollout = tracing.RolloutContext(
                attempt.rollout_id,
                attempt.attempt,
                attempt.agent,
                select(attempt.agents),
                attempt.gateway_url,
                attempt.key,
                attempt.capture_content,
            )
            if attempt.prompts is not None:
                self.rollout.system_prompts = replacements(load_prompts(attempt.prompts))
        self.rollout.prompts = True
        self.rollout.spans = RecentSpans()
        self.rollout.on_span_end = self.exporter.put

    def begin(self) -> None:
        if self.attempt is not None:
            self.attempt.restore(os.environ)
        tracing.whole_process(self.root)
        self._threads = carried_across_threads()
        self._threads.__enter__()
        os.register_at_fork(after_in_child=self._after_fork)
        self._excepthook = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._exit)
        _call_before_process_ends(self.exporter.flush)
        disabled = {n.strip() for n in os.environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")}
        for name, tracer in adapters().items():
            if f"agl_{name}" not in disabled:
                when_imported(tuple(getattr(tracer, "modules", ())), lambda _, t=tracer: switch_on(t, _report))

    def root(self) -> tracing.Scope:
        if self._root is None:
            with self._lock:
                if self._root is None:
                    if self.attempt is None:
                        path = Path(sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python")
                        self.rollout.agent = (path.parent.name if path.stem == "__main__" else path.stem) or "python"
                    self._root = tracing.root(
                        self.rollout, self.attempt.traceparent if self.attempt else None, began=self.began
                    )
        return self._root

    def _open_sink(self) -> SpanSink:
        if self.attempt is not None:
            return _HttpSink(self.attempt)
        try:
            # The store belongs to the trainer, which core does not import and which may not be installed.
            collect = importlib.import_module("agl.trainer.store.collect")
            command = [Path(sys.executable).name, *sys.orig_argv[1:]]
            return collect.StoreSink(self.rollout, command, self.began)
        except ImportError as error:
            raise RuntimeError(
                f"the store needs {error.name}; {install_line('local')}, or run the program with agl run"
            ) from error

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        self.error = error
        if self.attempt is not None or self._root is not None:
            try:
                scope = tracing.start(semconv.EXCEPTION, kind.__name__, parent=self.root())
                if scope is not None:
                    tracing.end(scope, error=error)
            except Exception as raised:
                _report(f"an exception was not recorded: {raised}")
        self._excepthook(kind, error, traceback)

    def _exit(self) -> None:
        if self._root is None:
            return
        try:
            for scope in reversed([s for s in self.rollout.open if s is not self._root]):
                tracing.end(scope)
            tracing.end(self._root, error=self.error)
            tracing.close(self.rollout)
            error = self.error
            content = self.rollout.capture_content
            self.exporter.finish(None if error is None else described(error, content=content))
        except Exception as raised:
            _report(f"spans of this program are lost: {type(raised).__name__}: {raised}")

    def _after_fork(self) -> None:
        """Open scopes belong to the parent process, which ends them; spans made here still lie within them."""
        self._lock = threading.RLock()
        self.rollout.open = {}
        # With a lock of this process: a thread of the parent may hold the other one.
        self.rollout.spans = RecentSpans(self.rollout.spans)


class RecentSpans(deque[Span]):
    """The last finished spans. Beyond `KEPT_BYTES`, the oldest are kept without their texts."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        super().__init__(maxlen=KEPT_SPANS)
        self._lock = threading.Lock()
        self._bytes = 0
        self._whole: deque[int] = deque()
        """The sizes of the newest spans: those that still have their texts."""
        for span in spans:
            self.append(span)

    def append(self, span: Span) -> None:
        """Add a span."""
        with self._lock:
            super().append(span)
            self._whole.append(text_bytes(span))
            self._bytes += self._whole[-1]
            while self._bytes > KEPT_BYTES or len(self._whole) > KEPT_SPANS:
                oldest = len(self) - len(self._whole)
                self._bytes -= self._whole.popleft()
                if oldest >= 0:
                    self[oldest] = without_texts(self[oldest])


class _HttpSink:
    """Posts spans to `agl run`."""

    def __init__(self, attempt: AttemptEnvironment) -> None:
        url = urllib.parse.urlsplit(attempt.spans_url)
        self._host = url.hostname or ""
        self._port = url.port
        self._path = url.path
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {attempt.spans_key}"}

    def send(self, spans: Sequence[Span]) -> None:
        # Not urllib: it would use the environment's proxies, even for a loopback address.
        connection = http.client.HTTPConnection(self._host, self._port, timeout=SEND_SECONDS)
        try:
            connection.request("POST", self._path, json.dumps(otlp.encode(spans)), self._headers)
            response = connection.getresponse()
            response.read()
            if response.status in TRY_LATER:
                raise ConnectionError(f"agl run answered {response.status} {response.reason}")
            if response.status != 200:
                raise RuntimeError(f"agl run answered {response.status} {response.reason}")
        finally:
            connection.close()

    def finish(self, error: str | None) -> None:
        """`agl run` sees the program's end itself."""


def _call_before_process_ends(flush: Callable[[], object]) -> None:
    """Call `flush` before what ends a process without `atexit`: a forked child's `os._exit`, another program."""
    for name in ("_exit", "execv", "execve"):
        setattr(os, name, _after(flush, getattr(os, name)))


def _after(first: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            first()
        return function(*args, **kwargs)

    return both


def _report(text: str) -> None:
    try:
        print(f"agl: {printable(' '.join(text.split()))}", file=sys.stderr)
    except Exception:
        pass  # there is no stderr

"""Run a program as a user does who traces it with OpenTelemetry: `python own_tracing.py SPANS.jsonl PROGRAM.py`.

A provider of the user's own exports to a file. Everything that is installed and instruments itself is on: all
instrumentors that are not agl's (openinference's, for example), and the frameworks' own tracing with its processors.
"""

from __future__ import annotations

import contextlib
import json
import pkgutil
import runpy
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

LEAVE = ("asgi", "fastapi", "system_metrics", "sqlalchemy", "sqlite3", "logging")
"""Instrumentors that are not about agents."""

PROCESSORS = {
    "pydantic_ai": "openinference.instrumentation.pydantic_ai:OpenInferenceSpanProcessor",
    "agent_framework": "openinference.instrumentation.agent_framework:AgentFrameworkToOpenInferenceProcessor",
}
"""For the own tracing of the framework that a program imports."""


class ToFile(SpanExporter):
    """One line of JSON for each span."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file.open("w"), threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            for span in spans:
                parent = span.parent and f"{span.parent.span_id:016x}"
                facts: dict[str, Any] = {
                    "id": f"{span.context.span_id:016x}", "parent": parent, "name": span.name,
                    "attributes": dict(span.attributes or {}), "status": span.status.status_code.name,
                }  # fmt: skip
                self._file.write(json.dumps(facts, default=list) + "\n")
            self._file.flush()
        return SpanExportResult.SUCCESS


def main() -> None:
    spans, program, *rest = sys.argv[1:]
    text, provider = Path(program).read_text(), TracerProvider()
    for framework, name in PROCESSORS.items():
        if framework in text:
            with contextlib.suppress(ImportError):  # not installed
                provider.add_span_processor(pkgutil.resolve_name(name)())
    provider.add_span_processor(SimpleSpanProcessor(ToFile(Path(spans))))
    trace.set_tracer_provider(provider)
    for entry in entry_points(group="opentelemetry_instrumentor"):
        if not entry.value.startswith("agl.") and entry.name not in LEAVE:
            entry.load()().instrument(tracer_provider=provider)
    if "pydantic_ai" in text:
        from pydantic_ai import Agent

        Agent.instrument_all()
    sys.argv = [program, *rest]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()

"""A trace processor of the user's own in place of the SDK's: it makes OpenTelemetry spans, and counts what it saw."""

import asyncio
from collections import Counter

from agents import Agent, Runner, Span, Trace, function_tool, set_trace_processors, trace
from agents.tracing import TracingProcessor
from opentelemetry import trace as otel

tracer = otel.get_tracer("agents")


class ToOpenTelemetry(TracingProcessor):
    def __init__(self) -> None:
        self.open: dict[str, otel.Span] = {}
        self.ended: Counter[str] = Counter()

    def _start(self, id: str, parent: str | None, name: str) -> None:
        above = otel.set_span_in_context(self.open[parent]) if parent in self.open else None
        self.open[id] = tracer.start_span(name, context=above)

    def on_trace_start(self, trace: Trace) -> None:
        self._start(trace.trace_id, None, trace.name)

    def on_trace_end(self, trace: Trace) -> None:
        self.open.pop(trace.trace_id).end()

    def on_span_start(self, span: Span) -> None:
        self._start(span.span_id, span.parent_id or span.trace_id, span.span_data.type)

    def on_span_end(self, span: Span) -> None:
        self.ended[span.span_data.type] += 1
        self.open.pop(span.span_id).end()

    def shutdown(self) -> None:
        print("shut down with", len(self.open), "open")

    def force_flush(self) -> None: ...


@function_tool
async def weigh(parcel: str) -> str:
    """Weigh a parcel."""
    return f"{parcel}: 3 kg"


clerk = Agent(name="Postal clerk", instructions="You tell what parcels cost.", tools=[weigh])


async def main() -> None:
    with trace("Post office", group_id="counter-1"):
        for parcel in ("A", "B"):
            print((await Runner.run(clerk, f"What does parcel {parcel} cost?")).final_output)


processor = ToOpenTelemetry()
set_trace_processors([processor])
asyncio.run(main())
print(sorted(processor.ended.items()))

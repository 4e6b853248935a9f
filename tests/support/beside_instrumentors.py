"""A process with somebody else's instrumentor and ours, switched on once each; prints what both told, as JSON.

    python tests/support/beside_instrumentors.py SUBJECT MODULE:INSTRUMENTOR theirs|ours

The last says which is switched on first. Many instrumentors leave something behind when they are switched off, so that
what theirs tells without us is seen with ours off.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from all_subjects import SUBJECTS
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agl import semconv, tracing
from agl.mdp.selection import select
from agl.testing.provider import Provider, serve
from agl.testing.subject import Subject, uses_add
from agl.tracing.context import RolloutContext

WAYS = ("invoke", "stream", "ainvoke", "astream")
LOOP = asyncio.new_event_loop()
"""One for all, because LangChain keeps its async clients, whose connections do not outlive their loop."""


def main(name: str, instrumentor: str, first: str) -> dict[str, Any]:
    """Way -> what was told with theirs alone, with both outside a rollout, and with both in one."""
    [subject] = [s for s in SUBJECTS if s.name == name]
    exporter, users = InMemorySpanExporter(), TracerProvider()
    users.add_span_processor(SimpleSpanProcessor(exporter))
    module, _, cls = instrumentor.partition(":")
    theirs, ours = getattr(importlib.import_module(module), cls)(), subject.tracer()

    def told() -> list[str]:
        names = sorted(span.name for span in exporter.get_finished_spans())
        exporter.clear()
        return names

    def alone(provider: Provider) -> dict[str, Any]:
        return {way: do(subject, way, provider.url) and told() for way in WAYS}

    def together(provider: Provider) -> dict[str, Any]:
        outside = {way: do(subject, way, provider.url) and told() for way in WAYS}
        leaked = [seen.text for seen in provider.seen if "agl" in seen.text]
        inside = {way: in_rollout(subject, way, provider) | {"theirs": told()} for way in WAYS}
        return {"outside": outside, "inside": inside, "leaked": leaked}

    with serve(uses_add()) as provider:
        if first == "ours":
            ours.instrument()
        theirs.instrument(tracer_provider=users, skip_dep_check=True)
        if first == "theirs":
            found = {"alone": alone(provider)}
            provider.seen.clear()
            before = subject.changed()
            ours.instrument()
        else:
            found, before = {}, None
        found |= together(provider)
        ours.uninstrument()
        found["restored"] = before is None or subject.changed() == before
        return {"alone": alone(provider)} | found


def do(subject: Subject, way: str, url: str) -> str:
    run: Callable[[str], Any] = getattr(subject.agent(url, "solver"), way)
    asked = run("what is 2+3?")
    answer = LOOP.run_until_complete(asked) if way in subject.async_ways else asked
    assert answer == "sum 5", answer
    return answer


def in_rollout(subject: Subject, way: str, provider: Provider) -> dict[str, Any]:
    provider.seen.clear()
    rollout = RolloutContext("ro", 1, "solver", select(None), provider.root, "agl-key")
    with tracing.running(rollout):
        do(subject, way, "http://provider.invalid/v1")
    chats = [span for span in rollout.spans if span.operation == semconv.CHAT]
    return {
        "chats": [span.span_id for span in chats],
        "wire": [seen.traceparent_span for seen in provider.seen],
        "wire_calls": [span.attributes[semconv.WIRE_CALLS] for span in chats],
        "statuses": sorted({span.status for span in rollout.spans}),
        "kinds": sorted({span.operation for span in rollout.spans}),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

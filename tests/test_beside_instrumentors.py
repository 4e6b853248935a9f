"""Beside an OpenTelemetry set-up that is there already: its spans stay what they were, and ours are not doubled."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from all_subjects import SUBJECTS
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from provider import Provider, serve
from subjects import Subject, uses_add

from agl import semconv, tracing
from agl.selection import select
from agl.tracing import RolloutContext

SETUPS = {
    "traceloop-openai": ("openai", "opentelemetry.instrumentation.openai:OpenAIInstrumentor"),
    "traceloop-anthropic": ("anthropic", "opentelemetry.instrumentation.anthropic:AnthropicInstrumentor"),
    "traceloop-openai-under-langchain": ("langchain", "opentelemetry.instrumentation.openai:OpenAIInstrumentor"),
    "openinference-openai": ("openai", "openinference.instrumentation.openai:OpenAIInstrumentor"),
    "openinference-responses": ("openai_responses", "openinference.instrumentation.openai:OpenAIInstrumentor"),
    "openinference-anthropic": ("anthropic", "openinference.instrumentation.anthropic:AnthropicInstrumentor"),
    "openinference-langchain": ("langchain", "openinference.instrumentation.langchain:LangChainInstrumentor"),
    "openinference-agents": ("openai_agents", "openinference.instrumentation.openai_agents:OpenAIAgentsInstrumentor"),
    "traceloop-langchain": ("langchain", "opentelemetry.instrumentation.langchain:LangchainInstrumentor"),
}
"""Name -> subject, instrumentor."""

ONCE = ("traceloop-langchain",)
"""Those that, with us or without, make fewer spans once they were switched off and on again."""

ASK = "what is 2+3?"


def instrumentor(name: str) -> Any:
    module, _, cls = SETUPS[name][1].partition(":")
    return getattr(pytest.importorskip(module, exc_type=ImportError), cls)()


def subject_of(name: str) -> Subject:
    found = [s for s in SUBJECTS if s.name == SETUPS[name][0]]
    if not found:
        pytest.skip(f"{SETUPS[name][0]} is not installed")
    return found[0]


def switch_on(name: str) -> tuple[InMemorySpanExporter, Any]:
    """The user's instrumentation: what it exports, and the instrumentor."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    other = instrumentor(name)
    other.instrument(tracer_provider=provider, skip_dep_check=True)
    return exporter, other


switched_on = functools.cache(switch_on)


@contextmanager
def theirs(name: str) -> Iterator[InMemorySpanExporter]:
    """The user's instrumentation, with what it exports."""
    if name in ONCE:
        exporter, _ = switched_on(name)
        exporter.clear()
        yield exporter
        return
    exporter, other = switch_on(name)
    try:
        yield exporter
    finally:
        other.uninstrument()


@contextmanager
def ours(subject: Subject) -> Iterator[None]:
    with subject.tracer():
        yield


def do(subject: Subject, way: str, url: str) -> str:
    run: Callable[[str], Any] = getattr(subject.agent(url, "solver"), way)
    return asyncio.run(run(ASK)) if way in subject.async_ways else run(ASK)


def names(exporter: InMemorySpanExporter) -> list[str]:
    return sorted(span.name for span in exporter.get_finished_spans())


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
@pytest.mark.parametrize("first", ["theirs", "ours"])
@pytest.mark.parametrize("setup", SETUPS)
def test_both_tell_every_call_once(setup: str, first: str, way: str, provider: Provider) -> None:
    subject = subject_of(setup)
    if first == "ours" and setup in ONCE:
        pytest.skip("it can be switched on once only")
    with theirs(setup) as alone:
        assert do(subject, way, provider.url) == "sum 5"
        expected = names(alone)
    assert expected
    provider.seen.clear()
    rollout = RolloutContext("ro", 1, "solver", select(None), provider.root, "agl-key")
    before = subject.changed()
    with ExitStack() as stack:
        if first == "ours":
            stack.enter_context(ours(subject))
        together = stack.enter_context(theirs(setup))
        if first == "theirs":
            stack.enter_context(ours(subject))
        with tracing.running(rollout):
            assert do(subject, way, "http://provider.invalid/v1") == "sum 5"
        told = names(together)
    assert told == expected
    assert subject.changed() == before
    chats = [s for s in rollout.spans if s.operation == semconv.CHAT]
    assert [s.span_id for s in chats] == [seen.traceparent_span for seen in provider.seen]
    assert len(chats) == 2
    assert {s.attributes[semconv.WIRE_CALLS] for s in chats} == {1}
    assert {s.status for s in rollout.spans} == {"unset"}
    assert not {s.name for s in rollout.spans} - {s.name for s in rollout.spans if semconv.ROLLOUT_ID in s.attributes}


@pytest.mark.parametrize("setup", SETUPS)
def test_outside_a_rollout_theirs_is_as_without_us(setup: str, provider: Provider) -> None:
    subject = subject_of(setup)
    with theirs(setup) as alone:
        do(subject, "invoke", provider.url)
        expected = names(alone)
    with theirs(setup) as together, ours(subject):
        do(subject, "invoke", provider.url)
        assert names(together) == expected
    assert not [seen for seen in provider.seen if "agl" in seen.text]

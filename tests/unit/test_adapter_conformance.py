"""What every adapter must do, one suite over all of them (`all_subjects.SUBJECTS`), or over others:

pytest tests/unit/test_adapter_conformance.py --subject my_subject.py:MyFramework
"""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from all_subjects import SUBJECTS, chosen
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from provider import Provider, Reply, Seen, last_tool_call_id, serve
from subjects import KEY, NO_NUMBERS, Subject, ToolFailed, uses_add

import agl
from agl import semconv, tracing
from agl.agents import registry as plugins
from agl.agents.agent import Outcome, RolloutInfo
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.tracing.context import RolloutContext

ASK = "what is 2+3?"
capability = pytest.mark.capability


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    needs = [mark.kwargs.get("needs") for mark in metafunc.definition.iter_markers("capability")]
    subjects = [
        subject
        for subject in chosen(metafunc.config.getoption("subject"))
        if any(need is None or getattr(subject, need) for need in needs)
    ]
    if "way" in metafunc.fixturenames:
        each = [
            pytest.param(s, way, id=f"{s.name}-{way}", marks=pytest.mark.full if i else ())
            for s in subjects
            for i, way in enumerate((*s.ways, *s.async_ways))
        ]
        metafunc.parametrize(("subject", "way"), each)
    else:
        metafunc.parametrize("subject", subjects, ids=[s.name for s in subjects])


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


@pytest.fixture
def gateway() -> Iterator[Provider]:
    with serve(uses_add()) as server:
        yield server


def context(subject: Subject, gateway: Provider | None = None, *, agents: Any = None, id: str = "ro") -> RolloutContext:
    outer = "outer" if subject.names_agents else "solver"
    return RolloutContext(id, 1, outer, select(agents), gateway.root if gateway else None, "agl-key")


def do(subject: Subject, way: str, agent: Any, question: str = ASK) -> str:
    if way in subject.ways:
        return getattr(agent, way)(question)
    return asyncio.run(getattr(agent, way)(question))


def of(rollout: RolloutContext, operation: str) -> list[Span]:
    return [s for s in rollout.spans if s.operation == operation]


@capability("its answer's id and finish reason are recorded", gap="response_facts")
@capability("every model call is a span, joined to its request by id", by_way=True)
def test_every_call_has_a_chat_span_joined_to_the_wire_by_id(
    subject: Subject, way: str, provider: Provider, gateway: Provider
) -> None:
    agent = subject.agent(provider.url, "solver")
    with subject.tracer(), tracing.running(rollout := context(subject, gateway)):
        assert do(subject, way, agent) == "sum 5"
    assert provider.seen == []
    chats = of(rollout, semconv.CHAT)
    assert [s.span_id for s in chats] == [seen.traceparent_span for seen in gateway.seen]
    assert [s.agent for s in chats] == ["solver", "solver"]
    assert all("/agents/solver/" in seen.path for seen in gateway.seen)
    first, second = (s.attributes for s in chats)
    for attributes in (first, second):
        assert attributes[semconv.REQUEST_MODEL] == "m"
        assert attributes[semconv.PROVIDER_NAME] == subject.sdk
        # Where a framework drops the id of a stream, it comes from the wire.
        if "stream" in way or "response_facts" not in subject.gaps:
            assert str(attributes[semconv.RESPONSE_ID]).startswith(subject.response_id)
        assert attributes[semconv.WIRE_CALLS] == 1
    if "response_facts" not in subject.gaps:
        reasons = [reason for told in (first, second) for reason in told[semconv.FINISH_REASONS]]
        assert reasons == [*subject.finish_reasons]
    assert {s.status for s in rollout.spans} == {"unset"}


@capability("agents are told apart by their names", needs="names_agents")
@capability("a tool's run is a span: name, arguments, result, call id", needs="traces_tools")
def test_a_tool_span_tells_all_and_nests_in_its_agent(subject: Subject, way: str, provider: Provider) -> None:
    agent = subject.agent(provider.url, "solver")
    with subject.tracer(), tracing.running(rollout := context(subject)):
        do(subject, way, agent)
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    inner, outer = of(rollout, semconv.INVOKE_AGENT)
    assert tool.name == "execute_tool add"
    assert tool.attributes[semconv.TOOL_NAME] == "add"
    assert json.loads(tool.attributes[semconv.TOOL_CALL_ARGUMENTS]) == {"a": 2, "b": 3}
    assert tool.attributes[semconv.TOOL_CALL_RESULT] == "5"
    assert tool.attributes[semconv.TOOL_CALL_ID] == last_tool_call_id(provider.last.body)
    assert (inner.agent, outer.agent, tool.agent) == ("solver", "outer", "solver")
    assert (inner.parent_id, tool.parent_id) == (outer.span_id, inner.span_id)
    assert {s.parent_id for s in of(rollout, semconv.CHAT)} == {inner.span_id}


@capability("a tool's exception is recorded and goes on unchanged", gap="tool_errors")
def test_a_tools_exception_is_recorded_and_goes_on_unchanged(subject: Subject, way: str, provider: Provider) -> None:
    if "tool_errors" in subject.gaps:
        pytest.skip(f"{subject.name} does not raise a tool's exception")
    provider.script = uses_add(a=-1)
    agent = subject.agent(provider.url, "solver")
    rollout = context(subject)
    with pytest.raises(ToolFailed, match="a is negative") as caught, subject.tracer(), tracing.running(rollout):
        do(subject, way, agent)
    assert type(caught.value) is ToolFailed
    failed = [s for s in rollout.spans if s.operation != semconv.CHAT]
    assert {s.attributes[semconv.ERROR_TYPE] for s in failed} == {"ToolFailed"}
    assert {s.status for s in of(rollout, semconv.CHAT)} == {"unset"}


@capability(
    "a tool that says it failed, without raising, is recorded as failed", gap="tool_reports", needs="traces_tools"
)
def test_a_tool_that_reports_failure_without_raising_is_a_failure(
    subject: Subject, way: str, provider: Provider
) -> None:
    if "tool_reports" in subject.gaps:
        pytest.skip(f"{subject.name}'s tools can but raise")
    provider.script = uses_add(a=-1)
    agent = subject.reporting(provider.url, "solver")
    with subject.tracer(), tracing.running(rollout := context(subject)):
        assert do(subject, way, agent)
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert (tool.status, tool.attributes[semconv.TOOL_NAME]) == ("error", "add")
    assert NO_NUMBERS in str(tool.attributes[semconv.TOOL_CALL_RESULT])
    assert tool.attributes[semconv.TOOL_CALL_ID] == last_tool_call_id(provider.last.body)
    assert {s.status for s in rollout.spans if s is not tool} == {"unset"}


@capability("MCP tools are traced, and one that says it failed is recorded so", gap="mcp", needs="traces_tools")
@pytest.mark.slow
@pytest.mark.parametrize("a", [2, -1], ids=["succeeds", "fails"])
def test_an_mcp_tool_that_says_it_failed_is_a_failure(subject: Subject, a: int, provider: Provider) -> None:
    if "mcp" in subject.gaps:
        pytest.skip(f"{subject.name} has no MCP tools here")
    provider.script = uses_add(a=a)
    with subject.tracer(), tracing.running(rollout := context(subject)):
        asyncio.run(subject.with_mcp(provider.url, "solver", ASK))
    [tool] = of(rollout, semconv.EXECUTE_TOOL)
    assert tool.status == ("unset" if a == 2 else "error")
    told = str(tool.attributes.get(semconv.TOOL_CALL_RESULT) or tool.status_message)
    assert ("5" if a == 2 else "a is negative") in told
    assert tool.attributes[semconv.TOOL_CALL_ID] == last_tool_call_id(provider.last.body)


@capability("a failed model call is recorded and raised unchanged", gap="call_errors")
def test_a_failed_call_is_recorded_and_raised_unchanged(subject: Subject, way: str, gateway: Provider) -> None:
    gateway.script = lambda body: Reply(status=400)
    agent = subject.agent(gateway.url, "solver")
    rollout = context(subject, gateway)
    error = Exception if "call_errors" in subject.gaps else subject.bad_request()
    raises = pytest.raises(error, match="scripted 400")
    with raises as caught, subject.tracer(), tracing.running(rollout):
        do(subject, way, agent)
    [chat] = of(rollout, semconv.CHAT)
    assert (chat.status, chat.attributes[semconv.ERROR_TYPE]) == ("error", type(caught.value).__qualname__)
    assert [e.name for e in chat.events] == ["exception"]


@capability("an agent that is not selected keeps its provider, key and model, and is traced")
def test_an_unselected_agent_keeps_its_provider_and_is_traced(
    subject: Subject, provider: Provider, gateway: Provider
) -> None:
    agent = subject.agent(provider.url, "solver")
    with subject.tracer(), tracing.running(rollout := context(subject, gateway, agents="nobody")):
        assert agent.invoke(ASK) == "sum 5"
    assert gateway.seen == []
    keys = {s.headers.get("x-api-key", s.headers.get("authorization")) for s in provider.seen}
    assert {key.removeprefix("Bearer ") for key in keys if key is not None} == {KEY}
    assert not [s for s in provider.seen if "agl" in s.text or "traceparent" in s.headers]
    chat = of(rollout, semconv.CHAT)[-1]
    assert semconv.ROUTED not in chat.attributes
    assert "sum 5" in str(chat.attributes[semconv.OUTPUT_MESSAGES])
    assert (chat.attributes[semconv.INPUT_TOKENS], chat.attributes[semconv.OUTPUT_TOKENS]) == (7, 3)
    assert str(chat.attributes[semconv.URL]).startswith(provider.root)


@capability("its system prompt is replaced at the wire, and not another byte", needs="takes_prompt", by_way=True)
def test_a_system_prompt_is_replaced_and_not_another_byte(subject: Subject, way: str) -> None:
    subject = copy.copy(subject)
    subject.prompt, better = 'Add "numbers".\nBe brief.', "Use the tool."
    sent: list[list[Seen]] = []
    for texts in (None, {"solver": {subject.prompt: ("better", better)}}):
        # Each time at another address, for LangChain keeps an address's connections longer than their event loop lives.
        with serve(uses_add()) as provider, subject.tracer(), tracing.running(rollout := context(subject)):
            rollout.system_prompts, rollout.prompts = texts, True
            assert do(subject, way, subject.agent(provider.url, "solver")) == "sum 5"
        sent.append(provider.seen)
    own, replaced = sent
    text, new = json.dumps(subject.prompt).encode(), json.dumps(better).encode()
    assert [s.raw.count(text) for s in own] == [1, 1]
    assert [s.raw for s in replaced] == [s.raw.replace(text, new) for s in own]
    assert [s.path for s in replaced] == [s.path for s in own]
    headers = [{k: v for k, v in s.headers.items() if k not in ("content-length", "host")} for s in (*own, *replaced)]
    assert headers[:2] == headers[2:]
    chats = of(rollout, semconv.CHAT)
    assert [[*s.attributes[semconv.SYSTEM_PROMPTS]] for s in chats] == [["better"], ["better"]]
    assert all(better in str(s.attributes[semconv.INPUT_MESSAGES]) for s in chats)


def check_alone(subject: Subject, rollout: RolloutContext, gateway: Provider) -> None:
    """That a rollout has its own spans, whole, and nothing of anybody else's."""
    mine = [s for s in gateway.seen if f"/rollouts/{rollout.rollout_id}/" in s.path]
    # A request that names the response it continues does not repeat the question.
    assert [rollout.rollout_id in json.dumps(s.body) or "previous_response_id" in s.body for s in mine] == [True, True]
    assert {s.traceparent_span for s in mine} == {s.span_id for s in of(rollout, semconv.CHAT)}
    assert {s.rollout_id for s in rollout.spans} == {rollout.rollout_id}
    assert len({s.trace_id for s in rollout.spans}) == 1
    assert len(rollout.spans) == (5 if subject.traces_tools else 3)
    known = {s.span_id for s in rollout.spans}
    assert [s.parent_id for s in rollout.spans if s.parent_id not in known] == [None]


@capability("twenty rollouts in threads never mix")
def test_twenty_rollouts_in_threads_never_mix(subject: Subject, provider: Provider, gateway: Provider) -> None:
    agent = subject.agent(provider.url, "solver")
    rollouts = [context(subject, gateway, id=f"ro-{i:02}") for i in range(20)]
    barrier = threading.Barrier(len(rollouts))

    def run(rollout: RolloutContext) -> None:
        barrier.wait(10)
        with tracing.running(rollout):
            agent.invoke(rollout.rollout_id)

    with subject.tracer():
        threads = [threading.Thread(target=run, args=(r,)) for r in rollouts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rollout in rollouts:
        check_alone(subject, rollout, gateway)


@capability("twenty rollouts in asyncio tasks never mix")
def test_twenty_rollouts_in_tasks_never_mix(subject: Subject, provider: Provider, gateway: Provider) -> None:
    agent = subject.agent(provider.url, "solver")
    rollouts = [context(subject, gateway, id=f"ro-{i:02}") for i in range(20)]

    async def run(rollout: RolloutContext) -> None:
        with tracing.running(rollout):
            await agent.ainvoke(rollout.rollout_id)

    async def main() -> None:
        await asyncio.gather(*(run(r) for r in rollouts))

    with subject.tracer():
        asyncio.run(main())
    for rollout in rollouts:
        check_alone(subject, rollout, gateway)


@capability("switched off, it changes nothing")
def test_not_instrumented_is_without_effect(subject: Subject, provider: Provider, gateway: Provider) -> None:
    before = subject.changed()
    agent = subject.agent(provider.url, "solver")
    with tracing.running(rollout := context(subject, gateway)):
        assert agent.invoke(ASK) == "sum 5"
    assert gateway.seen == []
    assert [s.operation for s in rollout.spans] == [semconv.INVOKE_AGENT]
    assert subject.changed() == before


@capability("outside a rollout, the agent runs as ever")
def test_outside_a_rollout_an_instrumented_agent_runs_as_ever(
    subject: Subject, provider: Provider, gateway: Provider
) -> None:
    agent = subject.agent(provider.url, "solver")
    with subject.tracer():
        assert agent.invoke(ASK) == "sum 5"
        assert asyncio.run(agent.ainvoke(ASK)) == "sum 5"
    assert len(provider.seen) == 4
    assert not [s for s in provider.seen if "agl" in s.text or "traceparent" in s.headers]


@capability("a user's own tracing is as it would be without it")
def test_a_user_who_traces_sees_their_own_spans_alone(subject: Subject, provider: Provider) -> None:
    exporter, users = InMemorySpanExporter(), TracerProvider()
    users.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = users.get_tracer("users")
    agent = subject.agent(provider.url, "solver")
    with subject.tracer(), tracer.start_as_current_span("around") as around:
        with tracing.running(rollout := context(subject)):
            agent.invoke(ASK)
        assert trace.get_current_span() is around
        with tracer.start_as_current_span("after"):
            pass
    after, outermost = exporter.get_finished_spans()
    assert (after.name, outermost.name) == ("after", "around")
    assert after.parent is not None
    assert after.parent.span_id == around.get_span_context().span_id
    assert len(of(rollout, semconv.CHAT)) == 2


@capability("switched on twice is once; switched off restores all")
def test_twice_is_once_and_uninstrument_restores(subject: Subject, provider: Provider) -> None:
    before = subject.changed()
    first, second = subject.tracer(), subject.tracer()
    first.instrument()
    second.instrument()
    agent = subject.agent(provider.url, "solver")
    with tracing.running(rollout := context(subject)):
        agent.invoke(ASK)
    assert len(of(rollout, semconv.CHAT)) == 2
    assert first.instrumented
    second.uninstrument()
    assert subject.changed() == before
    assert not first.instrumented
    first.uninstrument()
    assert subject.changed() == before


@capability("beside every other adapter, each span is made once")
def test_all_adapters_together_do_not_double_spans(subject: Subject, provider: Provider) -> None:
    agent = subject.agent(provider.url, "solver")
    tracers = [s.tracer().instrument() for s in (*SUBJECTS, subject)]
    try:
        with tracing.running(rollout := context(subject)):
            agent.invoke(ASK)
    finally:
        for tracer in tracers:
            tracer.uninstrument()
    assert len(of(rollout, semconv.CHAT)) == len(provider.seen) == 2


@capability("importing it imports no framework")
def test_importing_the_adapter_imports_no_framework(subject: Subject) -> None:
    module = subject.tracer.__module__
    code = f"import sys, {module}; print([m for m in {subject.frameworks} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@capability("`agl.wrap` finds it by type")
def test_wrap_finds_the_framework_by_type(subject: Subject, provider: Provider) -> None:
    agent = agl.wrap(subject.wrappable(provider.url, "solver"), reward=lambda task, output: len(output))
    assert agent.name == "solver"
    assert subject.tracer in [type(t) for t in agent.tracers]
    assert plugins.adapters()[subject.adapter or subject.name] is subject.tracer

    async def run() -> Outcome:
        done: Any = agent.run({"question": ASK}, {}, RolloutInfo("ro", 1))
        return await done if agent.is_async else done

    assert asyncio.run(run()) == Outcome(5, "sum 5")


@capability("captured text can be switched off")
def test_captured_text_can_be_switched_off(subject: Subject, provider: Provider) -> None:
    agent = subject.agent(provider.url, "solver")
    rollout = context(subject)
    rollout.capture_content = False
    with subject.tracer(), tracing.running(rollout):
        agent.invoke(ASK)
    assert "sum 5" not in json.dumps([dict(s.attributes) for s in rollout.spans], default=str)
    if "response_facts" not in subject.gaps:
        assert of(rollout, semconv.CHAT)[0].attributes[semconv.RESPONSE_ID]

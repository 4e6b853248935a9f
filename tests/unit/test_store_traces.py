"""Spans from other people's exporters: the real OTLP exporter, JSON, gzip, and bodies that are none of it."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import gzip
import json
import math
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import StatusCode
from store_server import KEYS, OPERATOR, RUNNER, ServedStore, served

from agl import semconv
from agl.errors import StoreError
from agl.mdp.evaluations import evaluated
from agl.mdp.spans import Event, Span
from agl.mdp.types import Reward
from agl.tracing import otlp
from agl.trainer.http.limits import Limits
from agl.trainer.store import open_store
from agl.trainer.store.http import otlp as otlp_server
from agl.trainer.store.http.client import HttpStore
from agl.trainer.store.types import NewRollout, Rollout

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
JSON_TYPE, PROTOBUF = {"content-type": "application/json"}, {"content-type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with served(tmp_path_factory.mktemp("traces"), limits=Limits(body_bytes=1_000_000)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServedStore) -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, base_url=server.url) as opened:
        yield opened


def provider(server: ServedStore, *, key: str | None = None, lease: str = "", **attributes: Any) -> TracerProvider:
    """An application's own tracing, with the real exporter."""
    headers = {"Authorization": f"Bearer {key}", "agl-lease": lease} if key else None
    exporter = OTLPSpanExporter(f"{server.url}/v1/traces", headers=headers, compression=Compression.Gzip)
    made = TracerProvider(resource=Resource.create(attributes))
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made


def look(server: ServedStore, rollout_id: str, key: str | None = None) -> tuple[Rollout, list[Span]]:
    async def scenario() -> tuple[Rollout, list[Span]]:
        store = await HttpStore.open(server.url, key=key)
        try:
            return await store.get_rollout(rollout_id), await store.query_spans(rollout_id)
        finally:
            await store.close()

    return asyncio.run(scenario())


def leased(server: ServedStore, key: str | None = None) -> tuple[str, str]:
    """A rollout with its first attempt open, and the lease's secret."""

    async def scenario() -> tuple[str, str]:
        store = await HttpStore.open(server.url, key=key)
        (rollout,) = await store.enqueue_rollouts([NewRollout("t", run_id="leased")])
        lease = await store.dequeue_rollout(run_id="leased")
        assert lease is not None
        assert lease.secret is not None
        await store.close()
        return rollout.rollout_id, lease.secret

    return asyncio.run(scenario())


def rollouts(server: ServedStore, key: str) -> int:
    """How many rollouts there are."""

    async def scenario() -> int:
        store = await HttpStore.open(server.url, key=key)
        try:
            return await store.count_rollouts()
        finally:
            await store.close()

    return asyncio.run(scenario())


def test_a_trace_of_nobody_becomes_a_rollout_of_its_own(server: ServedStore) -> None:
    tracer = provider(server).get_tracer("app")
    with tracer.start_as_current_span("invoke_agent writer", attributes={"gen_ai.agent.name": "writer"}) as root:
        with tracer.start_as_current_span("chat m") as chat:
            chat.set_attributes({"n": 3, "f": 0.5, "ok": True, "list": ["a", "b"]})
            chat.add_event("token", {"k": "v"})
        with tracer.start_as_current_span("execute_tool t") as tool:
            tool.set_status(StatusCode.ERROR, "no such tool")
    context = root.get_span_context()
    rollout, spans = look(server, f"trace-{context.trace_id:032x}")
    assert (rollout.mode, rollout.status) == ("collect", "succeeded")
    assert [s.name for s in spans] == ["invoke_agent writer", "chat m", "execute_tool t"]
    assert spans[0].agent == "writer"
    assert spans[1].parent_id == spans[0].span_id == f"{context.span_id:016x}"
    assert dict(spans[1].attributes) == {"n": 3, "f": 0.5, "ok": True, "list": ["a", "b"]}
    assert [(e.name, dict(e.attributes)) for e in spans[1].events] == [("token", {"k": "v"})]
    assert (spans[2].status, spans[2].status_message) == ("error", "no such tool")
    assert 0 < spans[1].start <= spans[1].end


def test_a_trace_whose_root_failed_has_failed(server: ServedStore) -> None:
    tracer = provider(server).get_tracer("app")
    with pytest.raises(ZeroDivisionError), tracer.start_as_current_span("root") as root:
        _ = 1 / 0
    rollout, spans = look(server, f"trace-{root.get_span_context().trace_id:032x}")
    assert rollout.status == "failed"
    assert spans[0].events[0].name == "exception"


def chat(tracer: Any, question: str, **attributes: Any) -> Any:
    """A finished `chat` span, as OpenTelemetry's conventions have it."""
    sent = [{"role": "user", "parts": [{"type": "text", "content": question}]}]
    facts = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(sent), **attributes}
    with tracer.start_as_current_span("chat m", attributes=facts) as span:
        pass
    return span


def test_a_traces_task_is_what_was_asked_first(server: ServedStore) -> None:
    """Children come before their root, as every batching exporter sends them, and in any order."""
    tracer = provider(server).get_tracer("app")
    tasks = []
    for question in ("one?", "two?"):
        with tracer.start_as_current_span("invoke_agent writer") as root:
            chat(tracer, question)
            chat(tracer, "and then?")
        tasks.append(look(server, f"trace-{root.get_span_context().trace_id:032x}")[0].task)
    assert tasks == [{"input": "one?"}, {"input": "two?"}]
    sent = json.dumps([{"role": "system", "content": "be brief"}, {"role": "user", "content": "the root's?"}])
    with tracer.start_as_current_span("invoke_agent writer", attributes={"gen_ai.input.messages": sent}) as root:
        chat(tracer, "a part of it")
    assert look(server, f"trace-{root.get_span_context().trace_id:032x}")[0].task == {"input": "the root's?"}
    with tracer.start_as_current_span("job") as root, tracer.start_as_current_span("a part of it"):
        pass
    assert look(server, f"trace-{root.get_span_context().trace_id:032x}")[0].task == {"trace": "job"}


def posted(client: httpx.Client, *spans: Span) -> None:
    assert client.post("/v1/traces", json=otlp.encode(spans)).json() == {}


def task_of(server: ServedStore, client: httpx.Client, number: int, *requests: Any) -> Any:
    """The task of a trace whose calls sent these messages."""
    trace_id = f"{number:032x}"
    calls = [
        Span(trace_id, f"{i + 2:016x}", f"{1:016x}", "", 0, "chat", i + 1.0, i + 2.0,
             attributes={"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(sent)})
        for i, sent in enumerate(requests)
    ]  # fmt: skip
    posted(client, *reversed(calls))
    posted(client, Span(trace_id, f"{1:016x}", None, "", 0, "POST /ask", 1.0, 90.0))
    return look(server, f"trace-{trace_id}")[0].task


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"type": "text", "content": text}]}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "parts": [{"type": "text", "content": text}]}


def test_questions_after_the_same_examples_are_different_tasks(server: ServedStore, client: httpx.Client) -> None:
    shots = [{"role": "system", "content": "Add."}, user("1 + 1"), assistant("2"), user("2 + 2"), assistant("4")]
    asked = [[*shots, user(question)] for question in ("3 + 3", "5 + 5", "3 + 3")]
    tool = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "6"}]}
    one, two, again = (
        task_of(server, client, 1000 + i, sent, [*sent, assistant(""), tool]) for i, sent in enumerate(asked)
    )
    assert (one["input"], two["input"]) == ("3 + 3", "5 + 5")
    assert one == again


def test_each_turn_of_a_conversation_is_a_task_of_its_own(server: ServedStore, client: httpx.Client) -> None:
    """One trace a turn, as a chat application has it; the last turn's first call has a tool's result."""
    paris, rome = ([user(f"Where is {city}?"), assistant(f"{city} is ...")] for city in ("Paris", "Rome"))
    called = {"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "look", "arguments": {}}]}
    result = {"role": "user", "parts": [{"type": "tool_call_response", "id": "c", "response": "rain"}]}
    turns = [paris[:1], [*paris, user("And its weather?")], [*rome, user("And its weather?")]]
    turns.append([*turns[1], called, result])
    first, of_paris, of_rome, further = (task_of(server, client, 1100 + i, sent) for i, sent in enumerate(turns))
    assert first == {"input": "Where is Paris?"}
    assert of_paris["input"] == of_rome["input"] == "And its weather?"
    assert of_paris != of_rome
    assert further == of_paris


@pytest.mark.parametrize("text", ["", "What is this?"])
def test_a_question_of_pictures_is_told_by_the_pictures(text: str, server: ServedStore, client: httpx.Client) -> None:
    def shown(*pictures: str, **more: Any) -> list[Any]:
        parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{p}"}, **more} for p in pictures]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]

    number = 1200 if text else 1300
    requests = [shown("AAAA"), shown("BBBB"), shown("AAAA", "BBBB"), shown("AAAA", cache_control={"type": "ephemeral"})]
    tasks = [task_of(server, client, number + i, sent) for i, sent in enumerate(requests)]
    assert [task["input"] for task in tasks] == [text] * 4
    assert [len(task["files"]) for task in tasks] == [1, 1, 2, 1]
    assert tasks[0] == tasks[3]
    assert len({json.dumps(task) for task in tasks}) == 3


def test_a_trace_without_its_root_ends_when_nothing_more_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its root is in a service that sends its spans elsewhere. Some of the traces are an earlier server's."""
    monkeypatch.setattr(otlp_server, "QUIET_SECONDS", 0.3)

    def local(trace: str, name: str, **facts: Any) -> list[Span]:
        sent = {"gen_ai.input.messages": json.dumps([user("asked")])}
        top = Span(trace * 32, "2" * 16, "1" * 16, "", 0, name, 2.0, 9.0, **facts)
        return [Span(trace * 32, "3" * 16, "2" * 16, "", 0, "chat", 3.0, 4.0, attributes=sent), top]

    def ended(server: ServedStore, trace: str) -> Rollout:
        until = time.monotonic() + 60
        while (rollout := look(server, f"trace-{trace * 32}")[0]).status == "running" and time.monotonic() < until:
            time.sleep(0.05)
        return rollout

    with served(tmp_path) as server, httpx.Client(trust_env=False, base_url=server.url) as client:
        posted(client, *local("a", "agent"))
        posted(client, *local("b", "agent", status="error", status_message="no such city"))
        assert [ended(server, trace).status for trace in "ab"] == ["succeeded", "failed"]
        assert ended(server, "a").task == {"input": "asked"}
        posted(client, *local("c", "agent"))
    with served(tmp_path) as server:
        assert ended(server, "c").status == "succeeded"


@pytest.mark.parametrize("none", ["", "0" * 16, None])
def test_a_parent_of_zeros_is_none(none: str | None, server: ServedStore, client: httpx.Client) -> None:
    trace_id = {None: "d1", "": "d2"}.get(none, "d3") * 16
    request = otlp.encode([Span(trace_id, "1" * 16, None, "", 0, "root", 1.0, 2.0)])
    request["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["parentSpanId"] = none
    assert client.post("/v1/traces", json=request).json() == {}
    rollout, [span] = look(server, f"trace-{trace_id}")
    assert (rollout.status, span.parent_id) == ("succeeded", None)


def whole_request(trace: int) -> ExportTraceServiceRequest:
    """Two spans with all that a span can have."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "app"
    spans = resource.scope_spans.add().spans
    root = spans.add(
        trace_id=trace.to_bytes(16), span_id=b"\1" * 8, parent_span_id=bytes(8), name="root", kind=2,
        start_time_unix_nano=1_700_000_000_123_456_789, end_time_unix_nano=1_700_000_001_000_000_000,
    )  # fmt: skip
    root.status.code = 2
    child = spans.add(trace_id=trace.to_bytes(16), span_id=b"\2" * 8, parent_span_id=b"\1" * 8, name="chat", flags=769)
    child.start_time_unix_nano = 2**63 + 5
    child.status.code = 2
    child.status.message = "no such city"
    values = child.attributes
    values.add(key="text").value.string_value = "ä"
    values.add(key="int").value.int_value = -(2**53) - 1
    values.add(key="double").value.double_value = 0.1
    values.add(key="infinite").value.double_value = math.inf
    values.add(key="bool").value.bool_value = False
    values.add(key="bytes").value.bytes_value = b"\0\xff"
    values.add(key="nothing")
    values.add(key="list").value.array_value.values.add().kvlist_value.values.add(key="k").value.int_value = 1
    values.add(key="empty list").value.array_value.SetInParent()
    messages = values.add(key="gen_ai.input.messages").value.array_value.values.add().kvlist_value.values
    messages.add(key="role").value.string_value = "user"
    messages.add(key="content").value.string_value = "asked"
    child.events.add(name="e", time_unix_nano=5).attributes.add(key="k").value.bool_value = True
    return request


def as_json(request: ExportTraceServiceRequest) -> dict[str, Any]:
    """As OTLP has it: protobuf's mapping, but for ids in hex."""
    written = json_format.MessageToDict(request, use_integers_for_enums=True)
    for span in written["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId", "parentSpanId"):
            span[name] = base64.b64decode(span[name]).hex()
    return written


def test_protobuf_and_json_say_the_same(server: ServedStore, client: httpx.Client) -> None:
    def sent(trace: int, **request: Any) -> tuple[Any, ...]:
        answer = client.post("/v1/traces", **request)
        assert answer.status_code == 200
        rollout, spans = look(server, f"trace-{trace:032x}")
        same = {"trace_id": "", "rollout_id": ""}
        return rollout.status, rollout.task, [dataclasses.replace(span, **same) for span in spans]

    binary = sent(0xE1, content=whole_request(0xE1).SerializeToString(), headers=PROTOBUF)
    assert binary == sent(0xE2, json=as_json(whole_request(0xE2)))
    status, task, [root, child] = binary
    assert (status, task) == ("failed", {"input": "asked"})
    assert (root.parent_id, root.status_message) == (None, None)
    assert child.attributes["bytes"] == "00ff"
    assert child.attributes["list"] == [{"k": 1}]


@pytest.mark.parametrize("code", [3, 99])
def test_a_status_of_a_newer_version_is_none(code: int, server: ServedStore, client: httpx.Client) -> None:
    request = whole_request(0xE300 + code)
    for span in request.resource_spans[0].scope_spans[0].spans:
        span.status.code = code
    client.post("/v1/traces", content=request.SerializeToString(), headers=PROTOBUF)
    binary = [span.status for span in look(server, f"trace-{0xE300 + code:032x}")[1]]
    request = whole_request(0xE400 + code)
    written = as_json(request)
    for span in written["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        span["status"]["code"] = code
    assert client.post("/v1/traces", json=written).json() == {}
    assert binary == [span.status for span in look(server, f"trace-{0xE400 + code:032x}")[1]] == ["unset", "unset"]


def test_a_task_that_a_later_batch_has_is_taken(server: ServedStore, client: httpx.Client) -> None:
    sent = json.dumps([{"role": "user", "content": "first"}])
    trace_id = "9" * 32
    second = Span(trace_id, "2" * 16, "1" * 16, "", 0, "chat", 5.0, 6.0, attributes={"gen_ai.input.messages": "[]"})
    first = Span(trace_id, "3" * 16, "1" * 16, "", 0, "chat", 3.0, 4.0, attributes={"gen_ai.input.messages": sent})
    posted(client, second)
    assert look(server, f"trace-{trace_id}")[0].task == {"trace": "chat"}
    posted(client, first)
    posted(client, Span(trace_id, "1" * 16, None, "", 0, "root", 1.0, 9.0))
    rollout, spans = look(server, f"trace-{trace_id}")
    assert (rollout.task, rollout.status, len(spans)) == ({"input": "first"}, "succeeded", 3)


def test_a_task_that_comes_after_the_root_is_taken(server: ServedStore, client: httpx.Client) -> None:
    """Of two services that take part in a trace, the one with the root may send first."""
    sent = json.dumps([{"role": "user", "content": "asked"}])
    trace_id = "7" * 32
    root = Span(trace_id, "1" * 16, None, "", 0, "POST /ask", 1.0, 9.0)
    call = Span(trace_id, "2" * 16, "1" * 16, "", 0, "chat", 3.0, 4.0, attributes={"gen_ai.input.messages": sent})
    for span, task in ((root, {"trace": "POST /ask"}), (call, {"input": "asked"})):
        assert client.post("/v1/traces", json=otlp.encode([span])).json() == {}
        rollout, _ = look(server, f"trace-{trace_id}")
        assert (rollout.task, rollout.status) == (task, "succeeded")


@pytest.mark.parametrize("first", ["children", "root", "together"])
def test_a_trace_whose_root_names_its_rollout_is_that_rollout(
    first: str, server: ServedStore, client: httpx.Client
) -> None:
    rollout_id, _ = leased(server)
    trace_id = {"children": "a1", "root": "a2", "together": "a3"}[first] * 16
    root = Span(trace_id, "1" * 16, None, "", 0, "root", 1.0, 9.0, attributes={"agl.rollout.id": rollout_id})
    children = [Span(trace_id, f"{n}" * 16, "1" * 16, "", 0, "chat", n, n + 1) for n in (2, 3)]
    batches = {"children": [children, [root]], "root": [[root], children], "together": [[*children, root]]}
    for batch in batches[first]:
        assert client.post("/v1/traces", json=otlp.encode(batch)).json() == {}
    assert [(s.name, s.attempt) for s in look(server, rollout_id)[1]] == [("root", 1), ("chat", 1), ("chat", 1)]
    if first == "children":
        rollout, spans = look(server, f"trace-{trace_id}")
        assert (rollout.status, spans) == ("cancelled", [])
    else:
        with pytest.raises(StoreError):
            look(server, f"trace-{trace_id}")


def test_evaluation_events_are_rewards(server: ServedStore) -> None:
    tracer = provider(server).get_tracer("app")
    with tracer.start_as_current_span("invoke_agent writer", attributes={"gen_ai.agent.name": "writer"}) as root:
        graded = chat(tracer, "one?", **{"gen_ai.response.id": "resp-1"})
        for name, facts in {
            "helpful": {"gen_ai.evaluation.score.value": 0.5, "gen_ai.evaluation.explanation": "half of it"},
            "tone": {"gen_ai.evaluation.score.label": "pass"},
        }.items():
            root.add_event("gen_ai.evaluation.result", {"gen_ai.evaluation.name": name, **facts})
        with tracer.start_as_current_span("evaluation") as span:
            of = {"gen_ai.response.id": "resp-1"}
            for name, value in (("a", 1), ("b", 2.0), ("c", math.nan)):
                facts = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value, **of}
                span.add_event("gen_ai.evaluation.result", facts)
    assert graded is not None
    rollout_id = f"trace-{root.get_span_context().trace_id:032x}"
    _, spans = look(server, rollout_id)
    rewards = {r.name: r for s in spans if (r := Reward.of_span(s.attributes, s.parent_id)) is not None}
    assert {name: (r.value, r.primary, r.explanation) for name, r in rewards.items()} == {
        "helpful": (0.5, True, "half of it"),
        "a": (1.0, False, None),
        "b": (2.0, False, None),
    }
    assert rewards["helpful"].span_id == f"{root.get_span_context().span_id:016x}"
    calls = {s.attributes.get(semconv.REWARD_CALL) for s in spans if s.name in ("reward a", "reward b")}
    assert calls == {"resp-1"}


def test_evaluations_that_are_no_numbers_are_none() -> None:
    def reported(name: Any, value: Any) -> Event:
        return Event(semconv.EVALUATION, 1.0, {semconv.EVALUATION_NAME: name, semconv.EVALUATION_SCORE: value})

    values = [("a", "0.5"), ("b", math.inf), ("c", 10**400), ("d", None), ("e", [1]), ("half \ud83d", True)]
    graded = Span("ab" * 16, "cd" * 8, None, "ro", 1, "n", 0.0, 1.0, events=tuple(reported(*v) for v in values))
    [reward] = evaluated([graded])
    assert (reward.attributes[semconv.REWARD_VALUE], reward.attributes[semconv.REWARD_PRIMARY]) == (1.0, True)
    assert evaluated([reward, dataclasses.replace(graded, attributes={semconv.OPERATION_NAME: semconv.REWARD})]) == []


def test_spans_go_to_the_attempt_that_they_or_their_resource_name(server: ServedStore) -> None:
    (one, _), (other, _) = leased(server), leased(server)
    tracer = provider(server, **{"agl.rollout.id": one}).get_tracer("app")
    with tracer.start_as_current_span("by resource"), tracer.start_as_current_span("by span") as span:
        span.set_attributes({"agl.rollout.id": other, "agl.attempt": 1})
    assert [(s.name, s.attempt) for s in look(server, one)[1]] == [("by resource", 1)]
    assert [(s.name, s.attempt) for s in look(server, other)[1]] == [("by span", 1)]
    assert look(server, one)[0].status == "preparing"


def test_json_says_the_same_and_sending_it_twice_doubles_nothing(server: ServedStore, client: httpx.Client) -> None:
    rollout_id, _ = leased(server)
    ours = Span(
        "ab" * 16, "cd" * 8, None, "", 0, "chat m", 1.5, 2.5, attributes={"agl.rollout.id": rollout_id, "n": 2**53}
    )
    body = json.dumps(otlp.encode([ours])).encode()
    for content, headers in ((body, {}), (gzip.compress(body), {"content-encoding": "gzip"})):
        answer = client.post("/v1/traces", content=content, headers={**JSON_TYPE, **headers})
        assert (answer.status_code, answer.json()) == (200, {})
    (span,) = look(server, rollout_id)[1]
    assert (span.name, span.start, span.end, span.attributes["n"]) == ("chat m", 1.5, 2.5, 2**53)


def test_what_belongs_nowhere_is_a_partial_success(server: ServedStore, client: httpx.Client) -> None:
    rollout_id, _ = leased(server)
    spans = [
        Span("1" * 32, f"{n:016x}", None, "", 0, "s", 1.0, 2.0, attributes={"agl.rollout.id": r, "agl.attempt": a})
        for n, (r, a) in enumerate([(rollout_id, 1), (rollout_id, 2), ("nobody", 1), (rollout_id, "x")], 1)
    ]
    request = otlp.encode(spans)
    sent = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
    whole = dict(sent[0])
    sent.append({"traceId": "xyz", "name": "odd"})
    sent.append({**whole, "spanId": f"{'cd':<16}"})
    sent.append({**whole, "spanId": "a" * 16, "startTimeUnixNano": "9" * 300})
    sent.append({**whole, "spanId": "b" * 16, "startTimeUnixNano": "-1"})
    partial = client.post("/v1/traces", json=request).json()["partialSuccess"]
    assert partial["rejectedSpans"] == "7"
    assert "7 spans were not kept" in partial["errorMessage"]
    assert [s.span_id for s in look(server, rollout_id)[1]] == [f"{1:016x}"]

    message = ExportTraceServiceRequest()
    message.resource_spans.add().scope_spans.add().spans.add(trace_id=b"\0" * 16, span_id=b"12345678", name="zero")
    answer = client.post("/v1/traces", content=message.SerializeToString(), headers=PROTOBUF)
    told = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert told.rejected_spans == 1


def test_what_is_no_export_is_refused_in_its_own_encoding(client: httpx.Client) -> None:
    bomb = zlib.compressobj(wbits=31)
    packed = bomb.compress(b" " * 50_000_000) + bomb.flush()
    for content, headers, status, what in (
        (b"{", JSON_TYPE, 400, "unexpected end of data"),
        (b"[1]", JSON_TYPE, 400, "not an OTLP export request"),
        (b"no gzip at all", {**JSON_TYPE, "content-encoding": "gzip"}, 400, "not gzip"),
        (b"x", {**JSON_TYPE, "content-encoding": "br"}, 400, "'br' is unknown"),
        (packed, {**JSON_TYPE, "content-encoding": "gzip"}, 400, "more than 1000000 bytes once unpacked"),
        (gzip.compress(b"{}")[:-9], {**JSON_TYPE, "content-encoding": "gzip"}, 400, "ends too soon"),
        (b" " * 1_000_001, JSON_TYPE, 413, "more than 1000000 bytes"),
        (b"[" * 5000, JSON_TYPE, 400, ""),
        (b"{}", {"content-type": "text/plain"}, 415, "application/x-protobuf"),
    ):
        answer = client.post("/v1/traces", content=content, headers=headers)
        assert answer.status_code == status, what
        assert what in answer.json()["message"]
    answer = client.post("/v1/traces", content=b"\xff" * 510_000, headers=PROTOBUF)
    assert answer.status_code == 400
    assert b"more than 10 bytes" in answer.content
    answer = client.post("/v1/traces", content=b"\xff\xff", headers=PROTOBUF)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/x-protobuf")
    told = Status.FromString(answer.content)
    assert told.code == 3
    assert "not an OTLP export request" in told.message


def test_a_runners_exporter_reaches_open_attempts_alone(tmp_path: Path) -> None:
    with served(tmp_path, keys=KEYS) as server:
        (rollout_id, secret), (_, other) = leased(server, OPERATOR), leased(server, OPERATOR)
        names = {"agl.rollout.id": rollout_id}
        for key, lease, kept in (
            (RUNNER, "", 0), (RUNNER, other, 0), (RUNNER, "x" * 43, 0), (RUNNER, f"{other}, {secret}", 1),
            (None, secret, 1), ("wrong-key-of-this-test", secret, 1),
        ):  # fmt: skip
            provider(server, key=key, lease=lease, **names).get_tracer("app").start_span("s").end()
            assert len(look(server, rollout_id, OPERATOR)[1]) == kept
        # Spans that name no attempt would be a rollout of the runner's own making.
        provider(server, key=RUNNER, lease=secret).get_tracer("app").start_span("s").end()
        assert rollouts(server, OPERATOR) == 2

        async def end() -> None:
            store = await HttpStore.open(server.url, key=OPERATOR)
            await store.update_attempt(rollout_id, 1, "succeeded")
            await store.close()

        asyncio.run(end())
        provider(server, key=RUNNER, lease=secret, **names).get_tracer("app").start_span("late").end()
        assert len(look(server, rollout_id, OPERATOR)[1]) == 1


# -- malformed bodies -------------------------------------------------------------------------------------------------
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
HEX = st.sampled_from(["ab" * 16, "cd" * 8, "0" * 16, "é" * 16]) | ANYTHING
VALUE = st.recursive(
    st.fixed_dictionaries(
        {}, optional={k: ANYTHING for k in ("stringValue", "boolValue", "intValue", "doubleValue", "bytesValue")}
    ),
    lambda inner: st.fixed_dictionaries({"arrayValue": st.fixed_dictionaries({"values": st.lists(inner, max_size=3)})}),
    max_leaves=4,
)
NAME = st.sampled_from(["agl.rollout.id", "agl.attempt", "n"]) | ANYTHING
ATTRIBUTES = st.lists(st.fixed_dictionaries({"key": NAME, "value": VALUE | ANYTHING}), max_size=3) | ANYTHING
NANOS = st.integers(0, 2**63).map(str) | st.floats() | ANYTHING
SPAN = st.fixed_dictionaries(
    {"traceId": HEX, "spanId": HEX},
    optional={
        "parentSpanId": HEX, "name": ANYTHING, "startTimeUnixNano": NANOS, "endTimeUnixNano": NANOS,
        "attributes": ATTRIBUTES, "status": st.fixed_dictionaries({"code": ANYTHING}) | ANYTHING,
        "events": st.lists(st.fixed_dictionaries({"name": ANYTHING, "timeUnixNano": NANOS}) | ANYTHING, max_size=2),
    },
)  # fmt: skip
SCOPE = st.fixed_dictionaries({"spans": st.lists(SPAN | ANYTHING, max_size=3) | ANYTHING})
RESOURCE = st.fixed_dictionaries(
    {"scopeSpans": st.lists(SCOPE | ANYTHING, max_size=2) | ANYTHING},
    optional={"resource": st.fixed_dictionaries({"attributes": ATTRIBUTES}) | ANYTHING},
)
EXPORT = st.fixed_dictionaries({"resourceSpans": st.lists(RESOURCE | ANYTHING, max_size=2) | ANYTHING})


@FUZZ
@given(export=EXPORT)
def test_no_json_brings_it_down(client: httpx.Client, export: Any) -> None:
    answer = client.post("/v1/traces", content=json.dumps(export).encode(errors="surrogatepass"), headers=JSON_TYPE)
    assert answer.status_code in (200, 400), answer.text


WHOLE = ExportTraceServiceRequest()
for k in range(3):
    span = (
        WHOLE.resource_spans.add()
        .scope_spans.add()
        .spans.add(trace_id=bytes([k + 1] * 16), span_id=bytes([k + 1] * 8), name=f"s{k}")
    )
    span.attributes.add(key="agl.rollout.id").value.string_value = "r"
    span.attributes.add(key="list").value.array_value.values.add().kvlist_value.values.add(key="k").value.int_value = 1
    span.events.add(name="e", time_unix_nano=2**64 - 1)
WIRE = WHOLE.SerializeToString()


@FUZZ
@given(data=st.data())
def test_no_bytes_bring_it_down(client: httpx.Client, data: st.DataObject) -> None:
    """Bytes, and export requests with some bytes changed."""
    body = bytearray(WIRE)
    for _ in range(data.draw(st.integers(0, 6))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    content = data.draw(st.sampled_from([bytes(body), bytes(body[: len(body) // 2])]) | st.binary(max_size=40))
    for headers in (PROTOBUF, JSON_TYPE, {**PROTOBUF, "content-encoding": "gzip"}):
        answer = client.post("/v1/traces", content=content, headers=headers)
        assert answer.status_code in (200, 400), answer.text


def test_open_store_is_the_same_over_http(server: ServedStore) -> None:
    store = asyncio.run(open_store(server.url))
    assert isinstance(store, HttpStore)
    asyncio.run(store.close())

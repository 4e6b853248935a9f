"""Answers that a framework or OpenTelemetry recorded are what a student learns, whatever form they were recorded in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from all_subjects import SUBJECTS
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from scripted import quick_tokenizer
from store_server import ServedStore, served
from traced_runs import saved

import agl
from agl import semconv
from agl.errors import UnreadableMessageError
from agl.mdp.sequence import merge
from agl.testing.provider import serve
from agl.testing.subject import Subject

LEFT_OUT = ("smolagents", "crewai", "agent_framework_responses")
"""Frameworks whose answers are not these: a tool of their own ends the run, or the provider keeps the messages."""

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ASKED = {"role": "user", "parts": [{"type": "text", "content": "what is 2+3?"}]}
TOOLS = [{"type": "function", "name": "add", "description": "", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(quick_tokenizer(), tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with served(tmp_path_factory.mktemp("store")) as running:
        yield running


def trained(chosen: Any) -> list[str]:
    """The text of what is trained in each row."""
    made = [row for one in chosen.trajectories for row in merge(one, chosen.weights)]
    return [quick_tokenizer().decode(row.token_ids[row.action_mask]) for row in made]


def post(server: ServedStore, said: Any, sent: Any = (ASKED,), **more: Any) -> str:
    """Send a `chat` span as an application with tracing of its own does; the id of its rollout."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{server.url}/v1/traces")))
    tracer = provider.get_tracer("app")
    with tracer.start_as_current_span("invoke_agent solver", attributes={semconv.AGENT_NAME: "solver"}) as root:
        attributes = {semconv.OPERATION_NAME: semconv.CHAT, semconv.AGENT_NAME: "solver"}
        messages = {semconv.INPUT_MESSAGES: json.dumps(sent), semconv.OUTPUT_MESSAGES: json.dumps(said)}
        with tracer.start_as_current_span("chat m", attributes={**attributes, **messages, **more}):
            pass
    return f"trace-{root.get_span_context().trace_id:032x}"


def fast(subject: Subject) -> Any:
    return pytest.param(subject, id=subject.name, marks=() if subject.name == "pydantic_ai" else pytest.mark.slow)


@pytest.mark.parametrize("subject", [fast(s) for s in SUBJECTS if s.name not in LEFT_OUT])
def test_what_an_agent_of_each_framework_answered_is_trained(subject: Subject, student: str, tmp_path: Path) -> None:
    with serve(subject.script()) as provider:
        agent = agl.wrap(subject.wrappable(provider.url, "solver"), reward=lambda task, output: 1.0)
        agl.Trainer(agl.Baseline(), directory=tmp_path, n_workers=1, progress=False).fit(
            agent, [{"question": "what is 2+3?"}]
        )
    chosen = agl.traces(tmp_path, mode="dev").load(student)
    assert "".join(trained(chosen)).replace(" <|im_end|>", "<|im_end|>") == f"{CALL}<|im_end|>sum 5<|im_end|>"


def test_an_answer_in_opentelemetrys_form_is_trained(server: ServedStore, student: str) -> None:
    called = {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 2, "b": 3}}
    result = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "5"}]}
    asks = {"role": "assistant", "parts": [called], "finish_reason": "tool_call"}
    says = {"role": "assistant", "parts": [{"type": "text", "content": "sum 5"}], "finish_reason": "stop"}
    system = {semconv.SYSTEM_INSTRUCTIONS: json.dumps([{"type": "text", "content": "Be brief."}])}
    tools = {semconv.TOOL_DEFINITIONS: json.dumps(TOOLS)}
    rollouts = {post(server, [asks], **tools), post(server, [says], [ASKED, asks, result], **system, **tools)}
    chosen = agl.traces(server.url).load(student)
    assert {one.rollout_id for one in chosen.trajectories} == rollouts
    assert sorted(trained(chosen)) == sorted([f"{CALL}<|im_end|>", "sum 5<|im_end|>"])
    rows = [
        quick_tokenizer().decode(row.token_ids) for one in chosen.trajectories for row in merge(one, chosen.weights)
    ]
    assert any("system\nBe brief.\n" in row and "<tool_response>\n5\n" in row for row in rows)


@pytest.mark.parametrize(
    "said", [[{"role": "assistant", "answer": "sum 5"}], ["sum", 5], {"answer": "sum 5"}, [{"type": "text"}], [5]]
)
def test_an_answer_in_no_known_form_is_an_error_that_names_the_call(said: Any, student: str, tmp_path: Path) -> None:
    with served(tmp_path) as server:
        rollout = post(server, said)
        with pytest.raises(UnreadableMessageError) as caught:
            agl.traces(server.url).load(student)
    assert caught.value.where["rollout"] == rollout
    assert {"rollout", "attempt", "agent", "span"} <= {*caught.value.where}


@pytest.mark.parametrize(
    ("recorded", "form"),
    [
        ({"llm.input_messages.0.message.content": "hi"}, "OpenInference"),
        ({"gen_ai.prompt.0.content": "hi", "gen_ai.completion.0.content": "ho"}, "OpenLLMetry"),
        ({"langfuse.observation.input": "hi"}, "Langfuse"),
        ({}, None),
    ],
)
def test_texts_in_a_form_that_is_not_read_are_named(
    recorded: dict[str, str], form: str | None, student: str, tmp_path: Path
) -> None:
    with served(tmp_path) as server:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{server.url}/v1/traces")))
        facts = {semconv.OPERATION_NAME: semconv.CHAT, semconv.AGENT_NAME: "solver", **recorded}
        with provider.get_tracer("app").start_as_current_span("chat m", attributes=facts):
            pass
        counts = agl.traces(server.url).load(student).counts
    [reason] = [name for name, count in counts.items() if name.startswith("calls_left_out/texts") and count == 1]
    expected = "texts not recorded" if form is None else f"texts in the form of {form}"
    assert reason.startswith(f"calls_left_out/{expected}")

"""Which question a received span asks, whatever its tracer calls the request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl import semconv
from agl.mdp.spans import Event, Span
from agl.messages import foreign

Q = "What is 2 + 3?"
USER = {"role": "user", "content": Q}
SHOTS = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
HISTORY = [{"role": "system", "content": "Add."}, USER]
PARTS = [{"role": "user", "parts": [{"type": "text", "content": Q}]}]
HUMAN = {"type": "human", "content": Q, "additional_kwargs": {}, "id": "x"}
CONSTRUCTED = {
    "lc": 1,
    "type": "constructor",
    "id": ["langchain", "schema", "messages", "HumanMessage"],
    "kwargs": {"content": Q, "type": "human"},
}


def asked(*events: Event, of: Any = None) -> Any:
    """The question of a span with these events and attributes."""
    return foreign.question(Span("a" * 32, "b" * 16, None, "", 0, "s", 0.0, 1.0, attributes=of or {}, events=events))


VALUES: dict[str, Any] = {
    "a text": Q,
    "messages": HISTORY,
    "a request": {"messages": HISTORY, "model": "m", "temperature": 0.1},
    "a request of Responses": {"input": Q, "model": "m", "instructions": "Add."},
    "a request of Google": {"model": "m", "contents": [{"role": "user", "parts": [{"text": Q}]}]},
    "a prompt": {"prompt": Q, "system": "Add."},
    "arguments": {"args": [Q], "kwargs": {}},
    "named arguments": {"question": Q},
    "messages of LangChain": {"messages": [HUMAN]},
    "tuples of LangChain": {"messages": [["system", "Add."], ["human", Q]]},
    "a batch of LangChain": {"messages": [[CONSTRUCTED]]},
    "a run of LangChain": {"inputs": {"messages": [CONSTRUCTED]}, "tags": ["t"], "kwargs": {"name": "LangGraph"}},
    "a run of LangChain with a question": {"inputs": {"question": Q}, "tags": ["t"], "kwargs": {"name": "chain"}},
    "OpenTelemetry's messages": PARTS,
    "events of Logfire": [
        {"event.name": "gen_ai.system.message", "content": "Add.", "role": "system"},
        {"event.name": "gen_ai.user.message", "content": Q, "role": "user"},
        {"event.name": "gen_ai.choice", "index": 0, "message": {"role": "assistant", "content": "5"}},
    ],
}
"""How an input is written -> what is."""
NAMED = [name for name in foreign.FORMS if not name.endswith(".") and not name.startswith("gen_ai.c")]

INPUTS = [name for name in NAMED if not name.startswith(("llm.", "gen_ai.user")) and name != "events"]


@pytest.mark.parametrize("written", VALUES)
@pytest.mark.parametrize("name", INPUTS)
def test_the_input_under_every_name_and_in_every_writing_is_the_question(name: str, written: str) -> None:
    value = VALUES[written]
    for recorded in (value, json.dumps(value)) if not isinstance(value, str) else (value,):
        assert asked(of={name: recorded}) == {"input": Q}


def test_events_that_are_not_logfires_ask_nothing() -> None:
    assert asked(of={"events": json.dumps(VALUES["events of Logfire"])}) == {"input": Q}
    assert asked(of={"events": 5}) is asked(of={"events": ["click", "key"]}) is None


@pytest.mark.parametrize("written", ["messages", "a request", "a request of Google", "events of Logfire"])
def test_of_examples_and_a_question_the_question_is_asked(written: str) -> None:
    roles = {"user": "user", "assistant": "model"}
    of_google = [{"role": roles[m["role"]], "parts": [{"text": m["content"]}]} for m in SHOTS]
    longer: Any = {
        "messages": [*SHOTS, USER],
        "a request": {"messages": [*SHOTS, USER]},
        "a request of Google": {"contents": [*of_google, {"role": "user", "parts": [{"text": Q}]}]},
        "events of Logfire": [{"event.name": f"gen_ai.{m['role']}.message", **m} for m in [*SHOTS, USER]],
    }[written]
    one, other = (asked(of={"input.value": json.dumps(longer).replace("1 + 1", shot)}) for shot in ("1 + 1", "7 + 1"))
    assert one["input"] == other["input"] == Q
    assert one["history"] != other["history"]


PIECES: dict[str, dict[str, Any]] = {
    "OpenLLMetry": {
        "gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "Add.",
        "gen_ai.prompt.1.role": "user", "gen_ai.prompt.1.content": Q,
        "gen_ai.completion.0.content": "5",
    },
    "OpenLLMetry's parts": {
        "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": json.dumps([{"type": "text", "text": Q}]),
    },
    "OpenInference": {
        "llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": Q,
        "llm.output_messages.0.message.content": "5",
    },
    "OpenInference's parts": {
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.contents.0.message_content.type": "text",
        "llm.input_messages.0.message.contents.0.message_content.text": Q,
    },
    "more than nine": {
        **{f"gen_ai.prompt.{i}.{k}": v for i in range(10) for k, v in SHOTS[i % 2].items()},
        "gen_ai.prompt.10.role": "user", "gen_ai.prompt.10.content": Q,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
def test_messages_whose_fields_are_attributes_are_put_together(name: str) -> None:
    assert asked(of=PIECES[name])["input"] == Q


def test_a_picture_among_them_is_told() -> None:
    begin = "llm.input_messages.0.message.contents.0.message_content.image.image.url"
    one, other = (asked(of={"llm.input_messages.0.message.role": "user", begin: f"data:{n}"}) for n in "ab")
    assert one["input"] == ""
    assert one["files"] != other["files"]


EVENTS = {
    "gen_ai.user.message": {"content": Q, "role": "user"},
    "gen_ai.content.prompt": {"gen_ai.prompt": Q},
    "gen_ai.client.inference.operation.details": {semconv.INPUT_MESSAGES: json.dumps(PARTS)},
}


@pytest.mark.parametrize("name", EVENTS)
def test_events_of_a_span_are_read(name: str) -> None:
    before = [Event("gen_ai.system.message", 0.0, {"content": "Add."})] if name == "gen_ai.user.message" else []
    assert asked(*before, Event(name, 1.0, EVENTS[name])) == {"input": Q}


def test_every_form_has_a_row() -> None:
    assert {*NAMED, *EVENTS, "langfuse."} == {*foreign.FORMS}
    assert {name for name in NAMED if any(key.startswith(f"{name}.0") for row in PIECES.values() for key in row)} == {
        "gen_ai.prompt",
        "llm.input_messages",
    }


def test_the_conventions_own_messages_come_first_and_what_cannot_be_read_last() -> None:
    own = {semconv.INPUT_MESSAGES: json.dumps(PARTS)}
    assert asked(of={"input.value": "another", **own}) == {"input": Q}
    assert asked(of={"input.value": Q, semconv.INPUT_MESSAGES: '[{"says": "nothing known"}]'}) == {"input": Q}
    assert asked(of={"input.value": "", "mlflow.spanInputs": json.dumps({"question": Q})}) == {"input": Q}


def test_of_several_inputs_all_are_the_question() -> None:
    one, other = (asked(of={"input.value": json.dumps({"question": Q, "k": k})}) for k in (1, 2))
    assert one != other
    assert Q in one["input"]


def test_a_question_in_the_system_prompt_alone_is_asked() -> None:
    assert asked(of={"input.value": json.dumps([{"role": "system", "content": Q}])}) == {"input": Q}


@pytest.mark.parametrize(
    "value",
    ["", None, [], {}, "[", '{"a": ', "[1, [2", 5, [5], [[]], [None], {"messages": None}, {"messages": 5}, [{}],
     [["user"]], [[[], 2]], {"messages": [{"role": [], "content": {}}]}, "[" * 100_000, {"input": {"input": []}}],
)  # fmt: skip
@pytest.mark.parametrize("name", NAMED)
def test_no_value_is_an_error(name: str, value: Any) -> None:
    found = asked(of={name: value})
    assert found is None or isinstance(found["input"], str)
    written = asked(of={name: json.dumps(value)})
    assert written is None or isinstance(written["input"], str)

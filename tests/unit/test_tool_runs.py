"""Tools that a program runs by hand, without an id: which tool call of which answer each run belongs to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import semconv
from agl.mdp.outcomes import TOOL_RESULTS, tool_outcomes
from agl.mdp.span_index import SpanIndex
from agl.mdp.spans import Span
from agl.mdp.tool_runs import joined
from agl.mdp.types import Call, float_array, int_array
from agl.tracing.inferred import completed

Asked = tuple[str, str, Any]
"""Id, name and arguments of a tool call."""


def span(id: str, operation: str, parent: str | None = "root", agent: str = "llm_call", **attributes: Any) -> Span:
    facts = {semconv.OPERATION_NAME: operation, semconv.AGENT_NAME: agent, **attributes}
    return Span("t" * 32, id, parent, "ro", 1, operation, 0.0, 1.0, attributes=facts)


ROOT = span("root", semconv.INVOKE_AGENT, None)


def call_part(asked: Asked) -> dict[str, Any]:
    id, name, arguments = asked
    return {"type": "tool_call", "id": id, "name": name, "arguments": arguments}


def chat(id: str, *asked: Asked, sent: list[Any] | None = None, parent: str = "root", agent: str = "llm_call") -> Span:
    answer = [{"role": "assistant", "parts": [call_part(a) for a in asked]}]
    messages = {semconv.OUTPUT_MESSAGES: json.dumps(answer)}
    if sent is not None:
        messages[semconv.INPUT_MESSAGES] = json.dumps(sent)
    return span(id, semconv.CHAT, parent, agent, **messages)


def run(id: str, arguments: Any = None, name: str = "add", parent: str = "root", also: Any = None) -> Span:
    facts = {semconv.TOOL_NAME: name, semconv.TOOL_CALL_RESULT: f"result of {id}", **(also or {})}
    if arguments is not None:
        facts[semconv.TOOL_CALL_ARGUMENTS] = json.dumps(arguments)
    return span(id, semconv.EXECUTE_TOOL, parent, "tool_node", **facts)


def ids(spans: list[Span], calls: list[Call] | None = None) -> dict[str, Any]:
    """Span id -> the tool call that its run was joined to."""
    tools = [s for s in joined(spans, calls or []) if s.operation == semconv.EXECUTE_TOOL]
    return {s.span_id: s.attributes.get(semconv.TOOL_CALL_ID) for s in tools}


ONE: Asked = ("call_1", "add", {"a": 2, "b": 3})


def test_a_run_gets_the_id_of_its_call_and_the_agent_that_asked() -> None:
    [_, _, tool] = joined([ROOT, chat("c1", ONE), run("t1", {"b": 3, "a": 2})])
    assert (tool.attributes[semconv.TOOL_CALL_ID], tool.agent) == ("call_1", "llm_call")


@pytest.mark.parametrize(
    ("arguments", "name", "id"),
    [
        ({"a": 2, "b": 3}, "add", "call_1"),
        ({"a": 2, "b": 3, "token": "t"}, "add", "call_1"),
        (None, "add", "call_1"),
        ({"a": 2, "b": 4}, "add", None),
        ({"a": 2}, "add", None),
        ({"a": 2, "b": 3}, "subtract", None),
    ],
    ids=["equal", "more than asked", "not recorded", "others", "fewer", "of another tool"],
)
def test_name_and_arguments_decide(arguments: Any, name: str, id: str | None) -> None:
    assert ids([ROOT, chat("c1", ONE), run("t1", arguments, name)]) == {"t1": id}


def test_a_tool_with_one_argument_may_be_passed_that_alone() -> None:
    asked = ("call_1", "search", {"query": "cats"})
    assert ids([ROOT, chat("c1", asked), run("t1", "cats", "search")]) == {"t1": "call_1"}


def test_arguments_as_the_model_wrote_them_are_compared_as_values() -> None:
    assert (
        ids([ROOT, chat("c1", ("call_1", "add", '{"a":2,  "b":3.0}')), run("t1", {"a": 2, "b": 3})])["t1"] == "call_1"
    )


def test_a_call_that_a_person_changed_is_known_by_what_the_conversation_says_then() -> None:
    changed = {"role": "assistant", "parts": [call_part(("call_1", "add", {"a": 20, "b": 30}))]}
    spans = [ROOT, chat("c1", ONE), run("t1", {"a": 20, "b": 30}), chat("c2", sent=[changed])]
    assert ids(spans) == {"t1": "call_1"}


@pytest.mark.parametrize(
    ("name", "arguments", "result", "id"),
    [
        ("add", {"a": 7}, "result of t1", "call_1"),
        ("add", {"a": 7}, '{"sum": 5}', "call_1"),
        ("add", {"a": 7}, "of something else", None),
        ("adder", ONE[2], "result of t1", "call_1"),
        ("adder", ONE[2], "of something else", None),
        ("adder", {"a": 7}, "result of t1", None),
        ("subtract", ONE[2], "result of t1", None),
    ],
)
def test_a_run_with_other_arguments_or_another_name_is_known_by_its_result(
    name: str, arguments: Any, result: str, id: str | None
) -> None:
    written = "{'sum': 5}" if result.startswith("{") else "result of t1"
    answered = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": written}]}
    tool = run("t1", arguments, name, also={semconv.TOOL_CALL_RESULT: result})
    other: Asked = ("call_2", "subtract", {"a": 1})
    assert ids([ROOT, chat("c1", ONE, other), tool, chat("c2", sent=[answered])]) == {"t1": id}


def test_equal_calls_of_two_answers_are_each_their_own() -> None:
    again: Asked = ("call_2", "add", ONE[2])
    spans = [ROOT, chat("c1", ONE), run("t1", ONE[2]), chat("c2", again), run("t2", ONE[2])]
    assert ids(spans) == {"t1": "call_1", "t2": "call_2"}
    # The first was refused.
    assert ids([ROOT, chat("c1", ONE), chat("c2", again), run("t2", ONE[2])]) == {"t2": "call_2"}


def test_agents_side_by_side_keep_their_own_calls() -> None:
    left, right = (span(name, semconv.INVOKE_AGENT, agent=name) for name in ("left", "right"))
    spans = [
        chat("c1", ONE, parent="left", agent="left"),
        chat("c2", ("call_2", "add", ONE[2]), parent="right", agent="right"),
        run("t1", ONE[2], parent="left"),
        run("t2", ONE[2], parent="right"),
        left, right, ROOT,
    ]  # fmt: skip
    assert ids(spans) == {"t1": "call_1", "t2": "call_2"}


def test_a_tool_that_runs_again_is_a_repeat_of_its_call() -> None:
    paused = run("t1", ONE[2], also={semconv.PAUSED: True})
    assert ids([ROOT, chat("c1", ONE), paused, run("t2", ONE[2])]) == {"t1": "call_1", "t2": "call_1"}
    assert ids([ROOT, chat("c1", ONE), run("t1", ONE[2]), run("t2", ONE[2])]) == {"t1": "call_1", "t2": "call_1"}


def test_what_has_a_run_is_not_taken_by_another() -> None:
    by_id = run("t1", ONE[2], also={semconv.TOOL_CALL_ID: "call_1"})
    assert ids([ROOT, chat("c1", ONE), by_id, run("t2", ONE[2])]) == {"t1": "call_1", "t2": None}
    in_text = run("t3", ONE[2], also={semconv.ISSUED_BY: "c1"})
    assert ids([ROOT, chat("c1", ONE), in_text]) == {"t3": None}


def test_a_call_of_the_gateway_is_joined_and_earns_the_outcome_once() -> None:
    function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    response = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    message = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    later = {TOOL_RESULTS: [{"id": "call_1", "name": "add", "failed": False}], "messages": [message]}
    calls = [
        gateway_call(0, response=response, tool_call_ids=("call_1",)),
        gateway_call(1, request=later),
    ]
    spans = [span("chat0", semconv.CHAT), run("t1", {"a": 2, "b": 3}), span("chat1", semconv.CHAT), ROOT]
    [outcome] = tool_outcomes(SpanIndex(calls, spans))
    assert (outcome.tool_call_id, outcome.call, outcome.agent) == ("call_1", calls[0], "llm_call")
    [tool] = [s for s in completed(spans, calls) if s.operation == semconv.EXECUTE_TOOL]
    assert (tool.span_id, tool.attributes[semconv.TOOL_CALL_ID]) == ("t1", "call_1")


def gateway_call(index: int, **more: Any) -> Call:
    tokens = (int_array([1, 2]), int_array([3]), float_array([-0.5]))
    return Call(f"c{index}", "ro", 1, index, "llm_call", "policy", 0, *tokens, span_id=f"chat{index}", **more)


def test_a_result_whose_run_cannot_be_joined_is_not_inferred_beside_it() -> None:
    result = {"type": "tool_call_response", "id": "call_1", "response": "5"}
    sent = [{"role": "assistant", "parts": [call_part(ONE)]}, {"role": "tool", "parts": [result]}]
    spans = [ROOT, chat("c1", ONE), run("t1", {"a": 9}), chat("c2", sent=sent)]
    tools = [s for s in completed(spans) if s.operation == semconv.EXECUTE_TOOL]
    assert [s.span_id for s in tools] == ["t1"]


ARGUMENTS = st.fixed_dictionaries({"a": st.integers(0, 2)})


@given(st.lists(st.lists(ARGUMENTS, min_size=1, max_size=3), min_size=1, max_size=4))
def test_runs_in_order_are_joined_to_the_answer_before_them(answers: list[list[Any]]) -> None:
    """Whatever the arguments: each answer's calls run before the next answer."""
    spans, expected = [ROOT], {}
    for i, asked in enumerate(answers):
        spans.append(chat(f"c{i}", *((f"call_{i}_{k}", "add", arguments) for k, arguments in enumerate(asked))))
        for k, arguments in enumerate(asked):
            spans.append(run(f"t{i}_{k}", arguments))
            expected[f"t{i}_{k}"] = f"call_{i}_{k}"
    assert ids(spans) == expected

"""Sessions: what continues what, token for token, however a client echoes it; and why a rewritten history forks."""

from __future__ import annotations

import copy
import itertools
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import TOOLS, Attempt, in_loop, quick_tokenizer, serving, tool_call
from tiny_tokenizers import template_tokenizer

from agl.mdp.types import Call, int_array
from agl.trainer.gateway.sessions import ForkCause, Sessions
from agl.trainer.rendering.digests import digest

SYSTEM = {"role": "system", "content": "Use the calculator."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


# -- conversations through the official client ------------------------------------------------------------------------


def as_dumped(message: Any) -> dict[str, Any]:
    """As `messages.append(answer.choices[0].message.model_dump())` sends it back."""
    return message.model_dump()


def as_dumped_without_nulls(message: Any) -> dict[str, Any]:
    return message.model_dump(exclude_none=True)


def as_the_object(message: Any) -> Any:
    return message


def as_langchain_does(message: Any) -> dict[str, Any]:
    """Arguments parsed and written again, "" for null, the keys in another order."""
    echoed: dict[str, Any] = {"content": message.content or ""}
    if message.tool_calls:
        echoed["tool_calls"] = [
            {
                "function": {
                    "arguments": json.dumps(json.loads(c.function.arguments), indent=1),
                    "name": c.function.name,
                },
                "id": c.id,
                "type": "function",
            }
            for c in message.tool_calls
        ]
    return {**echoed, "role": "assistant"}


def in_parts(message: Any) -> dict[str, Any]:
    echoed = message.model_dump(exclude_none=True)
    if echoed.get("content"):
        echoed["content"] = [{"type": "text", "text": echoed["content"]}]
    return {**echoed, "content": echoed.get("content"), "name": "agent"}


ECHOES = [as_dumped, as_dumped_without_nulls, as_the_object, as_langchain_does, in_parts]


def script(turns: int) -> list[str]:
    """A tool call, then an answer, in turns; the second kind of call has text before it and odd white space."""
    lines = []
    for i in range(turns):
        spaced = f'Well.\n<tool_call>{{"arguments":{{"expression":  "{i} + é"}}, "name":"calculator"}}</tool_call>'
        lines += [tool_call(f"{i} + 1") if i % 2 else spaced, f"It is {i + 1}."]
    return lines


async def converse(attempt: Attempt, echo: Any, turns: int) -> None:
    """Each turn: a question, a tool call, its result, an answer."""
    history: list[Any] = [SYSTEM]
    for i in range(turns):
        history.append(user(f"What is {i} + 1?"))
        message = (await attempt.chat(history, tools=TOOLS)).choices[0].message
        assert message.tool_calls
        history.append(echo(message))
        history += [{"role": "tool", "tool_call_id": c.id, "content": str(i + 1)} for c in message.tool_calls]
        message = (await attempt.chat(history, tools=TOOLS)).choices[0].message
        assert not message.tool_calls
        history.append(echo(message))


def drift(calls: list[Call]) -> list[int]:
    """Calls that do not extend the one before them token for token."""
    return [
        c.index
        for before, c in itertools.pairwise(calls)
        if c.parent_id != before.id or not np.array_equal(c.prompt_ids[: before.ids.size], before.ids)
    ]


@pytest.mark.parametrize("echo", ECHOES)
@in_loop
async def test_ten_turns_with_tools_drift_nowhere(echo):
    async with serving(script(5)) as rig:
        attempt = await rig.attempt()
        await converse(attempt, echo, 5)
        calls = await attempt.close()
    assert len(calls) == 10
    assert drift(calls) == []
    assert {c.fork_cause for c in calls} == {None}
    # What is new in the record is what came after the parent's answer.
    assert [m["role"] for m in calls[1].request["messages"]] == ["tool"]
    assert [m["role"] for m in calls[2].request["messages"]] == ["user"]
    assert "tools" not in calls[1].request


XML_CALL = "<tool_call>\n<function=calculator>\n<parameter=expression>\n1\n</parameter>\n</function>\n</tool_call>"
TEMPLATES = {
    "qwen25": ([tool_call("1 + 1"), "two"], None),
    "llama31": (['{"name": "calculator", "parameters": {"expression": "1 + 1"}}', "two"], None),
    "qwen3": ([f"<think>\nhm\n</think>\n\n{t}" for t in (tool_call("1"), "two")], "drops reasoning in earlier answers"),
    "qwen35": ([f"</think>\n\n{t}" for t in (XML_CALL, "two")], "rewrites the history when a user message follows"),
    "mistral_v3": (
        ['[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "1"}, "id": "abcdefghi"}]', "two"],
        "rewrites the history when a user message follows",
    ),
}
"""Template -> a tool call and an answer as it writes them; why it forks at a new question, if it does."""


@pytest.mark.parametrize("name", TEMPLATES)
@in_loop
async def test_a_template_forks_where_it_rewrites_history_itself_and_nowhere_else(name):
    lines, why = TEMPLATES[name]
    async with serving(lines * 5, template_tokenizer(name)) as rig:
        attempt = await rig.attempt()
        await converse(attempt, as_langchain_does, 5)
        calls = await attempt.close()
    questions = [2, 4, 6, 8] if why else []
    assert [c.index for c in calls if c.fork_cause] == drift(calls) == questions
    for call in (calls[i] for i in questions):
        assert call.fork_cause == "template"
        assert why in call.request["fork_detail"]


@in_loop
async def test_an_answer_cut_short_goes_on_exactly():
    async with serving(["one two three four", "five"]) as rig:
        attempt = await rig.attempt()
        first = await attempt.chat([user("count")], max_tokens=4)
        await attempt.chat([user("count"), first.choices[0].message, user("go on")])
        calls = await attempt.close()
    assert calls[0].finish_reason == "length"
    assert drift(calls) == []


@in_loop
async def test_two_branches_of_one_conversation_both_continue_it():
    async with serving(["a fine beginning", "left", "right", "more left"]) as rig:
        attempt = await rig.attempt()
        history = [user("begin"), (await attempt.chat([user("begin")])).choices[0].message]
        left = [*history, user("left?")]
        left += [(await attempt.chat(left)).choices[0].message, user("and?")]
        await attempt.chat([*history, user("right?")])
        await attempt.chat(left)
        root, first, second, third = await attempt.close()
    assert [first.parent_id, second.parent_id, third.parent_id] == [root.id, root.id, first.id]


@in_loop
async def test_attempts_share_no_conversation():
    async with serving(["a fine beginning", "more"]) as rig:
        one, other = await rig.attempt(), await rig.attempt()
        answer = (await one.chat([user("begin")])).choices[0].message
        await other.chat([user("begin"), answer, user("go on")])
        (call,) = await other.close()
    assert (call.parent_id, call.fork_cause) == (None, None)


# -- rewritten histories ----------------------------------------------------------------------------------------------

A1, A2 = "the first answer, of some length", "the second answer, of some length"
HISTORY = [SYSTEM, user("one"), assistant(A1), user("two"), assistant(A2), user("three")]


def rewritten(**changes: Any) -> list[dict[str, Any]]:
    history = copy.deepcopy(HISTORY)
    for at, content in changes.items():
        history[int(at[1:])]["content"] = content
    return history


REWRITES = {
    "an answer edited": (rewritten(_2="edited"), "assistant_rewritten", r"message 2 \(assistant\) is not the answer"),
    "the last answer edited": (rewritten(_4="edited"), "assistant_rewritten", r"message 4 \(assistant\) is not the"),
    "a question edited": (rewritten(_1="uno"), "history_rewritten", r"message 1 \(user\)"),
    "a later question edited": (rewritten(_3="due"), "history_rewritten", r"message 3 \(user\)"),
    "the system prompt edited": (rewritten(_0="It is noon."), "system_changed", r"message 0 \(system\)"),
    "the first turn dropped": ([SYSTEM, *HISTORY[3:]], "trimmed", "2 messages left out from message 1 on$"),
    "all but the last turn dropped": (HISTORY[3:], "trimmed", "3 messages left out from message 0 on$"),
    "a question dropped": ([*HISTORY[:3], *HISTORY[4:]], "trimmed", "1 message left out from message 3 on$"),
    "a middle turn dropped": ([*HISTORY[:1], *HISTORY[3:]], "trimmed", "2 messages left out"),
    "an answer injected": (
        [*HISTORY[:5], user("so"), assistant("indeed"), user("three")],
        "assistant_rewritten",
        r"message 6 \(assistant\) was not sampled here",
    ),
    "another agent's turn": (
        [*HISTORY[:5], user("so"), assistant("indeed, says another"), user("three")],
        "assistant_rewritten",
        r"message 6 \(assistant\) was not sampled here",
    ),
    "an answer doubled": (
        [*HISTORY[:5], assistant("indeed"), user("three")],
        "assistant_rewritten",
        "message 5 .* not sampled",
    ),
    "a summary in place of the past": (
        [user("Summary: one was answered."), *HISTORY[3:]],
        "summarised",
        r"3 messages left out from message 0 on; in their place message 0 \(user\)$",
    ),
    "a summary after the system prompt": (
        [SYSTEM, user("Summary: one was answered."), *HISTORY[4:]],
        "summarised",
        r"3 messages left out from message 1 on; in their place message 1 \(user\)$",
    ),
    "a summary in the system prompt": (
        [{"role": "system", "content": "Use the calculator. So far: one."}, *HISTORY[3:]],
        "summarised",
        r"in their place message 0 \(system\)$",
    ),
    "a summary as an answer": (
        [SYSTEM, assistant("So far one was answered."), *HISTORY[3:]],
        "summarised",
        r"in their place message 1 \(assistant\)$",
    ),
    "all but the first request summarised": (
        [*HISTORY[:2], user("So far: one and two were answered.")],
        "summarised",
        r"3 messages left out from message 2 on; in their place message 2 \(user\)$",
    ),
    "a summary that another call wrote, and nothing else": (
        [SYSTEM, user("What was done?"), assistant("the third answer"), user("Go on.")],
        "summarised",
        r"^4 messages left out from message 1 on; in their place message 1 \(user\), message 2 \(assistant\)",
    ),
    "one turn in the place of one": (
        [SYSTEM, user("uno"), assistant("Uno."), *HISTORY[3:]],
        "history_rewritten",
        r"message 1 \(user\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REWRITES)
@in_loop
async def test_a_rewritten_history_forks_with_its_cause(name):
    messages, cause, detail = REWRITES[name]
    async with serving([A1, A2, "the third answer"]) as rig:
        attempt = await rig.attempt()
        await attempt.chat(HISTORY[:2])
        await attempt.chat(HISTORY[:4])
        if name == "an answer injected":
            await attempt.chat(HISTORY)
        if name == "a summary that another call wrote, and nothing else":
            await attempt.chat([user("Summarise: one, two.")])
        await attempt.chat(messages)
        call = (await attempt.close())[-1]
    assert (call.parent_id, call.fork_cause) == (None, cause)
    assert re.search(detail, call.request["fork_detail"])
    assert call.prompt_ids.tolist() == quick_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


@in_loop
async def test_other_tools_fork():
    other = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
    async with serving([A1, A2, "third"]) as rig:
        attempt = await rig.attempt()
        await attempt.chat(HISTORY[:2], tools=TOOLS)
        await attempt.chat(HISTORY[:4], tools=other)
        await attempt.chat(HISTORY, tools=TOOLS)
        await attempt.chat([*HISTORY, assistant("third"), user("four")], tools=TOOLS)
        calls = await attempt.close()
    assert [c.fork_cause for c in calls] == [None, "tools_changed", "tools_changed", None]
    assert calls[3].parent_id == calls[2].id


@in_loop
async def test_tools_of_the_same_meaning_do_not_fork():
    again = json.loads(json.dumps(TOOLS, sort_keys=True))
    async with serving([A1, A2]) as rig:
        attempt = await rig.attempt()
        await attempt.chat(HISTORY[:2], tools=TOOLS)
        await attempt.chat(HISTORY[:4], tools=again)
        calls = await attempt.close()
    assert drift(calls) == []


@in_loop
async def test_an_edited_call_is_known_by_its_id():
    async with serving([tool_call("1"), "x"]) as rig:
        attempt = await rig.attempt()
        made = (await attempt.chat([user("q")], tools=TOOLS)).choices[0].message.model_dump()
        made["tool_calls"][0]["function"]["arguments"] = '{"expression": "2"}'
        result = {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "2"}
        await attempt.chat([user("q, again"), made, result], tools=TOOLS)
        call = (await attempt.close())[-1]
    assert call.fork_cause == "history_rewritten"


@in_loop
async def test_after_a_fork_the_conversation_goes_on_from_there():
    async with serving([A1, "after the fork", "more"]) as rig:
        attempt = await rig.attempt()
        await attempt.chat(HISTORY[:2])
        forked = rewritten(_2="edited")[:4]
        answer = (await attempt.chat(forked)).choices[0].message
        await attempt.chat([*forked, answer, user("and?")])
        _, fork, last = await attempt.close()
    assert (fork.parent_id, last.parent_id, last.fork_cause) == (None, fork.id, None)


# -- conversations that are simply others -----------------------------------------------------------------------------


@in_loop
async def test_new_conversations_are_no_forks():
    shots = [SYSTEM, user("2 + 2"), assistant("4"), user("3 + 3"), assistant("6")]
    more_shots = [user("translate"), assistant("4"), user("now")]
    async with serving(["4"]) as rig:
        attempt = await rig.attempt()
        requests = [
            [user("7 - 3")],
            [user("7 - 3")],
            [SYSTEM, user("5 - 1")],
            [*shots, user("1 + 3")],
            [*shots, user("8 - 4")],
            [*shots, user("8 - 4")],
            more_shots,
            [SYSTEM, user("something else")],
        ]
        for messages in requests:
            await attempt.chat(messages)
        calls = await attempt.close()
    assert [(c.parent_id, c.fork_cause) for c in calls] == [(None, None)] * len(requests)


@in_loop
async def test_parallel_conversations_and_sub_agents_do_not_mix():
    def answer(asked: Any) -> str:
        return "heard: " + quick_tokenizer().decode(asked.prompt_ids).rsplit("user\n", 1)[1].partition("<|im_end|>")[0]

    async with serving(answer) as rig:
        attempt = await rig.attempt()
        histories = [[SYSTEM, user(f"conversation {i}")] for i in range(4)]
        histories += [
            [user("conversation 0")],
            [{"role": "system", "content": "You are a helper."}, user("conversation 1")],
        ]
        for turn in range(3):
            for history in histories:
                message = (await attempt.chat(history)).choices[0].message
                history += [message.model_dump(), user(f"turn {turn}")]
        calls = await attempt.close()
    assert {c.fork_cause for c in calls} == {None}
    n = len(histories)
    assert [c.parent_id for c in calls] == [None] * n + [c.id for c in calls[:-n]]


# -- properties -------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, width=32) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.builds(
        lambda i, name, arguments: {
            "id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}
        },
        st.integers(0, 3), st.sampled_from(["f", "g"]), st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    ),
    max_size=2,
)  # fmt: skip
REPLIES = st.builds(
    lambda text, calls: {"role": "assistant", "content": text or None, "tool_calls": calls or None},
    st.text(max_size=8),
    CALLS,
)


@st.composite
def echoed(draw: Any, message: dict[str, Any]) -> dict[str, Any]:
    """The same message as some client sends it back."""
    out = copy.deepcopy(message)
    text = out["content"]
    form = draw(st.sampled_from(["same", "null", "parts", "strings"]))
    if form == "null" and not text:
        out["content"] = draw(st.sampled_from([None, "", []]))
    elif form == "parts" and text:
        cut = draw(st.integers(0, len(text)))
        out["content"] = [{"type": "text", "text": text[:cut]}, {"type": "text", "text": text[cut:]}]
    elif form == "strings" and text:
        out["content"] = [text]
    for call in out.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        if draw(st.booleans()):
            arguments = dict(reversed(arguments.items()))
        ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, 2]))
        call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    if not out["tool_calls"] and draw(st.booleans()):
        out["tool_calls"] = draw(st.sampled_from([None, []]))
    extra = draw(
        st.sampled_from([{}, {"refusal": None}, {"name": "agent"}, {"reasoning_content": "hm"}, {"audio": None}])
    )
    return out | extra


@given(st.data())
def test_every_echo_of_a_message_is_that_message(data):
    message = data.draw(REPLIES)
    assert digest(data.draw(echoed(message))) == digest(message)


@given(REPLIES, REPLIES)
def test_messages_that_say_different_things_are_different(a, b):
    def said(message: dict[str, Any]) -> Any:
        calls = message["tool_calls"] or []
        spoken = [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        return message["content"] or "", json.dumps(spoken, sort_keys=True)

    assert (digest(a) == digest(b)) == (said(a) == said(b))


def test_a_result_belongs_to_its_call():
    results = [{"role": "tool", "content": "5", "tool_call_id": i} for i in ("a", "b")]
    assert digest(results[0]) != digest(results[1])
    assert digest(user("5")) != digest(assistant("5"))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_was_done_to_a_history_is_the_cause(data):
    """A conversation of any length; any of its messages are left out, replaced or edited, and it goes on from there."""
    sessions, turns = Sessions(), data.draw(st.integers(2, 6))
    history = [SYSTEM]
    for i in range(turns):
        history.append(user(f"question {i}"))
        match = sessions.match("policy", history, None, "agent")
        history.append(assistant(f"this is answer {i}"))
        sessions.remember(match, f"call{i}", "s", int_array([1]), int_array([2]), history[-1])
    # Other conversations of the attempt do not matter, however alike they begin.
    other = [SYSTEM, user("another thing")]
    sessions.remember(sessions.match("policy", other, None), "o", "o", int_array([1]), int_array([2]), assistant("ok"))
    # The last answer stays: it is how the conversation is known.
    first, last = sorted(data.draw(st.lists(st.integers(1, 2 * turns - 1), min_size=2, max_size=2, unique=True)))
    done = data.draw(st.sampled_from(ForkCause))
    where = f"from message {first} on"
    match done:
        case ForkCause.TRIMMED:
            changed, detail = [*history[:first], *history[last:]], where
        case ForkCause.SUMMARISED:
            summary = {"role": data.draw(st.sampled_from(["user", "assistant", "system"])), "content": "So far: much."}
            changed, detail = (
                [*history[:first], summary, *history[last + 1 :]],
                f"{where}; in their place message {first}",
            )
        case ForkCause.SYSTEM_CHANGED:
            changed, detail = [user("no system") | {"role": "developer"}, *history[1:]], "message 0 (system)"
        case ForkCause.HISTORY_REWRITTEN | ForkCause.ASSISTANT_REWRITTEN:
            changed, detail = copy.deepcopy(history), f"message {first} ({history[first]['role']}) is not the"
            changed[first]["content"] = "something else"
            done = ForkCause.HISTORY_REWRITTEN if first % 2 else ForkCause.ASSISTANT_REWRITTEN
        case _:
            changed, detail, done = history, None, None
    match = sessions.match("policy", [*changed, user("the next question")], None, "agent")
    assert match.cause is done
    assert match.detail is None if detail is None else detail in str(match.detail)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_request_continues_exactly_the_longest_conversation_that_it_extends(data):
    """Against the definition: a list of whole conversations, compared message by message."""
    sessions, past = Sessions(), []
    texts = st.sampled_from(["a", "b"])
    for number in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.sampled_from([[], *(whole for whole, _, _ in past)]))
        kept = start[: data.draw(st.integers(0, len(start)))] if data.draw(st.booleans()) else start
        new = data.draw(st.lists(st.builds(lambda r, t: {"role": r, "content": t}, st.sampled_from(
            ["user", "user", "system", "assistant"]), texts), min_size=1, max_size=2))  # fmt: skip
        messages = [*kept, *new]
        tools = data.draw(st.sampled_from([None, TOOLS]))
        match = sessions.match("policy", messages, tools)

        ended_here = [p for p in past if len(p[0]) < len(messages) and messages[: len(p[0])] == p[0]]
        longest = max((len(p[0]) for p in ended_here), default=0)
        fits = [p for p in ended_here if len(p[0]) == longest]
        injected = any(m["role"] == "assistant" for m in messages[longest:])
        same_tools = [p for p in fits if p[1] == tools]
        if fits and not injected and same_tools:
            assert match.parent is not None
            assert (match.parent.call_id, match.new, match.cause) == (same_tools[-1][2], longest, None)
        else:
            assert (match.parent, match.new) == (None, 0)
            assert (match.cause is None) == (match.detail is None)
            if fits:
                assert match.cause is not None
            elif not any(m["role"] == "assistant" for m in messages):
                # An earlier request, and fewer messages than followed it there.
                asked = [p[0] for p in past if messages[: len(p[0]) - 1] == p[0][:-1] and len(messages) >= len(p[0])]
                assert match.cause is None or (match.cause is ForkCause.SUMMARISED and asked)

        reply, session = assistant(data.draw(texts)), match.parent.session if match.parent else f"s{number}"
        sessions.remember(match, f"call{number}", session, int_array([1]), int_array([2]), reply)
        past.append(([*messages, reply], tools, f"call{number}"))

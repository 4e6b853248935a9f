"""Anthropic's Messages dialect, judged by Anthropic's client: answers, streams, tools, errors, continuation."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import numpy as np
import pytest
from late import Late
from scripted import Attempt, ScriptedEngine, in_loop, new_access, quick_tokenizer, serving, tool_call, until
from tiny_tokenizers import template_tokenizer

from agl.errors import EngineError
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.sequence import merge, merge_report
from agl.mdp.span_index import SpanIndex
from agl.trainer.gateway.dialects.messages.body import read
from agl.trainer.gateway.errors import RequestError

anthropic = Late("anthropic")

USER: dict[str, Any] = {"role": "user", "content": "hi"}
ASK: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": [USER]}
CALCULATOR: dict[str, Any] = {
    "name": "calculator",
    "description": "Work out a sum.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
SEARCH: dict[str, Any] = {"name": "search", "input_schema": {"type": "object", "properties": {}}}


def client(attempt: Attempt, **options: Any) -> Any:
    """The official client, as an agent would make it."""
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    base_url = f"{attempt.access.url}/agents/agent"
    defaults = {"base_url": base_url, "api_key": attempt.key, "http_client": http, "max_retries": 0}
    return anthropic.AsyncAnthropic(**defaults | options)


async def create(attempt: Attempt, **fields: Any) -> Any:
    # The newest clients have no argument for these; older ones, and other programs, send them.
    sampling = {k: fields.pop(k) for k in ("temperature", "top_p", "top_k") if k in fields}
    async with client(attempt) as own:
        return await own.messages.create(**ASK | fields, extra_body=sampling)


async def stream(attempt: Attempt, **fields: Any) -> tuple[Any, list[Any]]:
    """The final message of a stream, and its events."""
    async with client(attempt) as own, own.messages.stream(**ASK | fields) as events:
        seen = [event async for event in events]
        return await events.get_final_message(), seen


def blocks(message: Any) -> list[dict[str, Any]]:
    return [b.model_dump(exclude_none=True) for b in message.content]


def asked(**fields: Any) -> Any:
    return read(ASK | fields, new_access()).chat


# -- answers ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_answer_and_its_call() -> None:
    async with serving(["hello there"]) as rig:
        attempt = await rig.attempt()
        message = await create(attempt, system="be brief", temperature=0.5, top_p=0.9, top_k=7)
        (call,) = await attempt.close()
    assert (message.type, message.role, message.model) == ("message", "assistant", "policy")
    assert blocks(message) == [{"type": "text", "text": "hello there"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id == call.id
    assert message.id.startswith("msg_")
    assert message.usage.input_tokens == call.prompt_ids.size
    assert message.usage.output_tokens == call.response_ids.size
    assert call.agent == "agent"
    assert call.request["messages"] == [{"role": "system", "content": "be brief"}, USER]
    assert call.request["asked"] == {"model": "m", "max_tokens": 200, "temperature": 0.5, "top_p": 0.9, "top_k": 7}
    sampling = rig.engine.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 200)


@in_loop
async def test_why_an_answer_ended() -> None:
    async with serving(["one two three"] * 2 + [tool_call("1 + 1"), "well\nObservation: and so on"]) as rig:
        attempt = await rig.attempt()
        whole = await create(attempt)
        cut = await create(attempt, max_tokens=3)
        called = await create(attempt, tools=[CALCULATOR])
        stopped = await create(attempt, stop_sequences=["\nThought:", "\nObservation:"])
        streamed, _ = await stream(attempt, stop_sequences=["\nThought:", "\nObservation:"])
    assert whole.stop_reason == "end_turn"
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    assert called.stop_reason == "tool_use"
    for message in (stopped, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\nObservation:")
        assert message.content[0].text == "well"


ANSWERS = {
    "text": "Let me think about that, " * 20,
    "unicode": "Grüße 🎉👩‍👩‍👧 日本語 ½",
    "a call": tool_call("1 + 2"),
    "text and calls": "  I will work it out.  \n\n" + tool_call("1 + 2") + "\n" + tool_call("3 * 4") + " and so on",
    "text that looks like a call": "a < b and <tool is not <tool_call",
    "malformed": "well <tool_call>\n{broken}\n</tool_call> then",
    "only white space": " \n ",
    "nothing": "",
    "integers longer than a machine word": tool_call("x").replace('"x"', str(2**80)),
}


@pytest.mark.parametrize("tools", [[], [CALCULATOR]], ids=["plain", "tools"])
@in_loop
async def test_the_events_add_up_to_the_message(tools: list[Any]) -> None:
    fields = {"tools": tools} if tools else {}
    for name, text in ANSWERS.items():
        async with serving([text]) as rig:
            streamed, plain = await rig.attempt(seed=4), await rig.attempt(seed=4)
            message, events = await stream(streamed, **fields)
            whole = await create(plain, **fields)
            a, b = message.model_dump(exclude={"id"}), whole.model_dump(exclude={"id"})
            for block in a["content"] + b["content"]:
                block.pop("parsed_output", None)
            assert a == b, name
            (first,), (second,) = await streamed.close(), await plain.close()
            assert first.response_ids.tolist() == second.response_ids.tolist()
            assert (first.response, first.id) == (second.response, message.id), name
            kinds = [e.type for e in events if e.type not in ("text", "input_json")]
            assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)


@in_loop
async def test_a_stream_counts_tokens_as_the_whole_answer_does() -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["one two"], caches=True)) as rig:
        attempt = await rig.attempt()
        await create(attempt)
        whole = await create(attempt)
        message, events = await stream(attempt)
    assert message.usage == whole.usage
    assert whole.usage.cache_read_input_tokens
    start, end = (next(e for e in events if e.type == kind) for kind in ("message_start", "message_delta"))
    counted = start.message.usage.model_dump(exclude_unset=True)
    assert counted.keys() == end.usage.model_dump(exclude_unset=True).keys()
    assert counted["input_tokens"] == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    # What is not known yet is nothing, of a type that clients add up.
    details = counted.pop("output_tokens_details")
    assert {*details.values(), *(n for name, n in counted.items() if name != "input_tokens")} == {0}


@in_loop
async def test_text_comes_as_it_is_sampled() -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["1234567890"], paused=True)) as rig:
        attempt = await rig.attempt()
        async with client(attempt) as own:
            events = await own.messages.create(**ASK, stream=True)
            first = [await anext(events) for _ in range(3)]
            assert [e.type for e in first] == ["message_start", "content_block_start", "content_block_delta"]
            assert first[2].delta.text == "1"
            assert first[0].message.usage.input_tokens == rig.engine.asked[0].prompt_ids.size
            rig.engine.resume.set()
            rest = [e async for e in events]
    assert "".join(e.delta.text for e in rest if e.type == "content_block_delta") == "234567890"


@in_loop
async def test_thoughts_are_shown_when_asked_for() -> None:
    tokenizer = template_tokenizer("qwen3")
    thoughtful: Any = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with serving(ScriptedEngine(tokenizer, ["<think>\nhmm\n</think>\n\nyes"]), tokenizer) as rig:
        attempt = await rig.attempt()
        shown = await create(attempt, **thoughtful)
        hidden = await create(attempt)
        streamed, _ = await stream(attempt, **thoughtful)
        more = [USER, {"role": "assistant", "content": shown.content}, USER]
        await create(attempt, messages=more, **thoughtful)
        calls = await attempt.close()
    assert [b.type for b in hidden.content] == ["text"]
    for message in (shown, streamed):
        assert [b.type for b in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking.strip(), message.content[1].text) == ("hmm", "yes")
    # This template drops earlier thoughts, which no continuation can; the fork is its own, not the client's.
    assert [c.fork_cause for c in calls] == [None, None, None, "template"]
    assert calls[3].request["messages"][1]["reasoning_content"].strip() == "hmm"


@pytest.mark.parametrize("display", ["summarized", None])
@in_loop
async def test_thoughts_that_are_omitted_are_signed_blocks_without_a_text(display: str | None) -> None:
    tokenizer = template_tokenizer("qwen3")
    line = "<think>\nhmm\n</think>\n\n" + tool_call("1 + 1")
    async with serving(ScriptedEngine(tokenizer, [line, line, line, "two"]), tokenizer) as rig:
        attempt, tools = await rig.attempt(), {"tools": [CALCULATOR]}
        shown = await create(attempt, **tools, thinking={"type": "between_tools"})
        assert shown.content[0].thinking.strip() == "hmm"
        adaptive = {"type": "adaptive", "display": display}
        assert (await create(attempt, **tools, thinking=adaptive)).content[0].thinking.strip() == "hmm"
        omitted = {"type": "adaptive", "display": "omitted"}
        message, events = await stream(attempt, **tools, thinking=omitted)
        thought, use = message.content
        assert [thought.type, thought.thinking, use.type] == ["thinking", "", "tool_use"]
        assert thought.signature == message.id
        kinds = [e.delta.type for e in events if e.type == "content_block_delta"]
        assert kinds == ["signature_delta", "input_json_delta"]
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "2"}]}
        more = [USER, {"role": "assistant", "content": message.content}, result]
        await create(attempt, messages=more, **tools, thinking=omitted)
        calls = await attempt.close()
        whole = await create(await rig.attempt(), **tools, thinking=omitted)
    assert whole.content[0].text == "two"
    # The client has sent no thoughts, and the policy continues its own.
    assert (calls[3].parent_id, calls[3].fork_cause) == (calls[2].id, None)
    np.testing.assert_array_equal(calls[3].prompt_ids[: calls[2].ids.size], calls[2].ids)


@in_loop
async def test_omitted_thoughts_are_the_same_whole_and_streamed() -> None:
    tokenizer = template_tokenizer("qwen3")
    thoughtful: Any = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}
    async with serving(ScriptedEngine(tokenizer, ["<think>\nhmm\n</think>\n\nyes"]), tokenizer) as rig:
        attempt = await rig.attempt()
        whole = await create(attempt, **thoughtful)
        streamed, _ = await stream(attempt, **thoughtful)
    for message in (whole, streamed):
        thought, text = blocks(message)
        assert thought == {"type": "thinking", "thinking": "", "signature": message.id}
        assert text["text"] == "yes"


def test_a_sync_client_and_raw_responses() -> None:
    async def main() -> None:
        async with serving(["hello"]) as rig:
            attempt = await rig.attempt()

            def use() -> None:
                base_url = f"{attempt.access.url}/agents/agent"
                with anthropic.Anthropic(
                    base_url=base_url,
                    auth_token=attempt.key,
                    api_key=None,
                    http_client=anthropic.DefaultHttpxClient(trust_env=False),
                ) as own:
                    assert own.messages.create(**ASK).content[0].text == "hello"
                    raw = own.messages.with_raw_response.create(**ASK)
                    assert raw.parse().content[0].text == "hello"
                    with own.messages.with_streaming_response.create(**ASK) as response:
                        assert response.parse().content[0].text == "hello"
                    with own.messages.stream(**ASK) as events:
                        assert "".join(events.text_stream) == "hello"
                    assert own.beta.messages.create(**ASK, betas=["some-beta"]).content[0].text == "hello"

            await asyncio.to_thread(use)
            assert len(await attempt.close()) == 5

    asyncio.run(main())


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_blocks_become_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    request = asked(
        system=[{"type": "text", "text": "be "}, {"type": "text", "text": "brief", **cached}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "what", **cached}, {"type": "text", "text": "?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hmm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "c1", "name": "calculator", "input": {"expression": "½"}, **cached},
                    {"type": "tool_use", "id": "c2", "name": "search", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}], **cached},
                    {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        tools=[{**CALCULATOR, **cached}],
    )

    def call(id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert request.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what?"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hmm",
            "tool_calls": [call("c1", "calculator", '{"expression": "½"}'), call("c2", "search", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "tool", "tool_call_id": "c2", "content": "error"},
        {"role": "user", "content": "go on"},
    ]
    schema = CALCULATOR["input_schema"]
    function = {"name": "calculator", "description": "Work out a sum.", "parameters": schema}
    assert request.tools == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("choice", "tools", "force"),
    [
        (None, 2, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, 2, None),
        ({"type": "any"}, 2, True),
        ({"type": "tool", "name": "search"}, 2, "search"),
        ({"type": "none"}, 0, None),
    ],
)
def test_tool_choice(choice: Any, tools: int, force: Any) -> None:
    request = asked(tools=[CALCULATOR, SEARCH], tool_choice=choice)
    assert (len(request.tools or ()), request.force_tool) == (tools, force)


@in_loop
async def test_a_forced_tool_is_called() -> None:
    async with serving(['{"expression": "1 + 1"}}\n</tool_call>']) as rig:
        attempt = await rig.attempt()
        choice = {"type": "tool", "name": "calculator"}
        for message in (
            await create(attempt, tools=[CALCULATOR], tool_choice=choice),
            (await stream(attempt, tools=[CALCULATOR], tool_choice=choice))[0],
        ):
            assert [(b.name, b.input) for b in message.content] == [("calculator", {"expression": "1 + 1"})]
            assert message.stop_reason == "tool_use"


def test_fields_without_effect_are_accepted() -> None:
    asked(metadata={"user_id": "u"}, service_tier="auto", cache_control={"type": "ephemeral"}, output_config={})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "unknown field": ({"max_token": 5}, "max_tokens"),
    "too hot": ({"temperature": 1.5}, "temperature"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
    "a message that is hidden later": (
        {"messages": [{"role": "system", "content": "x", "clear_at": "next_user_message"}, USER]},
        "messages.0.clear_at",
    ),
    "block": ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    "nameless result": ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    "prefill": ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "assistant"),
    "server tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    "no schema": ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    "no such tool": ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
    "nothing to choose": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "choice": ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
    "stop": ({"stop_sequences": [""]}, "stop_sequences"),
    "servers": ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
    "a misspelt format": ({"output_config": {"fromat": {}}}, "'output_config.fromat'; did you mean 'format'"),
    "an effort": ({"output_config": {"effort": "huge"}}, "output_config.effort: "),
    "a budget of what": ({"output_config": {"task_budget": {"type": "euros", "total": 9}}}, "task_budget.type: "),
    "thinking": ({"thinking": {"type": "bogus"}}, "thinking.type is 'bogus'"),
    "what is shown of it": ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display: "),
    "a field of a block": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}]},
        "'messages.0.content.0.cache'",
    ),
    "a call of the provider's code": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "code", "id": "x"}}
                    ],
                },
                USER,
            ]
        },
        "messages.0.content.0.caller is for the provider's code execution",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    fields, told = BAD[name]
    with pytest.raises(RequestError, match=told.replace(".", r"\.")) as caught:
        read(ASK | fields, new_access())
    assert caught.value.status == 400


# -- errors -----------------------------------------------------------------------------------------------------------


@in_loop
async def test_errors_are_the_clients_own() -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), [EngineError("no engine")], max_context=300)) as rig:
        attempt = await rig.attempt()
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client(attempt, api_key="wrong").messages.create(**ASK)
        assert caught.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
            await create(attempt, temperature=7)
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError, match="tokens"):
            await create(attempt, messages=[{"role": "user", "content": "x" * 2000}])
        with pytest.raises(anthropic.NotFoundError, match="not served") as caught:
            await client(attempt).messages.batches.list()
        assert caught.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.InternalServerError, match="no engine") as caught:
            await create(attempt)
        assert caught.value.body["error"]["type"] == "api_error"
        calls = await attempt.close()
        with pytest.raises(anthropic.AuthenticationError):
            await create(attempt)
    assert [c.finish_reason for c in calls] == ["error"] * 3
    assert "temperature" in str(calls[0].error)


@in_loop
async def test_an_attempt_that_ends_tells_its_streams() -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["a long answer"], paused=True)) as rig:
        attempt = await rig.attempt()
        async with client(attempt) as own:
            events = await own.messages.create(**ASK, stream=True)
            await anext(events)
            (call,) = await attempt.close()
            with pytest.raises(anthropic.APIError, match="attempt has ended") as caught:
                async for _ in events:
                    pass
    body: Any = caught.value.body
    assert body["request_id"] == call.id
    assert (call.finish_reason, call.response_ids.size) == ("cancelled", 1)


@in_loop
async def test_a_client_that_hangs_up_cancels_its_call() -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["a long answer"], paused=True)) as rig:
        attempt = await rig.attempt()
        async with client(attempt) as own:
            events = await own.messages.create(**ASK, stream=True)
            await anext(events)
            await events.close()
        await until(lambda: rig.engine.cancelled == 1)
        (call,) = await attempt.close()
    assert call.finish_reason == "cancelled"


# -- counting, addresses ----------------------------------------------------------------------------------------------


@in_loop
async def test_counted_tokens_are_those_of_the_prompt_and_no_call() -> None:
    async with serving(["hello"]) as rig:
        attempt = await rig.attempt()
        fields = {"messages": [USER], "system": "be brief", "tools": [CALCULATOR]}
        async with client(attempt) as own:
            counted = await own.messages.count_tokens(model="m", **fields)
            with pytest.raises(anthropic.BadRequestError, match="tools"):
                await own.messages.count_tokens(model="m", messages=[USER], tools=[{"name": "f"}])
            # A conversation so far, which ends with the assistant.
            answered = [USER, {"role": "assistant", "content": "four words of it"}]
            longer = await own.messages.count_tokens(model="m", **fields | {"messages": answered})
        await create(attempt, **fields)
        (call,) = await attempt.close()
    assert counted.input_tokens == call.prompt_ids.size
    assert longer.input_tokens > counted.input_tokens + 4


@in_loop
async def test_a_base_url_that_ends_in_v1_is_the_same_agents() -> None:
    async with serving(["hello"]) as rig:
        attempt = await rig.attempt()
        async with client(attempt, base_url=attempt.url()) as own:
            await own.messages.create(**ASK)
        (call,) = await attempt.close()
    assert call.agent == "agent"


# -- exact continuation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [create, stream], ids=["whole", "stream"])
@in_loop
async def test_ten_turns_drift_by_nothing(ask: Any) -> None:
    lines = []
    for i in range(10):
        two = tool_call(f"{i} + {i}").replace('"arguments": ', '"arguments":   ') + "\n" + tool_call(f"{i} * {i}")
        lines += ["I look — naïvely.\n" + two, f"It is {2 * i} — naïvely  "]
    async with serving(ScriptedEngine(quick_tokenizer(), lines, caches=True)) as rig:
        attempt = await rig.attempt()
        messages: list[Any] = []
        for i in range(10):
            messages.append({"role": "user", "content": f"what is {i} and {i}?"})
            for _ in range(2):
                answer = await ask(attempt, messages=messages, system="Use the calculator!", tools=[CALCULATOR])
                message = answer[0] if isinstance(answer, tuple) else answer
                messages.append({"role": "assistant", "content": message.content})
                uses = [b for b in message.content if b.type == "tool_use"]
                if uses:
                    results = [{"type": "tool_result", "tool_use_id": b.id, "content": str(i)} for b in uses]
                    messages.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
        where = (attempt.access.rollout_id, 1, "group")
        calls = await attempt.close()
        built = build_trajectory(*where, SpanIndex(calls, []), select(None))
    assert len(calls) == 20
    for before, after in itertools.pairwise(calls):
        assert after.parent_id == before.id
        np.testing.assert_array_equal(after.prompt_ids[: before.ids.size], before.ids)
    usage = message.usage
    assert usage.cache_read_input_tokens == calls[-2].ids.size
    assert usage.input_tokens + usage.cache_read_input_tokens == calls[-1].prompt_ids.size
    (trajectory,) = built.trajectories.values()
    report = merge_report([trajectory], merge(trajectory, dict.fromkeys((c.id for c in calls), 1.0)))
    assert (report.rows, report.forks) == (1, {})
    assert report.tokens == calls[-1].ids.size


@in_loop
async def test_a_result_joins_the_call_that_it_answers() -> None:
    async with serving([tool_call("1 + 1"), "two"]) as rig:
        attempt = await rig.attempt()
        first = await create(attempt, tools=[CALCULATOR])
        (use,) = first.content
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "2"}]}
        echoed = [{k: v for k, v in b.items() if v is not None} for b in json.loads(first.to_json())["content"]]
        history = [USER, {"role": "assistant", "content": echoed}, {"role": "user", "content": [result]}]
        await create(attempt, tools=[CALCULATOR], messages=history)
        before, after = await attempt.close()
    assert before.tool_call_ids == (use.id,)
    assert after.parent_id == before.id
    assert after.request["messages"] == [{"role": "tool", "tool_call_id": use.id, "content": "2"}]

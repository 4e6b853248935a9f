"""The Responses dialect, asked by the official client: what an agent gets, and what is recorded of it."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import openai
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Attempt, ScriptedEngine, in_loop, new_access, quick_tokenizer, rendering_of, serving, tool_call
from tiny_tokenizers import template_tokenizer

from agl.errors import ConfigError, EngineError
from agl.trainer.gateway.dialects.responses.answer import response_object
from agl.trainer.gateway.dialects.responses.body import read
from agl.trainer.gateway.dialects.responses.items import listed_items
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.sessions import Sessions

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "calculator",
        "description": "Work out a sum.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
        "strict": True,
    }
]

THOUGHT = "<think>\nlet me see\n</think>\n\n"


async def ask(attempt: Attempt, input: Any = "hello", **fields: Any) -> Any:
    return await attempt.client().responses.create(model="m", input=input, **fields)


async def events_of(attempt: Attempt, input: Any = "hello", **fields: Any) -> list[Any]:
    return [e async for e in await ask(attempt, input, stream=True, **fields)]


# -- answers ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_answer_and_its_record():
    async with serving(["12 apples"]) as rig:
        attempt = await rig.attempt()
        ignored = {"metadata": {"a": "b"}, "extra_body": {"client_metadata": {"as": "Codex does"}}}
        answer = await ask(attempt, "how many?", instructions="be brief", temperature=0.5, **ignored)
        (call,) = await attempt.close()
    assert (answer.id, answer.object, answer.status, answer.model) == (call.id, "response", "completed", "policy")
    assert answer.id.startswith("resp_")
    assert (answer.output_text, answer.error, answer.incomplete_details) == ("12 apples", None, None)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.instructions, answer.metadata, answer.temperature) == ("be brief", {"a": "b"}, 0.5)
    assert (call.agent, call.finish_reason, call.error) == ("agent", "stop", None)
    assert call.request["messages"] == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "how many?"}
    ]  # fmt: skip
    assert call.request["asked"] == {"model": "m", "temperature": 0.5}
    assert call.response == {"role": "assistant", "content": "12 apples"}
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (call.prompt_ids.size, call.response_ids.size)
    assert (answer.usage.total_tokens, answer.usage.input_tokens_details.cached_tokens) == (call.ids.size, 0)


@in_loop
async def test_the_sync_client_and_raw_responses():
    async with serving(["yes"]) as rig:
        attempt = await rig.attempt()

        def ask_all():
            with attempt.sync_client() as client:
                yield client.responses.create(model="m", input="really?").output_text
                yield client.responses.with_raw_response.create(model="m", input="really?").parse().output_text
                with client.responses.with_streaming_response.create(model="m", input="really?") as raw:
                    yield raw.parse().output_text
                with client.responses.stream(model="m", input="really?") as stream:
                    yield stream.get_final_response().output_text
                yield "".join(
                    e.delta
                    for e in client.responses.create(model="m", input="really?", stream=True)
                    if e.type == "response.output_text.delta"
                )

        assert await asyncio.to_thread(lambda: list(ask_all())) == ["yes"] * 5
        client = attempt.client()
        raw = await client.responses.with_raw_response.create(model="m", input="really?", stream=True)
        assert [e.type async for e in raw.parse()][-1] == "response.completed"
        async with client.responses.with_streaming_response.create(model="m", input="really?", stream=True) as streamed:
            assert [e.type async for e in await streamed.parse()][-1] == "response.completed"


@in_loop
async def test_tool_calls():
    async with serving(["Let me see." + tool_call("1 + 2") + "\n" + tool_call("3 + 4")]) as rig:
        attempt = await rig.attempt()
        message, first, second = (await ask(attempt, tools=TOOLS)).output
        (call,) = await attempt.close()
    assert (message.type, message.content[0].text) == ("message", "Let me see.")
    assert (first.type, first.name, json.loads(first.arguments)) == (
        "function_call", "calculator", {"expression": "1 + 2"}
    )  # fmt: skip
    assert call.tool_call_ids == (first.call_id, second.call_id)
    assert len({message.id, first.id, second.id}) == 3
    (tool,) = call.request["tools"]
    assert tool == {"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}


@in_loop
async def test_tool_choice():
    other = {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}
    rest = '{"expression": "1"}}\n</tool_call>'
    async with serving(["no tools here", rest, 'search", "arguments": {}}\n</tool_call>', rest]) as rig:
        attempt = await rig.attempt()
        await ask(attempt, tools=TOOLS, tool_choice="none")
        named = await ask(attempt, tools=[*TOOLS, other], tool_choice={"type": "function", "name": "calculator"})
        either = await ask(attempt, tools=[*TOOLS, other], tool_choice="required")
        streamed = await events_of(attempt, tools=TOOLS, tool_choice="required")
        calls = await attempt.close()
    assert "tools" not in calls[0].request or calls[0].request["tools"] == []
    assert [named.output[0].name, either.output[0].name] == ["calculator", "search"]
    assert [item.name for item in streamed[-1].response.output] == ["calculator"]


@in_loop
async def test_an_answer_that_is_cut_short_is_incomplete():
    async with serving(["a long answer"]) as rig:
        attempt = await rig.attempt()
        answer = await ask(attempt, max_output_tokens=2)
        streamed = await events_of(attempt, max_output_tokens=2)
        calls = await attempt.close()
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[-1].status, answer.usage.output_tokens) == ("incomplete", 2)
    assert streamed[-1].type == "response.incomplete"
    assert streamed[-1].response.output_text == answer.output_text
    assert [c.finish_reason for c in calls] == ["length", "length"]


@in_loop
async def test_reasoning_is_an_item_of_its_own():
    for stream in (False, True):
        async with serving([THOUGHT + "forty-two"], template_tokenizer("qwen3")) as rig:
            attempt = await rig.attempt()
            answer = (await events_of(attempt))[-1].response if stream else await ask(attempt)
        reasoning, message = answer.output
        assert (reasoning.type, reasoning.summary, reasoning.content[0].text) == ("reasoning", [], "let me see")
        assert message.content[0].text == "forty-two"


@in_loop
async def test_logprobs_and_parsed_formats():
    class Sum(pydantic.BaseModel):
        total: int

    async with serving(['{"total": 3}', "12", "12"]) as rig:
        attempt = await rig.attempt()
        parsed = await attempt.client().responses.parse(model="m", input="1 + 2?", text_format=Sum)
        with_logprobs = await ask(attempt, include=["message.output_text.logprobs"], top_logprobs=2)
        streamed = await events_of(attempt, top_logprobs=0, include=["message.output_text.logprobs"])
        calls = await attempt.close()
    assert parsed.output_parsed == Sum(total=3)
    entries = with_logprobs.output[0].content[0].logprobs
    # The last token ends the answer, and is not a part of its text.
    assert [e.logprob for e in entries] == pytest.approx(calls[1].logprobs[:-1].tolist())
    assert all(len(e.top_logprobs) == 2 for e in entries)
    assert len(streamed[-1].response.output[0].content[0].logprobs) == calls[2].response_ids.size - 1


# -- streams ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_the_events_of_a_stream_are_in_order():
    async with serving([THOUGHT + "Let me see." + tool_call("1 + 2")], template_tokenizer("qwen3")) as rig:
        attempt = await rig.attempt()
        events = await events_of(attempt, tools=TOOLS)
        (call,) = await attempt.close()
    assert [e.sequence_number for e in events] == list(range(len(events)))
    item = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    call_events = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert [kind.removeprefix("response.") for kind, _ in itertools.groupby(e.type for e in events)] == [
        "created", "in_progress",
        *item, "reasoning_text.delta", "reasoning_text.done", *done,
        *item, "output_text.delta", "output_text.done", *done,
        "output_item.added", *call_events, "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[0].response.status == "in_progress"
    end = events[-1].response
    assert end.id == call.id == events[0].response.id
    done_items = [e for e in events if e.type == "response.output_item.done"]
    assert [e.output_index for e in done_items] == [0, 1, 2]
    assert [e.item.model_dump() for e in done_items] == [i.model_dump() for i in end.output]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == end.output_text == "Let me see."
    added = {e.item.id: e.output_index for e in events if e.type == "response.output_item.added"}
    assert all(added[e.item_id] == e.output_index for e in events if hasattr(e, "item_id"))


@in_loop
async def test_text_comes_token_by_token():
    async with serving(["one two three four five six"]) as rig:
        attempt = await rig.attempt()
        events = await events_of(attempt)
        empty = await events_of(attempt, max_output_tokens=1)
    assert len([e for e in events if e.type == "response.output_text.delta"]) > 3
    assert empty[-1].response.output[0].type == "message"


@in_loop
async def test_an_error_before_the_first_token_has_a_status_and_a_later_one_ends_the_stream():
    class Breaks(ScriptedEngine):
        async def generate(self, request, *, on_tokens=None):
            if len(self.asked) == 0:
                self.asked.append(None)  # type: ignore[arg-type]
                raise EngineError("broken at once")
            assert on_tokens is not None
            on_tokens(self.encode("12"), [-1.0, -2.0])
            await asyncio.sleep(0.01)
            raise EngineError("broken in the middle")

    async with serving(Breaks(quick_tokenizer(), [])) as rig:
        attempt = await rig.attempt()
        with pytest.raises(openai.InternalServerError, match="broken at once"):
            await events_of(attempt)
        events = await events_of(attempt)
        calls = await attempt.close()
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].response.error.message == "broken in the middle"
    assert [c.error for c in calls] == ["broken at once", "broken in the middle"]


# -- what cannot be served --------------------------------------------------------------------------------------------

ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"max_tokens": 5}, "unknown field 'max_tokens'; did you mean 'max_output_tokens'?", "max_tokens"),
        (
            {"temperature": 3},
            "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3",
            "temperature",
        ),
        ({"background": True}, "background is not supported", "background"),
        ({"conversation": "conv_1"}, "use previous_response_id", "conversation"),
        ({"input": None}, "input is missing", "input"),
        ({"input": []}, "input is empty", "input"),
        ({"input": ["hi"]}, "input.0 is not an object", "input.0"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role is 'robot'", "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text", "input.0.content.0"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "'web_search_call'; only messages", "input.0"),
        ({"input": [{"type": "compaction_trigger"}]}, "compaction_trigger. Only OpenAI's models", "input.0"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "with a request of your own", "input.0"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.arguments is missing", "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, "call_id is missing", "input.0.call_id"),
        ({"tools": [{"type": "web_search"}]}, "function tools only", "tools.0"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "not among the tools", "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "send only the tools", "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tools is missing", "tool_choice.tools"),
        ({"tool_choice": ALLOWED | {"mode": "any"}}, "tool_choice.mode: Input should be 'auto'", "tool_choice.mode"),
        ({"tool_choice": ALLOWED}, "not among the tools", "tool_choice"),
    ],
)
@in_loop
async def test_what_cannot_be_served_is_refused_and_recorded(fields, message, param):
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        with pytest.raises(openai.BadRequestError) as told:
            await attempt.client().post(
                "/responses", cast_to=object, body={"model": "m", "input": "hi", "stream": True} | fields
            )
        (call,) = await attempt.close()
    assert message in told.value.message
    assert told.value.param == param
    assert (call.finish_reason, call.response_ids.size) == ("error", 0)
    assert rig.engine.asked == []


@in_loop
async def test_a_compaction_is_refused_with_what_to_do():
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        with pytest.raises(
            openai.NotFoundError, match=r"responses/compact is not served\. Only OpenAI's.*model_provider"
        ):
            await attempt.client().responses.compact(model="m", input="hi")
        assert await attempt.close() == []


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(max_size=5) | ANYTHING
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image"]) | ANYTHING},
    optional={"text": TEXT, "refusal": TEXT},
)
PARTS = st.lists(PART | ANYTHING, max_size=2) | TEXT
TYPES = ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(TYPES) | ANYTHING, "role": st.sampled_from(["system", "user", "assistant"]) | ANYTHING},
    optional={
        "content": PARTS, "summary": PARTS, "output": PARTS, "id": TEXT, "call_id": TEXT, "name": TEXT,
        "arguments": st.just('{"a": 1}') | TEXT,
    },
)  # fmt: skip
TOOL = st.fixed_dictionaries(
    {"type": st.just("function") | ANYTHING, "name": TEXT},
    optional={"description": TEXT, "parameters": ANYTHING, "strict": ANYTHING},
)
BODY = st.fixed_dictionaries(
    {"input": st.lists(ITEM | ANYTHING, max_size=4) | TEXT},
    optional={
        "instructions": TEXT, "tools": st.just(TOOLS) | st.lists(TOOL | ANYTHING, max_size=2) | ANYTHING,
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | ANYTHING, "include": ANYTHING, "text": ANYTHING,
        "previous_response_id": ANYTHING, "top_logprobs": st.integers(0, 5) | ANYTHING, "store": ANYTHING,
    },
)  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODY | st.fixed_dictionaries({"input": st.lists(ITEM, min_size=1, max_size=3)}))
def test_no_body_brings_it_down(body):
    access = new_access()
    try:
        asked = read(body, access)
        rendering_of(quick_tokenizer()).prompt(asked.chat.messages, asked.chat.tools, force_tool=asked.chat.force_tool)
        Sessions().match("policy", asked.chat.messages, asked.chat.tools)
        response = response_object("resp_1", "policy", asked.body, "completed", 0.0)
        access.responses.add(response, asked.previous, asked.new, listed_items("resp_1", asked.items))
        json.dumps([response, *access.responses.find("resp_1").input])
    except (RequestError, ConfigError):
        return
    assert asked.new


@in_loop
async def test_keys_are_checked():
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        with pytest.raises(openai.AuthenticationError):
            await attempt.client(key="wrong").responses.create(model="m", input="hi")
        assert await attempt.close() == []


# -- the published schema ----------------------------------------------------------------------------------------------

SCHEMA_ASKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a tool": {"tools": [{"type": "function", "name": "look"}], "parallel_tool_calls": False},
    "a strict tool": {"tools": TOOLS, "tool_choice": "auto"},
    "a format": {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
    "a verbosity": {"text": {"verbosity": "low"}},
    "an effort": {"reasoning": {"effort": "low"}},
    "penalties of zero": {"extra_body": {"frequency_penalty": 0, "presence_penalty": 0.0}},
    "keys": {"safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "flex", "metadata": {"a": "b"}},
}


@pytest.mark.parametrize("ask_for", SCHEMA_ASKS)
@in_loop
async def test_every_response_object_fits_the_schema_of_open_responses(ask_for: str) -> None:
    """Whole and in a stream's events, by the types that are generated from its OpenAPI document."""
    types = pytest.importorskip("openresponses_types")
    async with serving(["12 apples", tool_call("1"), THOUGHT + "so"] * 2) as rig:
        attempt = await rig.attempt()
        whole = [(await ask(attempt, **SCHEMA_ASKS[ask_for])).model_dump() for _ in range(3)]
        events = [event for _ in range(3) for event in await events_of(attempt, **SCHEMA_ASKS[ask_for])]
        await attempt.close()
    streamed = [(event.type, event.response.model_dump()) for event in events if hasattr(event, "response")]
    assert {kind for kind, _ in streamed} == {"response.created", "response.in_progress", "response.completed"}
    for found in (*whole, *(response for _, response in streamed)):
        types.ResponseResource.model_validate(found)


@in_loop
async def test_what_was_asked_for_is_repeated() -> None:
    form = {"type": "json_schema", "name": "answer", "schema": {"type": "object", "properties": {}}}
    fields: dict[str, Any] = {"safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "flex"}
    async with serving(["{}"]) as rig:
        attempt = await rig.attempt()
        answer = await ask(attempt, tools=[{"type": "function", "name": "look"}], text={"format": form}, **fields)
        await attempt.close()
    found = answer.model_dump()
    assert {name: found[name] for name in fields} == fields
    assert (found["presence_penalty"], found["frequency_penalty"]) == (0.0, 0.0)
    [tool] = found["tools"]
    assert (tool["name"], tool["description"], tool["parameters"], tool["strict"]) == ("look", None, None, False)
    assert (found["text"]["format"]["name"], found["text"]["format"]["strict"]) == ("answer", False)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
@in_loop
async def test_a_penalty_is_refused_by_name(name: str) -> None:
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        with pytest.raises(openai.BadRequestError, match=f"{name} would sample from something other than the policy"):
            await ask(attempt, extra_body={name: 0.5})
        await attempt.close()

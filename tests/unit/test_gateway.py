"""The gateway, asked by the official client: what an agent gets, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from scripted import TOOLS, ScriptedEngine, in_loop, logprob, quick_tokenizer, serving, tool_call
from tiny_engine import tiny_model

from agl.errors import EngineError
from agl.trainer.gateway.access import SamplingRules

# -- answers ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_answer_and_its_record():
    async with serving(["12 apples"]) as rig:
        attempt = await rig.attempt()
        answer = await attempt.chat("how many?")
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "12 apples", "stop")
        assert (answer.model, answer.object) == ("policy", "chat.completion")
        (call,) = await attempt.close()

    (asked,) = rig.engine.asked
    ids = [*rig.engine.encode("12 apples"), quick_tokenizer().eos_token_id]
    assert call.id == answer.id
    assert (call.agent, call.policy, call.index, call.finish_reason) == ("agent", "policy", 0, "stop")
    assert (call.parent_id, call.fork_cause, call.error) == (None, None, None)
    assert call.prompt_ids.tolist() == asked.prompt_ids.tolist()
    assert call.response_ids.tolist() == ids
    np.testing.assert_array_equal(call.logprobs, np.float32([logprob(t, i) for i, t in enumerate(ids)]))
    assert call.request["messages"] == [{"role": "user", "content": "how many?"}]
    assert call.response == {"role": "assistant", "content": "12 apples"}
    assert quick_tokenizer().decode(call.prompt_ids) == "<|im_start|>user\nhow many?<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage.prompt_tokens == call.prompt_ids.size
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.total_tokens == call.ids.size


SCHEMA = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@in_loop
async def test_a_schema_goes_to_an_engine_that_holds_answers_to_it_and_into_the_record():
    async with serving(["{}"]) as rig:
        rig.engine.grammars = True
        attempt = await rig.attempt()
        await attempt.chat(response_format=FORMAT)
        await attempt.chat(response_format={"type": "json_object"})
        await attempt.chat(response_format={"type": "text"})
        await attempt.chat()
        await attempt.chat(response_format=FORMAT, tools=TOOLS, tool_choice="none")
        await attempt.chat(response_format=FORMAT, tools=TOOLS)
        strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
        await attempt.chat(tools=strict, parallel_tool_calls=False)
        calls = await attempt.close()
    grammars = [asked.sampling.grammar for asked in rig.engine.asked]
    assert [call.grammar for call in calls] == grammars
    *grammars, with_schema, with_strict = [json.loads(grammar) if grammar else {} for grammar in grammars]
    forms = [grammar.get("forms") for grammar in grammars]
    assert all(texts == [["", texts[0][1], ""]] for texts in forms if texts)
    schemas = [texts and texts[0][1] for texts in forms]
    assert schemas == [SCHEMA, {"type": "object"}, None, None, SCHEMA]
    assert [*schemas[0]["properties"]] == ["z", "a"]
    assert grammars[0]["stop"] == [*rig.engine.asked[0].sampling.stop_token_ids]
    for grammar, otherwise, several in ((with_schema, SCHEMA, True), (with_strict, None, False)):
        assert (grammar["trigger"], grammar["otherwise"], grammar["several"]) == ("<tool_call>", otherwise, several)
        assert [schema for _, schema, _, _ in grammar["forms"]] == [TOOLS[0]["function"]["parameters"]]


@in_loop
async def test_a_forced_call_is_held_to_the_parameters_of_its_tool_and_no_other_call_is(caplog):
    async with serving(["{}"]) as rig:
        rig.engine.grammars = True
        attempt = await rig.attempt()
        name = TOOLS[0]["function"]["name"]
        tools = [*TOOLS, {"type": "function", "function": {"name": "other", "parameters": SCHEMA}}]
        for choice in ({"type": "function", "function": {"name": name}}, "required", "auto"):
            await attempt.chat(tools=tools, tool_choice=choice)
        calls = await attempt.close()
    assert [call.grammar for call in calls] == [asked.sampling.grammar for asked in rig.engine.asked]
    named, any_tool, free = (json.loads(call.grammar)["forms"] if call.grammar else None for call in calls)
    assert free is None
    [[before, schema, after, _]] = named
    assert schema == TOOLS[0]["function"]["parameters"]
    opening = quick_tokenizer().decode(calls[0].prompt_ids).rpartition("<|im_start|>assistant\n")[2]
    whole = opening + before + "{}" + after
    assert whole == f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    assert [form[0] for form in any_tool] == [f'{tool["function"]["name"]}", "arguments": ' for tool in tools]
    assert not caplog.records


@in_loop
async def test_an_engine_that_holds_to_no_schema_answers_and_one_line_says_so(caplog):
    async with serving(["{}"]) as rig:
        attempt = await rig.attempt()
        for _ in range(3):
            await attempt.chat(response_format=FORMAT)
        calls = await attempt.close()
    assert [call.grammar for call in calls] == ["", "", ""]
    [said] = [record.getMessage() for record in caplog.records if "JSON schema" in record.getMessage()]
    assert "ScriptedEngine does not enforce" in said


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"type": "json_schema", "schema": "x"}, "schema: Input should be a valid dictionary"),
        ({"type": "json_schema"}, "schema is missing"),
        ({"type": "json_schema", "schema": {}, "name": None}, "name is missing"),
        ({"type": "json_schema", "schema": {}, "name": "no spaces"}, "name: String should match pattern"),
        ({"type": "json_schema", "schema": {}, "strict": "yes"}, "strict: Input should be a valid boolean"),
        ({"type": "grammar", "grammar": "x"}, "type is 'grammar'; it is one of 'text', 'json_object', 'json_schema'"),
        ({"schema": {}}, "format.type is missing"),
    ],
)
@in_loop
async def test_a_format_that_cannot_be_held_is_refused(form: dict[str, Any], why: str):
    form = {"name": "a", **form}
    # Chat Completions has all but the type one level deeper.
    nested = {"json_schema": {key: value for key, value in form.items() if key != "type"}}
    async with serving(["{}"]) as rig:
        attempt = await rig.attempt()
        with pytest.raises(openai.BadRequestError, match=re.escape(why)):
            await attempt.chat(response_format={key: form[key] for key in ("type",) if key in form} | nested)
        with pytest.raises(openai.BadRequestError, match=re.escape(why)):
            await attempt.client().responses.create(model="m", input="hi", text={"format": form})
        await attempt.close()


@in_loop
async def test_the_sync_client():
    async with serving(["yes"]) as rig:
        attempt = await rig.attempt()

        def ask():
            with attempt.sync_client() as client:
                return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "really?"}])

        assert (await asyncio.to_thread(ask)).choices[0].message.content == "yes"


@in_loop
async def test_a_tool_call():
    async with serving([tool_call("1 + 2")]) as rig:
        attempt = await rig.attempt()
        (choice,) = (await attempt.chat(tools=TOOLS)).choices
        (call,) = await attempt.close()
    (made,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (made.function.name, json.loads(made.function.arguments)) == ("calculator", {"expression": "1 + 2"})
    assert call.tool_call_ids == (made.id,)
    assert call.finish_reason == "tool_calls"
    assert call.request["tools"] == TOOLS


@in_loop
async def test_several_tool_calls_and_text_have_ids_of_their_own():
    async with serving(["Let me see." + tool_call("1 + 2") + "\n" + tool_call("3 + 4")]) as rig:
        attempt = await rig.attempt()
        (choice,) = (await attempt.chat(tools=TOOLS)).choices
    assert choice.message.content == "Let me see."
    first, second = choice.message.tool_calls
    assert first.id != second.id
    assert json.loads(second.function.arguments) == {"expression": "3 + 4"}


@in_loop
async def test_a_malformed_tool_call_stays_text():
    whole = '<tool_call>\n{"name": "calculator", "arguments": oops}\n</tool_call>'
    begun = '<tool_call>\n{"name": "calculator", "argu'
    async with serving([whole, begun]) as rig:
        attempt = await rig.attempt()
        for broken in (whole, begun):
            (choice,) = (await attempt.chat(tools=TOOLS)).choices
            assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (broken, None, "stop")


@in_loop
async def test_half_a_surrogate_pair_in_a_tool_call_reaches_the_client_as_a_question_mark():
    async with serving(
        ['<tool_call>\n{"name": "calculator", "arguments": {"expression": "\\ud800"}}\n</tool_call>']
    ) as rig:
        attempt = await rig.attempt()
        (choice,) = (await attempt.chat(tools=TOOLS)).choices
        again = [{"role": "user", "content": "hello"}, choice.message.model_dump(),
                 {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "?"}]  # fmt: skip
        await attempt.chat(again, tools=TOOLS)
        calls = await attempt.close()
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"expression": "?"}
    assert calls[1].parent_id == calls[0].id


@in_loop
async def test_tool_choice():
    named = {"type": "function", "function": {"name": "calculator"}}
    other = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
    rest = '{"expression": "1"}}\n</tool_call>'
    async with serving(["no tools here", "free to talk", rest, rest, 'search", "arguments": {}}\n</tool_call>']) as rig:
        attempt = await rig.attempt()
        await attempt.chat(tools=TOOLS, tool_choice="none")
        await attempt.chat(tools=TOOLS, tool_choice="auto")
        by_name = await attempt.chat(tools=[*TOOLS, other], tool_choice=named)
        only_one = await attempt.chat(tools=TOOLS, tool_choice="required")
        any_one = await attempt.chat(tools=[*TOOLS, other], tool_choice="required")
        none, auto, *_, open_end = [quick_tokenizer().decode(a.prompt_ids) for a in rig.engine.asked]
    assert "calculator" not in none
    assert "calculator" in auto
    assert open_end.endswith('<|im_start|>assistant\n<tool_call>\n{"name": "')
    for answer in (by_name, only_one):
        (made,) = answer.choices[0].message.tool_calls
        assert (made.function.name, made.function.arguments) == ("calculator", '{"expression": "1"}')
    assert any_one.choices[0].message.tool_calls[0].function.name == "search"


@in_loop
async def test_several_answers_to_one_request():
    async with serving(["one", "two", "three"]) as rig:
        attempt = await rig.attempt()
        answer = await attempt.chat(n=3, seed=5)
        calls = await attempt.close()
    assert [(c.index, c.message.content) for c in answer.choices] == [(0, "one"), (1, "two"), (2, "three")]
    assert [c.id for c in calls] == [answer.id, f"{answer.id}:1", f"{answer.id}:2"]
    assert {c.index for c in calls} == {0}
    assert len({a.sampling.seed for a in rig.engine.asked}) == 3
    assert answer.usage.completion_tokens == sum(c.response_ids.size for c in calls)


@in_loop
async def test_each_of_several_answers_can_be_continued():
    async with serving(["one", "two", "more"]) as rig:
        attempt = await rig.attempt()
        answer = await attempt.chat(n=2)
        user = {"role": "user", "content": "hello"}
        for choice in answer.choices:
            await attempt.chat([user, choice.message.model_dump(), {"role": "user", "content": "go on"}])
        first, second, *continued = await attempt.close()
    assert [c.parent_id for c in continued] == [first.id, second.id]
    sessions = [a.session for a in rig.engine.asked]
    assert sessions[2:] == sessions[:2]
    assert sessions[0] != sessions[1]


@in_loop
async def test_a_stop_text_is_sampled_but_not_shown():
    tokens = quick_tokenizer().encode("12 + 3", add_special_tokens=False)
    async with serving([tokens]) as rig:
        attempt = await rig.attempt()
        answer = await attempt.chat(stop=[" +", " 3"])
        (call,) = await attempt.close()
    assert answer.choices[0].message.content == "12"
    assert call.response_ids.tolist() == tokens
    assert rig.engine.asked[0].sampling.stop == (" +", " 3")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@in_loop
async def test_an_answer_cut_short(field):
    async with serving(["1234567"]) as rig:
        attempt = await rig.attempt()
        answer = await attempt.chat(**{field: 3})
        (call,) = await attempt.close()
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("123", "length")
    assert (call.finish_reason, call.response_ids.size) == ("length", 3)


@in_loop
async def test_log_probs():
    async with serving(["12"]) as rig:
        attempt = await rig.attempt()
        answer = await attempt.chat(logprobs=True, top_logprobs=2)
        without = await attempt.chat()
        calls = await attempt.close()
    entries = answer.choices[0].logprobs.content
    # Of the text alone: the third token ends the answer.
    assert [e.token for e in entries] == ["1", "2"]
    np.testing.assert_allclose([e.logprob for e in entries], calls[0].logprobs[:2], rtol=1e-6)
    assert entries[0].bytes == [49]
    assert [len(e.top_logprobs) for e in entries] == [2, 2]
    assert without.choices[0].logprobs is None


@in_loop
async def test_an_agent_is_called_what_it_is_called():
    names = ["a/b", "Ünïcode writer", "v1/chat/completions", "100%", "Sales\nagent\n"]
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        for name in names:
            client = attempt.client(agent="".join(f"%{b:02X}" for b in name.encode()))
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert [c.agent for c in await attempt.close()] == names


@in_loop
async def test_an_agent_that_is_not_selected_is_answered_but_has_no_policy():
    async with serving(["x"]) as rig:
        attempt = await rig.attempt(agents=["writer"])
        await attempt.chat()
        await attempt.client(agent="writer").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
        assert [(c.agent, c.policy) for c in await attempt.close()] == [("agent", None), ("writer", "policy")]


# -- refusals ---------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "hi"}
REFUSED = {
    "unknown field": ({"temprature": 0.5}, "temprature.*did you mean 'temperature'"),
    "no messages": ({"messages": []}, "messages"),
    "role": ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role is 'robot'"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0 has the type 'image_url'; only text",
    ),
    "content": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    "text of a part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages.0.content",
    ),
    "tool result": ({"messages": [USER, {"role": "tool", "content": "5"}]}, "messages.1.tool_call_id"),
    "tool calls": ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls"),
    "tool": ({"tools": [{"type": "web_search"}]}, "tools.0"),
    "tool_choice name": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "'other'",
    ),
    "tool_choice word": ({"tools": TOOLS, "tool_choice": "sometimes"}, "sometimes"),
    "required without tools": ({"tool_choice": "required"}, "there are none"),
    "temperature": ({"temperature": 3}, "temperature"),
    "n": ({"n": 0}, "Invalid 'n': integer below minimum value. Expected a value >= 1, but got 0"),
    "stop": ({"stop": ""}, "stop"),
    "top_logprobs": ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
    "penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "stream options": ({"stream": True, "stream_options": {"include_usage": "perhaps"}}, "include_usage"),
}


@in_loop
async def test_requests_that_cannot_be_served_name_the_field_and_are_recorded():
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        client = attempt.client()
        for name, (fields, words) in REFUSED.items():
            body = {"model": "m", "messages": [USER]} | fields
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                await client.post("/chat/completions", body=body, cast_to=object)
            assert refused.value.body["type"] == "invalid_request_error", name
        calls = await attempt.close()
    assert rig.engine.asked == []
    assert [c.finish_reason for c in calls] == ["error"] * len(REFUSED)
    assert all(c.error and c.response_ids.size == 0 for c in calls)


@in_loop
async def test_bodies_that_are_no_chat_request():
    deep = '{"messages": [{"role": "user", "content": "hi"}], "metadata": ' + "[" * 400 + "]" * 400 + "}"
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        headers = {"authorization": f"Bearer {attempt.key}", "content-type": "application/json"}
        async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
            for body in ("", "{", "[]", "null", '"hi"', "\x00", "{}", "[" * 100_000, deep):
                answer = await client.post(f"{attempt.url()}/chat/completions", content=body)
                assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), body[:80]
            lost = await client.get(f"{attempt.url()}/embeddings")
            assert (lost.status_code, lost.json()["error"]["type"]) == (404, "invalid_request_error")
        assert len(await attempt.close()) == 9


@in_loop
async def test_arguments_that_are_nested_too_deep_are_refused_or_kept_as_text():
    arguments = '{"a": ' * 5000 + "1" + "}" * 5000
    calls = [{"id": "c", "type": "function", "function": {"name": "calculator", "arguments": arguments}}]
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        try:
            await attempt.chat([USER, {"role": "assistant", "tool_calls": calls}], tools=TOOLS)
        except openai.BadRequestError:
            pass


@in_loop
async def test_a_prompt_that_is_too_long_says_so():
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], max_context=50)) as rig:
        attempt = await rig.attempt()
        with pytest.raises(openai.BadRequestError, match="leaves no room in a context of 50") as refused:
            await attempt.chat("9 " * 60)
        (call,) = await attempt.close()
    assert refused.value.code == "context_length_exceeded"
    assert (call.finish_reason, call.prompt_ids.size > 50) == ("error", True)


@in_loop
async def test_an_answer_is_bounded_by_the_context():
    async with serving(ScriptedEngine(quick_tokenizer(), ["9" * 500], max_context=50)) as rig:
        attempt = await rig.attempt()
        answer = await attempt.chat(max_tokens=400)
    assert answer.usage.total_tokens == 50
    assert answer.choices[0].finish_reason == "length"


@in_loop
async def test_a_failed_engine_is_an_internal_error_that_clients_try_again():
    script = [EngineError("the policy process died"), ValueError("a bug"), "recovered"]
    async with serving(script) as rig:
        attempt = await rig.attempt()
        with pytest.raises(openai.InternalServerError, match="the policy process died") as failed:
            await attempt.chat()
        assert failed.value.status_code == 503
        client = attempt.client(max_retries=1)
        answer = await client.chat.completions.create(model="m", messages=[USER])
        assert answer.choices[0].message.content == "recovered"
        calls = await attempt.close()
    assert [c.finish_reason for c in calls] == ["error", "error", "stop"]
    assert [c.error for c in calls] == ["the policy process died", "ValueError: a bug", None]


@in_loop
async def test_one_failed_answer_of_several_fails_the_request_and_all_are_recorded():
    async with serving(["one", EngineError("broken"), "three"]) as rig:
        attempt = await rig.attempt()
        with pytest.raises(openai.InternalServerError, match="broken"):
            await attempt.chat(n=3)
        calls = await attempt.close()
    assert len(calls) == 3
    assert {c.index for c in calls} == {0}
    assert sum(c.finish_reason == "error" for c in calls) >= 1


# -- sampling ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_the_trainers_rules_win_and_both_are_recorded():
    rules = SamplingRules(temperature=1.0, top_p=1.0, top_k=0, max_tokens=5)
    async with serving(["12"]) as rig:
        attempt = await rig.attempt(rules=rules)
        await attempt.chat(temperature=0.2, top_p=0.5, max_tokens=50, extra_body={"top_k": 3})
        await attempt.chat(max_tokens=2)
        first, second = await attempt.close()
    sampling = rig.engine.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, 5)
    assert rig.engine.asked[1].sampling.max_tokens == 2
    assert first.temperature == 1.0
    assert first.request["asked"] == {"model": "m", "temperature": 0.2, "top_p": 0.5, "top_k": 3, "max_tokens": 50}
    assert first.request["used"] == {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 5, "seed": sampling.seed
    }  # fmt: skip
    assert second.request["asked"] == {"model": "m", "max_tokens": 2}


@in_loop
async def test_without_rules_the_agent_decides():
    async with serving(["12"]) as rig:
        attempt = await rig.attempt()
        await attempt.chat(temperature=0.0, top_p=0.5, extra_body={"top_k": 3})
        (call,) = await attempt.close()
    sampling = rig.engine.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 3)
    assert call.temperature == 0.0


@in_loop
async def test_captured_text_can_be_switched_off():
    async with serving(["a secret"], capture_content=False) as rig:
        attempt = await rig.attempt()
        await attempt.chat("tell me", tools=TOOLS, user="somebody", metadata={"who": "somebody"})
        (call,) = await attempt.close()
    assert call.response == {}
    assert set(call.request) == {"asked", "used"}
    assert call.request["asked"] == {"model": "m"}
    assert call.response_ids.size


@pytest.fixture(scope="session")
def policy_directory(tmp_path_factory) -> Path:
    """A tiny model with random weights and the quickstart's tokenizer."""
    path = tmp_path_factory.mktemp("gateway-policy")
    tokenizer = quick_tokenizer()
    tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
               max_position_embeddings=512).save_pretrained(path)  # fmt: skip
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.full
@in_loop
async def test_a_real_policy_seeds_streams_and_continuation(policy_directory):
    from agl.trainer.local.policy import LocalPolicy, PolicySpec

    policy = await LocalPolicy.start(PolicySpec(str(policy_directory), device="cpu", threads=1))
    try:
        async with serving(policy) as rig:

            async def texts(rollout_seed: int, **fields) -> list[str]:
                attempt = await rig.attempt(seed=rollout_seed)
                answers = [await attempt.chat(max_tokens=20, **fields) for _ in range(2)]
                return [a.choices[0].message.content for a in answers]

            assert await texts(1) == await texts(1)
            first, second = await texts(1)
            assert first != second
            # A group's rollouts differ in their seeds; a seed of the agent's own must not make them one.
            group = [(await texts(seed, seed=42))[0] for seed in range(4)]
            assert len(set(group)) == 4
            assert group == [(await texts(seed, seed=42))[0] for seed in range(4)]
            assert (await texts(0, seed=43))[0] != group[0]

            one, other = await rig.attempt(seed=9), await rig.attempt(seed=9)
            whole = await one.chat(max_tokens=30, n=2)
            parts = {0: "", 1: ""}
            async for chunk in await other.chat(max_tokens=30, n=2, stream=True):
                for choice in chunk.choices:
                    parts[choice.index] += choice.delta.content or ""
            assert [parts[0], parts[1]] == [c.message.content for c in whole.choices]
            streamed, plain = await other.close(), await one.close()
            for a, b in zip(streamed, plain, strict=True):
                assert a.response_ids.tolist() == b.response_ids.tolist()
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)

            attempt = await rig.attempt(seed=3)
            history = [USER]
            for _ in range(5):
                answer = await attempt.chat(history, max_tokens=12, tools=TOOLS)
                history += [answer.choices[0].message.model_dump(exclude_none=True)]
                history += [
                    {"role": "tool", "tool_call_id": c.id, "content": "7"}
                    for c in answer.choices[0].message.tool_calls or ()
                ] or [{"role": "user", "content": "again"}]
            calls = await attempt.close()
            assert [c.parent_id for c in calls] == [None, *(c.id for c in calls[:-1])]
            for call, parent in zip(calls[1:], calls, strict=False):
                assert call.prompt_ids[: parent.ids.size].tolist() == parent.ids.tolist()
    finally:
        await policy.close()

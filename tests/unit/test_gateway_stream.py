"""Streams: the same answers as without one, in parts; clients that hang up; errors before and after the first token."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scripted import (
    TOOLS,
    Attempt,
    ScriptedEngine,
    in_loop,
    new_access,
    quick_tokenizer,
    rendering_of,
    serving,
    tool_call,
    until,
)
from tiny_tokenizers import template_tokenizer

from agl.errors import EngineError
from agl.mdp.types import int_array
from agl.trainer.gateway.calls import Choice, assistant_message, cut_at_stop
from agl.trainer.gateway.dialects.chat.body import read
from agl.trainer.gateway.dialects.deltas import MessageDeltas

USER = {"role": "user", "content": "hi"}


async def stream(attempt: Attempt, **fields: Any) -> list[Any]:
    """The chunks of one streamed answer."""
    fields = {"messages": [USER]} | fields
    answer = await attempt.client().chat.completions.create(model="m", stream=True, **fields)
    return [chunk async for chunk in answer]


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Choice -> message, as a client puts deltas together."""
    messages: dict[int, dict[str, Any]] = defaultdict(lambda: {"content": "", "reasoning": "", "calls": {}})
    for chunk in chunks:
        for choice in chunk.choices:
            message = messages[choice.index]
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                known = message["calls"].setdefault(call.index, {"id": call.id, "name": "", "arguments": ""})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
            message["finish"] = choice.finish_reason or message.get("finish")
    return messages


def whole(answer: Any) -> dict[int, dict[str, Any]]:
    """The same of an answer that was not streamed."""
    return {
        choice.index: {
            "content": choice.message.content or "",
            "reasoning": getattr(choice.message, "reasoning_content", None) or "",
            "calls": {
                k: {"id": c.id, "name": c.function.name, "arguments": c.function.arguments}
                for k, c in enumerate(choice.message.tool_calls or ())
            },
            "finish": choice.finish_reason,
        }
        for choice in answer.choices
    }


ANSWERS = {
    "text": "Let me think about that, " * 20,
    "unicode": "Grüße 🎉👩‍👩‍👧 日本語 ½",
    "a call": tool_call("1 + 2"),
    "text and calls": "  I will work it out.  \n\n" + tool_call("1 + 2") + "\n" + tool_call("3 * 4") + " and so on",
    "text that looks like a call": "a < b and <tool is not <tool_call",
    "malformed": "well " + "<tool_call>\n{broken}\n</tool_call>" + " then",
    "only white space": " \n ",
    "nothing": "",
    "white space at both ends": "\n\n padded \n\n",
    "a call in quickest form": '<tool_call>{"name":"calculator","arguments":{}}</tool_call>',
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@in_loop
async def test_the_deltas_add_up_to_the_message(tools):
    fields = {} if tools is None else {"tools": tools}
    for name, text in ANSWERS.items():
        async with serving([text]) as rig:
            streamed, plain = await rig.attempt(seed=4), await rig.attempt(seed=4)
            chunks = await stream(streamed, **fields)
            answer = await plain.chat([USER], **fields)
            assert joined(chunks) == whole(answer), name
            (a,), (b,) = await streamed.close(), await plain.close()
            assert a.response_ids.tolist() == b.response_ids.tolist()
            assert a.logprobs.tolist() == b.logprobs.tolist()
            assert (a.response, a.finish_reason, a.id) == (b.response, b.finish_reason, chunks[0].id)


@in_loop
async def test_text_comes_as_it_is_sampled():
    async with serving(ScriptedEngine(quick_tokenizer(), ["1234567890"], paused=True)) as rig:
        attempt = await rig.attempt()
        answer = await attempt.client().chat.completions.create(model="m", messages=[USER], stream=True)
        first = [await anext(answer), await anext(answer)]
        assert [c.choices[0].delta.content for c in first] == ["", "1"]
        assert first[0].choices[0].delta.role == "assistant"
        assert rig.engine.running == 1
        rig.engine.resume.set()
        rest = [chunk async for chunk in answer]
    assert joined(first + rest)[0]["content"] == "1234567890"
    assert len(rest) > 3


@in_loop
async def test_several_choices_are_interleaved():
    async with serving(["first " * 9, "second " * 9]) as rig:
        attempt = await rig.attempt()
        chunks = await stream(attempt, n=2)
        order = [c.choices[0].index for c in chunks]
        assert {k: m["content"] for k, m in joined(chunks).items()} == {0: "first " * 9, 1: "second " * 9}
        assert order != sorted(order)
        assert len(await attempt.close()) == 2


@in_loop
async def test_a_stop_text_is_never_shown():
    # A token that holds the stop text's end and more: what was sent before must not reach into it.
    tokenizer = template_tokenizer("chatml")
    ids = tokenizer.encode("the answer the tool the user", add_special_tokens=False)
    async with serving([ids], tokenizer) as rig:
        streamed, plain = await rig.attempt(), await rig.attempt()
        chunks = await stream(streamed, stop=["r the t"])
        answer = await plain.chat([USER], stop=["r the t"])
    assert joined(chunks)[0]["content"] == answer.choices[0].message.content == "the answe"


@in_loop
async def test_reasoning_is_not_streamed_as_text():
    tokenizer = template_tokenizer("qwen3")
    for text in ("<think>\nlet me see\n</think>\n\nforty-two", "<think>\nlet me see\n</think>\n\n" + tool_call("1")):
        async with serving([text], tokenizer) as rig:
            streamed, plain = await rig.attempt(), await rig.attempt()
            chunks = await stream(streamed, tools=TOOLS)
            answer = await plain.chat([USER], tools=TOOLS)
        assert joined(chunks) == whole(answer)
        assert joined(chunks)[0]["reasoning"] == "let me see"


@in_loop
async def test_a_forced_call_is_streamed_as_a_call():
    async with serving(['{"expression": "1"}}\n</tool_call>']) as rig:
        streamed, plain = await rig.attempt(), await rig.attempt()
        chunks = await stream(streamed, tools=TOOLS, tool_choice="required")
        answer = await plain.chat([USER], tools=TOOLS, tool_choice="required")
    assert joined(chunks) == whole(answer)
    assert joined(chunks)[0]["calls"][0]["arguments"] == '{"expression": "1"}'


@in_loop
async def test_usage_comes_last_if_asked_for():
    async with serving(["12"]) as rig:
        attempt = await rig.attempt()
        chunks = await stream(attempt, stream_options={"include_usage": True})
        plain = await stream(attempt)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3
    assert all(c.usage is None for c in plain)


@in_loop
async def test_log_probs_and_token_ids_of_a_stream():
    async with serving(["12"]) as rig:
        attempt = await rig.attempt()
        chunks = await stream(attempt, logprobs=True, extra_body={"return_token_ids": True})
        (call,) = await attempt.close()
    entries = [e for c in chunks for choice in c.choices if choice.logprobs for e in choice.logprobs.content]
    assert [e.token for e in entries] == ["1", "2", "<|im_end|>"]
    assert chunks[-1].choices[0].token_ids == call.response_ids.tolist()


@in_loop
async def test_the_stream_helper_of_the_client():
    async with serving([tool_call("1 + 2")]) as rig:
        attempt = await rig.attempt()
        async with attempt.client().chat.completions.stream(model="m", messages=[USER], tools=TOOLS) as events:
            final = await events.get_final_completion()
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"expression": "1 + 2"}


# -- ends that are not the end ----------------------------------------------------------------------------------------


@in_loop
async def test_hanging_up_in_the_middle_cancels_and_records_what_was_seen():
    async with serving(ScriptedEngine(quick_tokenizer(), ["1234567890"], paused=True)) as rig:
        attempt = await rig.attempt()
        answer = await attempt.client().chat.completions.create(model="m", messages=[USER], stream=True)
        await anext(answer)
        await answer.close()
        await until(lambda: rig.engine.cancelled == 1)
        await until(lambda: not attempt.access.pending)
        (call,) = await attempt.close()
    assert (call.finish_reason, call.error) == ("cancelled", "cancelled by the client")
    assert call.prompt_ids.size
    assert call.response_ids.tolist() == rig.engine.encode("1")
    assert call.logprobs.shape == (1,)


@in_loop
async def test_hanging_up_before_the_first_token_cancels():
    arrived = asyncio.Event()

    class Slow(ScriptedEngine):
        async def generate(self, *args, **kwargs):
            arrived.set()
            try:
                await self.resume.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return await super().generate(*args, **kwargs)

    async with serving(Slow(quick_tokenizer(), ["1"], paused=True)) as rig:
        attempt = await rig.attempt()
        asking = asyncio.ensure_future(stream(attempt))
        await arrived.wait()
        asking.cancel()
        await until(lambda: rig.engine.cancelled == 1)
        await until(lambda: not attempt.access.pending)
        (call,) = await attempt.close()
    assert call.finish_reason == "cancelled"


@in_loop
async def test_an_error_before_the_first_token_has_a_status():
    async with serving([EngineError("broken")]) as rig:
        attempt = await rig.attempt()
        with pytest.raises(openai.InternalServerError, match="broken"):
            await stream(attempt)
        with pytest.raises(openai.BadRequestError, match=r"messages\.0\.role"):
            await stream(attempt, messages=[{"role": "robot", "content": "hi"}])
        with pytest.raises(openai.AuthenticationError):
            await attempt.client(key="wrong").chat.completions.create(model="m", messages=[USER], stream=True)
        assert [c.finish_reason for c in await attempt.close()] == ["error", "error"]


@in_loop
async def test_an_error_after_the_first_token_ends_the_stream_with_an_error():
    class Breaks(ScriptedEngine):
        async def generate(self, request, *, on_tokens=None):
            on_tokens(self.encode("12"), [-1.0, -2.0])
            await asyncio.sleep(0.01)
            raise EngineError("broken in the middle")

    async with serving(Breaks(quick_tokenizer(), [])) as rig:
        attempt = await rig.attempt()
        with pytest.raises(openai.APIError, match="broken in the middle"):
            await stream(attempt)
        (call,) = await attempt.close()
    assert (call.finish_reason, call.error) == ("error", "broken in the middle")
    assert call.logprobs.tolist() == [-1.0, -2.0]


@in_loop
async def test_closing_the_attempt_ends_its_streams():
    async with serving(ScriptedEngine(quick_tokenizer(), ["1234567890"], paused=True)) as rig:
        attempt = await rig.attempt()
        answer = await attempt.client().chat.completions.create(model="m", messages=[USER], stream=True)
        await anext(answer)
        (call,) = await attempt.close()
        with pytest.raises(openai.APIError, match="attempt has ended"):
            async for _ in answer:
                pass
    assert (call.finish_reason, call.response_ids.size) == ("cancelled", 1)


@in_loop
async def test_a_reader_that_does_not_read_is_cancelled_when_it_goes():
    async with serving(["word " * 3000], quick_tokenizer()) as rig:
        attempt = await rig.attempt()
        headers = {"authorization": f"Bearer {attempt.key}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
            body = {"messages": [USER], "stream": True}
            async with client.stream("POST", f"{attempt.url()}/chat/completions", json=body) as answer:
                assert answer.status_code == 200
        (call,) = await attempt.close()
    assert call.finish_reason in ("cancelled", "stop")
    assert rig.engine.running == 0


# -- the deltas alone -------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "calculator", "arguments": {"expression": "1"}}', "<think>", "</think>",
     "\n", " ", "  ", "text", "é", "🎉", "{", '"', "STOP", "ST", "<|im_end|>", "<tool", "_call>", "日本"]
)  # fmt: skip


@example(template="qwen3", pieces=["\n", "<think>"], noise=[], tools=False, stop=False, step=1)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    template=st.sampled_from(["chatml", "qwen25", "qwen3", "llama31", "mistral_v3"]),
    pieces=st.lists(PIECES, max_size=12),
    noise=st.lists(st.integers(0, 255), max_size=4),
    tools=st.booleans(),
    stop=st.booleans(),
    step=st.integers(1, 5),
)
def test_any_tokens_in_any_steps_add_up(template, pieces, noise, tools, stop, step):
    tokenizer = template_tokenizer(template)
    rendering = rendering_of(tokenizer)
    ids = [*tokenizer.encode("".join(pieces), add_special_tokens=False), *noise]
    body = {
        "messages": [USER],
        "tools": TOOLS if tools and template != "chatml" else None,
        "stop": "STOP" if stop else None,
    }
    request = read(body, new_access()).chat
    deltas = MessageDeltas(request, rendering)
    choice = Choice(0, int_array([1]), int_array([]), [], [])
    text = ""
    for at in range(0, len(ids), step):
        choice.ids.extend(ids[at : at + step])
        for delta in deltas.push(choice):
            text += delta.get("content", "")
    parsed = cut_at_stop(rendering.parse(ids, request.tools, prompt_ids=[1]), request.sampling.stop)
    message, _ = assistant_message(parsed, str)
    for delta in deltas.finish(0, _reply(message)):
        text += delta.get("content", "")
    assert text == (message["content"] or "")


def _reply(message: dict[str, Any]) -> Any:
    from agl.trainer.engines.base import empty_completion
    from agl.trainer.gateway.calls import Reply

    return Reply("id", message, empty_completion(0), "stop", 1, 0)

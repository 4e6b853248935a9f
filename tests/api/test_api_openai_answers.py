"""What Chat Completions and Responses say beside the text of an answer fits the SDK's own types: failures, echoes,
stored inputs, sealed reasoning, counts."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import openai
import pytest
from pydantic import TypeAdapter
from scripted import ScriptedEngine, in_loop, new_access, quick_tokenizer, rendering_of, serving
from tiny_tokenizers import template_tokenizer

from agl.errors import EngineError
from agl.trainer.gateway.dialects.chat.body import read as read_chat
from agl.trainer.gateway.dialects.error_forms import failure_code
from agl.trainer.gateway.dialects.responses.body import read as read_responses
from agl.trainer.gateway.errors import RequestError

THOUGHT = "<think>\nIs it so?\n</think>\n\n"
USER: dict[str, Any] = {"role": "user", "content": "how many?"}
TOOL: dict[str, Any] = {"type": "function", "name": "count", "parameters": {"type": "object", "properties": {}}}

adapter = functools.cache(TypeAdapter)


def fits(kind: Any, value: Any) -> None:
    """Check an SDK's object against the SDK's own type, which the client does not."""
    adapter(kind).validate_python(value.model_dump(mode="json", exclude_unset=True, warnings=False))


# -- failures ---------------------------------------------------------------------------------------------------------


class Breaks(ScriptedEngine):
    """Ends after the tokens of a text with an error."""

    async def generate(self, request: Any, *, on_tokens: Any = None) -> Any:
        assert on_tokens is not None
        for token in self.encode(THOUGHT + "It is twelve, and"):
            on_tokens([token], [-1.0])
            await asyncio.sleep(0)
        raise EngineError("broken in the middle")


@in_loop
async def test_a_response_that_fails_has_what_was_sent_and_is_kept() -> None:
    from openai.types.responses import Response

    tokenizer = template_tokenizer("qwen3")
    async with serving(Breaks(tokenizer, []), tokenizer) as rig:
        client = (await rig.attempt()).client()
        events = [e async for e in await client.responses.create(model="m", input="hi", stream=True)]
        failed = events[-1].response
        assert events[-1].type == "response.failed"
        fits(Response, failed)
        assert failed.error.code == "server_error"
        assert [item.type for item in failed.output] == ["reasoning", "message"]
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert failed.output_text == text != ""
        assert failed.output[1].status == "incomplete"
        assert (await client.responses.retrieve(failed.id)).model_dump() == failed.model_dump()
        with pytest.raises(openai.BadRequestError, match="not found; a response is known"):
            await client.responses.create(model="m", input="hi", previous_response_id=failed.id)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 499, 500, 503, 529])
def test_the_code_of_a_failure_is_one_of_openais(status: int) -> None:
    from openai.types.responses import ResponseError

    adapter(ResponseError).validate_python({"code": failure_code(RequestError(status, "why")), "message": "why"})


# -- echoes -----------------------------------------------------------------------------------------------------------

REPEATED: dict[str, dict[str, Any]] = {
    "prompt_cache_retention": {"prompt_cache_retention": "24h"},
    "prompt_cache_options": {"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}},
    "service_tier": {"service_tier": "flex"},
    "metadata": {"metadata": {"a": "b"}},
}


@pytest.mark.parametrize("field", REPEATED)
@in_loop
async def test_a_response_repeats_what_it_was_asked(field: str) -> None:
    from openai.types.responses import Response

    async with serving(["12"]) as rig:
        client = (await rig.attempt()).client()
        whole = await client.responses.create(model="m", input="hi", **REPEATED[field])
        events = [e async for e in await client.responses.create(model="m", input="hi", stream=True, **REPEATED[field])]
    for response in (whole, events[0].response, events[-1].response):
        fits(Response, response)
        assert (
            response.model_dump()[field] == {"comparison_response_id": None, **REPEATED[field][field]}
            if (field == "prompt_cache_options")
            else response.model_dump()[field] == REPEATED[field][field]
        )


@pytest.mark.parametrize(
    ("asked", "said"), [({}, "default"), ({"service_tier": "auto"}, "default"), ({"service_tier": "flex"}, "flex")]
)
@in_loop
async def test_chat_says_which_tier_served(asked: dict[str, Any], said: str) -> None:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    async with serving(["12"]) as rig:
        create = (await rig.attempt()).client().chat.completions.create
        whole = await create(model="m", messages=[USER], **asked)
        chunks = [chunk async for chunk in await create(model="m", messages=[USER], stream=True, **asked)]
    fits(ChatCompletion, whole)
    for chunk in chunks:
        fits(ChatCompletionChunk, chunk)
    assert {part.service_tier for part in (whole, *chunks)} == {said}


# -- log-probs, refusals ----------------------------------------------------------------------------------------------


def test_no_alternatives_are_no_wish_for_log_probs() -> None:
    for more, wanted in (
        ({"top_logprobs": 0}, False), ({"top_logprobs": 2}, True), ({}, False),
        ({"top_logprobs": 0, "include": ["message.output_text.logprobs"]}, True),
    ):  # fmt: skip
        assert read_responses({"input": "hi", **more}, new_access()).logprobs == wanted


def test_an_answer_that_refuses_is_in_the_prompt() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "I will not count."}
    chat = read_chat({"messages": [USER, refused, USER]}, new_access()).chat
    model = rendering_of(quick_tokenizer())
    assert "I will not count." in quick_tokenizer().decode(model.prompt(chat.messages).ids.tolist())


@in_loop
async def test_answers_that_refuse_differently_are_different_histories() -> None:
    async with serving(["12", "13", "14"]) as rig:
        attempt = await rig.attempt()
        for refusal in ("I will not.", "I can not."):
            history = [USER, {"role": "assistant", "content": None, "refusal": refusal}, USER]
            await attempt.chat(history)
        first, second = await attempt.close()
    assert first.prompt_ids.tolist() != second.prompt_ids.tolist()


# -- sealed reasoning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_reasoning_comes_back_sealed(stream: bool) -> None:
    """A client that keeps nothing on the server sends the seal instead of the text."""
    from openai.types.responses import Response

    tokenizer = template_tokenizer("qwen3")
    async with serving(ScriptedEngine(tokenizer, [THOUGHT + "12"]), tokenizer) as rig:
        attempt = await rig.attempt()
        asked: dict[str, Any] = {"model": "m", "store": False, "include": ["reasoning.encrypted_content"]}
        create = attempt.client().responses.create
        if stream:
            response = [e async for e in await create(input=[USER], stream=True, **asked)][-1].response
        else:
            response = await create(input=[USER], **asked)
        fits(Response, response)
        reasoning = response.output[0]
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
        plain = {"type": "reasoning", "summary": [], "content": [part.model_dump() for part in reasoning.content]}
        message = response.output[1].model_dump(exclude_none=True)
        bare = await create(model="m", input=[USER], store=False)
        await attempt.close()
    assert not getattr(bare.output[0], "encrypted_content", None)
    read = [read_responses({"input": [USER, item, message, USER]}, new_access()).new for item in (sealed, plain)]
    assert read[0] == read[1]
    assert read[0][1]["reasoning_content"] == "Is it so?"


@pytest.mark.parametrize("content", ["gAAAAAB-of-another-provider", "agl:no base64!", "agl:/w=="])
def test_a_seal_of_others_is_no_reasoning(content: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": content}
    answer = {"role": "assistant", "content": "12"}
    read = read_responses({"input": [USER, item, answer, USER]}, new_access()).new
    assert not any(message.get("reasoning_content") for message in read)
    assert [message["role"] for message in read] == ["user", "assistant", "user"]


# -- stored inputs, counts --------------------------------------------------------------------------------------------

HISTORY: list[Any] = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "input_text", "text": "how many?"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
    {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "phase": "commentary"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"type": "function_call", "call_id": "c1", "name": "count", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "12"},
    {"type": "function_call", "call_id": "c2", "name": "count", "arguments": "{}", "id": "fc_own"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "12"}]},
    {"role": "user", "content": "sure?"},
]


@in_loop
async def test_stored_inputs_fit_the_sdks_items() -> None:
    from openai.types.responses import ResponseItem

    async with serving(["12"]) as rig:
        client = (await rig.attempt()).client()
        first = await client.responses.create(model="m", input=HISTORY, tools=[TOOL])
        reference = {"type": "item_reference", "id": first.output[0].id}
        second = await client.responses.create(model="m", input=[USER, reference, USER], tools=[TOOL])
        found = [(await client.responses.input_items.list(r.id, order="asc", limit=100)).data for r in (first, second)]
    for items, asked in zip(found, (HISTORY, [USER, reference, USER]), strict=True):
        assert len(items) == len(asked)
        assert len({item.id for item in items}) == len(asked)
        for item in items:
            fits(ResponseItem, item)
    assert found[0][7].id == "fc_own"
    assert (found[1][1].type, found[1][1].content[0].text) == ("message", "12")


@in_loop
async def test_tokens_of_a_history_that_ends_with_the_model_are_counted() -> None:
    async with serving(["12"]) as rig:
        client = (await rig.attempt()).client()
        count = client.responses.input_tokens.count
        first = await client.responses.create(model="m", input="hi")
        stored = await count(model="m", previous_response_id=first.id)
        sent = await count(model="m", input=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "12"}])
        short = await count(model="m", input="hi")
        with pytest.raises(openai.BadRequestError, match="input is missing"):
            await count(model="m")
        with pytest.raises(openai.BadRequestError, match="input is missing"):
            await client.responses.create(model="m", previous_response_id=first.id)
    assert stored.input_tokens == sent.input_tokens > short.input_tokens

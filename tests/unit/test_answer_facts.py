"""What the four APIs say of an answer beside its text: usage, log-probs of streams, signatures, stored responses."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from four_apis import APIS, QUESTION, Answer, clients
from scripted import ScriptedEngine, in_loop, logprob, serving, tool_call
from test_cut_answers import imported as imported
from test_responses import TOOLS, ask
from tiny_tokenizers import package_tokenizer, template_tokenizer

from agl.trainer.gateway.calls import TokenCounts
from agl.trainer.rendering.rendering import Rendering

THOUGHT = "<think>\nIs it so?\n</think>\n\n"
WAYS = [(api, stream) for api in APIS for stream in (False, True)]


def counts(api: str, usage: Any) -> TokenCounts:
    """The usage of an SDK's answer, in one form for all APIs."""
    match api:
        case "chat":
            details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details.reasoning_tokens
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            return TokenCounts(usage.prompt_tokens, details[0], usage.completion_tokens, details[1])
        case "responses":
            details = usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens
            assert usage.total_tokens == usage.input_tokens + usage.output_tokens
            return TokenCounts(usage.input_tokens, details[0], usage.output_tokens, details[1])
        case "messages":
            cached, thought = usage.cache_read_input_tokens, usage.output_tokens_details.thinking_tokens
            return TokenCounts(usage.input_tokens + cached, cached, usage.output_tokens, thought)
    thought = usage.thoughts_token_count
    sampled = usage.candidates_token_count + thought
    assert usage.total_token_count == usage.prompt_token_count + sampled
    return TokenCounts(usage.prompt_token_count, usage.cached_content_token_count, sampled, thought)


@in_loop
async def test_usage_has_what_the_engine_reused_and_what_is_reasoning() -> None:
    """Two attempts with one prompt share all of it, though neither continues a call of the other."""
    tokenizer = template_tokenizer("qwen3")
    engine = ScriptedEngine(tokenizer, [THOUGHT + "Yes.", "Yes."], caches=True)
    thought = len(engine.encode(THOUGHT.rstrip()))
    found: list[tuple[Answer, TokenCounts]] = []
    async with serving(engine, tokenizer) as rig:
        for api, stream in (WAYS[0], *WAYS):
            attempt = await rig.attempt()
            async with clients(attempt) as of:
                answer = await APIS[api](of[api], stream, 99, False)
            (call,) = await attempt.close()
            found.append((answer, counts(api, answer.usage)))
            assert (found[-1][1].prompt, found[-1][1].sampled) == (call.prompt_ids.size, call.response_ids.size)
    assert [(c.cached, c.reasoning) for _, c in found] == [
        (0, thought), *((c.prompt, 0) for _, c in found[1:])
    ]  # fmt: skip
    assert [answer.reasoning for answer, _ in found] == ["Is it so?", *[""] * len(WAYS)]


@pytest.mark.parametrize("renderer", [None, "qwen3", "qwen3.5"])
@pytest.mark.parametrize("end", ["", "\n</think>\n\n", "\n</think>\n\nYes, it is.<|im_end|>"])
def test_reasoning_is_counted_with_its_marks(renderer: str | None, end: str) -> None:
    tokenizer = package_tokenizer() if renderer else template_tokenizer("qwen3")
    rendering = Rendering(tokenizer, renderer=renderer)
    begun = tokenizer.encode("<think>\nIs it\n\nso?", add_special_tokens=False)
    ids = [*begun, *tokenizer.encode(end, add_special_tokens=False)]
    parsed = rendering.parse(ids)
    assert (parsed.reasoning or "").strip() == "Is it\n\nso?"
    marks = tokenizer.encode("\n</think>", add_special_tokens=False) if end else []
    assert len(rendering.reasoning_places(ids, parsed)) == len(begun) + len(marks)
    plain = tokenizer.encode("Yes.", add_special_tokens=False)
    assert rendering.reasoning_places(plain, rendering.parse(plain)) == set()


# -- log-probs --------------------------------------------------------------------------------------------------------

LINES = {
    "text": "It is 12, so I say that it is 12, and the answer to all of the tool calls is 46.",
    "characters of several tokens": "Grüße: 日本 — 12",
    "thought": THOUGHT + "It is 12.",
    "a call": "I look.\n" + tool_call("1 + 2"),
}


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("line", LINES)
@in_loop
async def test_log_probs_come_with_the_deltas_whose_tokens_they_are(line: str, tools: bool) -> None:
    tokenizer = template_tokenizer("qwen3")
    chat_tools: Any = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
    async with serving(ScriptedEngine(tokenizer, [LINES[line]]), tokenizer) as rig:
        attempt = await rig.attempt()
        asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": QUESTION}], "logprobs": True}
        asked |= {"top_logprobs": 2} | ({"tools": chat_tools} if tools else {})
        create = attempt.client().chat.completions.create
        choices = [chunk.choices[0] async for chunk in await create(**asked, stream=True)]
        whole = (await create(**asked)).choices[0]
        include: Any = ["message.output_text.logprobs"]
        options: dict[str, Any] = {"include": include, "top_logprobs": 2} | ({"tools": TOOLS} if tools else {})
        events = [e async for e in await ask(attempt, QUESTION, stream=True, **options)]
        response = await ask(attempt, QUESTION, **options)
        ids, *others = [call.response_ids.tolist() for call in await attempt.close()]
    assert others == [ids] * 3
    (done,) = [e for e in events if e.type == "response.output_text.done"]
    (part,) = next(item for item in response.output if item.type == "message").content
    content = whole.message.content
    assert content == part.text == done.text
    assert [e.logprob for e in part.logprobs] == [e.logprob for e in done.logprobs]
    for deltas, entire in (
        ([(c.delta.content or "", c.logprobs.content if c.logprobs else []) for c in choices], whole.logprobs.content),
        ([(e.delta, e.logprobs) for e in events if e.type == "response.output_text.delta"], part.logprobs),
    ):
        entries = [entry for _, found in deltas for entry in found]
        assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in entire])
        assert [e.bytes for e in entries] == [e.bytes for e in entire]
        # The tokens of the content, without those of reasoning, calls and the end.
        assert bytes(byte for entry in entire for byte in entry.bytes or ()) == content.encode()
        sampled = [logprob(t, i) for i, t in enumerate(ids)]
        first = next(i for i, value in enumerate(sampled) if value == pytest.approx(entries[0].logprob))
        assert [e.logprob for e in entries] == pytest.approx(sampled[first : first + len(entries)])
        assert first == (len(tokenizer.encode(THOUGHT, add_special_tokens=False)) if line == "thought" else 0)
        assert all(len(e.top_logprobs) == 2 for e in entries)
        if line == "text":
            said = told = ""
            for text, found in deltas[:-1]:
                said, told = said + text, told + "".join(e.token for e in found)
                # What is held back for a call may begin within a token.
                assert said.startswith(told) if tools else said == told
                assert len(said) - len(told) < 8


@pytest.mark.parametrize("most", [7, 8, 9, 11])
@in_loop
async def test_log_probs_of_a_character_that_is_cut_are_streamed(most: int) -> None:
    """Its tokens wait for the rest of it, which never comes."""
    tokenizer = template_tokenizer("qwen3")
    async with serving(ScriptedEngine(tokenizer, ["It is 12 😀😀"]), tokenizer) as rig:
        attempt = await rig.attempt()
        options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "max_output_tokens": most}
        events = [event async for event in await ask(attempt, QUESTION, stream=True, **options)]
        await attempt.close()
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert done.text.endswith("\ufffd")
    streamed = [entry for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in done.logprobs])
    assert len(streamed) == most


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_log_probs_next_to_the_ids_of_all_tokens_are_those_of_all_tokens(stream: bool) -> None:
    tokenizer = template_tokenizer("qwen3")
    async with serving(ScriptedEngine(tokenizer, [LINES["thought"]]), tokenizer) as rig:
        attempt = await rig.attempt()
        more: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}, "stream": stream}
        answer: Any = await attempt.client().chat.completions.create(
            model="m", messages=[{"role": "user", "content": QUESTION}], **more
        )
        choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
        (call,) = await attempt.close()
    assert choices[-1].token_ids == call.response_ids.tolist()
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.logprob for entry in entries] == pytest.approx(call.logprobs.tolist())


# -- streams ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_block_of_thinking_is_closed_by_its_signature() -> None:
    tokenizer = template_tokenizer("qwen3")
    async with serving([THOUGHT + "Yes.", THOUGHT], tokenizer) as rig:
        attempt = await rig.attempt()
        async with clients(attempt) as of:
            whole = await APIS["messages"](of["messages"], False, 99, False)
            only_thought = await APIS["messages"](of["messages"], True, 99, False)
        async with clients(await rig.attempt()) as of:
            streamed = await APIS["messages"](of["messages"], True, 99, False)
    assert whole.raw.content[0].signature
    for answer in (only_thought, streamed):
        raw = [e for e in answer.raw if e.type.startswith(("content_block", "message_"))]
        of_thought = [e for e in raw if getattr(e, "index", None) == 0]
        kinds = [e.delta.type if e.type == "content_block_delta" else e.type for e in of_thought]
        assert kinds[0] == "content_block_start"
        assert set(kinds[1:-2]) == {"thinking_delta"}
        assert kinds[-2:] == ["signature_delta", "content_block_stop"]
        assert of_thought[-1].content_block.signature == of_thought[-2].delta.signature != ""


PARENTS = {
    "response.content_part": "response.output_item",
    "response.output_text": "response.content_part",
    "response.reasoning_text": "response.content_part",
    "response.function_call_arguments": "response.output_item",
    "response.output_item": "response",
}


@pytest.mark.parametrize("line", LINES)
@in_loop
async def test_events_of_responses_nest(line: str) -> None:
    """Each has its place: a part within its item, one item after the other, all within the response."""
    tokenizer = template_tokenizer("qwen3")
    async with serving([LINES[line]], tokenizer) as rig:
        events = [e async for e in await ask(await rig.attempt(), QUESTION, stream=True, tools=TOOLS)]
    assert [e.sequence_number for e in events] == [*range(len(events))]
    begun = ["response"]
    for event in events[2:-1]:
        kind, _, what = event.type.rpartition(".")
        if what == "added":
            assert begun[-1] == PARENTS[kind], (event.type, begun)
            begun.append(kind)
        elif what == "done" and kind == begun[-1]:
            begun.pop()
        else:
            assert PARENTS[kind] == begun[-1], (event.type, begun)
    assert begun == ["response"]
    items = [e.item for e in events if e.type == "response.output_item.done"]
    assert items == events[-1].response.output
    assert [e.output_index for e in events if e.type == "response.output_item.done"] == [*range(len(items))]


def open_responses() -> dict[str, Any]:
    """The types of Open Responses' events, by their `type`."""
    types = pytest.importorskip("openresponses_types.types")
    events = [event for name, event in vars(types).items() if name.endswith("StreamingEvent")]
    return {str(kind): event for event in events for kind in event.model_fields["type"].annotation}


@pytest.mark.parametrize("line", LINES)
@in_loop
async def test_events_and_stored_responses_fit_the_schema_of_open_responses(line: str) -> None:
    from openresponses_types import types

    known, tokenizer = open_responses(), template_tokenizer("qwen3")
    options: dict[str, Any] = {"tools": TOOLS, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with serving([LINES[line]], tokenizer) as rig:
        attempt = await rig.attempt()
        events = [e async for e in await ask(attempt, QUESTION, stream=True, **options)]
        stored = await attempt.client().responses.retrieve(events[-1].response.id)
    for event in events:
        # Reasoning has OpenAI's name for it, which its SDK reads: `reasoning_text`, there `reasoning`.
        if not event.type.startswith("response.reasoning_text."):
            known[event.type].model_validate(event.model_dump(mode="json"))
    types.ResponseResource.model_validate(stored.model_dump(mode="json"))


@in_loop
async def test_the_item_that_was_cut_is_the_incomplete_one() -> None:
    async with serving([tool_call("1 + 2") + "\n" + tool_call("3")[:40]]) as rig:
        attempt = await rig.attempt()
        whole = await ask(attempt, QUESTION, tools=TOOLS)
        events = [e async for e in await ask(attempt, QUESTION, tools=TOOLS, stream=True)]
    assert events[-1].type == "response.incomplete"
    for output in (whole.output, events[-1].response.output):
        assert [(item.type, item.status) for item in output] == [
            ("message", "incomplete"), ("function_call", "completed")
        ]  # fmt: skip


# -- stored responses -------------------------------------------------------------------------------------------------


@in_loop
async def test_a_stored_response_is_returned_until_it_is_deleted() -> None:
    async with serving(["one", "two", "three"]) as rig:
        attempt, other = await rig.attempt(), await rig.attempt()
        own = attempt.client().responses
        first = await ask(attempt, QUESTION, instructions="Be brief.", tools=TOOLS)
        asked = [
            {"role": "user", "content": "and"},
            {"role": "assistant", "content": "so"},
            {"role": "user", "content": "on"},
        ]
        second = await ask(attempt, asked, previous_response_id=first.id)
        unstored = await ask(attempt, QUESTION, store=False)
        assert await own.retrieve(first.id) == first
        assert await own.retrieve(second.id) == second
        with pytest.raises(openai.BadRequestError, match="stream is not supported"):
            await own.retrieve(second.id, stream=True)
        listed = [item async for item in own.input_items.list(second.id, order="asc", limit=2)]
        assert [(i.role, i.content[0].text) for i in listed] == [("user", "and"), ("assistant", "so"), ("user", "on")]
        assert len({item.id for item in listed}) == 3
        newest = await own.input_items.list(second.id)
        assert [i.id for i in newest.data] == [i.id for i in reversed(listed)]
        await own.delete(first.id)
        for response_id, of in ((first.id, own), (unstored.id, own), (second.id, other.client().responses)):
            for method in (of.retrieve, of.delete, of.input_items.list):
                with pytest.raises(openai.NotFoundError, match="not found"):
                    await method(response_id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await ask(attempt, QUESTION, previous_response_id=first.id)
        assert (await ask(attempt, QUESTION, previous_response_id=second.id)).status == "completed"


@in_loop
async def test_input_tokens_are_those_of_the_prompt() -> None:
    async with serving(["one", "two"]) as rig:
        attempt = await rig.attempt()
        counted = attempt.client().responses.input_tokens.count
        first = await ask(attempt, QUESTION)
        asked: dict[str, Any] = {"input": "and?", "instructions": "Be brief.", "tools": TOOLS}
        count = await counted(model="m", previous_response_id=first.id, **asked)
        answer = await ask(attempt, asked.pop("input"), previous_response_id=first.id, **asked)
        calls = await attempt.close()
    assert (count.object, count.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)
    assert len(calls) == 2

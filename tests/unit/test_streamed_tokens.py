"""Whatever tokens are sampled, a stream adds up to the whole answer, with the same log-probs, for every renderer and
every chat template, and in each of the four APIs.

Answers are drawn at random out of marks, whole and in letters, halves of marks, calls, parts of calls, and texts.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from four_apis import APIS, clients
from scripted import ScriptedEngine, in_loop, serving
from test_held_forms import spelled
from test_rendering import TOOLS
from test_streamed_reasoning import RENDERERS, SPELLED, USER, joined, model_of, streamed, until_stop
from tiny_tokenizers import TEMPLATE_TOKENS, template_tokenizer

from agl.mdp.types import int_array
from agl.trainer.engines.base import Sampling
from agl.trainer.gateway.calls import ChatRequest
from agl.trainer.rendering.rendering import Rendering

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"expression": "x"}}\n</tool_call>'
TEXTS = [
    "<think>", "</think>", "<channel|>", "<|channel>", "thought\n", " ", "\n", "\n\n", "Hm", "a <", "<", "</", "é漢",
    "👩‍🚀",
    "STOP", "ST", "{", '{"name": "lookup", "parameters": {"expression": "x"}}', '{"n": 1}', '"}', "<tool_call>",
    "</tool_call>", "the sum is", "<|end_header_id|>",
]  # fmt: skip
MODELS = [*(f"template:{name}" for name in TEMPLATE_TOKENS), SPELLED, *(f"package:{name}" for name in RENDERERS)]


def pieces_of(model: Rendering) -> list[list[int]]:
    """What answers are drawn out of."""
    tokenizer = model._tokenizer

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    marks = [token.content for token in tokenizer.added_tokens_decoder.values()]
    call = None if model.tools_refusal else model.possible_call(TOOLS)
    texts = [*TEXTS]
    if call is not None:
        texts += [call.single, call.two, call.trigger, *call.marks, call.single[:-5], call.single[5:]]
    pieces = [piece for text in texts for piece in (*[ids(text)] * 3, spelled(tokenizer, text))]
    pieces += [piece for mark in marks for piece in (ids(mark), spelled(tokenizer, mark)[:3])]
    return [piece for piece in pieces if piece]


def drawn(model: Rendering, pieces: list[list[int]], dice: random.Random, stop: tuple[str, ...]) -> list[int]:
    """The tokens that an engine samples."""
    ids = [token for _ in range(dice.randint(1, 9)) for token in dice.choice(pieces)]
    end = next((k for k, token in enumerate(ids) if token in model.stop_token_ids), len(ids))
    return until_stop(model, ids[:end], stop)


def compare(name: str, count: int, seed: str) -> None:
    model = model_of(name)
    pieces = pieces_of(model)
    for k in range(count):
        dice = random.Random(f"{name} {seed} {k}")
        tools = TOOLS if dice.random() < 0.5 and not model.tools_refusal else None
        stop = ("STOP",) if dice.random() < 0.3 else ()
        other = int_array(model.encode(dice.choice(["hi\n", "hi\n<think>\n"])))
        prompt = dice.choice([model.prompt([USER], tools).ids, other])
        ids = drawn(model, pieces, dice, stop)
        request = ChatRequest([USER], tools, None, Sampling(max_tokens=99, stop=stop))
        deltas, message, logprobs, of_content = streamed(model, ids, request, prompt)
        content, text = message.get("content") or "", model.decode(ids)
        assert joined(deltas, "reasoning_content") == (message.get("reasoning_content") or ""), text
        assert joined(deltas, "content") == content, text
        assert logprobs == of_content, text
        # Other parsers leave out marks in the middle of a text.
        if name.startswith("template:") and not stop:
            assert b"".join(bytes(entry["bytes"]) for entry in of_content) == content.encode(), text


@pytest.mark.parametrize("name", MODELS)
def test_any_tokens_are_streamed_as_they_are_answered_whole(name: str) -> None:
    compare(name, 12, "few")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_many_tokens_are_streamed_as_they_are_answered_whole(name: str) -> None:
    compare(name, 400, "many")


FOUND = [
    ("template:qwen3", f"{CALL}<", "<"),
    ("template:qwen3", f"{CALL}so </tool", "so </tool"),
    ("template:chatml", f"a {CALL}<", "a <"),
    ("template:qwen3", "<think>\n\n</think>\n\n<", "<"),
    ("package:qwen3", "<think>\n\n</think>\n\n<", "<"),
    ("package:deepseek-v4", "It is <think>so</think> then", None),
    ("package:llama-3", "before<|end_header_id|>after", "beforeafter"),
    ("package:gemma4", "before <|channel>thought\nnot ended", "before <|channel>thought\nnot ended"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content"), FOUND)
def test_a_text_that_ends_as_a_mark_begins_is_whole(name: str, text: str, content: str | None) -> None:
    model = model_of(name)
    ids = [*model.encode(text), model.stop_token_ids[0]]
    request = ChatRequest([USER], TOOLS, None, Sampling(max_tokens=99))
    deltas, message, logprobs, of_content = streamed(model, ids, request, int_array(model.encode("hi\n")))
    assert joined(deltas, "content") == message["content"]
    assert logprobs == of_content
    if content is not None:
        assert message["content"] == content
    spelled_out = b"".join(bytes(entry["bytes"]) for entry in of_content).decode()
    assert spelled_out.strip() == message["content"].strip() or name == "package:deepseek-v4"


def test_the_tokens_of_a_thought_behind_a_text_are_its_own() -> None:
    model = model_of("package:deepseek-v4")
    ids = [*model.encode("It is <think>so</think> then"), model.stop_token_ids[0]]
    prompt = int_array(model.encode("hi\n"))
    parsed = model.parse(ids, prompt_ids=prompt)
    assert parsed.reasoning == "so"
    places = sorted(model.reasoning_places(ids, parsed, prompt_ids=prompt))
    assert model.decode([ids[place] for place in places]) == "<think>so</think>"


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "inkling", "deepseek-v4", "kimi-k2.5", "template:qwen3"])
@in_loop
async def test_each_api_answers_any_tokens_as_it_streams_them(name: str) -> None:
    name = name if ":" in name else f"package:{name}"
    model = model_of(name)
    pieces = pieces_of(model)
    current: list[int] = []
    engine = ScriptedEngine(model._tokenizer, lambda _: current)
    async with serving(engine, template_tokenizer("chatml")) as rig:
        rig.gateway.serve("policy", engine, model)
        attempt = await rig.attempt()
        async with clients(attempt) as of:
            for k in range(5):
                current[:] = drawn(model, pieces, random.Random(f"{name} api {k}"), ())
                for api, ask in APIS.items():
                    pair: list[Any] = [await ask(of[api], stream, 999, True) for stream in (False, True)]
                    whole, stream = ((one.text, one.reasoning, one.calls, one.end) for one in pair)
                    assert whole == stream, (api, model.decode(current))


@pytest.mark.parametrize("name", ["package:deepseek-v4", "package:qwen3", "package:kimi-k2.5"])
def test_a_call_that_ends_a_thought_is_no_part_of_it(name: str) -> None:
    model = model_of(name)
    call = model.possible_call(TOOLS)
    assert call is not None
    ids = [*model.encode(f"<think>I call it.{call.single.removeprefix('</think>')}"), model.stop_token_ids[0]]
    request = ChatRequest([USER], TOOLS, None, Sampling(max_tokens=99))
    deltas, message, *_ = streamed(model, ids, request, int_array(model.encode("hi\n")))
    assert (message["reasoning_content"], len(message["tool_calls"])) == ("I call it.", 1)
    assert joined(deltas, "reasoning_content") == "I call it."

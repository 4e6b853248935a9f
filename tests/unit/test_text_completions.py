"""Text completions, tokens and texts at the address of applications."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from applications import KEYS, SHOP, Served, served
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, in_loop, logprob, quick_tokenizer
from tiny_tokenizers import sentencepiece_tokenizer

from agl.mdp.types import int_array
from agl.trainer.gateway.completions import routes
from agl.trainer.gateway.text_logprobs import TextLogprobs
from agl.trainer.rendering.rendering import Rendering

TEXT = "What is 3 + 4?"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
"""A chat template."""


class Scoring(ScriptedEngine):
    """One that scores prompts, as agl's own engine does."""

    async def scored(self, token_ids: Any, top: int) -> tuple[Any, Any, Any]:
        size = len(token_ids) - 1
        values = np.asarray([-1.0 - k for k in range(size)], np.float32)
        return values, np.full((size, top), 5, np.int32), np.full((size, top), -0.5, np.float32)


def _served(engine: Any) -> Any:
    return served(engine, KEYS, routes=routes)


async def _answer(at: Served, **body: Any) -> Any:
    answered = await at.post("/v1/completions", {"model": "policy", "prompt": TEXT, **body})
    assert answered.status_code == 200, answered.text
    return answered.json()


@in_loop
async def test_a_text_is_continued_whole_and_as_a_stream():
    async with _served(["seven is the answer"]) as at:
        client = at.openai()
        whole = await client.completions.create(model="policy", prompt=TEXT, max_tokens=50)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("seven is the answer", "stop")
        assert at.engine.asked[0].prompt_ids.tolist() == at.engine.encode(TEXT)
        assert whole.usage.prompt_tokens == len(at.engine.encode(TEXT))
        stream = await client.completions.create(
            model="policy",
            prompt=TEXT,
            max_tokens=50,
            stream=True,
            stream_options={"include_usage": True, "include_obfuscation": False},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks if c.choices) == "seven is the answer"
        first = 'agl_first_token_seconds_count{application="shop",model="policy"} 1'
        assert first in at.gateway.metrics.text().splitlines()
        assert chunks[-1].usage == whole.usage
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_stop_text_ends_the_text_and_is_not_in_it(stream: bool):
    async with _served(["seven is the answer"]) as at:
        asked = {"model": "policy", "prompt": TEXT, "max_tokens": 50, "stop": [" the"], "stream": stream}
        answered = await at.openai().completions.create(**asked)
        text = "".join([c.choices[0].text async for c in answered]) if stream else answered.choices[0].text
        assert text == "seven is"


@in_loop
async def test_prompts_are_texts_or_tokens_one_or_several():
    async with _served(lambda asked: f"{asked.prompt_ids.size}") as at:
        ids = at.engine.encode(TEXT)
        for prompt, sizes in ((ids, [len(ids)]), ([TEXT, "3"], [len(ids), 1]), ([ids, ids[:2]], [len(ids), 2])):
            choices = (await _answer(at, prompt=prompt, n=2))["choices"]
            assert [int(c["text"]) for c in choices] == [size for size in sizes for _ in range(2)]
            assert [c["index"] for c in choices] == list(range(2 * len(sizes)))
        seeds = [asked.sampling.seed for asked in at.engine.asked[-2:]]
        assert seeds[0] != seeds[1]


@in_loop
async def test_log_probs_are_those_of_the_sampled_tokens():
    async with _served(["seven"]) as at:
        choice = (await _answer(at, logprobs=2, max_tokens=50))["choices"][0]
        ids = [*at.engine.encode("seven"), at.engine.tokenizer.eos_token_id]
        entries = choice["logprobs"]
        np.testing.assert_allclose(entries["token_logprobs"], [logprob(t, k) for k, t in enumerate(ids)], rtol=1e-6)
        assert "".join(entries["tokens"]) == at.engine.tokenizer.decode(ids)
        assert entries["text_offset"][0] == 0
        assert list(entries["top_logprobs"][0]) == entries["tokens"][:1]


@pytest.mark.parametrize("echo", [False, True])
@in_loop
async def test_log_probs_end_with_the_text_before_a_stop_text(echo: bool):
    async with _served(Scoring(quick_tokenizer(), ["seven is the answer"])) as at:
        for stop, said in ((" the", "seven is"), ("v", "se"), ("seven", ""), ("nowhere", "seven is the answer")):
            choice = (await _answer(at, logprobs=1, max_tokens=50, stop=[stop], echo=echo))["choices"][0]
            entries = choice["logprobs"]
            text = (TEXT if echo else "") + said
            assert choice["text"] == text
            assert {len(values) for values in entries.values()} == {len(entries["tokens"])}
            assert all(offset < len(text) for offset in entries["text_offset"]) or stop == "nowhere"
            # A token may begin before the stop text and end in it.
            assert "".join(entries["tokens"]).startswith(text)


@pytest.mark.parametrize("style", ["bytes", "legacy", "first"])
@given(text=st.text(min_size=1, max_size=12), before=st.sampled_from(["The answer is", "漢"]))
@settings(max_examples=60, deadline=None)
def test_a_tokens_place_is_where_its_first_character_is(style: str, text: str, before: str):
    model = Rendering(quick_tokenizer() if style == "bytes" else sentencepiece_tokenizer(style, PLAIN))
    prompt = int_array(model.encode(before))
    ids = int_array(model.encode(before + text)[prompt.size :])
    whole = model.decode_after(prompt, ids)
    entries = TextLogprobs(model)
    entries.add(prompt, ids, [0.0] * ids.size, [])
    places = entries.json["text_offset"]
    assert places == sorted(places)
    for k, (place, token) in enumerate(zip(places, entries.json["tokens"], strict=True)):
        before_it = model.decode_after(prompt, ids[:k])
        assert before_it[:place] == whole[:place]
        # Only what stands for an unfinished character is not before it.
        assert place == len(before_it) or before_it[place:].strip("\ufffd") == ""
        if "\ufffd" not in token:
            assert whole[place : place + len(token)] == token


@in_loop
async def test_an_echo_has_the_prompt_with_its_log_probs():
    async with _served(Scoring(quick_tokenizer(), ["seven"])) as at:
        ids = at.engine.encode(TEXT)
        choice = (await _answer(at, echo=True, logprobs=1, max_tokens=1, prompt=ids))["choices"][0]
        entries = choice["logprobs"]
        assert choice["text"].startswith(TEXT)
        assert entries["token_logprobs"][: len(ids)] == [None, *(-1.0 - k for k in range(len(ids) - 1))]
        assert entries["top_logprobs"][0] is None
        assert max(entries["top_logprobs"][1].values()) == -0.5
        assert len(entries["tokens"]) == len(ids) + 1
        nothing = (await _answer(at, echo=True, logprobs=1, max_tokens=0))["choices"][0]
        assert (nothing["text"], len(nothing["logprobs"]["tokens"])) == (TEXT, len(ids))
        assert len(at.engine.asked) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [3, 10**6]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "stream": True}, "echo"),
        ({"stop": ""}, "stop"),
        ({"temprature": 1}, "temprature"),
        ({"prompt": "3 " * 5000}, "prompt"),
    ],
)
@in_loop
async def test_what_cannot_be_held_is_refused_by_name(body: dict[str, Any], param: str):
    async with _served(["x"]) as at:
        refused = await at.post("/v1/completions", {"prompt": TEXT, **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert at.engine.asked == []
        assert set(at.gateway.metrics.open_requests.values()) == {0}


@in_loop
async def test_tokens_of_texts_and_conversations_and_back():
    async with _served(["x"]) as at:
        ids = at.engine.encode(TEXT)
        whole = (await at.post("/tokenize", {"prompt": TEXT, "return_token_strs": True})).json()
        assert (whole["tokens"], whole["count"], "".join(whole["token_strs"])) == (ids, len(ids), TEXT)
        assert whole["max_model_len"] == at.engine.max_context
        conversation = [{"role": "user", "content": TEXT}]
        await at.post("/v1/chat/completions", {"messages": conversation})
        rendered = (await at.post("/tokenize", {"messages": conversation})).json()
        assert rendered["tokens"] == at.engine.asked[0].prompt_ids.tolist()
        assert (await at.post("/detokenize", {"tokens": ids})).json() == {"prompt": TEXT}
        neutral = {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": None}
        assert (await at.post("/tokenize", {"messages": conversation, **neutral})).json() == rendered
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"messages": [{"role": "user", "content": 5}]}),
            ("/tokenize", {"messages": conversation, "tools": [{"x": 1}]}),
            ("/tokenize", {"messages": conversation, "add_generation_prompt": False}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [10**6]}),
        ):
            assert (await at.post(path, body)).status_code == 400
        for path in ("/tokenize", "/detokenize", "/v1/completions"):
            assert (await at.post(path, {"prompt": TEXT}, "wrong-key-0123456789")).status_code == 401


@in_loop
async def test_text_counts_against_an_applications_limit():
    engine = ScriptedEngine(quick_tokenizer(), ["x"], paused=True)
    async with served(engine, KEYS, routes=routes, most_requests=1) as at:
        at.gateway.admit_one("shop")
        assert (await at.post("/v1/completions", {"prompt": TEXT}, SHOP)).status_code == 429
        at.gateway.ended("shop")
        engine.resume.set()
        await _answer(at)
        async for _ in await at.openai().completions.create(model="policy", prompt=TEXT, stream=True):
            pass
        assert set(at.gateway.metrics.open_requests.values()) == {0}

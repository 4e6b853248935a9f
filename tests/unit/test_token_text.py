"""Text and ids where a text is a part of a longer one: what SentencePiece's tokenizers do at its beginning and end."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import sentencepiece_tokenizer, template_tokenizer

from agl.mdp.types import float_array, int_array
from agl.trainer.engines.base import Completion, Sampling
from agl.trainer.gateway.calls import ChatRequest, Choice, Reply, assistant_message
from agl.trainer.gateway.dialects.common import logprob_entries
from agl.trainer.gateway.dialects.deltas import MessageDeltas
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.token_text import TokenText

ROLES = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Zephyr's and TinyLlama's: the roles are plain text, and an answer follows a line break."""
INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    "{{ m.content }}</s>{% endif %}{% endfor %}"
)
"""Mistral 0.1's and 0.2's, without a space before the answer."""
INST_SPACE = INST.replace("{{ m.content }}</s>", " {{ m.content }}</s>")
CONTROL = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '\\n' }}{{ m.content }}<|end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '\\n' }}{% endif %}"
)
"""Phi-3's: the roles are control tokens."""
BARE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
BARE += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
"""The same without line breaks: an answer follows a control token."""
TEMPLATES = {"roles": ROLES, "inst": INST, "inst_space": INST_SPACE, "control": CONTROL, "bare": BARE}
STYLES = ("legacy", "first")


@cache
def sentencepiece(style: str, template: str = "roles") -> Any:
    specials = ("<|user|>", "<|assistant|>", "<|end|>") if "<|end|>" in TEMPLATES[template] else ()
    return sentencepiece_tokenizer(style, TEMPLATES[template], specials)


@cache
def rendering_of(style: str, template: str) -> Rendering:
    return Rendering(sentencepiece(style, template))


USER = {"role": "user", "content": "The sum?"}
ANSWERS = ("The answer is 4.", "Done", "", " The", "\u4f60\u597d", "\nThe", "3")


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("style", STYLES)
def test_an_imitated_answer_has_the_ids_that_follow_its_prompt(style: str, template: str, answer: str) -> None:
    model, tokenizer = rendering_of(style, template), sentencepiece(style, template)
    prompt = model.prompt([USER]).ids
    ids = model.response(prompt, [USER], {"role": "assistant", "content": answer})
    messages = [USER, {"role": "assistant", "content": answer}]
    whole = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    assert whole[: prompt.size] == prompt.tolist()
    assert ids.tolist() == whole[prompt.size : prompt.size + ids.size]
    assert ids[-1] in model.stop_token_ids


def test_an_imitated_answer_begins_with_the_token_that_the_model_would_produce() -> None:
    for style in STYLES:
        model = rendering_of(style, "roles")
        prompt = model.prompt([USER]).ids
        ids = model.response(prompt, [USER], {"role": "assistant", "content": "The answer"})
        tokens = sentencepiece(style).convert_ids_to_tokens(ids.tolist())
        assert tokens == ["The", "\u2581answer", "</s>"]


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("style", STYLES)
def test_a_continued_conversation_has_the_ids_of_the_whole_one(style: str, template: str, cut: bool) -> None:
    model = rendering_of(style, template)
    messages: list[dict[str, Any]] = [USER]
    prompt = model.prompt(messages).ids
    for said in ("The answer is 4.", "Done"):
        answer = {"role": "assistant", "content": said}
        response = model.response(prompt, messages, answer)
        new = {"role": "user", "content": "The \u4f60 sum is the answer?"}
        extended = model.extend(prompt, response[:-1] if cut else response, [new])
        assert not isinstance(extended, str)
        messages = [*messages, answer, new]
        assert extended.tolist() == model.prompt(messages).ids.tolist()
        prompt = extended


CALLS = (
    "{% if tools %}<|system|>\n{{ tools | tojson }}</s>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}{"name": {{ c.function.name | tojson }}, '
    '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}</s>\n{% endfor %}'
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize("style", STYLES)
def test_a_forced_call_is_begun_with_the_ids_that_follow_the_prompt(style: str) -> None:
    tokenizer = sentencepiece_tokenizer(style, CALLS)
    model = Rendering(tokenizer)
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
    prompt = model.prompt([USER], tools, force_tool="lookup")
    text = tokenizer.apply_chat_template([USER], tools=tools, add_generation_prompt=True, tokenize=False)
    text += '{"name": "lookup", "parameters":'
    assert prompt.ids.tolist() == tokenizer.encode(text, add_special_tokens=False)


def test_texts_that_share_a_token_with_what_is_before_them_are_encoded_as_inside_a_text() -> None:
    for style in STYLES:
        tokenizer = sentencepiece(style)
        text = TokenText(tokenizer)
        before = text.encode("The sum ")
        ids = text.encode_after(before, "The")
        assert tokenizer.convert_ids_to_tokens(ids) == ["The"]
        assert text.decode([*before, *ids]) == "The sum The"


def test_other_tokenizers_encode_a_text_behind_another_as_alone() -> None:
    text = TokenText(template_tokenizer("chatml"))
    for before in ("", "the user", "the user\n", "the user \n\n", "<|im_end|>"):
        for after in ("the tool", "\n", "\n\n<|im_end|>", " the", "12"):
            assert text.encode_after(text.encode(before), after) == text.encode(after)


# -- half characters --------------------------------------------------------------------------------------------------


def byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    return tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data])


def test_a_byte_too_few_leaves_the_characters_around_it() -> None:
    tokenizer = sentencepiece("first")
    text = TokenText(tokenizer)
    half = byte_ids(tokenizer, "\u4f60\u597d\u4f60".encode()[:-1])
    assert tokenizer.decode(half) == "\ufffd" * 8
    assert text.decode(half) == "\u4f60\u597d\ufffd"
    assert text.decode([*half, *byte_ids(tokenizer, b"x")]) == "\u4f60\u597d\ufffdx"


def tokenizers() -> dict[str, Any]:
    return {"legacy": sentencepiece("legacy"), "first": sentencepiece("first"), "bytes": template_tokenizer("chatml")}


def pieces(tokenizer: Any) -> list[list[int]]:
    """Ids that are worth streaming one after another: characters, halves of them, text."""
    texts = ["\u4f60", "The", " answer", " ", "\n", "\ufffd", "\U0001f469", "3"]
    whole = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [*whole, *([token] for ids in (whole[0], whole[6]) for token in ids)]


@pytest.mark.parametrize("name", ["legacy", "first", "bytes"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_streamed_adds_up_to_what_is_recorded(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizers()[name]
    model = rendering_of(name, "roles") if name in STYLES else Rendering(tokenizer)
    sampled = data.draw(st.lists(st.sampled_from(pieces(tokenizer)), max_size=12))
    request = ChatRequest([USER], None, None, Sampling(max_tokens=99))
    deltas, choice = MessageDeltas(request, model), Choice(0, int_array([]), int_array([]), [], [])
    streamed = []
    for token in (token for piece in sampled for token in piece):
        choice.ids.append(token)
        streamed += [delta.get("content") or "" for delta in deltas.push(choice)]
    message, _ = assistant_message(model.parse(choice.ids), str)
    count = len(choice.ids)
    completion = Completion(int_array(choice.ids), float_array(np.zeros(count)), "stop", 0)
    streamed += [d.get("content") or "" for d in deltas.finish(0, Reply("c", message, completion, "stop", 1, 0))]
    assert "".join(streamed) == message["content"]


@pytest.mark.parametrize("style", STYLES)
def test_the_tokens_of_log_probs_add_up_to_the_answer(style: str) -> None:
    model = rendering_of(style, "roles")
    text = "The answer is 4. The user."
    ids = model.response(model.prompt([USER]).ids, [USER], {"role": "assistant", "content": text})[:-1]
    completion = Completion(ids, float_array(np.zeros(ids.size)), "stop", 0, [[(int(i), 0.0)] for i in ids])
    entries = logprob_entries(completion, model)
    assert "".join(entry["token"] for entry in entries) == text
    assert [entry["top_logprobs"][0]["token"] for entry in entries] == [entry["token"] for entry in entries]
    assert json.loads(json.dumps(entries)) == entries


@pytest.mark.parametrize("name", ["legacy", "first", "bytes"])
def test_the_bytes_of_log_probs_add_up_to_the_answer(name: str) -> None:
    """Also those of tokens that are parts of a character."""
    model = rendering_of(name, "roles") if name in STYLES else Rendering(tokenizers()[name])
    text = "Gr\u00fc\u00dfe: \u65e5\u672c, \U0001f389"
    ids = model.response(model.prompt([USER]).ids, [USER], {"role": "assistant", "content": text})[:-1]
    entries = logprob_entries(Completion(ids, float_array(np.zeros(ids.size)), "stop", 0), model)
    assert any("\ufffd" in entry["token"] for entry in entries)
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode()


def test_a_stop_text_is_seen_behind_half_a_character() -> None:
    from agl.trainer.local.engine.sampler import StopTexts

    tokenizer = sentencepiece("first")
    watch = StopTexts(("\u597d",), TokenText(tokenizer).decode)
    half, stop = "\u4f60".encode()[:2], "\u597d".encode()
    assert [watch.add(token) for token in byte_ids(tokenizer, half + stop)] == [False] * 4 + [True]

"""Hand-written renderers: a continued conversation keeps the old ids and says what the renderer would say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_tokenizers import CHATML, package_tokenizer, tiny_tokenizer

from agl.errors import ConfigError
from agl.trainer.rendering.bridge import Kind, example
from agl.trainer.rendering.package_renderer import PackageRenderer, known_renderers
from agl.trainer.rendering.rendering import Rendering

NEEDS_DOWNLOAD = {"gpt-oss": "its encoding is downloaded by openai_harmony"}

CONTINUES = {
    # renderer: first new message of the continuations that must work, with and without reasoning in the answers
    "deepseek-v3": {"user", "tool", "user+think", "tool+think"},
    "deepseek-v4": {"user", "tool", "user+think", "tool+think"},
    "deepseek-r1": set(),
    "gemma4": {"user", "tool", "user+think", "tool+think"},
    "glm-4.5": {"tool", "tool+think"},
    "glm-5": {"tool+think"},
    "glm-5.1": {"tool", "tool+think"},
    "glm-5.3": {"user", "tool", "user+think", "tool+think"},
    "hy3": {"tool"},
    "inkling": {"user", "tool", "user+think", "tool+think"},
    "kimi-k2": {"user", "tool", "user+think", "tool+think"},
    "kimi-k2.5": {"tool", "tool+think"},
    "laguna-m.1": set(),
    "laguna-xs.2": set(),
    "laguna-s-2.1": {"user", "tool", "user+think", "tool+think"},
    "laguna-xs-2.1": {"user", "tool", "user+think", "tool+think"},
    "llama-3": {"user", "tool", "user+think", "tool+think"},
    "minimax-m2": {"tool+think"},
    "nemotron-3": {"tool+think"},
    "nemotron-3-ultra": {"tool+think"},
    "nemotron-3.5": {"tool+think"},
    "prime-qwen3": {"user", "tool", "user+think", "tool+think"},
    "qwen3": {"tool", "tool+think"},
    "qwen3-vl": {"user", "tool", "user+think", "tool+think"},
    "qwen3.5": {"tool", "tool+think"},
    "qwen3.6": {"tool", "tool+think"},
    "qwen3.8": {"user", "tool", "user+think", "tool+think"},
}

TEXTS = [
    "",
    "plain",
    "  two\n\nlines \n",
    "é 漢字 👩‍🚀",
    "<|im_end|>",
    '{"json": [1]}',
    "</tool_response>",
    "<think>x</think>",
]

_MODELS: dict[str, Rendering] = {}


def model_of(name: str) -> Rendering:
    if name not in _MODELS:
        _MODELS[name] = Rendering(package_tokenizer(), renderer=name)
    return _MODELS[name]


def test_every_renderer_of_the_package_is_covered():
    assert set(CONTINUES) | set(NEEDS_DOWNLOAD) | {"default"} == set(known_renderers())


@pytest.mark.parametrize("name", CONTINUES)
def test_where_a_renderer_continues(name: str):
    found = {
        role + ("+think" if reasoning else "")
        for role in ("user", "tool")
        for reasoning in (False, True)
        if model_of(name)._model.fork_reason((role,), role == "tool", False, reasoning) is None
    }
    assert found == CONTINUES[name]


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", CONTINUES)
def test_continuations_say_what_the_renderer_says(name: str, cut: bool):
    model = model_of(name)
    inner = model._model
    assert isinstance(inner, PackageRenderer)
    stops = [model.decode([i]) for i in model.stop_token_ids]
    for roles in (("user",), ("tool",), ("tool", "tool"), ("tool", "user")):
        for reasoning in (False, True):
            if (name, roles) == ("llama-3", ("tool", "tool")):
                continue  # test_template_refusals.py: it renders no answer with two calls
            tried = example(inner.render, Kind(roles, "tool" in roles, False, reasoning), stops)
            if isinstance(tried, str):
                continue
            prompt, response = inner.encode(tried.prompt), inner.encode(tried.answer)
            if cut and response[-1] in model.stop_token_ids:
                response = response[:-1]
            old = prompt + response
            for text in TEXTS:
                new = [{**message, "content": text} for message in tried.new]
                ids = model.extend(prompt, response, new, tried.tools)
                if isinstance(ids, str):
                    assert ids
                    continue
                assert ids[: len(old)].tolist() == old
                expected = _with_texts(inner, tried, roles, reasoning, text)
                assert expected is None or model.decode(ids) == expected


def _with_texts(inner: PackageRenderer, tried: Any, roles: tuple[str, ...], reasoning: bool, text: str) -> str | None:
    """The conversation with `text` in its new messages, as the renderer writes it; None if that moves the history."""
    answer: dict[str, Any] = {"role": "assistant", "content": "" if "tool" in roles else "placeholder answer"}
    if "tool" in roles:
        answer["tool_calls"] = [
            {
                "id": message["tool_call_id"],
                "type": "function",
                "function": {"name": "placeholder_tool", "arguments": {"placeholder_key": "placeholder value"}},
            }
            for message in tried.new
            if message["role"] == "tool"
        ]
    if reasoning:
        answer["reasoning_content"] = "placeholder thought"
    user = {"role": "user", "content": "placeholder user"}
    new = [{**message, "content": text} for message in tried.new]
    whole = inner.render([user, answer, *new], tried.tools, True)
    return whole if whole.startswith(tried.prompt + tried.answer) else None


@pytest.mark.parametrize("name", sorted(set(CONTINUES) - {"kimi-k2", "kimi-k2.5"}))
def test_calls_that_a_renderer_writes_are_read(name: str):
    model = model_of(name)
    inner = model._model
    assert isinstance(inner, PackageRenderer)
    stops = [model.decode([i]) for i in model.stop_token_ids]
    tried = example(inner.render, Kind(("tool",), True, False, True), stops)
    if isinstance(tried, str):
        tried = example(inner.render, Kind(("tool",), True, False, False), stops)
    if isinstance(tried, str):
        pytest.skip(tried)
    prompt, response = inner.encode(tried.prompt), inner.encode(tried.answer)
    parsed = model.parse(response, tried.tools, prompt_ids=prompt)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [
        ("placeholder_tool", {"placeholder_key": "placeholder value"})
    ]
    assert not parsed.malformed
    untold = model.parse(response, None, prompt_ids=prompt)
    assert not untold.tool_calls
    assert "placeholder value" in untold.content


def test_an_answer_that_went_on_after_its_end_token_is_not_trimmed():
    model = model_of("qwen3-vl")
    user = {"role": "user", "content": "x"}
    prompt = model.prompt([user]).ids
    response = package_tokenizer().encode("one<|im_end|>two", add_special_tokens=False)
    assert "continues after its end token" in str(model.extend(prompt, response, [user]))


def test_broken_calls_stay_in_the_text():
    model = model_of("qwen3")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    whole, broken = (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", \n</tool_call>',
    )
    ids = package_tokenizer().encode(f"First {whole}\n{broken}<|im_end|>", add_special_tokens=False)
    parsed = model.parse(ids, tools)
    assert [call.name for call in parsed.tool_calls] == ["f"]
    assert parsed.malformed == (broken,)
    assert parsed.content == "First" + broken


@pytest.mark.parametrize("name", ["kimi-k2", "kimi-k2.5"])
def test_kimi_reads_a_tools_name_from_the_id_that_the_model_wrote(name: str):
    model = model_of(name)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    user = {"role": "user", "content": "go"}
    call = {"id": "minted", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "minted", "name": "f", "content": "done"}
    whole = model.decode(
        model.prompt([user, {"role": "assistant", "content": None, "tool_calls": [call]}, result], tools).ids
    )
    assert "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>" in whole
    assert "## Return of functions.f:0\n" in whole
    prompt = model.prompt([user], tools).ids
    response = package_tokenizer().encode(
        ("</think>" if name == "kimi-k2.5" else "")
        + "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>",
        add_special_tokens=False,
    )
    extended = model.extend(prompt, response, [result], tools)
    assert not isinstance(extended, str)
    assert "## Return of functions.f:7\n" in model.decode(extended)


def test_a_forced_tool_begins_as_the_renderer_would():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    user = [{"role": "user", "content": "go"}]
    expected = {
        "qwen3": '<tool_call>\n{"name": "f", "arguments":',
        "qwen3.5": "\n</think>\n\n<tool_call>\n<function=f>\n",
        "llama-3": '{"name": "f", "parameters":',
        "glm-4.5": "\n<think></think>\n<tool_call>f\n",
    }
    for name, text in expected.items():
        assert model_of(name).decode(model_of(name).prompt(user, tools, force_tool="f").forced_ids) == text


def test_a_renderer_that_does_not_exist_or_does_not_fit():
    with pytest.raises(ConfigError, match="did you mean 'qwen3"):
        Rendering(package_tokenizer(), renderer="qwen-3")
    with pytest.raises(ConfigError, match="cannot be used with this tokenizer"):
        Rendering(tiny_tokenizer(CHATML, "<|im_end|>"), renderer="glm-4.5")


def test_the_renderer_is_chosen_by_the_models_name():
    tokenizer = tiny_tokenizer(package_tokenizer().get_added_vocab(), "<|im_end|>")
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    assert Rendering(tokenizer).renderer == "qwen3"

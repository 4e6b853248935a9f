"""`agl export gguf`, judged by llama.cpp itself: its tokens, answers, prompts and the tool calls that it reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported_policies import CUTS, TEXTS, WRITTEN, merging_tokenizer, policy
from llama_cpp import LlamaCpp, llama_cpp
from tiny_engine import VOCABULARY
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl.trainer.local.gguf_export import export_gguf
from agl.trainer.local.gguf_tokenizer import PRE_TOKENIZERS, QWEN2
from agl.trainer.local.prepared import model_directory
from agl.trainer.quickstart.policy import Recipe, make_policy
from agl.trainer.quickstart.smollm2 import smollm2_file

pytestmark = pytest.mark.slow
torch.set_num_threads(1)

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
APPROXIMATED = {"Gemma 2", "Gemma 3", "StarCoder 2"}
"""llama.cpp looks GELU up in a table of float16 numbers."""


def exported(directory: Path, precision: str = "f32") -> Path:
    """The policy's file."""
    return Path(export_gguf(directory, directory.with_suffix(".gguf"), precision)["file"])


def answers(model: Any, prompt: Sequence[int], length: int) -> list[int]:
    """The likeliest tokens after a prompt, up to the one that ends the answer."""
    with torch.no_grad():
        whole = model.generate(torch.tensor([[*prompt]]), max_new_tokens=length, do_sample=False)
    tokens = whole[0, len(prompt) :].tolist()
    stops = model.generation_config.eos_token_id
    return [token for token in tokens if token not in (stops if isinstance(stops, list) else [stops])]


def require_equal_answers(file: LlamaCpp, directory: Path | str, questions: Sequence[str], length: int) -> None:
    """Prompts, and the greedy answers in float32."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    stops = {*tokenizer.all_special_ids}
    for question in questions:
        messages = [{"role": "user", "content": question}]
        prompt: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert file.prompt(messages) == prompt
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert file.tokens(prompt) == ids
        theirs, _ = file.greedy(ids, length)
        assert [token for token in theirs if token not in stops] == answers(model, ids, length)


def require_equal_logprobs(file: LlamaCpp, model: Any, longest: int, error: float) -> None:
    """The likeliest token after random prompts of up to `longest` tokens, and the five highest log-probs."""
    random, compared = np.random.default_rng(0), 0
    for length in np.linspace(3, longest, 24, dtype=int):
        ids = random.integers(3, VOCABULARY - 2, length).tolist()
        _, places = file.greedy(ids, 1, top=5)
        # Part of a character has no entry: the server holds it back.
        if not places:
            continue
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        for token, logprob in places[0].items():
            assert logprob == pytest.approx(logprobs[token].item(), abs=error)
        best = max(places[0], key=places[0].__getitem__)
        assert logprobs[best] > logprobs.max() - 2 * error
        compared += 1
    assert compared >= 8


@pytest.mark.parametrize("name", WRITTEN)
def test_llama_cpp_computes_what_the_model_computes(name: str, tmp_path: Path) -> None:
    model = policy(tmp_path / "policy", name)
    # With long rope, llama.cpp turns all tokens otherwise where its context is longer.
    context = 256 if name == "Phi-3, long rope" else 1024
    with llama_cpp(exported(tmp_path / "policy"), context) as file:
        require_equal_logprobs(file, model, context - 24, 5e-3 if name in APPROXIMATED else 1e-4)


@pytest.mark.parametrize("pre_tokenizer", CUTS)
def test_llama_cpp_gives_texts_the_same_tokens(pre_tokenizer: str, tmp_path: Path) -> None:
    whole_words = PRE_TOKENIZERS[pre_tokenizer].whole_words
    tokenizer = merging_tokenizer(CUTS[pre_tokenizer], 600, whole_words=whole_words)
    policy(tmp_path / "policy", tokenizer=tokenizer, vocab_size=608)
    random = np.random.default_rng(0)
    letters = [*"aZéÜß1٣²½ \u00a0\u2028\t\n\r'.,-+/*\"{}<>|你👋🏽\u0301dDsSlLvV"]
    mixed = ["".join(random.choice(letters, 40)) for _ in range(200)]
    with llama_cpp(exported(tmp_path / "policy")) as file:
        for text in (*TEXTS, *mixed):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            assert file.tokens(text) == tokens, text
            assert file.tokens(text, special=True) == tokenizer.encode(text), text


@pytest.mark.parametrize(("precision", "error"), [("f16", 0.02), ("bf16", 0.2), ("q8_0", 0.2)])
def test_it_loads_every_precision(precision: str, error: float, tmp_path: Path) -> None:
    model = policy(tmp_path / "policy")
    with llama_cpp(exported(tmp_path / "policy", precision)) as file:
        require_equal_logprobs(file, model, 100, error)


def test_the_quickstarts_policy_answers_as_here_and_its_tool_calls_are_read(tmp_path: Path) -> None:
    recipe = Recipe(capability_steps=200, mixed_steps=0)
    make_policy(tmp_path / "policy", threads=1, recipe=recipe, words=QWEN2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    numbers = np.random.default_rng(0).integers(2, 500, (20, 2))
    with llama_cpp(exported(tmp_path / "policy")) as file:
        require_equal_answers(file, tmp_path / "policy", [f"What is {a} * {b}?" for a, b in numbers], 48)
        for a, b in numbers[:4]:
            asked = [
                {"role": "system", "content": "Use the calculator."},
                {"role": "user", "content": f"What is {a} * {b}?"},
            ]
            choice = file.chat(asked, [TOOL])
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "calculator"
            prompt: Any = tokenizer.apply_chat_template(asked, tools=[TOOL], tokenize=False, add_generation_prompt=True)
            written = tokenizer.decode(answers(model, tokenizer.encode(prompt, add_special_tokens=False), 64))
            ours = json.loads(written.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            assert json.loads(call["function"]["arguments"]) == ours["arguments"]


def test_smollm2_answers_as_here(tmp_path: Path) -> None:
    directory = model_directory(str(smollm2_file()))
    export_gguf(directory, tmp_path / "smollm2.gguf", "f32")
    questions = [f"{question}{i}?" for question in ("What is 7 plus ", "Name animals: ") for i in range(10)]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with llama_cpp(tmp_path / "smollm2.gguf") as file:
        for text in TEXTS:
            assert file.tokens(text) == tokenizer.encode(text, add_special_tokens=False), text
        require_equal_answers(file, directory, questions, 16)


def test_an_adapter_alone_answers_as_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model

    monkeypatch.setenv("AGL_CACHE", str(tmp_path / "cache"))
    policy(tmp_path / "base")
    torch.manual_seed(1)
    options = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), options)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    compared = 0
    with llama_cpp(exported(tmp_path / "adapter")) as file:
        for length in range(5, 25):
            ids = np.random.default_rng(length).integers(3, VOCABULARY - 2, length).tolist()
            theirs, _ = file.greedy(ids, 8)
            # The server holds back part of a character, and leaves out what ends the answer.
            assert theirs == answers(merged, ids, 8)[: len(theirs)]
            compared += len(theirs)
    assert compared > 40

"""Models as people have them: GGUF files and chat templates, made into directories that load like any other."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from paths import ROOT
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import agl
from agl.errors import ConfigError, ModelLoadError
from agl.trainer.cli.doctor_model import examine_model
from agl.trainer.local.conversion import prepare
from agl.trainer.local.memory import require_memory
from agl.trainer.local.model import load_policy, save_model
from agl.trainer.local.prepared import CACHE_VARIABLE, TEMPLATES, model_directory
from agl.trainer.local.tokenizer import PROBE, load_tokenizer
from agl.trainer.rendering.rendering import Rendering
from agl_verl.config import local

WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def subject(untrained_model: Path, tmp_path: Path) -> tuple[Any, Any]:
    """A model, and a tokenizer that cuts digits as SmolLM's does; it has tokens of several digits, too."""
    tokenizer = AutoTokenizer.from_pretrained(untrained_model)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[attr-defined]
    tokenizer = tokenizer.train_new_from_iterator([PROBE, "2024 1692 " * 50], vocab_size=330)
    assert "2024" in tokenizer.get_vocab()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[attr-defined]
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return AutoModelForCausalLM.from_pretrained(untrained_model), tokenizer


def write_gguf(path: Path, model: Any, tokenizer: Any, *, architecture: str = "llama", pre: str = "smollm") -> Path:
    """A GGUF file as llama.cpp writes one: rows of queries and keys in its order, weights in float32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if isinstance(tokenizer, sentencepiece.SentencePieceProcessor):
        _write_pieces(writer, tokenizer)
    else:
        _write_byte_pairs(writer, tokenizer, config.vocab_size, pre)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
    }  # fmt: skip
    for name, value in model.state_dict().items():
        array = value.numpy()
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if part in name:
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_byte_pairs(writer: gguf.GGUFWriter, tokenizer: Any, size: int, pre: str) -> None:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    added = {t["content"]: 3 if t["special"] else 4 for t in backend["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([added.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _write_pieces(writer: gguf.GGUFWriter, pieces: Any) -> None:
    def kind(i: int) -> int:
        # Normal, unknown, control, the user's own, or a byte.
        if pieces.is_unknown(i) or pieces.is_control(i):
            return 2 if pieces.is_unknown(i) else 3
        return 6 if pieces.is_byte(i) else 4 if pieces.id_to_piece(i) == "<tool>" else 1

    ids = range(pieces.vocab_size())
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([pieces.id_to_piece(i) for i in ids])
    writer.add_token_scores([pieces.get_score(i) for i in ids])
    writer.add_token_types([kind(i) for i in ids])
    writer.add_unk_token_id(pieces.unk_id())
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())


def test_a_gguf_model_computes_and_tokenises_as_the_model_that_it_was_made_of(
    subject: tuple[Any, Any], tmp_path: Path, cache: Path
) -> None:
    model, tokenizer = subject
    file = write_gguf(tmp_path / "small" / "small.gguf", model, tokenizer)
    policy = load_policy(model_directory(file), device="cpu")
    ids = torch.tensor([tokenizer.encode(PROBE)])
    with torch.no_grad():
        expected, found = (m(input_ids=ids).logits for m in (model, policy.model))
    assert torch.allclose(expected, found, atol=1e-5)
    for before, after in zip(model.parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(before, after)
    assert policy.tokenizer.encode(PROBE) == tokenizer.encode(PROBE)
    assert len(policy.tokenizer.encode("2024")) == 4
    assert policy.tokenizer.decode(ids[0]) == PROBE
    assert policy.tokenizer.eos_token == tokenizer.eos_token
    assert policy.tokenizer.chat_template == tokenizer.chat_template
    # Made once, also where the directory is named that holds it.
    made = [*(cache / "models").iterdir()]
    assert model_directory(file.parent) == model_directory(file) == str(made[0])
    assert len(made) == 1


def test_a_gguf_tokenizer_of_sentencepiece_cuts_as_sentencepiece_does(untrained_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "docs" / "concepts.md").read_text() + PROBE)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "spm"), vocab_size=512, model_type="bpe", byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        control_symbols=["<|im_start|>"], user_defined_symbols=["<tool>"], minloglevel=2,
    )  # fmt: skip
    pieces: Any = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    model = AutoModelForCausalLM.from_pretrained(untrained_model)
    model.resize_token_embeddings(512)
    file = write_gguf(tmp_path / "spm.gguf", model, pieces)
    tokenizer: Any = load_tokenizer(model_directory(file, "hermes"))
    for sample in (
        PROBE,
        "  two spaces",
        "12345 + 6",
        "def f():\n    return 1\n",
        "na\u00efve \u2603 \u4f60\u597d",
        "",
    ):
        assert tokenizer.encode(sample, add_special_tokens=False) == pieces.encode(sample)
        assert tokenizer.decode(pieces.encode(sample)) == sample
    assert tokenizer.encode("x<tool>", add_special_tokens=False) == pieces.encode("x<tool>")
    control = pieces.piece_to_id("<|im_start|>")
    assert tokenizer.encode("x<|im_start|>", add_special_tokens=False) == [*pieces.encode("x"), control]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


def test_what_is_no_gguf_file_that_can_be_converted_is_refused(
    subject: tuple[Any, Any], tmp_path: Path, cache: Path
) -> None:
    whole = write_gguf(tmp_path / "whole" / "model.gguf", *subject)
    short = tmp_path / "short.gguf"
    short.write_bytes(whole.read_bytes()[:-4096])
    (text := tmp_path / "text.gguf").write_text("a model")
    alien = write_gguf(tmp_path / "alien.gguf", *subject, architecture="mamba9")
    other = write_gguf(tmp_path / "other.gguf", *subject, pre="klingon")
    shutil.copy(whole, whole.with_name("second.gguf"))
    for path, said in (
        (short, "is cut short or damaged"),
        (text, "not a GGUF file"),
        (tmp_path / "none.gguf", "no such file"),
        (alien, "architecture 'mamba9'"),
        (other, "pre-tokenizer 'klingon' is not known"),
    ):
        with pytest.raises(ModelLoadError, match=said) as raised:
            prepare(str(path), None, tmp_path)
        assert raised.value.hint
    with pytest.raises(ModelLoadError, match=r"the directory holds 2 GGUF files: model.gguf, second.gguf"):
        model_directory(whole.parent)
    # The same from the process that converts.
    with pytest.raises(ModelLoadError, match="pre-tokenizer 'klingon' is not known"):
        model_directory(other)
    assert [*(cache / "models").iterdir()] == []


@pytest.mark.parametrize("template", ["hermes", pytest.param("llama3", marks=pytest.mark.night)])
def test_a_template_is_given_and_kept_and_its_tokens_are_added(
    template: str, untrained_model: Path, tmp_path: Path
) -> None:
    plain = load_policy(untrained_model, device="cpu")
    directory = model_directory(untrained_model, template)
    policy = load_policy(directory, device="cpu")
    rendering = Rendering(policy.tokenizer)
    assert rendering.tools_refusal is None
    prompt = rendering.prompt(
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 2?"}], TOOLS
    )
    assert "Be short." in rendering.decode(prompt.ids)
    assert prompt.ids.max() < policy.model.get_input_embeddings().weight.shape[0]
    added = {"hermes": 0, "llama3": 3}[template]
    assert len(policy.tokenizer) == len(plain.tokenizer) + added
    known = len(plain.tokenizer)  # behind them the model has spare rows, which new tokens take
    for before, after in zip(plain.model.parameters(), policy.model.parameters(), strict=True):
        of_tokens = before.shape[0] == plain.model.config.vocab_size
        n = known if of_tokens else before.shape[0]
        assert torch.equal(before[:n], after[:n])
    # As another engine finds it.
    assert set(rendering.stop_token_ids) <= set(policy.model.generation_config.eos_token_id)
    save_model(policy, tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).chat_template == policy.tokenizer.chat_template


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.night), True])
def test_tokens_for_which_the_embedding_has_no_rows_are_trained_and_saved(
    tied: bool, untrained_model: Path, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(untrained_model, tie_word_embeddings=tied))
    plain.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(untrained_model)
    tokenizer.save_pretrained(tmp_path / "model")
    known = len(tokenizer)
    rows = plain.config.vocab_size
    tokens = [f"<|extra_{i}|>" for i in range(rows)]
    (file := tmp_path / "many.jinja").write_text(
        "{# " + " ".join(tokens) + " #}" + (TEMPLATES / "hermes.jinja").read_text()
    )
    policy = load_policy(model_directory(tmp_path / "model", str(file)), device="cpu")
    last = [len(policy.tokenizer) - 1]
    assert last[0] >= rows
    assert policy.tokenizer.encode(policy.tokenizer.convert_ids_to_tokens(last[0]), add_special_tokens=False) == last
    embedding, head = policy.model.get_input_embeddings().weight, policy.model.get_output_embeddings().weight
    assert embedding.shape[0] == head.shape[0] == policy.model.config.vocab_size == len(policy.tokenizer)
    assert (embedding is head) == tied
    assert torch.equal(embedding[:known], plain.get_input_embeddings().weight[:known])
    ids = torch.tensor([[5, *last, 7]])
    policy.model(input_ids=ids, labels=ids).loss.backward()
    assert embedding.grad is not None
    assert embedding.grad[last].any()
    save_model(policy, tmp_path / "saved")
    again = load_policy(tmp_path / "saved", device="cpu")
    with torch.no_grad():
        assert torch.equal(policy.model(input_ids=ids).logits, again.model(input_ids=ids).logits)
    assert (again.model.get_input_embeddings().weight is again.model.get_output_embeddings().weight) == tied


def test_a_policy_is_trained_with_the_template_that_it_was_given(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    async def solve(task: str, llm: agl.LLM) -> float:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
        messages: Any = [{"role": "user", "content": task}]
        answer = await client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS, max_tokens=4)
        return float(len(answer.choices[0].message.content or "") % 2)

    settings: Any = dict(group_size=2, batch_size=1, steps=1, max_context=512, val_before_train=False)
    algorithm = agl.GRPO(model=str(untrained_model), chat_template="llama3", **settings)
    result = agl.Trainer(algorithm, directory=tmp_path / "run", progress=False).fit(solve, ["1 + 2?"])
    tokenizer = load_tokenizer(str(result.policy))
    assert "<|start_header_id|>" in tokenizer.chat_template
    assert len(tokenizer.encode("<|eot_id|>", add_special_tokens=False)) == 1
    evaluated = agl.evaluate(
        solve, ["1 + 2?"], {"now": result.policy}, directory=tmp_path / "evaluated", progress=False
    )
    assert not evaluated.policies["now"].failures


def test_a_template_that_is_none_is_refused(untrained_model: Path, tmp_path: Path) -> None:
    (broken := tmp_path / "broken.jinja").write_text("{% for message in messages %}")
    for template, said in (("hermess", "did you mean 'hermes'"), (str(broken), "is no Jinja template: line 1")):
        with pytest.raises(ConfigError) as raised:
            model_directory(untrained_model, template)
        assert said in str(raised.value)


def test_doctor_says_what_a_model_can_do(untrained_model: Path, tmp_path: Path) -> None:
    (dropping := tmp_path / "dropping.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    able, unable = (examine_model(str(untrained_model), t, "cpu") for t in ("hermes", str(dropping)))
    assert (able.tools, able.system) == (None, None)
    assert able.continued == {"user": None, "tool": None, "two tools": None, "tool, user": None}
    assert able.refused == unable.refused == {}
    assert unable.system == "the chat template drops it"
    assert "cannot be used with tools" in str(unable.tools)
    model = AutoModelForCausalLM.from_pretrained(untrained_model)
    assert able.parameters == sum(p.numel() for p in model.parameters())
    assert able.memory["all weights"] > 16 * able.parameters


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(untrained_model: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(untrained_model).config
    config.update({"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 100, "head_dim": 64})
    cpu = torch.device("cpu")
    with pytest.raises(ModelLoadError, match=r"too large: the weights, gradients and AdamW's moments take [\d.]+ GiB"):
        require_memory("huge", config, cpu, torch.float32, trained=True)
    with pytest.raises(ModelLoadError, match=r"here a model fits of at most [\d.]+ billion parameters"):
        require_memory("huge", config, cpu, torch.float32, trained=False)


def test_verl_takes_a_gguf_file_and_a_template(subject: tuple[Any, Any], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", *subject)
    verl = agl.VERL(model=str(file), chat_template="hermes", steps=1, backend="local")
    plan = asyncio.run(verl.prepared(verl.plan))
    assert plan.model == plan.settings["actor_rollout_ref.model.path"] == model_directory(file, "hermes")
    assert load_tokenizer(plan.model).chat_template == (TEMPLATES / "hermes.jinja").read_text()
    assert local.as_grpo(verl.plan, 1, verl.chat_template).chat_template == "hermes"
    with pytest.raises(ConfigError, match="chat_template='hermez'"):
        agl.VERL(model=str(file), chat_template="hermez", steps=1)
    with pytest.raises(ModelLoadError, match="no such file"):
        agl.VERL(model=str(tmp_path / "none.gguf"), steps=1)


def test_an_adapter_alone_is_merged_into_the_base_that_it_names(untrained_model: Path, tmp_path: Path) -> None:
    policy = load_policy(untrained_model, device="cpu", lora=agl.LoraSpec(rank=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    save_model(policy, tmp_path / "policy")
    merged = model_directory(tmp_path / "policy" / "adapter")
    assert merged != str(tmp_path / "policy" / "adapter")
    ids = torch.tensor([[5, 9, 30, 17]])
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")(ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(merged)(ids).logits, expected)
    assert not torch.allclose(AutoModelForCausalLM.from_pretrained(untrained_model)(ids).logits, expected, atol=1e-3)
    assert load_tokenizer(merged).chat_template == load_tokenizer(str(untrained_model)).chat_template
    file = tmp_path / "policy" / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ModelLoadError, match="gone"):
        model_directory(tmp_path / "policy" / "adapter")

"""`agl export gguf`: what is read from the file is the model and the tokenizer that were written; what llama.cpp would
compute otherwise is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_model
from exported_policies import CUTS, TEXTS, WRITTEN, merging_tokenizer, policy
from tiny_engine import VOCABULARY, tiny_tokenizer
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from agl.errors import ConfigError, ExportError, ModelLoadError
from agl.trainer.cli.app import app
from agl.trainer.local import gguf_tokenizer as known
from agl.trainer.local.gguf import gguf_model, read_gguf
from agl.trainer.local.gguf_export import export_gguf
from agl.trainer.local.gguf_families import FAMILIES
from agl.trainer.local.gguf_tokenizer import PRE_TOKENIZERS, QWEN2, gguf_tokenizer
from agl.trainer.quickstart.run import make

torch.set_num_threads(1)


def first(cases: Sequence[str]) -> list[Any]:
    """The first case for the fast tier, the others for the full one."""
    return [cases[0], *(pytest.param(case, marks=pytest.mark.full) for case in cases[1:])]


def test_every_family_that_is_written_is_proven() -> None:
    assert {make_model(name, **changes).config.model_type for name, changes in WRITTEN.items()} == {*FAMILIES}


@pytest.mark.parametrize("name", first([*WRITTEN]))
def test_what_is_read_computes_what_was_written(name: str, tmp_path: Path) -> None:
    source = policy(tmp_path / "policy", name)
    facts = export_gguf(tmp_path / "policy", tmp_path / "policy.gguf", "f32")
    read = gguf_model(tmp_path / "policy.gguf")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (1, 1000)))
    with torch.no_grad():
        assert torch.equal(source(input_ids=ids).logits, read.eval()(input_ids=ids).logits)
    assert facts["architecture"] == FAMILIES[source.config.model_type].architecture
    assert facts["tensors"] == len(read_gguf(tmp_path / "policy.gguf").tensors)
    assert facts["bytes"] == (tmp_path / "policy.gguf").stat().st_size


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_layer_is_written_where_the_model_has_its_own(tied: bool, tmp_path: Path) -> None:
    policy(tmp_path / "policy", tie_word_embeddings=tied)
    export_gguf(tmp_path / "policy", tmp_path / "policy.gguf")
    names = {tensor.name for tensor in read_gguf(tmp_path / "policy.gguf").tensors}
    assert ("output.weight" in names) == (not tied)


@pytest.mark.parametrize(("precision", "error"), [("f16", 1e-3), ("bf16", 8e-3), ("q8_0", 1e-2)])
def test_matrices_have_the_precision_that_was_asked_for(precision: str, error: float, tmp_path: Path) -> None:
    source = policy(tmp_path / "policy", intermediate_size=48)
    export_gguf(tmp_path / "policy", tmp_path / "policy.gguf", precision)
    read = gguf_model(tmp_path / "policy.gguf").state_dict()
    for name, weight in source.state_dict().items():
        largest = weight.abs().max()
        assert (weight - read[name]).abs().max() <= error * largest, name
        assert torch.equal(weight, read[name]) == ("norm" in name), name
    kinds = {tensor.name: tensor.tensor_type.name for tensor in read_gguf(tmp_path / "policy.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == precision.upper()
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    # Rows of 48 are no whole blocks of 32.
    assert kinds["blk.0.ffn_down.weight"] == ("F16" if precision == "q8_0" else precision.upper())


def test_numbers_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = policy(tmp_path / "policy")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "policy")
    with pytest.raises(ExportError, match=r"blk.0.ffn_up.weight is 100000, and f16 ends at 65504") as caught:
        export_gguf(tmp_path / "policy", tmp_path / "policy.gguf", "f16")
    assert "bf16" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    export_gguf(tmp_path / "policy", tmp_path / "policy.gguf", "bf16")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mistral, sliding", {}, "llama models have no sliding window"),
        ("Qwen 2, sliding", {}, "qwen2 models have no sliding window"),
        ("Llama, dynamic NTK", {}, "rope scaling of the kind 'dynamic'"),
        ("Qwen 3 MoE", {}, "the type 'qwen3_moe' are not written"),
        ("Gemma 2", {"tie_word_embeddings": False}, "gemma2 models have no output layer of their own"),
        ("Gemma 2", {"query_pre_attn_scalar": 16}, "a gemma2 file cannot say query_pre_attn_scalar=16"),
        ("Gemma 3", {"layer_types": ["full_attention"] * 6}, "a gemma3 file cannot say sliding_window=64"),
        ("Llama 3", {"attention_bias": True}, "a llama file cannot say attention_bias=True"),
        ("Llama 3", {"hidden_act": "gelu"}, "a llama file cannot say hidden_act='gelu'"),
        ("Phi-3", {"head_dim": 16}, "phi3 models have heads that are together as wide"),
        ("Llama, YaRN", {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256,
            "attention_factor": 3.0,
        }}, "a llama file cannot say rope_parameters="),
    ],
)  # fmt: skip
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    policy(tmp_path / "policy", name, **changes)
    with pytest.raises(ExportError, match=message) as caught:
        export_gguf(tmp_path / "policy", tmp_path / "policy.gguf")
    assert "convert_hf_to_gguf.py" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize("pre_tokenizer", CUTS)
def test_a_tokenizer_is_written_by_what_it_cuts(pre_tokenizer: str, tmp_path: Path) -> None:
    tokenizer = merging_tokenizer(CUTS[pre_tokenizer], 600, whole_words=PRE_TOKENIZERS[pre_tokenizer].whole_words)
    policy(tmp_path / "policy", tokenizer=tokenizer, vocab_size=608)
    export_gguf(tmp_path / "policy", tmp_path / "policy.gguf")
    reader = read_gguf(tmp_path / "policy.gguf")
    assert known.value(reader, "tokenizer.ggml.pre") == pre_tokenizer
    read = gguf_tokenizer(reader, tmp_path / "policy.gguf")
    for text in TEXTS:
        assert read.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert read.chat_template == tokenizer.chat_template
    assert (read.eos_token, read.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)


def test_every_pre_tokenizer_that_is_written_is_proven() -> None:
    ways = {known for known in PRE_TOKENIZERS.values() if known.exact}
    assert {PRE_TOKENIZERS[name] for name in CUTS} == ways


def broken(change: str) -> Any:
    """A tokenizer that llama.cpp does not have."""
    if change == "bytes alone":
        return tiny_tokenizer()
    if change == "another cut":
        return merging_tokenizer([r" [-+*/] |[0-9]|[^0-9]+"])
    if change == "approximated":
        return merging_tokenizer([known._TEKKEN], whole_words=True)
    if change == "whole words":
        return merging_tokenizer([QWEN2], whole_words=True)
    tokenizer = merging_tokenizer()
    backend: Any = tokenizer.backend_tokenizer
    if change == "lower case":
        backend.normalizer = normalizers.Lowercase()
    elif change == "space before":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "no bytes":
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    elif change == "strips":
        tokenizer.add_tokens([AddedToken("<x>", rstrip=True, normalized=False)])
    return tokenizer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("bytes alone", "merges no bytes"),
        ("another cut", r"no pre-tokenizer that cuts texts at ' \[-"),
        ("approximated", "and takes whole words without merging"),
        ("whole words", "and takes whole words without merging"),
        ("lower case", "changes texts first"),
        ("space before", "its pre-tokenizer has the step"),
        ("no bytes", r"does not end with bytes: \['Whitespace'\]"),
        ("strips", "'<x>' has rstrip=True"),
    ],
)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(change: str, message: str, tmp_path: Path) -> None:
    policy(tmp_path / "policy", tokenizer=broken(change), vocab_size=280)
    with pytest.raises(ExportError, match=message):
        export_gguf(tmp_path / "policy", tmp_path / "policy.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy(tmp_path / "policy")
    file = tmp_path / "new" / "policy.gguf"
    seen: list[tuple[int, int]] = []
    export_gguf(tmp_path / "policy", file, on_tensors=lambda *progress: seen.append(progress))
    assert seen == [(done, 21) for done in range(22)]
    before = file.read_bytes()

    def full(done: int, total: int) -> None:
        if done == 10:
            raise OSError(28, "No space left on device")

    with pytest.raises(ExportError, match="No space left on device"):
        export_gguf(tmp_path / "policy", file, "f32", on_tensors=full)
    assert file.read_bytes() == before
    assert [*file.parent.iterdir()] == [file]
    export_gguf(tmp_path / "policy", file, "f32")
    assert file.stat().st_size > len(before)
    monkeypatch.chdir(tmp_path)
    assert export_gguf("policy", None, "q8_0")["file"] == "policy-q8_0.gguf"


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    policy(tmp_path / "policy")
    with pytest.raises(ConfigError, match="there is no type 'q4_0'"):
        export_gguf(tmp_path / "policy", precision="q4_0")
    with pytest.raises(ConfigError, match="this is a directory"):
        export_gguf(tmp_path / "policy", tmp_path)
    with pytest.raises(ModelLoadError):
        export_gguf(tmp_path / "none" / "nowhere", tmp_path / "x.gguf")


@pytest.mark.full
def test_an_adapter_is_merged_into_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model

    monkeypatch.setenv("AGL_CACHE", str(tmp_path / "cache"))
    base = tmp_path / "base"
    policy(base)
    torch.manual_seed(1)
    options = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), options)
    adapted.save_pretrained(tmp_path / "adapter")
    export_gguf(tmp_path / "adapter", tmp_path / "policy.gguf", "f32")
    merged = adapted.merge_and_unload().state_dict()
    for name, weight in gguf_model(tmp_path / "policy.gguf").state_dict().items():
        assert torch.allclose(weight, merged[name], atol=1e-6), name
    base.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("AGL_CACHE", str(tmp_path / "other"))
    with pytest.raises(ModelLoadError, match=r"the base does not load.*/base"):
        export_gguf(tmp_path / "adapter", tmp_path / "again.gguf")


def test_the_quickstart_makes_a_policy_that_llama_cpp_has(tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("\n".join(TEXTS))
    make(tmp_path / "policy", corpus=text, show=False)
    export_gguf(tmp_path / "policy", tmp_path / "policy.gguf")
    assert known.value(read_gguf(tmp_path / "policy.gguf"), "tokenizer.ggml.pre") == "qwen2"


def test_the_command_writes_the_file_and_says_how_to_use_it(tmp_path: Path) -> None:
    policy(tmp_path / "policy")
    file, facts = tmp_path / "policy.gguf", tmp_path / "facts.json"
    command = ["export", "gguf", str(tmp_path / "policy"), "--out", str(file), "--type", "q8_0", "--json", str(facts)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert f"llama-server -m {file} --jinja" in done.stdout
    assert f"FROM {file}" in done.stdout
    assert "tensors 21/21" in done.stderr
    assert json.loads(facts.read_text())["file"] == str(file)
    assert CliRunner().invoke(app, [*command, "--quiet"]).output == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gguf"], "no policy given"),
        (["sft", "--type", "f16"], "--type is for gguf"),
        (["sft", "directory"], "DIR is for gguf"),
        (["sft"], "no directory given"),
    ],
)
def test_an_option_of_another_export_is_refused(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(app, ["export", *arguments]).exception
    assert isinstance(error, ConfigError)
    assert message in error.message

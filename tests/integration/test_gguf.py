"""A model from GGUF computes what the model that it was made of computes, at every position; a file that says what is
not understood is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_model
from gguf_files import write_gguf
from tiny_engine import VOCABULARY

from agl.errors import ModelLoadError
from agl.trainer.local.architecture import exact_context
from agl.trainer.local.gguf import gguf_model

torch.set_num_threads(1)

WRITTEN = (
    "Llama 3", "Llama 3.1", "Llama, linear rope", "Llama, YaRN", "Qwen 2.5", "Qwen 3", "Phi-3", "Phi-3, long rope",
    "Gemma 2", "Gemma 3", "StarCoder 2",
)  # fmt: skip

OTHERWISE: dict[str, dict[str, Any]] = {
    # Which of its layers slide is not in a file: five of six.
    "Gemma 3": {"layer_types": None, "num_hidden_layers": 6, "query_pre_attn_scalar": 8},
    # Not in a file either: the size of a head, but for models of 46 and 62 layers.
    "Gemma 2": {"query_pre_attn_scalar": 8},
    # transformers does not read from a file by what angles it turns, and takes the default.
    "StarCoder 2": {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_its_source_at_every_position(name: str, tmp_path: Path) -> None:
    source = make_model(name, **OTHERWISE.get(name, {}))
    found = gguf_model(write_gguf(tmp_path / "model.gguf", source))
    assert exact_context(found.config) == exact_context(source.config)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (1, 1000)))
    with torch.no_grad():
        expected = source(input_ids=ids).logits.log_softmax(-1)
        actual = found(input_ids=ids).logits.log_softmax(-1)
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), [("Gemma 2", 46), ("Gemma 3", 62)])
def test_the_largest_gemmas_scale_attention_by_all_heads(family: str, layers: int, tmp_path: Path) -> None:
    changes = {"layer_types": None, "num_hidden_layers": layers, "head_dim": 16, "query_pre_attn_scalar": 8}
    found = gguf_model(write_gguf(tmp_path / "model.gguf", make_model(family, **changes)))
    assert (found.config.head_dim, found.config.query_pre_attn_scalar) == (16, 8)


def test_a_factor_without_a_kind_is_linear(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", make_model("Llama, linear rope"), {"rope.scaling.type": None})
    assert gguf_model(file).config.rope_parameters["rope_type"] == "linear"


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"rope.scaling.type": "su"}, {}, "of the kind 'su'"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, {}, "llama.rope.scaling.yarn_ext_factor"),
        ({"expert_count": 4}, {}, "llama.expert_count"),
        ({"attention.clamp_kqv": 8.0}, {}, "llama.attention.clamp_kqv"),
        ({"attention.sliding_window": 64}, {}, "llama.attention.sliding_window"),
        ({"logit_scale": 0.5}, {}, "llama.logit_scale"),
        ({"attention.value_length": 4}, {}, "llama.attention.value_length"),
        ({"rope.scaling.attn_factor": 1.5}, {}, "scales attention by 1.5 with rope scaling of the kind none"),
        ({}, {"rope_factors_long.weight": [1.0] * 4}, "of rope_factors_long.weight and rope_factors_short.weight"),
        ({}, {"rope_freqs.weight": [1.0, 3.0, 2.0, 5.0]}, "not Llama 3.1's scaling"),
        ({}, {"blk.0.attn_q.bias": np.zeros(32)}, "no place for its tensors blk.0.attn_q.bias"),
        ({}, {"blk.1.ffn_gate_inp.weight": np.zeros((4, 32))}, "blk.1.ffn_gate_inp.weight"),
    ],
)
def test_what_is_not_understood_is_refused(keys: Any, tensors: Any, message: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", make_model("Llama 3"), keys, tensors)
    with pytest.raises(ModelLoadError, match=message) as caught:
        gguf_model(file)
    assert caught.value.hint == "take the model's Hugging Face directory instead"


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    source = make_model("Qwen 3")
    whole = source.state_dict()
    del whole["model.layers.1.mlp.up_proj.weight"]
    source.state_dict = lambda: whole
    with pytest.raises(ModelLoadError, match=r"lacks 1 of .* would start at random: model.layers.1.mlp.up_proj"):
        gguf_model(write_gguf(tmp_path / "model.gguf", source))

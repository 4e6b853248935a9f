"""GGUF files of small models, written as llama.cpp writes them, from the names that its own package has for tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_engine import tiny_tokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agl.trainer.local.gguf_families import FAMILIES


def write_gguf(
    path: Path, model: Any, keys: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None
) -> Path:
    """A GGUF file of the model in float32 and a tokenizer of bytes.

    Args:
        keys: of its architecture, beside or in place of those that every file has; None leaves one out. tensors: beside
            the model's.
    """
    config = model.config
    architecture = FAMILIES[config.model_type].architecture
    writer = gguf.GGUFWriter(path, architecture)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
        **{f"rope.{key}": value for key, value in _scaling(config, rope).items()},
    }
    if hasattr(config, "rms_norm_eps"):
        values["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    else:
        values["attention.layer_norm_epsilon"] = config.norm_epsilon
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            values[name] = float(getattr(config, name))
    if getattr(config, "sliding_window", None):
        values["attention.sliding_window"] = config.sliding_window
    for name, value in (values | dict(keys or {})).items():
        key = f"{architecture}.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    _write_tokenizer(writer)

    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.numpy()
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if architecture == "llama" and part in name:
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if architecture.startswith("gemma") and "norm.weight" in name:
            array = array + 1
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, np.ascontiguousarray(array))
    for name, array in {**_rope_tensors(config, rope), **(tensors or {})}.items():
        writer.add_tensor(name, np.asarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _scaling(config: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope["rope_type"]
    if kind == "linear":
        return {"scaling.type": "linear", "scaling.factor": rope["factor"]}
    if kind == "yarn":
        return {
            "scaling.type": "yarn",
            "scaling.factor": rope["factor"],
            "scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if kind == "longrope":
        _, gain = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
        return {"scaling.original_context_length": config.original_max_position_embeddings, "scaling.attn_factor": gain}
    return {}


def _rope_tensors(config: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "longrope":
        return {"rope_factors_long.weight": rope["long_factor"], "rope_factors_short.weight": rope["short_factor"]}
    if rope["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = rope["rope_theta"] ** -(np.arange(scaled.numel()) / scaled.numel())
        return {"rope_freqs.weight": plain / scaled.numpy()}
    return {}


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), 272)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges([])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(str(tokenizer.chat_template))

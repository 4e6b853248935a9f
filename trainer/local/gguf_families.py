"""A model's configuration as the keys of a GGUF file: the way back of `gguf_config`, from which it has its names.

Invariant: a configuration that is written is read as an equal one, by agl and by llama.cpp; any other is refused by the
name of what differs.
Source: llama.cpp's convert_hf_to_gguf.py and src/models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agl.errors import ExportError
from agl.trainer.local.gguf_config import ATTRIBUTES, ROPE_FREQS, ROPE_LONG, ROPE_SHORT, head_size
from agl.trainer.local.gguf_tokenizer import CONVERTER, refused

if TYPE_CHECKING:
    from gguf import GGUFWriter


@dataclass(frozen=True, slots=True)
class Family:
    """How llama.cpp has the models of one type.

    Attributes:
        architecture: its name for them.
        pairs: whether it turns neighbouring numbers of a head, and not halves, so that
            rows of queries and keys change places. norm_offset: what is added to the weights of norms.
        windows: whether it attends within a sliding window where the model does.
        square: whether all heads together are
            as wide as the model. tied: whether the output layer always is the embeddings.
    """

    architecture: str
    pairs: bool = False
    norm_offset: float = 0.0
    windows: bool = False
    square: bool = False
    tied: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", pairs=True),
    "mistral": Family("llama", pairs=True),
    "qwen2": Family("qwen2", square=True),
    "qwen3": Family("qwen3"),
    "phi3": Family("phi3", square=True),
    "gemma2": Family("gemma2", norm_offset=1.0, windows=True, tied=True),
    "gemma3_text": Family("gemma3", norm_offset=1.0, windows=True),
    "starcoder2": Family("starcoder2", square=True),
}
"""By transformers' model type."""
_WITHOUT_EFFECT = {
    "attention_dropout",
    "embedding_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "residual_dropout",
    "initializer_range",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "pretraining_tp",
    "tie_word_embeddings",
    "rope_parameters",
    "max_window_layers",
    "use_sliding_window",
    "sliding_window",
    "layer_types",
}
"""Attributes of a configuration that change nothing here, or that are compared on their own."""
_NUMBER = (int, float, np.number)


def family_of(config: Any) -> Family:
    """How llama.cpp has a model.

    Raises:
        ExportError: it does not have it, or it is not proven that both compute the same.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ExportError(
            f"models of the type {config.model_type!r} are not written as GGUF",
            hint=f"{CONVERTER}; agl writes {', '.join(FAMILIES)}",
        )
    if family.square and head_size(config) * config.num_attention_heads != config.hidden_size:
        raise refused(f"llama.cpp's {family.architecture} models have heads that are together as wide as the model")
    if not family.windows and any(_windows(config)):
        raise refused(f"llama.cpp's {family.architecture} models have no sliding window, and it has one")
    if family.tied and not config.tie_word_embeddings:
        raise refused(f"llama.cpp's {family.architecture} models have no output layer of their own, and it has one")
    return family


def write_config(writer: GGUFWriter, config: Any, family: Family) -> dict[str, np.ndarray]:
    """Write what describes the architecture.

    Returns:
        Tensors that belong to it, float32: of rope scaling.

    Raises:
        ExportError: it has rope scaling that a GGUF file cannot describe.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    names = {key: name for key, name in GGUF_CONFIG_MAPPING[family.architecture].items() if name} | ATTRIBUTES
    values = {key: getattr(config, name, None) for key, name in names.items() if not key.startswith("rope.")}
    for key in ("attention.key_length", "attention.value_length"):
        values[key] = head_size(config)
    values["vocab_size"] = config.vocab_size
    if not family.windows:
        del values["attention.sliding_window"]
    keys, tensors = _rope(config)
    for key, number in (values | keys).items():
        name = f"{family.architecture}.{key}"
        if isinstance(number, str):
            writer.add_string(name, number)
        elif isinstance(number, float):
            writer.add_float32(name, number)
        elif number is not None:
            writer.add_uint32(name, number)
    return tensors


def require_equal(config: Any, read: Any, family: Family) -> None:
    """Refuse a configuration that a GGUF file does not hold.

    Args:
        read: the configuration that the file of `config` is read as.

    Raises:
        ExportError: with the names of what differs.
    """
    from transformers import PreTrainedConfig

    ignored = _WITHOUT_EFFECT | PreTrainedConfig().to_dict().keys()
    names = type(config)().to_dict().keys() - ignored
    others = [
        f"{name}={getattr(config, name)!r}"
        for name in sorted(names)
        if not _close(getattr(config, name), getattr(read, name, None))
    ]
    if family.windows and list(_windows(config)) != list(_windows(read)):
        others.append(f"sliding_window={config.sliding_window} in layer_types={config.layer_types}")
    others += _other_rope(config, read)
    if others:
        raise refused(f"a {family.architecture} file cannot say {', '.join(others)}")


def _windows(config: Any) -> Iterator[int | None]:
    """The window of each layer that is shorter than the model's context; None for a layer that sees everything."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    for kind in kinds:
        slides = kind == "sliding_attention" and window is not None and window < config.max_position_embeddings
        yield window if slides else None


def _rope(config: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys and tensors of the rotary embedding."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    full = parameters.get("full_attention", parameters)
    base = float(full["rope_theta"])
    turned = int(head_size(config) * full.get("partial_rotary_factor", 1.0))
    keys: dict[str, Any] = {"rope.freq_base": base, "rope.dimension_count": turned}
    if "sliding_attention" in parameters and parameters["sliding_attention"]["rope_theta"] != base:
        keys["rope.freq_base_swa"] = float(parameters["sliding_attention"]["rope_theta"])
    kind = full["rope_type"]
    if kind == "default":
        return keys, {}
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(full["factor"])}
        original = full.get("original_max_position_embeddings")
        if original is not None:
            keys["rope.scaling.original_context_length"] = original
        for name in ("beta_fast", "beta_slow"):
            if full.get(name) is not None:
                keys[f"rope.scaling.yarn_{name}"] = float(full[name])
        return keys, {}
    if kind == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = base ** -(np.arange(scaled.numel()) / scaled.numel())
        return keys, {ROPE_FREQS: (plain / scaled.numpy()).astype(np.float32)}
    if kind == "longrope":
        _, gain = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
        original = config.original_max_position_embeddings
        keys |= {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": float(gain)}
        factors = {ROPE_LONG: full["long_factor"], ROPE_SHORT: full["short_factor"]}
        return keys, {name: np.asarray(numbers, np.float32) for name, numbers in factors.items()}
    raise refused(f"it has rope scaling of the kind {kind!r}")


def _other_rope(config: Any, read: Any) -> Iterator[str]:
    """What turns queries and keys otherwise: by the angles themselves, since they can be described in many ways."""
    for name in ("full_attention", "sliding_attention"):
        one, other = (c.rope_parameters.get(name, c.rope_parameters) for c in (config, read))
        for factors in ("short_factor", "long_factor"):
            if not _close(one.get(factors), other.get(factors)):
                yield f"rope {factors}={one.get(factors)}"
        (angles, gain), (read_angles, read_gain) = (_angles(c, name) for c in (config, read))
        if not (_close(angles, read_angles) and _close(gain, read_gain)):
            yield f"rope_parameters={one}"
            return


def _angles(config: Any, layers: str) -> tuple[list[float], float]:
    """By how much each pair of numbers turns at a step, and the factor of the attention scores."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    nested = layers in config.rope_parameters
    parameters = config.rope_parameters[layers] if nested else config.rope_parameters
    if parameters["rope_type"] == "default":
        turned = int(head_size(config) * parameters.get("partial_rotary_factor", 1.0))
        return (parameters["rope_theta"] ** -(np.arange(0, turned, 2) / turned)).tolist(), 1.0
    options = {"layer_type": layers} if nested else {}
    angles, gain = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), **options)
    return angles.tolist(), float(gain)


def _close(one: Any, other: Any) -> bool:
    """Whether two values are equal, numbers as float32."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, bool) or not isinstance(one, _NUMBER) or not isinstance(other, _NUMBER):
        return one == other
    return math.isclose(one, other, rel_tol=1e-6)

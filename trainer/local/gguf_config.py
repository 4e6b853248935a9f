"""What a GGUF file says of a model beyond what transformers reads from it: rope scaling, sizes of heads, windows, caps.

Invariant: every key and tensor of a file that is read is honoured or without effect; a file with any other is refused.
Source: the GGUF specification (ggml/docs/gguf.md) and llama.cpp's llama-model.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agl.errors import ModelLoadError

if TYPE_CHECKING:
    from gguf import GGUFReader

ATTRIBUTES = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Key of an architecture -> attribute of the configuration that it sets."""
ROPE_KEYS = {
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
NEUTRAL = {
    "vocab_size": None,
    "rope.scaling.finetuned": None,
    "tensor_data_layout": None,
    "attention.causal": True,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "expert_count": 0,
    "expert_used_count": 0,
}
"""Keys that change nothing where they have this value; None: whatever it is."""
OTHER_KEYS = re.compile(
    r"GGUF\.|general\.|quantize\.|imatrix\.|split\.|tokenizer\.chat_template|tokenizer\.huggingface\.json$"
    r"|tokenizer\.ggml\.(model|pre|tokens|token_type|token_type_count|scores|merges|add_\w+|\w+_token_ids?)$"
)
"""Keys that do not describe an architecture: facts about the file, and what the tokenizer is built from."""
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG = "rope_factors_long.weight"
ROPE_SHORT = "rope_factors_short.weight"
LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Of every model with this scaling."""

_SCALED_BY_ALL_HEADS = {("gemma2", 46), ("gemma3_text", 62)}
"""Models (type, layers) whose attention is scaled by their hidden size over their heads, not by the size of a head."""
Value = Callable[[str], Any]
"""The value of a key of the file's architecture, by its name without that; None if the file does not have it."""


def honour(reader: GGUFReader, config: Any, file: Path) -> None:
    """Set in a configuration, as transformers reads it from a GGUF file, what the file says beyond that.

    Args:
        config: a `PreTrainedConfig`; changed in place.

    Raises:
        ModelLoadError: the file says something that is not understood.
    """
    architecture = reader.get_field("general.architecture").contents()  # type: ignore[union-attr]

    def value(name: str) -> Any:
        field = reader.get_field(f"{architecture}.{name}")
        return None if field is None else field.contents()

    unknown = sorted(_unknown_keys(reader, architecture, value))
    parts = reader.get_field("split.count")
    if parts is not None and int(parts.contents()) > 1:
        unknown.append("split.count (one of several files)")
    for key, attribute in ATTRIBUTES.items():
        if (wanted := value(key)) is None:
            continue
        if hasattr(config, attribute):
            setattr(config, attribute, wanted)
        elif attribute != "head_dim" or wanted != head_size(config):
            unknown.append(f"{architecture}.{key}")
    if value("attention.key_length") != value("attention.value_length"):
        unknown.append(f"{architecture}.attention.value_length")
    if unknown:
        raise _not_understood(f"it has {', '.join(unknown[:6])}{' ...' if len(unknown) > 6 else ''}", file)
    if hasattr(config, "query_pre_attn_scalar"):
        # It is in no key: llama.cpp has it by the number of layers, which are the 27B models'.
        of_all_heads = (config.model_type, config.num_hidden_layers) in _SCALED_BY_ALL_HEADS
        heads = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = heads if of_all_heads else head_size(config)
    _set_rope(reader, config, value, file)


def require_understood_tensors(reader: GGUFReader, model: Any, file: Path) -> None:
    """Refuse a file with tensors that its model does not take.

    Args:
        model: a `PreTrainedModel` of the file's configuration, on any device.

    Raises:
        ModelLoadError: with the names of such tensors.
    """
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    architecture = reader.get_field("general.architecture").contents()  # type: ignore[union-attr]
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    try:
        weights = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise _not_understood(f"transformers has no names for the tensors of {architecture!r}", file) from error
    taken = {*weights, ROPE_FREQS, ROPE_LONG, ROPE_SHORT}
    others = [tensor.name for tensor in reader.tensors if tensor.name not in taken]
    if others:
        names = f"{', '.join(others[:4])}{' ...' if len(others) > 4 else ''}"
        raise _not_understood(f"{type(model).__name__} has no place for its tensors {names}", file)


def _unknown_keys(reader: GGUFReader, architecture: str, value: Value) -> Iterator[str]:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    read = {name for name, attribute in GGUF_CONFIG_MAPPING[architecture].items() if attribute is not None}
    for name in reader.fields:
        if OTHER_KEYS.match(name):
            continue
        own = name.removeprefix(f"{architecture}.")
        if own in read or own in ATTRIBUTES or own in ROPE_KEYS:
            continue
        if own not in NEUTRAL or NEUTRAL[own] not in (None, value(own)):
            yield name


def _set_rope(reader: GGUFReader, config: Any, value: Value, file: Path) -> None:
    """Set the configuration's rotary embedding."""
    base = value("rope.freq_base")
    factors = {tensor.name: np.asarray(tensor.data, np.float64) for tensor in reader.tensors if "rope" in tensor.name}
    # llama.cpp's kind for a factor without one.
    has_factor = value("rope.scale_linear") is not None or value("rope.scaling.factor") is not None
    kind = value("rope.scaling.type") or ("linear" if has_factor else "none")
    if (parameters := getattr(config, "rope_parameters", None)) is None:
        if base is not None or factors or kind != "none":
            raise _not_understood(f"a {config.model_type} model has no rotary embedding, and the file has", file)
        return
    # Of models whose sliding layers turn by angles of their own, the file's are those of the others.
    parameters = dict(parameters.get("full_attention", parameters))
    theta = parameters["rope_theta"] if base is None else float(base)
    scaled = _scaled(kind, theta, factors, config, value, file)
    rotary = parameters.get("partial_rotary_factor")
    if rotary is not None:
        scaled["partial_rotary_factor"] = rotary
    turned = value("rope.dimension_count")
    if turned is not None and int(turned) != int(head_size(config) * (rotary or 1.0)):
        raise _not_understood(f"it turns {turned} of a head's {head_size(config)} numbers", file)
    local_base = value("rope.freq_base_swa")
    if "full_attention" in config.rope_parameters:
        sliding = dict(config.rope_parameters["sliding_attention"])
        sliding["rope_theta"] = sliding["rope_theta"] if local_base is None else float(local_base)
        config.rope_parameters = {"full_attention": scaled, "sliding_attention": sliding}
    elif local_base not in (None, theta):
        raise _not_understood(f"a {config.model_type} model turns all layers by the same angles", file)
    else:
        config.rope_parameters = scaled


def _scaled(
    kind: str, theta: float, factors: dict[str, np.ndarray], config: Any, value: Value, file: Path
) -> dict[str, Any]:
    """`rope_parameters` of this kind of scaling."""
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    factor = float(value("rope.scaling.factor") or value("rope.scale_linear") or 1.0)
    original = int(value("rope.scaling.original_context_length") or config.max_position_embeddings)
    gain = float(value("rope.scaling.yarn_attn_factor") or value("rope.scaling.attn_factor") or 1.0)
    if (ROPE_LONG in factors) != (ROPE_SHORT in factors):
        raise _not_understood(f"of {ROPE_LONG} and {ROPE_SHORT} it has one", file)
    if ROPE_LONG in factors:
        config.original_max_position_embeddings = original
        return {
            **plain,
            "rope_type": "longrope",
            "short_factor": factors[ROPE_SHORT].tolist(),
            "long_factor": factors[ROPE_LONG].tolist(),
            "attention_factor": gain,
            "original_max_position_embeddings": original,
        }
    if gain != 1.0 and kind != "yarn":
        raise _not_understood(f"it scales attention by {gain:g} with rope scaling of the kind {kind}", file)
    if ROPE_FREQS in factors and (factors[ROPE_FREQS] != 1.0).any():
        if kind != "none":
            raise _not_understood(f"it has rope scaling of the kind {kind}, and {ROPE_FREQS} as well", file)
        return _llama3(plain, factors[ROPE_FREQS], file)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return plain
    if kind == "linear":
        return {**plain, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        betas = {name: value(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return {
            **plain,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": gain * (1.0 + 0.1 * math.log(factor)),
            **{name: float(beta) for name, beta in betas.items() if beta is not None},
        }
    raise _not_understood(f"its rope scaling is of the kind {kind!r}", file)


def _llama3(plain: dict[str, Any], factors: np.ndarray, file: Path) -> dict[str, Any]:
    """Llama 3.1's scaling, of which the file has the result: what each frequency is divided by."""
    frequencies = plain["rope_theta"] ** -(np.arange(factors.size) / factors.size)
    wavelengths = 2 * math.pi / frequencies
    factor = float(factors.max())
    low = LLAMA3_BANDS["low_freq_factor"]
    high = LLAMA3_BANDS["high_freq_factor"]
    for original in (2**power for power in range(5, 24)):
        smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        if np.allclose(1.0 / ((1.0 - smooth) / factor + smooth), factors, rtol=1e-4):
            settings = {"factor": factor, "original_max_position_embeddings": original, **LLAMA3_BANDS}
            return {**plain, "rope_type": "llama3", **settings}
    raise _not_understood(f"its {ROPE_FREQS} are not Llama 3.1's scaling", file)


def head_size(config: Any) -> int:
    """How many numbers an attention head of a model has."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _not_understood(what: str, file: Path) -> ModelLoadError:
    return ModelLoadError(
        f"the GGUF file says more of the model than is understood, and it would compute something else: {what}",
        hint="take the model's Hugging Face directory instead",
        path=file,
    )

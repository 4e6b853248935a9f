"""Memory of a policy by formula, from shapes alone: no weight is made or downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from agl.errors import ModelLoadError
from agl.trainer.local.config import LearnerConfig, Quantize
from agl.trainer.local.learner.logprobs import CHUNK_ELEMENTS

GIB = 2**30
FLOAT32 = 4
BFLOAT16 = 2
LOGITS_KEPT = 3
"""Float32 matrices of a chunk of logits that exist at once: divided by temperature, log-softmax, and its gradient."""
NF4_BLOCK = 64
NF4_SCALES = 256
"""Weights with one scale of a byte, and scales with one float32."""


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes at the peak of an update.

    Attributes:
        resident: weights, gradient and AdamW's moments (`training_bytes`).
        weight_copies: bfloat16 copies of the linear layers' weights under autocast, which the backward pass reads.
        activations: what the layers keep of one forward pass for its backward pass.
        logits: a chunk of logits with its gradient, and the gradient of the output layer's weights before it is added
            to what earlier passes gave.
    """

    resident: int
    weight_copies: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.resident + self.weight_copies + self.activations + self.logits


def training_bytes(*models: Any) -> int:
    """Bytes of the weights and, for those in training, of their float32 gradient and AdamW's two moments."""
    weights = {id(p): p for model in models for p in model.parameters()}
    return sum(_nbytes(p) + (12 * p.numel() if p.requires_grad else 0) for p in weights.values())


def n_weights(parameter: Any) -> int:
    """Numbers in a parameter: of one in 4 bits, a byte holds two."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def _nbytes(parameter: Any) -> int:
    """Of a parameter, with the scales of one that bitsandbytes has quantised."""
    if (state := getattr(parameter, "quant_state", None)) is not None:
        return parameter.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    scales = getattr(parameter, "SCB", None)
    return parameter.nbytes + (0 if scales is None else scales.nbytes)


def base_bytes(model: Any, width: int, quantize: Quantize | None = None) -> int:
    """Bytes of all weights at `width` bytes each, or with `quantize` of the linear layers' but the output layer's in
    fewer, and their scales."""
    total = width * sum(p.numel() for p in model.parameters())
    for layer in [] if quantize is None else adapted_layers(model):
        n = layer.weight.numel()
        blocks = -(-n // NF4_BLOCK)
        nf4 = n // 2 + blocks + FLOAT32 * -(-blocks // NF4_SCALES)
        total += (nf4 if quantize == "4bit" else n + FLOAT32 * layer.out_features) - width * n
    return total


def adapted_layers(model: Any) -> list[torch.nn.Linear]:
    """The linear layers but the output layer: those with adapters, and those that are quantised."""
    head = model.get_output_embeddings()
    return [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]


def update_memory(
    model: Any, config: LearnerConfig, tokens: int, *, row_tokens: int, trained: int, autocast: bool
) -> UpdateMemory:
    """What an update of all weights needs, for layers of RMSNorm, grouped attention and a gated MLP (Llama, Qwen).

    With H hidden, I intermediate, Q = heads x head size and K = key heads x head size, such a layer of transformers
    keeps for each token, in elements: 6 H + 2 Q + 2 K + 4 I in float32; under autocast 4 H in float32 and
    5 H + 2 Q + 2 K + 4 I in bfloat16, as each linear layer casts its input for itself. Eager attention, where rows
    share no prefixes, keeps keys and values repeated for each head (4 Q in place of 2 Q + 2 K) and the scores: heads x
    row tokens in float32, and in bfloat16 once more; the masks of branching rows are not counted. With activation
    checkpointing, H in float32 for each layer, and one whole layer.

    Args:
        model: a `PreTrainedModel` of float32 weights, on any device.
        config: `activation_checkpointing` and `share_prefixes` are read.
        tokens: of one forward pass, each shared one counted once, or padding included: `max_tokens_per_microbatch`.
        row_tokens: of its longest row.
        trained: tokens of the pass whose log-prob is wanted.
        autocast: whether it computes in bfloat16.
    """
    shape = model.config.get_text_config()
    heads = shape.num_attention_heads
    layers = shape.num_hidden_layers
    hidden = shape.hidden_size
    # Older configurations have no name for these, or another.
    inner = getattr(shape, "intermediate_size", None) or getattr(shape, "ffn_dim", None) or 4 * hidden
    if isinstance(inner, list):  # of each layer
        inner = max(inner)
    size = getattr(shape, "head_dim", None) or hidden // heads
    queries = heads * size
    keys = (getattr(shape, "num_key_value_heads", None) or heads) * size
    eager = shape._attn_implementation == "eager" and not config.share_prefixes
    width = BFLOAT16 if autocast else FLOAT32

    attended = 4 * queries if eager else 2 * queries + 2 * keys
    layer = FLOAT32 * 4 * hidden + width * ((5 if autocast else 2) * hidden + attended + 4 * inner)
    if eager:
        layer += heads * row_tokens * (FLOAT32 + (BFLOAT16 if autocast else 0))
    if any(name.endswith("q_norm") for name, _ in model.named_modules()):
        layer += (queries + keys) * (FLOAT32 + width)
    activations = tokens * (layers * FLOAT32 * hidden + layer if config.activation_checkpointing else layers * layer)

    linear = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    head = model.get_output_embeddings().weight
    wanted = trained * head.shape[0]
    gradients = 2 if wanted > CHUNK_ELEMENTS else 1  # those of two chunks, to be added up
    copied = linear // layers if config.activation_checkpointing else linear
    return UpdateMemory(
        resident=training_bytes(model),
        weight_copies=BFLOAT16 * copied if autocast else 0,
        activations=activations,
        logits=FLOAT32 * (LOGITS_KEPT * min(wanted, CHUNK_ELEMENTS) + gradients * head.numel()),
    )


def with_adapters(model: Any, rank: int, full: UpdateMemory, quantize: Quantize | None = None) -> UpdateMemory:
    """The same for adapters of this rank on all linear layers of a frozen base in bfloat16, or quantised; an upper
    bound.

    The base has no gradient, no moments and no copies, the output layer no gradient. An adapter has rank x (in + out)
    float32 weights with gradient and moments. Activations are taken as for all weights: about a tenth too much. A
    quantised layer's weights are made wide one layer at a time.
    """
    head = model.get_output_embeddings()
    layers = adapted_layers(model)
    adapters = sum(rank * (m.in_features + m.out_features) for m in layers)
    return replace(
        full,
        resident=base_bytes(model, BFLOAT16, quantize) + 4 * FLOAT32 * adapters,
        weight_copies=0 if quantize is None else BFLOAT16 * max((m.weight.numel() for m in layers), default=0),
        logits=full.logits - FLOAT32 * head.weight.numel(),
    )


def model_of_shapes(config: Any, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    """The model of a configuration without weights, on device "meta"."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free: of the GPU, or of this machine and its container; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = []
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        free.append(int(limit) - int(used))
    except (OSError, ValueError):  # no limit
        pass
    return min(free)


def require_memory(
    name: str,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    trained: bool,
    lora: bool = False,
    quantize: Quantize | None = None,
) -> None:
    """Refuse a model whose weights, and gradients and AdamW's moments if all of them are trained, do not fit.

    Args:
        name: of the model.
        config: its configuration.
        dtype, quantize: of its weights.
        trained: all of them.
        lora: an
            adapter on them.

    Raises:
        ModelLoadError: with what it needs, what is free, and what would fit.
    """
    free = free_bytes(device)
    if free is None:
        return
    shapes = model_of_shapes(config, "eager", dtype).requires_grad_(trained)
    needed = training_bytes(shapes) if quantize is None else base_bytes(shapes, dtype.itemsize, quantize)
    if needed <= free:
        return
    parameters = sum(p.numel() for p in shapes.parameters())
    what = "weights, gradients and AdamW's moments take" if trained else "weights take"
    width = BFLOAT16 if device.type == "cuda" else FLOAT32
    adapters = {"": base_bytes(shapes, width), ", quantize='4bit'": base_bytes(shapes, width, "4bit")}
    fitting = [(how, size) for how, size in adapters.items() if (trained or lora) and size < min(free, needed)]
    raise ModelLoadError(
        f"the model is too large: the {what} {needed / GIB:.1f} GiB ({parameters:,} parameters), and "
        f"{free / GIB:.1f} GiB are free on {device}",
        hint=f"train an adapter, lora=agl.LoraSpec(16){fitting[0][0]}, whose model takes {fitting[0][1] / GIB:.1f} GiB"
        if fitting
        else f"here a model fits of at most {free * parameters // needed / 1e9:.2g} billion parameters",
        path=name,
    )

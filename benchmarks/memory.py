"""Memory of an update by formula, for models of common shapes or one of yours. The formula reads shapes alone: no
weight is made or downloaded.

    python benchmarks/memory.py [--tokens 16384] [--row-tokens 4096]
    python benchmarks/memory.py --lora 16                      # with adapters in bfloat16 instead of all weights
    python benchmarks/memory.py --model Qwen/Qwen2.5-1.5B      # a directory or hub id, of which config.json is read
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.learner.logprobs import CHUNK_ELEMENTS
from agl.trainer.local.model import training_bytes

SHAPES = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "3B": dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
               num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True),
    "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
               num_key_value_heads=4, vocab_size=152064),
}  # fmt: skip
GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2
LOGITS_KEPT = 3
"""Float32 matrices of a chunk of logits that exist at once: divided by temperature, log-softmax, and its gradient."""


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
        return self.resident + self.weight_copies + self.activations + self.logits


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
    heads, layers, hidden, inner = (
        shape.num_attention_heads, shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
    )  # fmt: skip
    size = getattr(shape, "head_dim", None) or hidden // heads
    queries, keys = heads * size, shape.num_key_value_heads * size
    eager = shape._attn_implementation == "eager" and not config.share_prefixes
    width = BFLOAT16 if autocast else FLOAT32

    attended = 4 * queries if eager else 2 * queries + 2 * keys
    layer = FLOAT32 * 4 * hidden + width * ((5 if autocast else 2) * hidden + attended + 4 * inner)
    if eager:
        layer += heads * row_tokens * (FLOAT32 + (BFLOAT16 if autocast else 0))
    if hasattr(next(m for n, m in model.named_modules() if n.endswith("self_attn")), "q_norm"):
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


def with_adapters(model: Any, rank: int, full: UpdateMemory) -> UpdateMemory:
    """The same for adapters of this rank on all linear layers of a frozen base in bfloat16; an upper bound.

    The base has no gradient, no moments and no copies, the output layer no gradient. An adapter has rank x (in + out)
    float32 weights with gradient and moments. Activations are taken as for all weights: about a tenth too much.
    """
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    adapters = sum(rank * (m.in_features + m.out_features) for m in layers)
    return replace(
        full,
        resident=BFLOAT16 * sum(p.numel() for p in model.parameters()) + 4 * FLOAT32 * adapters,
        weight_copies=0,
        logits=full.logits - FLOAT32 * head.weight.numel(),
    )


def table(
    models: dict[str, PretrainedConfig], *, tokens: int = 16384, row_tokens: int = 4096, lora: int | None = None
) -> str:
    """The table in Markdown, GiB."""
    state = "weights, gradient, AdamW" if lora is None else f"weights, adapters of rank {lora}"
    rows = [f"| GiB, sdpa, bfloat16 autocast | {state} | weight copies | activations | logits | together |"]
    rows.append("|---|---|---|---|---|---|")
    for name, shape in models.items():
        for checkpointing in (False, True):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa", dtype=torch.float32)
            needed = update_memory(
                model, LearnerConfig(activation_checkpointing=checkpointing), tokens, row_tokens=row_tokens,
                trained=tokens // 4, autocast=True,
            )  # fmt: skip
            if lora is not None:
                needed = with_adapters(model, lora, needed)
            parts = (needed.resident, needed.weight_copies, needed.activations, needed.logits, needed.total)
            what = ", activation checkpointing" if checkpointing else ""
            rows.append(f"| {name}{what} | " + " | ".join(f"{part / GIB:.1f}" for part in parts) + " |")
    return "\n".join(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of a forward pass: max_tokens_per_microbatch")
    parser.add_argument("--row-tokens", type=int, default=4096, help="of its longest row")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank")
    parser.add_argument("--model", help="a directory or hub id instead of common shapes")
    options = parser.parse_args()
    models: dict[str, PretrainedConfig] = (
        {name: LlamaConfig(**shape) for name, shape in SHAPES.items()}
        if options.model is None
        else {options.model: AutoConfig.from_pretrained(options.model)}
    )
    print(table(models, tokens=options.tokens, row_tokens=options.row_tokens, lora=options.lora))


if __name__ == "__main__":
    main()

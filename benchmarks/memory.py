"""Memory of an update by formula, for models of common shapes or one of yours. The formula reads shapes alone: no
weight is made or downloaded.

    python benchmarks/memory.py [--tokens 16384] [--row-tokens 4096]
    python benchmarks/memory.py --lora 16                      # with adapters in bfloat16 instead of all weights
    python benchmarks/memory.py --lora 16 --quantize 4bit      # with adapters on a base in 4 bits
    python benchmarks/memory.py --model Qwen/Qwen2.5-1.5B      # a directory or hub id, of which config.json is read
"""

from __future__ import annotations

import argparse
from typing import Any, get_args

from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from agl.trainer.local.config import LearnerConfig, Quantize
from agl.trainer.local.memory import GIB, model_of_shapes, update_memory, with_adapters

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "3B": dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
               num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True),
    "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
               num_key_value_heads=4, vocab_size=152064),
}  # fmt: skip


def table(
    models: dict[str, PretrainedConfig],
    *,
    tokens: int = 16384,
    row_tokens: int = 4096,
    lora: int | None = None,
    quantize: Quantize | None = None,
) -> str:
    """The table in Markdown, GiB."""
    state = "weights, gradient, AdamW" if lora is None else f"weights, adapters of rank {lora}"
    rows = [f"| GiB, sdpa, bfloat16 autocast | {state} | weight copies | activations | logits | together |"]
    rows.append("|---|---|---|---|---|---|")
    for name, shape in models.items():
        for checkpointing in (False, True):
            model = model_of_shapes(shape)
            needed = update_memory(
                model, LearnerConfig(activation_checkpointing=checkpointing), tokens, row_tokens=row_tokens,
                trained=tokens // 4, autocast=True,
            )  # fmt: skip
            if lora is not None:
                needed = with_adapters(model, lora, needed, quantize)
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
    parser.add_argument("--quantize", choices=get_args(Quantize), help="of the base of the adapters")
    parser.add_argument("--model", help="a directory or hub id instead of common shapes")
    options = parser.parse_args()
    models: dict[str, PretrainedConfig] = (
        {name: LlamaConfig(**shape) for name, shape in SHAPES.items()}
        if options.model is None
        else {options.model: AutoConfig.from_pretrained(options.model)}
    )
    if options.quantize and options.lora is None:
        parser.error("--quantize needs --lora")
    sizes = {"tokens": options.tokens, "row_tokens": options.row_tokens}
    print(table(models, **sizes, lora=options.lora, quantize=options.quantize))


if __name__ == "__main__":
    main()

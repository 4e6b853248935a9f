"""Memory of an update: the formula of `agl.trainer.local.memory` for models of common shapes; no weight is made.

python benchmarks/memory.py [--tokens 16384] [--row-tokens 4096]
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.memory import update_memory

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of a forward pass")
    parser.add_argument("--row-tokens", type=int, default=4096, help="of its longest row")
    options = parser.parse_args()
    print(
        "| GiB, sdpa, bfloat16 autocast | weights, gradient, AdamW | weight copies | activations | logits | together |"
    )
    print("|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        for checkpointing in (False, True):
            with torch.device("meta"):
                model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa"))
            config = LearnerConfig(activation_checkpointing=checkpointing)
            needed = update_memory(
                model, config, options.tokens, row_tokens=options.row_tokens, trained=options.tokens // 4, autocast=True
            )
            parts = (needed.resident, needed.weight_copies, needed.activations, needed.logits, needed.total)
            what = ", activation checkpointing" if checkpointing else ""
            print(f"| {name}{what} | " + " | ".join(f"{part / GIB:.1f}" for part in parts) + " |")


if __name__ == "__main__":
    main()

"""A very small model that nothing was taught: for tests in which what it says does not matter."""

from __future__ import annotations

from pathlib import Path


def make_untrained(
    directory: Path, *, head_dim: int = 16, hidden_size: int = 32, context: int = 512, seed: int = 0
) -> Path:
    """Write one with random weights and the quickstart's tokenizer and chat template; returns `directory`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from agl.trainer.quickstart.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.model_max_length = max(context, tokenizer.model_max_length)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory

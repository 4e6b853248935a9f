"""Weights with which a new model copies before it has learned anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

EMBEDDING = 0.3
"""Standard deviation of the embeddings: what a head copies has to stand out from what random weights add."""


@torch.no_grad()
def set_induction_heads(model: LlamaForCausalLM) -> None:
    """Set weights of a new model's first two layers so that it expects, after a token, what followed that token before.

    A head of the first layer finds the token before each token; heads of the second compare it with the current token
    and predict what stands there: induction heads (Olsson et al. 2022, "In-context Learning and Induction Heads"). What
    an agent copies, numbers and names, needs them, and from random weights they form late. To begin with what training
    would find is mimetic initialization (Trockman and Kolter 2023). All weights stay trainable, and no shape changes.

    Args:
        model: with random weights, at least two layers, and a width that is a multiple of 64.
    """
    config: Any = model.config
    layers: Any = model.model.layers
    width = config.hidden_size
    groups = config.num_key_value_heads
    size = width // config.num_attention_heads
    shared = config.num_attention_heads // groups
    half = width // 2
    n = min(size, width // 4)
    # Columns of the residual stream: one number for all tokens, the token, the one before it, the one to come.
    always = 0
    token = slice(1, half)
    before = slice(half, half + n)
    copied = slice(half + n, half + 2 * n)
    embeddings = model.model.embed_tokens.weight
    embeddings *= EMBEDDING / config.initializer_range
    embeddings[:, half:] *= 0.1
    embeddings[:, always] = 4 * EMBEDDING
    for layer in layers:
        layer.self_attn.o_proj.weight *= 0.3
        layer.mlp.down_proj.weight *= 0.3

    # RoPE turns queries and keys by their positions. A query that is the key turned back by one position fits the key
    # before it best, and only fast turns tell neighbours apart; slow ones compare tokens at any distance.
    speeds = config.rope_parameters["rope_theta"] ** -(torch.arange(size // 2) / (size // 2))
    fast = 1.5 * (speeds > 0.1)
    slow = (speeds < 0.02).repeat(2)
    first, second = (layer.self_attn for layer in layers[:2])
    first.k_proj.weight[:size, always] = torch.cat([fast, 0 * fast])
    for head in range(shared):  # the second one looks two back, which tells repeated tokens apart
        turn = (head + 1) * speeds
        first.q_proj.weight[head * size : (head + 1) * size, always] = torch.cat(
            [fast * turn.cos(), -fast * turn.sin()]
        )
    seen, read = (torch.linalg.qr(torch.randn(half - 1, n))[0].T for _ in range(2))
    first.v_proj.weight[:n, token] = seen
    first.o_proj.weight[before, :n] = EMBEDDING * torch.eye(n)
    for group in range(groups):
        key, query = (slice(start, start + size) for start in (group * size, group * shared * size))
        compare = torch.randn(int(slow.sum()), n) * 2 / n**0.5
        second.k_proj.weight[key][slow, before] = compare
        second.q_proj.weight[query][slow, token] = compare @ seen
        second.v_proj.weight[key][:n, token] = read
        second.o_proj.weight[copied, query.start : query.start + n] = EMBEDDING * torch.eye(n)
    model.lm_head.weight[:, copied] = 2 * config.initializer_range / EMBEDDING * embeddings[:, token] @ read.T

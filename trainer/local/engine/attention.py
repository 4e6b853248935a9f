"""Attention for cached decoding on CPU: reads grouped keys and values in place; transformers' eager form repeats them.

Invariant: it is used only for a model whose logits it reproduces; any other keeps the attention that it has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agl.trainer.local.attention import attention, require_plain

GROUPED = "agl_grouped"
"""Its name in `config._attn_implementation`."""
TOLERANCE = 1e-4
"""Largest difference in logits, relative to the largest logit."""


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention with an additive mask, in the form that transformers' attention modules call.

    Args:
        query: [B, heads, q, head_dim]. key, value: [B, key heads, columns, head_dim].
        attention_mask: additive, [B, 1, q, columns].

    Returns:
        [B, q, heads, head_dim], and no weights.

    Raises:
        NotImplementedError: the model asks for more than this, such as a soft cap or sinks.
    """
    require_plain(attention_mask, dropout, others, irrelevant="sliding_window")  # it is in the mask
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)


@torch.inference_mode()
def agrees(model: Any, device: torch.device) -> bool:
    """Whether `grouped_attention` gives the model's own logits on a short random text."""
    generator = torch.Generator().manual_seed(0)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(rows, (2, 24), generator=generator).to(device)
    dtype = model.get_input_embeddings().weight.dtype
    mask = torch.full((24, 24), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1).expand(2, 1, -1, -1)
    positions = torch.arange(24, device=device).expand(2, -1)

    def logits(implementation: str) -> Tensor:
        with attention(model.config, implementation):
            return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()

    own = logits(model.config._attn_implementation)
    try:
        difference = (logits(GROUPED) - own).abs().max()
    except (NotImplementedError, RuntimeError):
        return False
    return bool(difference <= TOLERANCE * own.abs().max())

"""Attention for cached decoding: reads grouped keys and values in place, where transformers repeats them, those of rows
of different length from different buffers, and those that neighbouring rows have in common once.

Invariant: it is used only for a model whose logits it reproduces; any other keeps the attention that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from agl.trainer.local.attention import attention, require_plain

GROUPED = "agl_grouped"
"""Its name in `config._attn_implementation`."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference in logits, relative to the largest logit, by the dtype of the weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some rows of a pass: they attend to their own keys and values [rows, key heads, columns, head_dim] under the
    additive mask [rows, 1, q, columns]; on a CPU also to all columns that they have in `common`, a pair of keys and
    values [key heads, columns, head_dim]."""

    key: Tensor
    value: Tensor
    mask: Tensor
    common: tuple[Tensor, Tensor] | None = None


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention with an additive mask, in the form that transformers' attention modules call.

    Args:
        query: [B, heads, q, head_dim].
        key, value: [B, key heads, columns, head_dim]; or the parts of the batch.
        attention_mask: additive, [B, 1, q, columns]; not used with parts.

    Returns:
        [B, q, heads, head_dim], and no weights.

    Raises:
        NotImplementedError: the model asks for more than this, such as a soft cap or sinks.
    """
    require_plain(attention_mask, dropout, others, irrelevant="sliding_window")  # it is in the mask
    parts: Sequence[Part] = key
    if isinstance(key, Tensor):
        parts = [Part(key, value, cast(Tensor, attention_mask))]
    queries = query.split([len(part.key) for part in parts])
    out = [_attend(q, part, scaling) for q, part in zip(queries, parts, strict=True)]
    return (out[0] if len(out) == 1 else torch.cat(out)).transpose(1, 2).contiguous(), None


def _attend(query: Tensor, part: Part, scaling: float | None) -> Tensor:
    if part.common is not None:
        return _attend_in_common(query, part, *part.common, scaling)
    rows, heads, n, width = query.shape
    group = heads // part.key.shape[1]
    mask = part.mask
    if query.device.type != "cpu" and group > 1:
        # Kernels that take a mask want as many heads of keys as of queries: a group's queries become one head's.
        query = query.reshape(rows, heads // group, group * n, width)
        mask = mask.repeat(1, 1, group, 1)
        group = 1
    out = scaled_dot_product_attention(query, part.key, part.value, attn_mask=mask, scale=scaling, enable_gqa=group > 1)
    return out.reshape(rows, heads, n, width)


def _attend_in_common(query: Tensor, part: Part, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """All rows' queries attend to the common keys at once, each row's to its own; the two results are combined by their
    log-sum-exps (Hydragen, arXiv 2402.05099, section 3)."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query = query.to(key.dtype)  # autocast does not do it for this operator
    rows = len(query)
    keys = len(key)
    width = query.shape[-1]
    together = query.reshape(rows, keys, -1, width).transpose(0, 1).reshape(1, keys, -1, width)
    common, common_lse = attend(together, key[None], value[None], scale=scaling)
    own, own_lse = attend(query, part.key, part.value, attn_mask=part.mask.to(query.dtype), scale=scaling)
    common = common.reshape(keys, rows, -1, width).transpose(0, 1).reshape(own.shape)
    common_lse = common_lse.reshape(keys, rows, -1).transpose(0, 1).reshape(own_lse.shape)
    return own.lerp(common, torch.sigmoid(common_lse - own_lse)[..., None].to(own.dtype))


AttentionInterface.register(GROUPED, grouped_attention)


class _CacheInParts(Cache):
    """Gives a pass its own keys and values as one part, in the form in which those of several buffers come."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(layers=[])
        self._mask = mask

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """The part, twice: in place of keys and of values."""
        parts = [Part(key_states, value_states, self._mask)]
        return parts, parts

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of earlier passes: none."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(columns, offset), for models that call this although they have a mask."""
        return query_length, 0


@torch.inference_mode()
def agrees(model: Any, device: torch.device) -> bool:
    """Whether `grouped_attention` gives the model's own logits on a short random text, also where its keys and values
    come in parts: some models look at them before they attend."""
    generator = torch.Generator().manual_seed(0)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(rows, (2, 24), generator=generator).to(device)
    dtype = model.get_input_embeddings().weight.dtype
    mask = torch.full((24, 24), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1).expand(2, 1, -1, -1)
    positions = torch.arange(24, device=device).expand(2, -1)

    def logits(implementation: str, cache: Cache | None = None) -> Tensor:
        with attention(model.config, implementation):
            return model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            ).logits.float()

    own = logits(model.config._attn_implementation)
    try:
        ours = [logits(GROUPED), logits(GROUPED, _CacheInParts(mask))]
    except (NotImplementedError, RuntimeError, AttributeError, TypeError, ValueError, IndexError):
        return False
    return all(bool((x - own).abs().max() <= TOLERANCE[dtype] * own.abs().max()) for x in ours)

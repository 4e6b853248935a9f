"""Attention over prefix trees: each query sees the keys of its own context; memory is linear in tokens.

What a query sees is a few ranges of keys. Each range is an attention of its own, and they are put together by their
log-sum-exp; backwards, each needs the whole's output and log-sum-exp alone (as blockwise and ring attention do it,
arXiv 2305.19370, 2310.01889).

Invariant: it is used only for a model whose logits it reproduces; any other keeps the attention that it has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from agl.trainer.local.attention import attention, require_plain
from agl.trainer.local.learner.prefix_trees import chain, prefix_trees

TREE = "agl_tree"
"""Its name in `config._attn_implementation`."""
SCORES = 1 << 24
"""Where torch has no kernel that returns the log-sum-exp, attention weights are made about this many at a time."""
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-4, 0.03
"""Largest difference in logits, relative to the largest logit, with weights in float32 and in fewer bits."""

_forward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers' attention modules call.

    Args:
        query: [1, heads, U, head_dim]. key, value: [1, key heads, U, head_dim].
        attention_mask: int64 [1, 1, K, 4] on the CPU: `PrefixTrees.blocks`.

    Returns:
        [1, U, heads, head_dim], and no weights.

    Raises:
        NotImplementedError: the model asks for more than this, such as a soft cap, sinks or a sliding window.
    """
    require_plain(attention_mask, dropout, others)
    assert attention_mask is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    out: Any = _TreeAttention.apply(query, key, value, attention_mask[0, 0].tolist(), scale)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE, tree_attention)


@torch.inference_mode()
def agrees(model: Any, device: torch.device) -> bool:
    """Whether `tree_attention` gives the model's own logits on short random texts with a common beginning.

    Args:
        model: a `PreTrainedModel`, not peft's wrapper.
    """
    weight = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(weight.shape[0], (40,), generator=generator).numpy()
    texts = [ids[:16], ids[[*range(8), *range(16, 24)]], ids[[*range(12), *range(24, 40)]]]
    trees = prefix_trees([chain(text) for text in texts])

    def logits(**arguments: Any) -> Tensor:
        tensors = {name: torch.as_tensor(x)[None].long().to(device) for name, x in arguments.items()}
        return model(**tensors, **mask, use_cache=False).logits[0].float()

    mask: dict[str, Any] = {}
    own = torch.cat([logits(input_ids=text) for text in texts])
    mask = {"attention_mask": torch.from_numpy(trees.blocks)[None, None]}
    try:
        with attention(model.config, TREE):
            ours = logits(input_ids=trees.token_ids, position_ids=trees.positions)
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError):
        return False
    difference = (ours[torch.cat([torch.from_numpy(p) for p in trees.places]).to(device)] - own).abs().max()
    tolerance = TOLERANCE if weight.dtype == torch.float32 else LOW_PRECISION_TOLERANCE
    return bool(difference <= tolerance * own.abs().max())


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: list[list[int]], scale: float) -> Tensor:
        sums = _dtype_of_sums(query)
        out = torch.empty_like(query, dtype=sums)
        lse = torch.empty(query.shape[:-1], dtype=sums, device=query.device)
        for first, last, first_key, last_key in blocks:
            own = first == first_key
            part, part_lse = _attend(
                query[:, :, first:last], key[:, :, first_key:last_key], value[:, :, first_key:last_key], own, scale
            )
            if own:
                out[:, :, first:last], lse[:, :, first:last] = part, part_lse
                continue
            before = lse[:, :, first:last].clone()
            after = torch.logaddexp(before, part_lse)
            lse[:, :, first:last] = after
            out[:, :, first:last] *= (before - after).exp_()[..., None]
            out[:, :, first:last].addcmul_(part.to(sums), (part_lse - after).exp_()[..., None])
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(x, dtype=_dtype_of_sums(x)) for x in (query, key, value)]
        for first, last, first_key, last_key in ctx.blocks:
            queries, keys = slice(first, last), slice(first_key, last_key)
            parts = _attend_backward(
                grad[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                first == first_key,
                ctx.scale,
            )
            for total, part, where in zip(grads, parts, (queries, keys, keys), strict=True):
                total[:, :, where] += part
        d_query, d_key, d_value = (g.to(x.dtype) for g, x in zip(grads, (query, key, value), strict=True))
        return d_query, d_key, d_value, None, None


def _dtype_of_sums(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax(q k) v [1, heads, q, head_dim] and the log-sum-exp of the scores, float32 [1, heads, q]."""
    if query.device.type == "cpu":
        return _forward_on_cpu(query, key, value, 0.0, causal, scale=scale)
    return attend_in_pieces(query, key, value, causal, scale)


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, given output and log-sum-exp over all keys that the queries see."""
    if query.device.type == "cpu":
        return _backward_on_cpu(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
    return attend_in_pieces_backward(grad, query, key, value, out, lse, causal, scale)


def attend_in_pieces(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """As `_attend`, in plain operations, on any device."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    out, lse = [], []
    for first, part in _pieces(query, key):
        scores = _scores(part, key, first, causal, scale)
        lse.append(scores.logsumexp(-1))
        out.append(torch.exp(scores - lse[-1][..., None]).to(value.dtype) @ value)
    return torch.cat(out, 2), torch.cat(lse, 2)


def attend_in_pieces_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_attend_backward`, in plain operations, on any device."""
    heads = key.shape[1]
    key, value = (x.repeat_interleave(query.shape[1] // heads, dim=1) for x in (key, value))
    d_query = []
    sums = _dtype_of_sums(query)
    d_key, d_value = (torch.zeros_like(x, dtype=sums) for x in (key, value))
    delta = (grad.to(sums) * out.to(sums)).sum(-1, keepdim=True)
    for first, part in _pieces(query, key):
        at = slice(first, first + part.shape[2])
        weights = torch.exp(_scores(part, key, first, causal, scale) - lse[:, :, at, None])
        d_value += weights.to(value.dtype).transpose(-1, -2) @ grad[:, :, at]
        d_scores = weights * ((grad[:, :, at] @ value.transpose(-1, -2)).to(sums) - delta[:, :, at])
        d_scores = (d_scores * scale).to(key.dtype)
        d_query.append(d_scores @ key)
        d_key += d_scores.transpose(-1, -2) @ part
    d_key, d_value = (x.unflatten(1, (heads, -1)).sum(2) for x in (d_key, d_value))
    return torch.cat(d_query, 2), d_key, d_value


def _pieces(query: Tensor, key: Tensor) -> list[tuple[int, Tensor]]:
    """The queries in pieces, each with the index of its first."""
    size = max(1, SCORES // (query.shape[1] * key.shape[2]))
    return [(i * size, part) for i, part in enumerate(query.split(size, dim=2))]


def _scores(query: Tensor, key: Tensor, first: int, causal: bool, scale: float) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).to(_dtype_of_sums(query)) * scale
    if causal:
        later = torch.arange(key.shape[2], device=key.device) > torch.arange(
            first, first + query.shape[2], device=key.device
        ).unsqueeze(1)
        scores = scores.masked_fill_(later, -math.inf)
    return scores

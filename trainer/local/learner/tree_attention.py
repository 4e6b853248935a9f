"""Attention over prefix trees: each query sees the keys of its own context; memory is linear in tokens.

On a GPU that is torch's FlexAttention. On the CPU, where that has no backward pass, what a query sees is a few ranges
of keys: each range is an attention of its own, and they are put together by their log-sum-exp; backwards, each needs
the whole's output and log-sum-exp alone (as blockwise and ring attention do it, arXiv 2305.19370, 2310.01889).

Invariant: it is used only for a model whose logits it reproduces; any other keeps the attention that it has.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from agl.trainer.local.attention import attention, require_plain
from agl.trainer.local.learner.prefix_trees import PrefixTrees, chain, prefix_trees

TREE = "agl_tree"
"""Its name in `config._attn_implementation`."""
BLOCK = 128
"""Tokens of a block of FlexAttention's masks."""
TOLERANCE = 1e-4
LOW_PRECISION_TOLERANCE = 0.06
"""Largest difference of logits or gradients, relative to the largest of them, in float32 and in fewer bits."""

# FlexAttention compiles once per model, dtype, GPU and kind of pass; beyond this number it computes all scores at once.
torch._dynamo.config.cache_size_limit = 64

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Kept(dict[nn.Module, list[tuple[Tensor, Tensor]]]):
    """Keys, values and states [1, .., T, dim] that one pass computes for later ones, whose gradients for it add up."""

    detached = True  # For one backward pass after another.

    def __call__(self, module: nn.Module, *tensors: Tensor) -> Seq[Tensor]:
        """Keep them in the first pass, and append the kept ones to those of a later one."""
        if module in self:
            return [torch.cat([x, kept], -2) for (_, kept), x in zip(self[module], tensors, strict=True)]
        self[module] = [(x, x.detach().requires_grad_(x.requires_grad) if self.detached else x) for x in tensors]
        return tensors

    def backward(self) -> None:
        """The first pass's backward pass, after those of the others."""
        pairs = [(x, kept.grad) for of in self.values() for x, kept in of if kept.grad is not None]
        self.clear()  # For checkpointed layers it is the first pass again.
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
        self.clear()


def tree_inputs(
    trees: PrefixTrees, device: torch.device, kept: Kept | None = None
) -> tuple[Tensor, Tensor, Tensor | BlockMask]:
    """What a model takes under `TREE`: token ids and positions, int64 [1, U], and the mask for `tree_attention`.

    On a GPU the trees are padded to whole blocks, whose number alone FlexAttention's compiled kernels depend on.
    """
    n = size = len(trees)
    mask: Tensor | BlockMask = torch.from_numpy(trees.blocks)[None, None]
    if device.type != "cpu":
        size = -(-n // BLOCK) * BLOCK
        starts, ends = torch.from_numpy(trees.seen_by(size)).to(device)
        mask = create_block_mask(
            lambda _batch, _head, query, key: (starts[key] <= query) & (query < ends[key]),
            None,
            None,
            size,
            size + trees.kept,
            device=str(device),
            BLOCK_SIZE=BLOCK,
        )
    mask.kept = kept  # type: ignore[union-attr]  # Some models do not pass other arguments on.
    inputs = torch.zeros(2, 1, size, dtype=torch.int64)
    inputs[0, 0, :n], inputs[1, 0, :n] = torch.from_numpy(trees.token_ids), torch.from_numpy(trees.positions)
    tokens_BT, positions_BT = inputs.to(device)
    return tokens_BT, positions_BT, mask


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers' attention modules call.

    Args:
        query: [1, heads, U, head_dim].
        key, value: [1, key heads, U, head_dim].
        attention_mask: of `tree_inputs`.

    Returns:
        [1, U, heads, head_dim], and no weights.

    Raises:
        NotImplementedError: the model asks for more than this, such as a soft cap, sinks or a sliding window.
    """
    require_plain(attention_mask, dropout, others)
    assert attention_mask is not None
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    if (kept := getattr(attention_mask, "kept", None)) is not None:
        key, value = kept(module, key, value)
    if isinstance(attention_mask, Tensor) and attention_mask[..., 3].max() > key.shape[2]:
        raise NotImplementedError("the model does not pass its mask on as it is")
    if isinstance(attention_mask, BlockMask):
        return flex_attention_forward(module, query, key, value, attention_mask, scaling)[0], None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Any = _TreeAttention.apply(query, key, value, attention_mask[0, 0].tolist(), scale)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE, tree_attention)


@torch.enable_grad()
def agrees(model: Any, device: torch.device, autocast: torch.dtype | None = None) -> bool:
    """Whether the model computes the same on short random texts with a common beginning, whether they are in trees or
    each alone: logits, and what it gives back to the embeddings of their tokens.

    Args:
        model: a `PreTrainedModel`, not peft's wrapper.
        autocast: dtype that updates compute in, if not the weights'.
    """
    embedding = model.get_input_embeddings()
    size = 1 if device.type == "cpu" else BLOCK // 16
    generator = torch.Generator().manual_seed(0)
    # On a GPU of several of its blocks.
    pieces = np.split(torch.randint(embedding.weight.shape[0], (40 * size,), generator=generator).numpy(), 10)
    texts = [np.concatenate([pieces[i] for i in text]) for text in ((0, 1, 2, 3), (0, 1, 4, 5), (0, 1, 2, 6, 7, 8, 9))]
    whole = prefix_trees([chain(text) for text in texts])
    n = 2 * pieces[0].size
    kept = Kept()
    kept.detached = False
    trees = whole.part([0, 1, 2], np.arange(n, len(whole)), np.arange(n), 1 if size == 1 else BLOCK)
    places = torch.from_numpy(np.concatenate(trees.places)).to(device)

    def run(passes: Seq[dict[str, Any]], at: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Logits float32 [T, V] at some places, and the gradient [U, H] of a function of them."""
        seen: list[Tensor] = []

        def keep(_module: object, _args: object, output: Tensor) -> Tensor:
            seen.append(output.detach().requires_grad_())
            return seen[-1]

        handle = embedding.register_forward_hook(keep)
        try:
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                logits_TV = torch.cat([model(**x, use_cache=False).logits[0] for x in passes][::-1])[at].float()
        finally:
            handle.remove()
        gradients = torch.autograd.grad(logits_TV.logsumexp(-1).sum(), seen[::-1])
        return logits_TV.detach(), torch.cat(gradients, 1)[0].float()

    names = "input_ids", "position_ids", "attention_mask"
    try:
        alone = [run([{"input_ids": torch.from_numpy(text)[None].long().to(device)}]) for text in texts]
        with attention(model.config, TREE):
            passes = [tree_inputs(x, device, kept) for x in (whole.part([], np.arange(n)), trees)]
            ours = run([dict(zip(names, x, strict=True)) for x in passes], places)
    except (NotImplementedError, RuntimeError, AttributeError, TypeError, ValueError, IndexError):
        return False
    parts = torch.cat([gradient for _, gradient in alone])
    theirs = torch.cat([logits for logits, _ in alone]), torch.zeros_like(ours[1]).index_add_(0, places, parts)
    exact = autocast is None and embedding.weight.dtype in (torch.float32, torch.float64)
    tolerance = TOLERANCE if exact else LOW_PRECISION_TOLERANCE
    return all(bool((a - b).abs().max() <= tolerance * b.abs().max()) for a, b in zip(ours, theirs, strict=True))


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: list[list[int]], scale: float) -> Tensor:
        sums = _dtype_of_sums(query)
        out = torch.empty_like(query, dtype=sums)
        lse = torch.empty(query.shape[:-1], dtype=sums, device=query.device)
        for first, last, first_key, last_key in blocks:
            own = first == first_key
            keys = key[:, :, first_key:last_key]
            values = value[:, :, first_key:last_key]
            part, part_lse = _forward(query[:, :, first:last], keys, values, 0.0, own, scale=scale)
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
        ctx.blocks = blocks
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(x, dtype=_dtype_of_sums(x)) for x in (query, key, value)]
        for first, last, first_key, last_key in ctx.blocks:
            queries = slice(first, last)
            keys = slice(first_key, last_key)
            parts = _backward(
                grad[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                0.0,
                first == first_key,
                scale=ctx.scale,
            )
            for total, part, where in zip(grads, parts, (queries, keys, keys), strict=True):
                total[:, :, where] += part
        d_query, d_key, d_value = (g.to(x.dtype) for g, x in zip(grads, (query, key, value), strict=True))
        return d_query, d_key, d_value, None, None


def _dtype_of_sums(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)

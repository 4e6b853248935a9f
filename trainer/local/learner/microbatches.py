"""Rows to micro-batches: which rows go into one forward pass, and the tensors that it takes.

Invariant: a token sees its ancestors and nothing else, at its own position, whatever row or padding is next to it.
Rows are written into prefix trees where the model can compute with them, and else padded to the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from agl.mdp.sequence import BoolArray, TrainingRow
from agl.trainer.local.architecture import Window
from agl.trainer.local.grammar import Grammars
from agl.trainer.local.learner.prefix_trees import NONE, PrefixTrees
from agl.trainer.local.learner.tree_attention import Kept, tree_inputs


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows with N tokens whose log-prob is wanted: B of them, right-padded to T tokens, or one of trees (B = 1).

    Attributes:
        tokens_BT, positions_BT: int64.
        attention_mask: of trees, that of `tree_inputs`. Of padded rows int64 [B, T], 1 where there is a token, when
            every row is a chain; otherwise additive [B, 1, T, T] in the dtype computed in: 0 where the query (third
            axis) sees the key; of a model with a window, what `Window.masks` makes of it.
        trees: whether it is one of trees.
        n_tokens: tokens computed, without padding.
        sources_N: int64: index into the flattened [B * T] of the output that predicts each wanted token.
        targets_N: int64: the wanted tokens.
        temperatures_N: float32, all above 0.
        places: for each row, the indices of its wanted tokens; row after row they line up with the N.
        bits_NW: which tokens could have come there, as `Grammars.bits` has them; None for all.
    """

    tokens_BT: Tensor
    positions_BT: Tensor
    attention_mask: Tensor | BlockMask | dict[str, Tensor]
    trees: bool
    n_tokens: int
    sources_N: Tensor
    targets_N: Tensor
    temperatures_N: Tensor
    places: tuple[np.ndarray, ...]
    bits_NW: Tensor | None = None


def length_buckets(lengths: Seq[int], max_tokens: int) -> list[list[int]]:
    """Divide rows into micro-batches of similar length: B * T <= max_tokens, or a single longer row.

    Args:
        lengths: tokens of each row.

    Returns:
        Indices of the rows of each micro-batch, the longest first.
    """
    batches: list[list[int]] = []
    width = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * width <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
            width = lengths[i]
    return batches


def collate(
    rows: Seq[TrainingRow],
    wanted: Seq[BoolArray],
    device: torch.device,
    mask_dtype: torch.dtype = torch.float32,
    *,
    trees: PrefixTrees | None = None,
    kept: Kept | None = None,
    grammars: Grammars | None = None,
    window: Window | None = None,
) -> MicroBatch:
    """The tensors of one forward pass.

    Args:
        rows: B rows.
        wanted: bool [T] per row: which tokens' log-probs are needed; none of them a first token.
        device: where the tensors go.
        mask_dtype: dtype of an additive mask.
        trees: those of the rows, where they are written into them.
        kept: what their passes keep.
        grammars: of the policy, for rows that were held to one.
        window: of the model.
    """
    if trees is not None:
        tokens_BT, positions_BT, mask = tree_inputs(trees, device, kept)
        where = trees.places
        n_tokens = len(trees)
    else:
        padded = np.zeros((2, len(rows), max(map(len, rows))), dtype=np.int64)
        for b, row in enumerate(rows):
            padded[0, b, : len(row)] = row.token_ids
            padded[1, b, : len(row)] = row.positions
        tokens_BT, positions_BT = torch.from_numpy(padded).to(device)
        mask = _mask(rows, mask_dtype).to(device)
        # Of chains, transformers makes the masks, with the window in them.
        if window is not None and mask.dim() == 4:
            distances = (positions_BT[:, :, None] - positions_BT[:, None, :])[:, None]
            mask = window.masks(mask, distances, torch.finfo(mask_dtype).min)
        where = [b * tokens_BT.shape[1] + np.arange(len(row)) for b, row in enumerate(rows)]
        n_tokens = sum(len(row) for row in rows)
    places = tuple(np.flatnonzero(w) for w in wanted)
    sources = [w[row.parents[p]] for w, row, p in zip(where, rows, places, strict=True)]
    targets = [row.token_ids[p].astype(np.int64) for row, p in zip(rows, places, strict=True)]
    temperatures = [np.empty(0, np.float32), *(row.temperatures[p] for row, p in zip(rows, places, strict=True))]
    # The engine gives log-probs of a greedy answer under the model's own distribution.
    temperatures_N = np.concatenate([np.where(t > 0, t, np.float32(1)) for t in temperatures])
    bits_NW = None if grammars is None else grammars.of_rows(rows, places)
    return MicroBatch(
        tokens_BT=tokens_BT,
        positions_BT=positions_BT,
        attention_mask=mask,
        trees=trees is not None,
        n_tokens=n_tokens,
        sources_N=torch.from_numpy(np.concatenate([NONE, *sources])).to(device),
        targets_N=torch.from_numpy(np.concatenate([NONE, *targets])).to(device),
        temperatures_N=torch.from_numpy(temperatures_N).to(device),
        places=places,
        bits_NW=None if bits_NW is None else bits_NW.to(device),
    )


def _mask(rows: Seq[TrainingRow], dtype: torch.dtype) -> Tensor:
    """`MicroBatch.attention_mask` of padded rows."""
    width = max(map(len, rows))
    if all(row.is_chain for row in rows):
        return torch.from_numpy(np.arange(width) < np.array([[len(row)] for row in rows])).long()
    visible_BTT = np.zeros((len(rows), width, width), dtype=np.bool_)
    for b, row in enumerate(rows):
        visible_BTT[b, : len(row), : len(row)] = ancestors(row)
        # A padded query sees itself, so that its softmax stays finite; nobody reads its output.
        padding = np.arange(len(row), width)
        visible_BTT[b, padding, padding] = True
    mask = torch.zeros(visible_BTT.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(~visible_BTT), torch.finfo(dtype).min)[:, None]


def ancestors(row: TrainingRow) -> BoolArray:
    """bool [T, T]: whether token t (first axis) sees token s: s is t or comes before it in t's own context."""
    n = len(row)
    sees_TT = np.zeros((n, n), dtype=np.bool_)
    # A chain's rows are written at once: only a token that does not follow its neighbour starts another.
    starts = [0, *np.flatnonzero(row.parents != np.arange(n) - 1).tolist()]
    for start, end in pairwise([*starts, n]):
        parent = int(row.parents[start])
        if parent >= 0:
            sees_TT[start:end, :start] = sees_TT[parent, :start]
        sees_TT[start:end, start:end] = np.tri(end - start, dtype=np.bool_)
    return sees_TT

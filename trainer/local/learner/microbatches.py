"""Rows to micro-batches: which rows go into one forward pass, and the tensors that it takes.

Invariant: a token sees its ancestors and nothing else, at its own position, whatever row or padding is next to it.
Rows are padded to the longest one of their micro-batch; they are not packed into one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from agl.mdp.sequence import BoolArray, TrainingRow
from agl.mdp.types import IntArray, int_array


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """B rows, right-padded to T tokens, with N tokens whose log-prob is wanted.

    Attributes:
        tokens_BT, positions_BT: int64.
        attention_mask: int64 [B, T], 1 where there is a token, when every row is a chain; otherwise additive
            [B, 1, T, T] in the dtype of the computation: 0 where the query (third axis) sees the key.
        sources_N: int64: index into the flattened [B * T] of the output that predicts each wanted token.
        targets_N: int64: the wanted tokens.
        temperatures_N: float32, all above 0.
        places: for each row, the indices of its wanted tokens; row after row they line up with the N.
    """

    tokens_BT: Tensor
    positions_BT: Tensor
    attention_mask: Tensor
    sources_N: Tensor
    targets_N: Tensor
    temperatures_N: Tensor
    places: tuple[np.ndarray, ...]


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
    rows: Seq[TrainingRow], wanted: Seq[BoolArray], device: torch.device, mask_dtype: torch.dtype = torch.float32
) -> MicroBatch:
    """The tensors of one forward pass.

    Args:
        rows: B rows.
        wanted: bool [T] per row: which tokens' log-probs are needed; none of them a first token.
        device: where the tensors go.
        mask_dtype: dtype of an additive mask.
    """
    width = max(len(row) for row in rows)
    tokens_BT = np.zeros((len(rows), width), dtype=np.int64)
    positions_BT = np.zeros((len(rows), width), dtype=np.int64)
    places = tuple(np.flatnonzero(w) for w in wanted)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)] = row.token_ids
        positions_BT[b, : len(row)] = row.positions
    sources = [b * width + row.parents[p].astype(np.int64) for b, (row, p) in enumerate(zip(rows, places, strict=True))]
    targets = [row.token_ids[p].astype(np.int64) for row, p in zip(rows, places, strict=True)]
    temperatures_N = np.concatenate([row.temperatures[p] for row, p in zip(rows, places, strict=True)])
    # The engine gives log-probs of a greedy answer under the model's own distribution.
    temperatures_N = np.where(temperatures_N > 0, temperatures_N, np.float32(1))
    if all(row.is_chain for row in rows):
        mask = torch.from_numpy(np.arange(width) < np.array([[len(row)] for row in rows])).long()
    else:
        visible_BTT = np.zeros((len(rows), width, width), dtype=np.bool_)
        for b, row in enumerate(rows):
            visible_BTT[b, : len(row), : len(row)] = ancestors(row)
            # A padded query sees itself, so that its softmax stays finite; nobody reads its output.
            padding = np.arange(len(row), width)
            visible_BTT[b, padding, padding] = True
        mask = torch.zeros(visible_BTT.shape, dtype=mask_dtype)
        mask = mask.masked_fill_(torch.from_numpy(~visible_BTT), torch.finfo(mask_dtype).min)[:, None]
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT).to(device),
        positions_BT=torch.from_numpy(positions_BT).to(device),
        attention_mask=mask.to(device),
        sources_N=torch.from_numpy(np.concatenate(sources)).to(device),
        targets_N=torch.from_numpy(np.concatenate(targets)).to(device),
        temperatures_N=torch.from_numpy(temperatures_N).to(device),
        places=places,
    )


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


def chain(token_ids: IntArray, temperature: float = 1.0) -> TrainingRow:
    """A row of tokens that simply follow each other, none of them trained; int32 [T]."""
    ids = int_array(token_ids)
    n = ids.size
    zeros = np.zeros(n, dtype=np.float32)
    return TrainingRow(
        rollout_id="",
        policy="",
        call_ids=(),
        token_ids=ids,
        parents=np.arange(-1, n - 1, dtype=np.int32),
        positions=np.arange(n, dtype=np.int32),
        action_mask=np.zeros(n, dtype=np.bool_),
        calls=np.full(n, -1, dtype=np.int32),
        logprobs=zeros,
        advantages=zeros,
        temperatures=np.full(n, temperature, dtype=np.float32),
        weights=zeros,
    )

"""Forward passes of a Hugging Face causal language model over cache slots: prefill of some rows, decode of all.

Invariant: each row sees its own earlier tokens and nothing else, whatever shares the pass with it.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from agl.mdp.types import IntArray
from agl.trainer.local.architecture import sliding_window
from agl.trainer.local.attention import attention
from agl.trainer.local.engine.attention import GROUPED, agrees
from agl.trainer.local.engine.graphs import Graphs
from agl.trainer.local.engine.kv_cache import (
    LENGTH_BLOCK,
    JoinedCache,
    SlotCache,
    common_beginnings,
    common_prefix,
    probe_shape,
)
from agl.trainer.local.engine.linear import favour_few_rows
from agl.trainer.local.lora import Adapters

WINDOW_BLOCK = 16
"""The number of columns that attention reads grows in these steps, so that most steps reuse the last one's views."""
FEW_TOKENS = 2048
FEWEST = 16
"""A GPU computes up to so many tokens in less time than it takes to launch the pass; fewest columns of such a one."""
SAVED_BYTES = 2**20
"""What reading a common beginning once must save in each layer, to be worth two kernels instead of one."""
SHORTEST = 512
FACTOR = 4
"""Tokens of a row in the first cache, and by how much a row of the next may be longer."""


class SlotModel:
    """A model and the slots that it computes in.

    Rows of like length share a cache, so that a step costs what their tokens cost, not what the longest one's would.
    That needs an attention of ours; with any other, one cache holds all rows.

    Args:
        model: a `PreTrainedModel`, or what a peft model wraps.
        device: where it is.
        autocast: dtype to compute in, if not the weights' own.
        max_slots: how many rows there can be.
        adapters: of the policies on the model, when it has any.
        like: slots of the same model, whose attention and window are copied.
        padded: decode in few shapes that come again, so that a GPU can replay what it recorded, all rows in one cache;
            None: on a GPU.
        context: tokens of the longest row.

    Attributes:
        caches: for rows of up to `longest` tokens each, the shortest first.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        autocast: torch.dtype | None,
        max_slots: int,
        adapters: Adapters | None = None,
        like: SlotModel | None = None,
        padded: bool | None = None,
        context: int = sys.maxsize,
    ) -> None:
        self.model = model
        self._adapters = adapters
        self.device = device
        self.autocast = autocast
        self._attention = like._attention if like else model.config._attn_implementation
        if like is None and device.type == "cpu":
            favour_few_rows(model)
        plain = ("eager",) if device.type == "cpu" else ("eager", "sdpa")
        if like is None and self._attention in plain and agrees(model, device):
            self._attention = GROUPED
        self.shape = probe_shape(model, device, autocast)
        self._padded = device.type == "cuda" if padded is None else padded
        self._window = like._window if like else sliding_window(model.config, context)
        # Caches that are joined have one mask each, for all layers.
        steps = 6 if self._attention == GROUPED and not self._padded and self._window is None else 0
        self.longest = [*(SHORTEST * FACTOR**step for step in range(steps)), sys.maxsize]
        self.caches = [SlotCache(self.shape, max_slots) for _ in self.longest]
        self._hidden = torch.finfo(self.shape.dtype).min
        self._graphs = Graphs(device)
        self._graphs_of = 0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """No gradients, the dtype and the attention to compute with. Every other method must be called inside."""
        with torch.inference_mode(), attention(self.model.config, self._attention):
            if self.autocast is None:
                yield
            else:
                with torch.autocast(self.device.type, dtype=self.autocast):
                    yield

    def cache_for(self, tokens: int) -> int:
        """The number of the cache for a row of so many tokens."""
        return bisect.bisect_left(self.longest, tokens)

    def release(self) -> None:
        """Give the memory of all caches back."""
        self._graphs.clear()
        for cache in self.caches:
            cache.release()

    def prefill(
        self,
        number: int,
        first: int,
        ids: Sequence[np.ndarray[Any, Any]],
        starts: Sequence[int],
        policies: Sequence[str],
        keep: int = 1,
    ) -> Tensor:
        """Compute new tokens of the rows in slots `first`.. of the cache of that number.

        Args:
            policies: per row, the policy that it belongs to.
            ids: per row, its new tokens; the rows are padded at the left to the longest.
            starts: per row, the position of its first new token; what comes before is in its slot already.
            keep: logits are returned for the last `keep` columns; 0 = all.

        Returns:
            Logits [rows, columns, V].
        """
        cache = self.caches[number]
        rows = len(ids)
        width = max(row.size for row in ids)
        columns = max(start + row.size for start, row in zip(starts, ids, strict=True))
        recorded = self._padded and len({*policies}) == 1 and rows * width <= FEW_TOKENS and keep == 1
        n = rows
        slots = [*range(first, first + rows)]
        if recorded:
            rows = power_of_two(rows)
            width = max(FEWEST, power_of_two(width))
            slots += [cache.slots] * (rows - n)
        tokens = np.zeros((rows, width), np.int64)
        positions = np.full((rows, width), -1, np.int64)
        for i, (row, start) in enumerate(zip(ids, starts, strict=True)):
            tokens[i, width - row.size :] = row
            positions[i, width - row.size :] = np.arange(start, start + row.size)
        inputs = [torch.from_numpy(array).to(self.device) for array in (tokens, positions)]
        if not recorded:
            return self._compute(cache, slice(first, first + n), rounded(columns, cache), policies, keep, *inputs)
        at = torch.tensor(slots, device=self.device)
        window = min(coarse(columns), cache.length)
        return self._replayed(cache, at, window, policies[0], *inputs)[:n].clone()

    def begin_decode(
        self, lengths: Sequence[int], policies: Sequence[str], rows: Sequence[int], prompts: Sequence[IntArray]
    ) -> None:
        """The next `decode` feeds the rows in slots 0.. of each cache, as many as `rows` says of it, the first cache's
        first; they hold `lengths` tokens, which begin with those `prompts`, and are those policies'."""
        self._policies = list(policies)
        self._positions = torch.tensor(lengths, device=self.device)[:, None] - 1
        parts = [slice(end - n, end) for n, end in zip(rows, np.cumsum(rows).tolist(), strict=True)]
        self._parts = [(cache, part) for cache, part in zip(self.caches, parts, strict=False) if part.stop > part.start]
        self._columns = [max(lengths[part]) for _, part in self._parts]
        shared = [0] * (len(prompts) - 1)
        if self.device.type == "cpu" and self._attention == GROUPED and not self._padded and self._window is None:
            every = zip(itertools.pairwise(policies), itertools.pairwise(prompts), strict=True)
            shared = [common_prefix(*neighbours) if a == b else 0 for (a, b), neighbours in every]
        least = -(-SAVED_BYTES * self.shape.layers // self.shape.bytes_per_token)
        self._runs = [common_beginnings(shared[part.start : part.stop - 1], least) for _, part in self._parts]

    def decode(self, tokens: Tensor) -> Tensor:
        """Feed one token [B] to each row; the logits that follow, [B, V]."""
        self._positions.add_(1)
        self._columns = [columns + 1 for columns in self._columns]
        if self._padded and len({*self._policies}) == 1:
            return self._decode_padded(tokens)
        masks = []
        for (cache, part), columns in zip(self._parts, self._columns, strict=True):
            n = part.stop - part.start
            cache.reserve(n, columns, n)
            masks.append(self._aim(cache, slice(0, n), rounded(columns, cache), self._positions[part]))
        caches = [cache for cache, _ in self._parts]
        alone = len(caches) == 1 and not any(common for _, _, common in self._runs[0])
        joined = caches[0] if alone else JoinedCache(caches, masks, self._runs)
        return self._run(tokens[:, None], self._positions, masks[-1], joined, self._policies, 1)[:, -1]

    def _decode_padded(self, tokens: Tensor) -> Tensor:
        """`decode` for a power of two of rows, those beyond the last being padding, and columns in coarse steps."""
        n, [cache] = len(tokens), self.caches
        rows = min(power_of_two(n), cache.max_slots)
        window = coarse(self._columns[0])
        cache.reserve(rows, window, n)
        inputs = torch.nn.functional.pad(torch.stack([tokens, self._positions[:, 0]]), (0, rows - n), value=-1)
        new, at = inputs[:, :, None]
        return self._replayed(cache, slice(0, rows), window, self._policies[0], new.clamp(min=0), at)[:n, -1]

    def _replayed(
        self, cache: SlotCache, slots: slice | Tensor, window: int, policy: str, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        """The logits after the last column of `_compute`, which the next call overwrites."""
        if cache.generation != self._graphs_of:
            self._graphs.clear()
            self._graphs_of = cache.generation
        tensors = (tokens, positions, slots) if isinstance(slots, Tensor) else (tokens, positions)

        def compute(tokens: Tensor, positions: Tensor, *some: Tensor) -> Tensor:
            chosen = some[0] if some else slots
            return self._compute(cache, chosen, window, [policy] * len(tokens), 1, tokens, positions)

        return self._graphs.run((len(tensors), *tokens.shape, window, policy), compute, *tensors)

    def _compute(
        self,
        cache: SlotCache,
        slots: slice | Tensor,
        window: int,
        policies: Sequence[str],
        keep: int,
        tokens: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Compute tokens [n, q] of the rows in n slots, which see `window` columns; negative positions are padding."""
        mask = self._aim(cache, slots, window, positions)
        return self._run(tokens, positions.clamp(min=0), mask, cache, policies, keep)

    def _aim(self, cache: SlotCache, slots: slice | Tensor, window: int, positions: Tensor) -> Any:
        """Let the next pass write tokens at `positions` [n, q] of the rows in n slots; the mask with which it reads."""
        every = torch.arange(slots.start, slots.stop, device=self.device) if isinstance(slots, slice) else slots
        cache.aim(slots, window, cache.places(every, positions))
        # A padded query sees column 0, so that its softmax is finite; nobody reads its output.
        mask = visible(positions.clamp(min=0), window, self._hidden, self.shape.dtype)
        if self._window is None:
            return mask
        columns = torch.arange(window, device=positions.device)
        distances = positions[:, None, :, None].clamp(min=0) - columns
        return self._window.masks(mask, distances, self._hidden)

    def _run(
        self, tokens: Tensor, positions: Tensor, mask: Any, cache: Cache, policies: Sequence[str], keep: int
    ) -> Tensor:
        with contextlib.nullcontext() if self._adapters is None else self._adapters.mixed(policies):
            return self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=keep,
            ).logits


def power_of_two(n: int) -> int:
    """The next one that is no less."""
    return 1 << (n - 1).bit_length()


def coarse(columns: int) -> int:
    """So many columns, rounded up to one of a few numbers: at most an eighth more, or two `LENGTH_BLOCK`."""
    block = max(2 * LENGTH_BLOCK, power_of_two(columns) // 16)
    return -(-columns // block) * block


def rounded(columns: int, cache: SlotCache) -> int:
    """So many columns, rounded up to whole blocks where the cache reaches."""
    return min(-(-columns // WINDOW_BLOCK) * WINDOW_BLOCK, cache.length)


def visible(positions: Tensor, window: int, hidden: float, dtype: torch.dtype) -> Tensor:
    """Additive mask [rows, 1, q, window]: a query sees the columns up to its own position."""
    beyond = torch.arange(window, device=positions.device) > positions[:, :, None]
    return torch.zeros(beyond.shape, dtype=dtype, device=positions.device).masked_fill_(beyond, hidden)[:, None]

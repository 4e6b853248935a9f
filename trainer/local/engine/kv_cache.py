"""Keys and values: the slots that the running batch attends to, and the prefixes stored for all further requests.

Invariant: the running rows of a cache fill its slots 0..B-1 without a gap, so that a forward pass reads one view per
layer and copies nothing; what lies beyond a row's own length is finite and masked. A stored prefix was computed with
the weights that its policy has now.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from agl.errors import EngineError
from agl.mdp.types import IntArray
from agl.trainer.local.engine.attention import Part

LENGTH_BLOCK = 128
"""The length of slots is a multiple of this many tokens."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's keys and values look like: `layers` pairs of [heads, head_dim]."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Memory for one token's keys and values in every layer."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


@torch.inference_mode()
def probe_shape(model: Any, device: torch.device, dtype: torch.dtype | None = None) -> KVShape:
    """The shape of a model's keys and values, measured on one token; `dtype` is the one to store them in.

    Raises:
        EngineError: the model keeps something else than the same keys and values in every layer.
    """
    cache = DynamicCache()
    model(
        input_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
        past_key_values=cache,
        use_cache=True,
    )
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    shapes = {None if x is None else tuple(x.shape) for x in tensors}
    shape = next(iter(shapes)) if len(shapes) == 1 else None
    value = tensors[-1] if tensors else None
    if shape is None or value is None or len(shape) != 4:
        raise EngineError(
            f"{type(model).__name__} does not keep the same keys and values in every layer",
            hint="the local engine serves decoder models with ordinary attention (Llama, Qwen, Mistral, ...); "
            "serve this one with vLLM",
        )
    return KVShape(len(cache.layers), shape[1], shape[3], dtype or value.dtype, device)


class SlotCache(Cache):
    """A transformers cache whose rows are slots of one buffer for each layer, [2, slots + 1, heads, length, head_dim].

    `aim` says which slots, how many columns and which places the next forward pass reads and writes. The last slot is
    scratch: padding is written there.

    Attributes:
        generation: another number whenever the buffers are others.
    """

    def __init__(self, shape: KVShape, max_slots: int) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self.max_slots = max_slots
        self.slots = 0
        self.length = self.generation = 0
        self._views: tuple[Tensor, ...] = ()
        self._aimed: tuple[slice, int] | None = None
        self.release()

    def release(self) -> None:
        """Give the memory back; every slot is empty after it."""
        self.slots = self.length = 0
        self._buffers: list[Tensor] = []
        self._flat: tuple[Tensor, ...] = ()
        self._aimed = None
        self._views = ()

    def reserve(self, slots: int, length: int, used: int) -> None:
        """Make room for `slots` rows of `length` tokens; the first `used` slots keep what they hold."""
        if slots <= self.slots and length <= self.length:
            return
        old = self._buffers
        old_slots = self.slots
        old_length = self.length
        if slots > old_slots:
            self.slots = max(slots, min(2 * old_slots, self.max_slots))
        if length > old_length:
            self.length = -(-max(length, 3 * old_length // 2) // LENGTH_BLOCK) * LENGTH_BLOCK
        shape = self.shape
        # What is read and written refers to the old ones.
        self._aimed = None
        self._views = ()
        self._flat = ()
        self.generation += 1
        self._buffers = []
        if not used:
            old.clear()
        for _ in range(shape.layers):
            buffer = _zeros((2, self.slots + 1, shape.heads, self.length, shape.head_dim), shape.dtype, shape.device)
            if used:
                # Let go one by one: both whole would be the most memory that sampling takes.
                buffer[:, :used, :, :old_length] = old.pop(0)[:, :used]
            self._buffers.append(buffer)
        self._flat = tuple(half.view(-1, shape.head_dim) for buffer in self._buffers for half in buffer)

    def places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where keys of tokens at `positions` [n, q] of rows in `slots` [n] go: int64 [n * heads * q]. A negative
        position is padding and goes to the scratch slot."""
        heads = torch.arange(self.shape.heads, device=self.shape.device)
        slot = torch.where(positions < 0, self.slots, slots[:, None])
        row = slot[:, None, :] * self.shape.heads + heads[None, :, None]
        return (row * self.length + positions.clamp(min=0)[:, None, :]).view(-1)

    def aim(self, slots: slice | Tensor, window: int, places: Tensor) -> None:
        """The next forward pass reads columns 0..window-1 of these slots, copied if they are a tensor, and writes to
        `places`."""
        every = slots if isinstance(slots, slice) else slice(0, self.slots + 1)
        self._places, self._picked = places, None if isinstance(slots, slice) else slots
        if self._aimed != (every, window):
            self._aimed = (every, window)
            self._views = tuple(half[every, :, :window] for buffer in self._buffers for half in buffer)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any):
        """Write this pass's keys and values [n, heads, q, head_dim] and return all that its rows attend to."""
        shape = self.shape
        at = 2 * layer_idx
        if key_states.dtype != shape.dtype or value_states.dtype != shape.dtype:
            key_states = key_states.to(shape.dtype)
            value_states = value_states.to(shape.dtype)
        self._flat[at].index_copy_(0, self._places, key_states.reshape(-1, shape.head_dim))
        self._flat[at + 1].index_copy_(0, self._places, value_states.reshape(-1, shape.head_dim))
        keys, values = self._views[at : at + 2]
        if self._picked is None:
            return keys, values
        return keys.index_select(0, self._picked), values.index_select(0, self._picked)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that the next pass reads."""
        return self._aimed[1] if self._aimed else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(columns, offset), for models that call this although they have a mask."""
        return self.get_seq_length(), 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for buffer in self._buffers:
            buffer[:, target, :, :length] = buffer[:, source, :, :length]

    def read(self, slot: int, start: int, end: int) -> Tensor:
        """A copy of tokens start..end-1 of a slot, [2 * layers, heads, end - start, head_dim]."""
        return torch.cat([buffer[:, slot, :, start:end] for buffer in self._buffers])

    def write(self, slot: int, parts: list[Tensor]) -> None:
        """Put what `read` returned, part after part, at a slot's beginning."""
        at = 0
        for part in parts:
            for buffer, layer in zip(self._buffers, part.split(2), strict=True):
                buffer[:, slot, :, at : at + part.shape[2]] = layer
            at += part.shape[2]


class JoinedCache(Cache):
    """Several caches as one, for a pass over the rows of all of them: first those of the first cache.

    Args:
        caches: each aimed at its rows.
        masks: of each, [rows, 1, q, columns].
        runs: of each, its rows by what they have
            in common, as of `common_beginnings`.
    """

    def __init__(self, caches: Sequence[SlotCache], masks: Sequence[Tensor], runs: Sequence[Sequence[Run]]) -> None:
        super().__init__(layers=[])
        self._caches = caches
        self._rows = [len(mask) for mask in masks]
        self._runs = [
            [(first, last, common, mask[first:last, ..., common:]) for first, last, common in some]
            for mask, some in zip(masks, runs, strict=True)
        ]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write this pass's keys and values, and return the parts that its rows attend to, for `grouped_attention`."""
        parts = []
        new = zip(key_states.split(self._rows), value_states.split(self._rows), strict=True)
        for cache, states, runs in zip(self._caches, new, self._runs, strict=True):
            keys, values = cache.update(*states, layer_idx)
            for first, last, n, mask in runs:
                common = (keys[first, :, :n], values[first, :, :n]) if n else None
                parts.append(Part(keys[first:last, :, n:], values[first:last, :, n:], mask, common))
        return parts, parts

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that the longest of the caches reads."""
        return max(cache.get_seq_length() for cache in self._caches)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(columns, offset), for models that call this although they have a mask."""
        return self.get_seq_length(), 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks for zeroed pages, which cost nothing until they are written; torch.zeros writes all of them.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def common_prefix(a: IntArray, b: IntArray) -> int:
    """How many leading tokens two id arrays share."""
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


Run = tuple[int, int, int]
"""Neighbouring rows: the first, the last + 1, and how many tokens all of them begin with."""


def common_beginnings(shared: Sequence[int], least: int, first: int = 0) -> list[Run]:
    """Divide rows into runs that begin alike: first the run that saves most, then likewise the rows before and after.

    Args:
        shared: for each row but the last, how many tokens it and the next one both begin with.
        least: tokens that a run must save, at least 1: those that all begin with x (rows - 1).
        first: number of the first row.
    """
    whole = [(first, first + len(shared) + 1, 0)]
    if sum(shared) < least:
        return whole  # No run saves more. Where nothing is shared, this costs nothing.
    spans = (
        (n * common, start, start + n, common)
        for start in range(len(shared))
        for n, common in enumerate(accumulate(shared[start:], min), start=1)
    )
    saved, start, last, common = max(spans)
    if saved < least:
        return whole
    before = common_beginnings(shared[: start - 1], least, first) if start else []
    after = common_beginnings(shared[last + 1 :], least, first + last + 1) if last < len(shared) else []
    return [*before, (first + start, first + last + 1, common), *after]


@dataclass(slots=True, eq=False)
class PrefixNode:
    """Tokens that were computed together after those of `parent`, and their keys and values; a policy's root has none.

    Attributes:
        ids: int32 [n].
        keys_values: [2 * layers, heads, n, head_dim].
        children: by the bytes of their ids.
        pins: how many running rows keep the node from being evicted.
    """

    parent: PrefixNode | None = None
    ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    keys_values: Tensor = field(default_factory=lambda: torch.empty(0))
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    pins: int = 0


class PrefixTree:
    """The prefixes of all sequences of each policy: a radix tree per policy, at most `max_tokens` tokens in all; the
    least recently used leaf goes first (RadixAttention, arXiv 2312.07104, section 3).

    A node is used whole or not at all. What a sequence computes itself thus begins where one of its own passes would
    have begun without the cache, and the passes, to the last bit of what they give, are the same.

    Attributes:
        tokens: how many it holds.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._roots: dict[str, PrefixNode] = {}
        # A node's children stand before it, because a path is touched from its end.
        self._least_recent: OrderedDict[PrefixNode, None] = OrderedDict()

    def match(self, policy: str, ids: IntArray) -> tuple[PrefixNode, list[Tensor]]:
        """The longest stored prefix that leaves at least one token of `ids`: its last node, and its keys and values in
        parts [2 * layers, heads, n, head_dim]."""
        node = self._roots.setdefault(policy, PrefixNode())
        at = 0
        parts = []
        while True:
            sizes = {child.ids.size for child in node.children.values() if at + child.ids.size < ids.size}
            keys = (ids[at : at + size].tobytes() for size in sorted(sizes, reverse=True))
            child = next((node.children[key] for key in keys if key in node.children), None)
            if child is None:
                self._touch(node)
                return node, parts
            node = child
            at = at + child.ids.size
            parts.append(node.keys_values)

    def extend(self, node: PrefixNode, ids: IntArray, read: Callable[[], Tensor]) -> PrefixNode | None:
        """The node of the tokens `ids` after a node, made from the keys and values that `read` copies where it is new.
        None where memory does not reach."""
        key = ids.tobytes()
        child = node.children.get(key)
        if child is None:
            node.pins += 1
            fits = self._make_room(ids.size)
            node.pins -= 1
            if not fits:
                return None
            child = node.children[key] = PrefixNode(node, ids.copy(), read())
            self.tokens += ids.size
        self._touch(child)
        return child

    def clear(self, policy: str) -> None:
        """Forget a policy's prefixes."""
        nodes = [self._roots.pop(policy, PrefixNode())]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.parent is not None:
                self.tokens -= node.ids.size
                del self._least_recent[node]

    def clear_all(self) -> None:
        """Forget everything."""
        for policy in list(self._roots):
            self.clear(policy)

    def _touch(self, node: PrefixNode) -> None:
        while node.parent is not None:
            self._least_recent[node] = None
            self._least_recent.move_to_end(node)
            node = node.parent

    def _make_room(self, n: int) -> bool:
        """Evict until `n` more tokens fit; False if they cannot."""
        if n > self.max_tokens:
            return False
        while self.tokens + n > self.max_tokens:
            leaf = next((node for node in self._least_recent if not node.children and not node.pins), None)
            if leaf is None:
                return False
            assert leaf.parent is not None
            del leaf.parent.children[leaf.ids.tobytes()]
            del self._least_recent[leaf]
            self.tokens -= leaf.ids.size
        return True

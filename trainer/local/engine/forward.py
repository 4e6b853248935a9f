"""Forward passes of a Hugging Face causal language model over cache slots: prefill of some rows, decode of all.

Invariant: each row sees its own earlier tokens and nothing else, whatever shares the pass with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agl.trainer.local.attention import attention
from agl.trainer.local.engine.attention import GROUPED, agrees
from agl.trainer.local.engine.kv_cache import SlotCache, probe_shape
from agl.trainer.local.lora import Adapters

WINDOW_BLOCK = 16
"""The number of columns that attention reads grows in these steps, so that most steps reuse the last one's views."""


class SlotModel:
    """A model and the slots that it computes in.

    Args:
        model: a `PreTrainedModel`, or what a peft model wraps.
        device: where it is.
        autocast: dtype to compute in, if not the weights' own.
        max_slots: how many rows there can be.
        adapters: of the policies on the model, when it has any.
        like: slots of the same model, whose attention is copied.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        autocast: torch.dtype | None,
        max_slots: int,
        adapters: Adapters | None = None,
        like: SlotModel | None = None,
    ) -> None:
        self.model = model
        self._adapters = adapters
        self.device = device
        self.autocast = autocast
        self._attention = like._attention if like else model.config._attn_implementation
        if like is None and device.type == "cpu" and self._attention == "eager" and agrees(model, device):
            self._attention = GROUPED
        self.shape = probe_shape(model, device, autocast)
        self.cache = SlotCache(self.shape, max_slots)
        self._hidden = torch.finfo(self.shape.dtype).min
        self._columns = 0
        self._window = 0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """No gradients, the dtype and the attention to compute with. Every other method must be called inside."""
        with torch.inference_mode(), attention(self.model.config, self._attention):
            if self.autocast is None:
                yield
            else:
                with torch.autocast(self.device.type, dtype=self.autocast):
                    yield

    def prefill(
        self,
        first: int,
        ids: Sequence[np.ndarray[Any, Any]],
        starts: Sequence[int],
        policies: Sequence[str],
        keep: int = 1,
    ) -> Tensor:
        """Compute new tokens of the rows in slots `first`.. .

        Args:
            policies: per row, the policy that it belongs to.
            ids: per row, its new tokens; the rows are padded at the left to the longest.
            starts: per row, the position of its first new token; what comes before is in its slot already.
            keep: logits are returned for the last `keep` columns; 0 = all.

        Returns:
            Logits [rows, columns, V].
        """
        width = max(row.size for row in ids)
        tokens = np.zeros((len(ids), width), np.int64)
        positions = np.full((len(ids), width), -1, np.int64)
        for i, (row, start) in enumerate(zip(ids, starts, strict=True)):
            tokens[i, width - row.size :] = row
            positions[i, width - row.size :] = np.arange(start, start + row.size)
        window = self._rounded(int(positions[:, -1].max()) + 1)
        at = torch.from_numpy(positions).to(self.device)
        last = first + len(ids)
        self.cache.aim(first, last, window, self.cache.places(torch.arange(first, last, device=self.device), at))
        # A padded query sees column 0, so that its softmax is finite; nobody reads its output.
        at = at.clamp_(min=0)
        return self._run(torch.from_numpy(tokens).to(self.device), at, self._mask(at, window), policies, keep)

    def begin_decode(self, lengths: Sequence[int], policies: Sequence[str]) -> None:
        """The next `decode` feeds the rows of slots 0..B-1, which hold `lengths` tokens and are those policies'."""
        self._policies = list(policies)
        self._positions = torch.tensor(lengths, device=self.device)[:, None] - 1
        self._columns = max(lengths)
        self._window = 0

    def decode(self, tokens: Tensor) -> Tensor:
        """Feed one token [B] to each row; the logits that follow, [B, V]."""
        self._positions.add_(1)
        self._columns += 1
        if self._columns > self._window:
            rows = self._positions.shape[0]
            self.cache.reserve(rows, self._columns, rows)
            self._window = self._rounded(self._columns)
            self._places = self.cache.places(torch.arange(rows, device=self.device), self._positions)
            self._decode_mask = self._mask(self._positions, self._window)
            self._flat_mask = self._decode_mask.view(-1)
            self._newest = torch.arange(rows, device=self.device) * self._window + self._positions[:, 0]
        else:
            self._places.add_(1)
            self._newest.add_(1)
            self._flat_mask.index_fill_(0, self._newest, 0.0)
        self.cache.aim(0, tokens.shape[0], self._window, self._places)
        return self._run(tokens[:, None], self._positions, self._decode_mask, self._policies, 1)[:, -1]

    def _rounded(self, columns: int) -> int:
        return min(-(-columns // WINDOW_BLOCK) * WINDOW_BLOCK, self.cache.length)

    def _mask(self, positions: Tensor, window: int) -> Tensor:
        """Additive mask [rows, 1, q, window]: a query sees the columns up to its own position."""
        hidden = torch.arange(window, device=self.device) > positions[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.shape.dtype, device=self.device)
        return mask.masked_fill_(hidden, self._hidden)[:, None]

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor, policies: Sequence[str], keep: int) -> Tensor:
        with contextlib.nullcontext() if self._adapters is None else self._adapters.mixed(policies):
            return self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=keep,
            ).logits

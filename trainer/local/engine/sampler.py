"""Drawing tokens: temperature, top-k and top-p over a batch of rows, each with its own random stream.

Invariant: the log-prob returned with a token is float32, under exactly the distribution that the token was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agl.trainer.engines.base import Sampling
from agl.trainer.local.precision import wide

_BLOCK = 64
_BELOW_ONE = 1.0 - 2.0**-40


class UniformStream:
    """The uniform numbers of one request, one per token: NumPy's Philox keyed by the request's seed."""

    __slots__ = ("_at", "_block", "_generator")

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(seed))
        self._block: list[float] = []
        self._at = 0

    def next(self) -> float:
        """The next number in [0, 1)."""
        if self._at == len(self._block):
            self._block = self._generator.random(_BLOCK).tolist()
            self._at = 0
        self._at += 1
        return self._block[self._at - 1]


@dataclass(frozen=True, slots=True, eq=False)
class Warp:
    """The sampling parameters of B rows as tensors; None where no row needs the step.

    Attributes:
        temperature: float32 [B, 1].
        top_k: int64 [B, 1].
        top_p: float32 [B, 1].
        greedy: bool [B].
    """

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    greedy: Tensor | None

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> Warp:
        """The parameters of these rows. A greedy row (temperature 0) keeps the model's own distribution."""

        def column(values: list[Any], neutral: Any, dtype: torch.dtype) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [s.temperature == 0 for s in samplings]
        return cls(
            temperature=column([s.temperature or 1.0 for s in samplings], 1.0, torch.float32),
            top_k=column(
                [0 if g else s.top_k for s, g in zip(samplings, greedy, strict=True)],
                0,
                torch.int64,
            ),
            top_p=column([1.0 if g else s.top_p for s, g in zip(samplings, greedy, strict=True)], 1.0, torch.float32),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        )

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-probs of the distribution to draw from, float32 [B, V]; -inf for what top-k and top-p exclude.

        The order is temperature, top-k, top-p on what top-k left, then renormalise. The nucleus is the smallest set of
        most likely tokens whose probability reaches top_p.
        """
        logits = logits.float()
        if self.temperature is not None:
            logits = logits / self.temperature
        if self.top_k is None and self.top_p is None:
            return torch.log_softmax(logits, dim=-1)
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        drop = torch.zeros_like(ordered, dtype=torch.bool)
        if self.top_k is not None:
            drop |= (torch.arange(ordered.shape[-1], device=ordered.device) >= self.top_k) & (self.top_k > 0)
        if self.top_p is not None:
            probs = torch.softmax(wide(ordered.masked_fill(drop, -torch.inf)), dim=-1)
            before = torch.cumsum(probs, dim=-1) - probs
            drop |= (before >= self.top_p.to(before.device)).to(drop.device) & (self.top_p < 1.0)
        allowed = logits.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), -torch.inf)
        return torch.log_softmax(allowed, dim=-1)

    def draw(self, logprobs: Tensor, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B] by inverse CDF at `uniforms` (argmax for greedy rows), and their log-probs float32 [B]."""
        # In float32 the sum over a large vocabulary is off by more than the probability of rare tokens.
        cdf = torch.cumsum(wide(logprobs.exp()), dim=-1)
        at = torch.tensor(uniforms, dtype=torch.float64).to(cdf.device)[:, None].clamp_(max=_BELOW_ONE)
        # right=True skips the empty steps of the CDF, the tokens of probability 0.
        tokens = torch.searchsorted(cdf, at * cdf[:, -1:], right=True).clamp_(max=logprobs.shape[-1] - 1)
        tokens = tokens.to(logprobs.device)
        if self.greedy is not None:
            tokens = torch.where(self.greedy[:, None], logprobs.argmax(dim=-1, keepdim=True), tokens)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def most_likely(logprobs: Tensor, n: int) -> list[tuple[int, float]]:
    """The `n` most likely tokens of one row's log-probs [V] that can be drawn at all, most likely first."""
    values, ids = torch.topk(logprobs, min(n, logprobs.shape[-1]))
    return [(i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True) if v > -torch.inf]


class StopTexts:
    """Watches one answer for its stop texts as tokens come.

    Args:
        stops: the texts, at least one.
        decode: ids -> text.
    """

    __slots__ = ("_decode", "_recent", "_stops", "_window")

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        # A text of n bytes spans at most n tokens; the rest is for tokens that decode to nothing.
        self._window = max(len(s.encode()) for s in stops) + 8
        self._recent: list[int] = []

    def add(self, token: int) -> bool:
        """Take the next token; whether it completes a stop text."""
        self._recent.append(token)
        del self._recent[: -self._window]
        text = self._decode(self._recent)
        return any(stop in text for stop in self._stops)

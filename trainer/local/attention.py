"""Attentions of our own in transformers' models: how one is switched on for a while, and what makes it refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

_IRRELEVANT = {"position_ids", "use_cache", "cache_position", "output_attentions", "is_causal"}
"""Arguments that change nothing where a mask is passed."""


@contextlib.contextmanager
def attention(config: Any, implementation: str) -> Iterator[None]:
    """Compute with another attention for a while; the model's configuration is as before after it."""
    before = config._attn_implementation
    if before == implementation:
        yield
        return
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def require_plain(mask: object, dropout: float, others: Mapping[str, Any], *, irrelevant: str = "") -> None:
    """Raise `NotImplementedError` where a model wants more than softmax(q k) v under a mask: a soft cap, sinks, ...

    Args:
        others: what its attention module passes in addition.
        irrelevant: one more of them that changes nothing.
    """
    unknown = [name for name, value in others.items() if value is not None and name not in {*_IRRELEVANT, irrelevant}]
    if unknown or mask is None or dropout:
        raise NotImplementedError(f"attention with {', '.join(unknown) or 'no mask, or dropout'}")

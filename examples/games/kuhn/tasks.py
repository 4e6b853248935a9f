"""The tasks are the six deals. None can be held out: what is measured is the strategy, in every situation."""

from __future__ import annotations

from typing import Any

from examples.games.kuhn.rules import DEALS


def deals(n: int) -> list[dict[str, Any]]:
    """`n` games, numbered: each deal equally often, where `n` is a multiple of six."""
    return [{"game": k, "cards": list(DEALS[k % len(DEALS)])} for k in range(n)]

"""Where an answer reasons, by the marks around it: what parsers read, and what grammars allow."""

from __future__ import annotations

from typing import Literal

THINK = "<think>"
END_THINK = "</think>"


def reasoning_state(prompt: str) -> Literal["none", "possible", "open"]:
    """Whether a model that reasons does so at the beginning of its answer.

    Args:
        prompt: its last characters, at least those of a mark and the space after it.

    Returns:
        "open" after a prompt that begins the reasoning, "none" after one that ends it, else "possible".
    """
    before = prompt.rstrip()
    return "open" if before.endswith(THINK) else "none" if before.endswith(END_THINK) else "possible"

"""Names and texts of agents, tools and files on a terminal: what they say is shown, and nothing of it is obeyed."""

from __future__ import annotations

import unicodedata

_CONTROL = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of invisible characters that move, hide or turn text, and of halves of characters."""


def printable(text: str) -> str:
    """Text that cannot control a terminal: control and bidirectional characters become escapes (`\\x1b`, `\\u202e`).

    Line breaks and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _CONTROL else ascii(c)[1:-1] for c in text)

"""Names and texts of agents, tools and files on a terminal, shown and never obeyed; and texts of docstrings."""

from __future__ import annotations

import re
import textwrap
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


def docstring_items(section: str) -> list[tuple[str, str]]:
    """Name and text of each item of a docstring's "Args", "Attributes" or "Raises"; a text without a name has "".

    A line may hold several items, "a, b: text" and "a: text. b: text".
    """
    names, items = r"[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*", []
    # A line that is indented further continues the item before it.
    for line in re.sub(r"\n +", " ", textwrap.dedent(section)).split("\n"):
        for part in re.split(rf"(?<=\.) (?={names}: )", line.strip()):
            match = re.fullmatch(rf"({names}): (.*)", part)
            items += [(name, match[2]) for name in match[1].split(", ")] if match else [("", part)] if part else []
    return items

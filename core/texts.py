"""Names and texts of agents, tools and files on a terminal, shown and never obeyed; and texts of docstrings."""

from __future__ import annotations

import re
import textwrap
import unicodedata

_CONTROL = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of invisible characters that move, hide or turn text, and of halves of characters."""
_ENCODED = re.compile(r"[A-Za-z0-9+/_=-]{2000,}")
"""A file in base64, such as an image in a message."""
_BEGINNING = 40
_LONGEST = 100_000
"""How many characters of one text a terminal is given."""


def printable(text: str) -> str:
    """Text that cannot control a terminal: control and bidirectional characters become escapes (`\\x1b`, `\\u202e`).

    Line breaks and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _CONTROL else ascii(c)[1:-1] for c in text)


def shortened(text: str) -> str:
    """Text for a person to read: of files in base64, such as images, and of very long texts only the beginning."""

    def beginning(found: re.Match[str]) -> str:
        return f"{found[0][:_BEGINNING]}... ({len(found[0]):,} characters)"

    text = _ENCODED.sub(beginning, text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def docstring_items(section: str) -> list[tuple[str, str]]:
    """Name and text of each item of a docstring's "Args", "Attributes" or "Raises"; a text without a name has "".

    A line may hold several items, "a, b: text" and "a: text. b: text".
    """
    names = r"[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*"
    items = []
    # A line that is indented further continues the item before it.
    for line in re.sub(r"\n +", " ", textwrap.dedent(section)).split("\n"):
        for part in re.split(rf"(?<=\.) (?={names}: )", line.strip()):
            match = re.fullmatch(rf"({names}): (.*)", part)
            items += [(name, match[2]) for name in match[1].split(", ")] if match else [("", part)] if part else []
    return items

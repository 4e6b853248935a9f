"""The fenced code blocks of a text, in time linear in its length: a policy writes the text."""

from __future__ import annotations

from collections.abc import Callable

FENCE = "```"


def fenced(text: str, accepts: Callable[[str], bool] = lambda info: True) -> list[tuple[str, str]]:
    """(info, body) of each block: what stands after the opening fence on its line, and the lines up to the next fence.

    Args:
        accepts: whether a fence followed by this info opens a block; another one is plain text.
    """
    blocks: list[tuple[str, str]] = []
    at = 0
    line = -1
    while (start := text.find(FENCE, at)) >= 0:
        inside = start + len(FENCE)
        if line < inside:
            line = text.find("\n", inside)
        if line < 0:
            break
        info = text[inside : min(line, inside + 100)].strip()
        if not accepts(info):
            at = inside
            continue
        end = text.find(FENCE, line + 1)
        if end < 0:
            break
        blocks.append((info, text[line + 1 : end]))
        at = end + len(FENCE)
    return blocks

"""docs/plan.md: its first command prints what stands below it."""

from __future__ import annotations

import documents
from plan_page import printed, shown_below


def test_the_example_prints_what_the_page_shows() -> None:
    [block] = [b for b in documents.blocks() if b.page == "docs/plan.md" and "--tool 0.5" in b.text and b.language]
    assert printed(block.text) == shown_below(block)

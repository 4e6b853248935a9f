"""The commands of docs/plan.md, and the outputs below them."""

from __future__ import annotations

import documents
from typer.testing import CliRunner

from agl.trainer.cli.app import app


def printed(script: str) -> list[str]:
    """The words that the `agl` commands of a script print."""
    words: list[str] = []
    for program, *arguments in documents.commands(script):
        if program == "agl":
            words += CliRunner().invoke(app, arguments, catch_exceptions=False).stdout.split()
    return words


def shown_below(block: documents.Block) -> list[str]:
    """The words of the block after a block."""
    [below] = [b for b in documents.blocks() if b.page == block.page and b.number == block.number + 1]
    assert below.language == "text"
    return below.text.split()

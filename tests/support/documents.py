"""What the documents show: their fenced blocks, how each is proved, and the commands in them.

A block is run by the tests, unless a comment stands right before it:

    <!-- run by: tests/unit/test_x.py::test_y -->      that test runs it, or what it shows
    <!-- not run: needs a GPU -->                      nobody does, and why

A comment "all run by: ..." says so of every block of its page but for shells and output.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paths import ROOT

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (?P<kind>run by|not run): (?P<what>[^>]+?) -->\s*$")
PAGE_MARK = re.compile(r"<!-- all run by: (.+?) -->")
SHELLS = ("bash", "sh")


def pages() -> list[Path]:
    """The documents that users read."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted([*found, *(ROOT / "examples").rglob("README.md"), *(ROOT / "deploy").rglob("*.md")])


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: relative to the root. number: among the page's blocks, from 1. language: "" where none is given.
        kind, what: of the comment before it, or "".
    """

    page: str
    number: int
    language: str
    text: str
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.page}, block {self.number}"


def blocks() -> Iterator[Block]:
    for page in pages():
        text = page.read_text()
        whole = PAGE_MARK.search(text)
        for number, fence in enumerate(FENCE.finditer(text), 1):
            mark = MARK.search(text[: fence.start()])
            kind, what = (mark["kind"], mark["what"]) if mark else ("", "")
            if whole and not mark and fence["language"] not in ("", "text", *SHELLS):
                kind, what = "run by", whole[1]
            body = re.sub(rf"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE)
            yield Block(str(page.relative_to(ROOT)), number, fence["language"], body, kind, what)


def inline_commands() -> Iterator[tuple[str, str]]:
    """(page, command) for each `agl ...` or `python FILE ...` within a text, and for lines indented as code."""
    for page in pages():
        text = FENCE.sub("", page.read_text())
        name = str(page.relative_to(ROOT))
        found = re.findall(r"`((?:agl|python) [a-z-][^`]*)`|^    ((?:agl|python|pytest) .+)$", text, re.MULTILINE)
        yield from ((name, " ".join((quoted or indented).split())) for quoted, indented in found)


ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S*")


def commands(script: str) -> Iterator[list[str]]:
    """The simple commands of a shell script, as words, without assignments before them."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                while words and ASSIGNMENT.fullmatch(words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []
            else:
                words.append(word)

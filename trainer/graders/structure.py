"""Graders of an answer's form: its structure, and signs of depth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from agl.errors import ConfigError
from agl.options import checked_options
from agl.rewards.trace import Trace
from agl.trainer.graders.base import Grader
from agl.trainer.graders.fields import text_of


@checked_options
@dataclass(frozen=True, kw_only=True)
class Structure(Grader):
    """How much of a required structure an answer has, 0 to 1: the mean over the requirements.

    A count is met in proportion (one heading of two is 0.5); tags, sections and patterns each on their own; a length
    fully within its bounds and in proportion outside. Markdown is parsed by markdown-it: a "#" in a code block is no
    heading. The default requirements are a heading, two paragraphs and a list item.

    Attributes:
        headings, paragraphs, list_items, code_blocks: the fewest of each.
        sections: headings that must be present, in any case.
        tags: XML tags (`("think", "answer")`) that must be present once each, closed, and in this order.
        patterns: regular expressions, each of which must match.
        min_words, max_words: bounds of the length.
    """

    needs = ("markdown_it",)

    headings: int = 0
    paragraphs: int = 0
    list_items: int = 0
    code_blocks: int = 0
    sections: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    patterns: tuple[str | re.Pattern[str], ...] = ()
    min_words: int | None = None
    max_words: int | None = None

    def __post_init__(self) -> None:
        if self.min_words is not None and self.max_words is not None and self.min_words > self.max_words:
            raise ConfigError(f"Structure(min_words={self.min_words}, max_words={self.max_words})")
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"Structure cannot read the pattern {pattern!r}: {error}") from error

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """The mean over the requirements."""
        text = text_of(output)
        if not text.strip():
            return 0.0
        counts = {name: getattr(self, name) for name in ("headings", "paragraphs", "list_items", "code_blocks")}
        others = (*self.sections, *self.tags, *self.patterns)
        if not (any(counts.values()) or others or self.min_words or self.max_words is not None):
            counts = {"headings": 1, "paragraphs": 2, "list_items": 1}
        elements, titles = _elements(text) if any(counts.values()) or self.sections else ({}, [])
        met = [min(elements[name] / count, 1.0) for name, count in counts.items() if count > 0]
        met += [float(section.strip().lower() in titles) for section in self.sections]
        met += _tags(text, self.tags)
        met += [float(re.search(pattern, text) is not None) for pattern in self.patterns]
        words = len(text.split())
        if self.min_words:
            met.append(min(words / self.min_words, 1.0))
        if self.max_words is not None:
            met.append(1.0 if words <= self.max_words else self.max_words / words)
        return sum(met) / len(met)


@checked_options
@dataclass(frozen=True, kw_only=True)
class Depth(Grader):
    """Signs that an English answer goes into depth, 0 to 1: the mean of examples, reasoning and specificity.

    Each is counted up to its option: examples ("for example", "such as", code blocks), connectives of reasoning
    ("because", "therefore", steps), and specifics (numbers, quotations, names) per sentence. A heuristic that a policy
    can learn to please: give it a small weight next to a grader of the content.

    Attributes:
        examples, reasoning: the counts that grade 1.
        specifics: the count per sentence that grades 1.
    """

    examples: int = 2
    reasoning: int = 3
    specifics: float = 1.0

    def __post_init__(self) -> None:
        if not (self.examples > 0 and self.reasoning > 0 and self.specifics > 0):
            raise ConfigError("Depth: examples, reasoning and specifics are more than 0")

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """The mean of the three."""
        text = text_of(output)
        if not text.strip():
            return 0.0
        sentences = max(1, len(_SENTENCE.findall(text)))
        return (
            min(len(_EXAMPLE.findall(text)) / self.examples, 1.0)
            + min(len(_REASON.findall(text)) / self.reasoning, 1.0)
            + min(len(_SPECIFIC.findall(text)) / sentences / self.specifics, 1.0)
        ) / 3


_EXAMPLE = re.compile(r"\b(?:for example|for instance|such as|e\.g\.|consider|imagine)|^```\w", re.I | re.M)
_REASON = re.compile(
    r"\b(?:because|therefore|thus|hence|since|so that|as a result|it follows|which means|consequently|"
    r"in contrast|however|if\b[^.\n]{1,80}\bthen|step \d+)\b",
    re.I,
)
_SPECIFIC = re.compile(r"\d+(?:[.,]\d+)*|\"[^\"\n]{2,80}\"|`[^`\n]{1,80}`|(?<=[a-z,;] )[A-Z][a-z]+")
_SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]?")


@cache
def _markdown() -> Any:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark")


def _elements(text: str) -> tuple[dict[str, int], list[str]]:
    """The number of each element in a Markdown text, and its headings' texts in lower case."""
    counts = {"headings": 0, "paragraphs": 0, "list_items": 0, "code_blocks": 0}
    names = {
        "heading_open": "headings",
        "list_item_open": "list_items",
        "fence": "code_blocks",
        "code_block": "code_blocks",
    }
    titles: list[str] = []
    tokens = _markdown().parse(text)
    for i, token in enumerate(tokens):
        if token.type in names:
            counts[names[token.type]] += 1
        elif token.type == "paragraph_open" and token.level == 0:
            counts["paragraphs"] += 1
        if token.type == "heading_open":
            titles.append(tokens[i + 1].content.strip().rstrip(":").lower())
    return counts, titles


def _tags(text: str, tags: tuple[str, ...]) -> list[float]:
    """For each tag whether it is present once, closed, and after the previous one."""
    met = []
    position = 0
    for tag in tags:
        opened = text.find(f"<{tag}>", position)
        closed = text.find(f"</{tag}>", position)
        once = text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1
        valid = once and 0 <= opened < closed
        met.append(float(valid))
        if valid:
            position = closed
    return met

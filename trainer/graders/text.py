"""Graders of texts: equality, similarity, shared words, containment, patterns."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal

from agl.errors import ConfigError
from agl.options import checked_options
from agl.rewards.trace import Trace
from agl.trainer.graders.base import AgainstReference, Grader
from agl.trainer.graders.fields import references, text_of

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalised(text: str, *, case: bool, whitespace: bool, punctuation: bool, articles: bool) -> str:
    """A text in NFC without the differences to ignore: case, runs of whitespace, ASCII punctuation, articles."""
    text = unicodedata.normalize("NFC", text)
    if case:
        text = unicodedata.normalize("NFC", text.lower())
    if punctuation:
        text = text.translate(_NO_PUNCTUATION)
    if articles:
        text = _ARTICLES.sub(" ", text)
    return " ".join(text.split()) if whitespace or articles else text


def squad(text: str) -> str:
    """The normal form of SQuAD's evaluation: lower case, no ASCII punctuation, no articles, single spaces.

    Source: Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1.
    """
    return normalised(text, case=True, whitespace=True, punctuation=True, articles=True)


@dataclass(frozen=True, kw_only=True)
class _Normalising(AgainstReference):
    ignore_case: bool = True
    ignore_whitespace: bool = True
    ignore_punctuation: bool = False
    ignore_articles: bool = False

    def normal(self, text: str) -> str:
        return normalised(
            text,
            case=self.ignore_case,
            whitespace=self.ignore_whitespace,
            punctuation=self.ignore_punctuation,
            articles=self.ignore_articles,
        )


@checked_options
@dataclass(frozen=True, kw_only=True)
class ExactMatch(_Normalising):
    """1 if the output is a reference, else 0; compared in NFC.

    Attributes:
        ignore_case, ignore_whitespace (runs of it, and around), ignore_punctuation (ASCII), ignore_articles (English):
            differences that do not count.
    """

    def compare(self, text: str, reference: str) -> float:
        """1 or 0."""
        return float(self.normal(text) == self.normal(reference))


@checked_options
@dataclass(frozen=True, kw_only=True)
class FuzzyMatch(_Normalising):
    """How alike the output and a reference are, 0 to 1, by rapidfuzz.

    Attributes:
        scorer: "ratio" (edits, in order), "partial" (the best place in the longer text), "token_sort" (words in any
            order), "token_set" (words in any order, however often), "weighted" (rapidfuzz's mixture of them).
        threshold: a lower similarity counts as 0.
        ignore_case, ignore_whitespace, ignore_punctuation, ignore_articles: as in `ExactMatch`.
    """

    needs = ("rapidfuzz",)

    scorer: Literal["ratio", "partial", "token_sort", "token_set", "weighted"] = "ratio"
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if self.scorer not in ("ratio", "partial", "token_sort", "token_set", "weighted"):
            raise ConfigError(
                f"FuzzyMatch has no scorer {self.scorer!r}", hint="ratio, partial, token_sort, token_set or weighted"
            )
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"FuzzyMatch(threshold={self.threshold!r})", hint="a number from 0 to 1")

    @cached_property
    def _score(self) -> Callable[[str, str], float]:
        from rapidfuzz import fuzz

        return {
            "ratio": fuzz.ratio,
            "partial": fuzz.partial_ratio,
            "token_sort": fuzz.token_sort_ratio,
            "token_set": fuzz.token_set_ratio,
            "weighted": fuzz.WRatio,
        }[self.scorer]

    def compare(self, text: str, reference: str) -> float:
        """Similarity, 0 below the threshold. Equal texts have similarity 1, also empty ones."""
        left = self.normal(text)
        right = self.normal(reference)
        value = 1.0 if left == right else self._score(left, right) / 100
        return value if value >= self.threshold else 0.0


@checked_options
@dataclass(frozen=True, kw_only=True)
class TokenF1(AgainstReference):
    """F1 of the words that output and reference share, 0 to 1, counted as SQuAD's evaluation does.

    Two texts without a word are equal. Source: Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1; for empty answers
    Rajpurkar et al. 2018, arXiv:1806.03822.
    """

    def compare(self, text: str, reference: str) -> float:
        """Harmonic mean of precision and recall over the multisets of words."""
        left = squad(text).split()
        right = squad(reference).split()
        if not left or not right:
            return float(left == right)
        shared = sum((Counter(left) & Counter(right)).values())
        return 2 * shared / (len(left) + len(right))


@checked_options
@dataclass(frozen=True, kw_only=True)
class Contains(_Normalising):
    """Whether the output contains the references: 1 or 0 for `require="any"`, the share of them for "all".

    Attributes:
        require: "any" reference is enough, or "all" count.
        whole_words: "4" is not in "42".
        ignore_case, ignore_whitespace, ignore_punctuation, ignore_articles: as in `ExactMatch`.
    """

    require: Literal["any", "all"] = "any"
    whole_words: bool = True

    def __post_init__(self) -> None:
        if self.require not in ("any", "all"):
            raise ConfigError(f"Contains(require={self.require!r})", hint='"any" or "all"')

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """The share of references that the output contains, or whether it contains any."""
        expected = references(task, self.answer, self.label)
        if output is None:
            return 0.0
        values = [self.compare(text_of(output), reference) for reference in expected]
        return max(values) if self.require == "any" else sum(values) / len(values)

    def compare(self, text: str, reference: str) -> float:
        """1 or 0."""
        whole = self.normal(text)
        part = self.normal(reference)
        if not self.whole_words:
            return float(part in whole)
        return float(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", whole) is not None)


@checked_options
@dataclass(frozen=True)
class RegexMatch(Grader):
    """1 if the output matches a pattern, else 0.

    Attributes:
        pattern: a regular expression, compiled or not. Its time is not limited.
        full: whether the whole output must match, not a part of it.
    """

    pattern: str | re.Pattern[str]
    _: KW_ONLY
    full: bool = False

    def __post_init__(self) -> None:
        try:
            _ = self._compiled
        except re.error as error:
            raise ConfigError(f"RegexMatch cannot read the pattern {self.pattern!r}: {error}") from error

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """1 or 0."""
        if output is None:
            return 0.0
        match = self._compiled.fullmatch if self.full else self._compiled.search
        return float(match(text_of(output)) is not None)

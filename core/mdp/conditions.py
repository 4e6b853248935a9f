"""Conditions on the rewards of a rollout, written as comparisons: `(agl.reward() >= 1) & (agl.reward("length") < 0.2)`.

Invariant: a rollout without a reward of that name fulfils neither a comparison nor its opposite.
"""

from __future__ import annotations

import json
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from agl.errors import ConfigError
from agl.mdp.builder import AttemptTrajectory

TOTAL = "reward"
"""What the sum of all primary rewards is called in texts."""

_OPPOSITE = {">=": "<", "<": ">=", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_TOKEN = re.compile(
    r"""\s*(?:(?P<compare>[<>=!]=|=|<|>)|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])"""
    r"""|(?P<quoted>"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")|(?P<name>[^\W\d][\w./:-]*)|(?P<sign>&&?|\|\|?|[~!()]))"""
)
_WORDS = {"and": "&", "or": "|", "not": "~", "&&": "&", "||": "|", "!": "~"}
_EXAMPLE = 'for example "reward>=1" or "correct>=1 & length<0.2"'


class Condition(ABC):
    """Whether a rollout is wanted, by its rewards; made by comparing `agl.reward()`.

    Combined with `&`, `|` and `~`. `str` of it is a text that `parse` reads.
    """

    @abstractmethod
    def __call__(self, attempt: AttemptTrajectory) -> bool:
        """Whether this attempt's rewards fulfil the condition."""

    @abstractmethod
    def __invert__(self) -> Condition: ...

    def __and__(self, other: Condition) -> Condition:
        return _combined("&", self, other)

    def __or__(self, other: Condition) -> Condition:
        return _combined("|", self, other)

    def __bool__(self) -> NoReturn:
        raise ConfigError(
            f"the condition {self} has no truth value",
            hint="combine conditions with & | ~ instead of and, or, not; write (0 < r) & (r < 1) instead of 0 < r < 1",
        )


@dataclass(frozen=True, slots=True)
class Comparison(Condition):
    """A reward compared with a number; False where the rollout has no such reward.

    Attributes:
        name: of the reward; None for the sum of all primary ones.
        relation: ">=", ">", "<=", "<", "==" or "!=".
        value: the number.
    """

    name: str | None
    relation: str
    value: float

    def __call__(self, attempt: AttemptTrajectory) -> bool:
        value = RewardTerm(self.name)(attempt)
        return value is not None and _COMPARE[self.relation](value, self.value)

    def __invert__(self) -> Condition:
        return Comparison(self.name, _OPPOSITE[self.relation], self.value)

    def __str__(self) -> str:
        return f"{RewardTerm(self.name)} {self.relation} {repr(self.value).removesuffix('.0')}"


@dataclass(frozen=True, slots=True)
class Combination(Condition):
    """All of the parts ("&"), or at least one of them ("|")."""

    sign: str
    parts: tuple[Condition, ...]

    def __call__(self, attempt: AttemptTrajectory) -> bool:
        return (all if self.sign == "&" else any)(part(attempt) for part in self.parts)

    def __invert__(self) -> Condition:
        return Combination("|" if self.sign == "&" else "&", tuple(~part for part in self.parts))

    def __str__(self) -> str:
        return f" {self.sign} ".join(f"({p})" if isinstance(p, Combination) else str(p) for p in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class RewardTerm:
    """A reward of a rollout, to be compared with a number.

    Attributes:
        name: of the reward; None for the sum of all primary ones.
    """

    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            raise ConfigError(
                f"agl.reward() has no reward {self.name!r}",
                hint="give the reward's name, or nothing for the sum of all primary rewards",
            )

    def __call__(self, attempt: AttemptTrajectory) -> float | None:
        """The sum of the rewards of this name, wherever they were earned; None if there is none."""
        if self.name is None:
            return attempt.reward
        values = [reward.value for reward, _ in attempt.credited if reward.name == self.name]
        return float(sum(values)) if values else None

    def __ge__(self, value: float) -> Condition:
        return self._compared(">=", value)

    def __gt__(self, value: float) -> Condition:
        return self._compared(">", value)

    def __le__(self, value: float) -> Condition:
        return self._compared("<=", value)

    def __lt__(self, value: float) -> Condition:
        return self._compared("<", value)

    def __eq__(self, value: float) -> Condition:  # type: ignore[override]
        return self._compared("==", value)

    def __ne__(self, value: float) -> Condition:  # type: ignore[override]
        return self._compared("!=", value)

    __hash__ = None  # type: ignore[assignment]

    def _compared(self, relation: str, value: Any) -> Condition:
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise ConfigError(f"the reward {self} is compared with {value!r}", hint="compare it with a number")
        return Comparison(self.name, relation, number)

    def _combined(self, _: Any) -> NoReturn:
        raise ConfigError(
            f"& or | stands next to the reward {self} instead of between conditions",
            hint="put each comparison in parentheses: (agl.reward() >= 1) & (agl.reward('length') < 0.2)",
        )

    __and__ = __rand__ = __or__ = __ror__ = _combined

    def __str__(self) -> str:
        if self.name is None:
            return TOTAL
        token = _TOKEN.fullmatch(self.name)
        plain = token is not None and token["name"] == self.name and self.name not in {TOTAL, *_WORDS}
        return self.name if plain else json.dumps(self.name)


def reward(name: str | None = None) -> RewardTerm:
    """The sum of a rollout's primary rewards, or of those of one name; a comparison with a number is a `Condition`.

    Args:
        name: a reward's name, as in `agl.emit_reward({"correct": 1.0, "length": 0.1})`; its parts count whether
            they are primary or not.

    Raises:
        ConfigError: the name is no text, or the reward is compared with something else than a number.

    Examples:
        >>> print((agl.reward() >= 1) & (agl.reward("length") < 0.2))
        reward >= 1 & length < 0.2
    """
    return RewardTerm(name)


Where = Condition | str | Callable[[AttemptTrajectory], bool] | None
"""Which rollouts are wanted: a condition, its text, or any function of an attempt; None wants all."""


def condition(where: Where, *, option: str = "where") -> Callable[[AttemptTrajectory], bool] | None:
    """The predicate that `where=` describes; None wants everything.

    Args:
        where: as above.
        option: the option's name in errors.

    Raises:
        ConfigError: it is none of these, or a text that is no condition.
    """
    if isinstance(where, str):
        return parse(where, option=option)
    if isinstance(where, RewardTerm) or not (where is None or callable(where)):
        raise ConfigError(
            f"{option}= is {where}, not a condition",
            hint="compare a reward: agl.reward() >= 1, or 'reward>=1'",
        )
    return where


def parse(text: str, *, option: str = "where") -> Condition:
    """The condition that a text describes: `reward` (the sum) or a name, a comparison, a number; `&`, `|`, `~` (or
    `and`, `or`, `not`) and parentheses. Names with other characters, or named like a word of this language, stand in
    double quotes, as in JSON.

    Raises:
        ConfigError: the text is no condition; says where.
    """
    tokens: list[tuple[str, str]] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise ConfigError(f"{option} is {text!r}: cannot read {text[at:].strip()!r}", hint=_EXAMPLE)
        kind = str(match.lastgroup)
        word = match[str(match.lastgroup)]
        if kind in ("sign", "name") and word in _WORDS:
            kind = "sign"
            word = _WORDS[word]
        tokens.append((kind, word))
        at = match.end()
    result, rest = _alternatives([*tokens, ("end", "the end")], option, text)
    if rest[0][0] != "end":
        raise ConfigError(f"{option} is {text!r}: {rest[0][1]!r} is unexpected", hint=_EXAMPLE)
    return result


_Tokens = list[tuple[str, str]]


def _alternatives(tokens: _Tokens, option: str, text: str) -> tuple[Condition, _Tokens]:
    result, tokens = _conjunction(tokens, option, text)
    while tokens[0] == ("sign", "|"):
        other, tokens = _conjunction(tokens[1:], option, text)
        result = result | other
    return result, tokens


def _conjunction(tokens: _Tokens, option: str, text: str) -> tuple[Condition, _Tokens]:
    result, tokens = _single(tokens, option, text)
    while tokens[0] == ("sign", "&"):
        other, tokens = _single(tokens[1:], option, text)
        result = result & other
    return result, tokens


def _single(tokens: _Tokens, option: str, text: str) -> tuple[Condition, _Tokens]:
    match tokens:
        case [("sign", "~"), *rest]:
            inner, rest = _single(rest, option, text)
            return ~inner, rest
        case [("sign", "("), *rest]:
            inner, rest = _alternatives(rest, option, text)
            if rest[0] == ("sign", ")"):
                return inner, rest[1:]
            raise ConfigError(f"{option} is {text!r}: a parenthesis is not closed", hint=_EXAMPLE)
        case [("name" | "quoted" as kind, word), ("compare", relation), ("number", number), *rest]:
            name = json.loads(word, strict=False) if kind == "quoted" else None if word == TOTAL else word
            return RewardTerm(name)._compared("==" if relation == "=" else relation, float(number)), rest
    raise ConfigError(
        f"{option} is {text!r}: a comparison of a reward with a number is missing before {tokens[0][1]!r}"
        if tokens[0][0] in ("end", "sign")
        else f"{option} is {text!r}: {tokens[0][1]!r} begins no comparison of a reward with a number",
        hint=_EXAMPLE,
    )


def _combined(sign: str, *conditions: Any) -> Condition:
    for one in conditions:
        if not isinstance(one, Condition):
            raise ConfigError(
                f"{one!r} is combined with a condition",
                hint="put each comparison in parentheses: (agl.reward() >= 1) & (agl.reward('length') < 0.2)",
            )
    parts: list[Condition] = []
    for one in conditions:
        parts += one.parts if isinstance(one, Combination) and one.sign == sign else [one]
    return Combination(sign, tuple(parts))

"""Weighted sums of graders and reward functions, which report every part next to the sum."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any

from agl.errors import ConfigError, RewardError, checked_options
from agl.mdp.types import Reward
from agl.rewards.emit import as_rewards
from agl.rewards.function import RewardCaller
from agl.rewards.trace import Trace
from agl.trainer.graders.base import Grader
from agl.trainer.graders.fields import extract, failure

Part = Any
"""A grader, or a reward function (task, output) -> number or dict, sync or async."""


@checked_options
@dataclass(frozen=True)
class Weighted(Grader):
    """The weighted sum of its parts, as {"reward": sum, part: unweighted value, ...}; the sum is what is trained on.

    `Weighted({"correct": (0.8, MathAnswer()), "format": (0.2, f)})`, or `0.8 * MathAnswer() + 0.2 * g`. Its range is
    the weighted sum of its parts' ranges, without bounds where a part is a function. A part that returns a dict adds
    its primary entry to the sum and reports the others as "part.entry".

    Attributes:
        parts: name -> (weight, grader or function).
        clip: (lowest, highest) sum; unlimited if None.

    Raises:
        ConfigError: no part, a weight that is not finite, a part that cannot be called, or a reserved name.
    """

    parts: Mapping[str, tuple[float, Part]]
    clip: tuple[float, float] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("Weighted has no part", hint='give {"name": (weight, grader)}')
        for name, part in self.parts.items():
            if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], Real) and callable(part[1])):
                raise ConfigError(f"Weighted has the part {name!r}: {part!r}", hint="make it (weight, grader)")
            if not math.isfinite(part[0]):
                raise ConfigError(f"Weighted gives {name!r} the weight {part[0]}", hint="make it a finite number")
        if "reward" in self.parts:
            raise ConfigError('Weighted has a part named "reward"', hint="that is the sum; choose another name")
        if self.clip is not None and not self.clip[0] <= self.clip[1]:
            raise ConfigError(f"Weighted(clip={self.clip!r})", hint="give (lowest, highest)")
        _ = self._callers  # a function with unknown arguments fails now, not in the first rollout

    @staticmethod
    def of(grader: Grader) -> Weighted:
        """A grader as a sum of one."""
        return grader if isinstance(grader, Weighted) else Weighted({grader.label: (1.0, grader)})

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest sum."""
        low = high = 0.0
        for weight, part in self.parts.values():
            ends = sorted(_times(weight, end) for end in (part.range if isinstance(part, Grader) else _ANY))
            low, high = low + ends[0], high + ends[1]
        return (low, high) if self.clip is None else (max(low, self.clip[0]), min(high, self.clip[1]))

    @property
    def is_async(self) -> bool:  # type: ignore[override]
        """Whether a part is async."""
        return any(caller.is_async for caller in self._callers.values())

    def __mul__(self, weight: float) -> Weighted:  # type: ignore[override]
        if not isinstance(weight, Real):
            return NotImplemented
        self._unclipped()
        return replace(self, parts={name: (weight * factor, part) for name, (factor, part) in self.parts.items()})

    __rmul__ = __mul__  # type: ignore[assignment]

    def __add__(self, other: Grader) -> Weighted:  # type: ignore[override]
        if not isinstance(other, Grader):
            return NotImplemented
        more = Weighted.of(other)
        self._unclipped()
        more._unclipped()
        parts = dict(self.parts)
        for name, part in more.parts.items():
            parts[_free(name, parts)] = part
        return replace(self, parts=parts)

    def __call__(self, task: Any, output: Any, trace: Trace | None = None) -> dict[str, float]:
        """{"reward": sum, part: value, ...}.

        Raises:
            RewardError: from a part, or a part that is not a finite number.
        """
        for name, caller in self._callers.items():
            if caller.is_async:
                raise failure(f"the part {name!r} of {self.label} is async", hint="await it: grader.call_async(...)")
        output = extract(output, self.output)
        return self._sum({name: caller(task, output, trace) for name, caller in self._callers.items()})

    async def call_async(self, task: Any, output: Any, trace: Trace | None = None) -> dict[str, float]:
        """The same; the parts are awaited together."""
        output = extract(output, self.output)
        calls: list[Awaitable[Any]] = [c.call_async(task, output, trace) for c in self._callers.values()]
        return self._sum(dict(zip(self._callers, await asyncio.gather(*calls), strict=True)))

    @cached_property
    def _callers(self) -> dict[str, RewardCaller]:
        return {name: RewardCaller(part) for name, (_, part) in self.parts.items()}

    def _sum(self, values: Mapping[str, Any]) -> dict[str, float]:
        total, parts = 0.0, {}
        for name, value in values.items():
            main, others = _split(name, value)
            total += self.parts[name][0] * main.value
            parts[name] = main.value
            parts |= {f"{name}.{other.name}": other.value for other in others}
        if self.clip is not None:
            total = min(max(total, self.clip[0]), self.clip[1])
        if not math.isfinite(total):
            raise failure(f"the parts of {self.label} add up to {total}", hint="give them smaller values or weights")
        return {"reward": total, **parts}

    def _unclipped(self) -> None:
        if self.clip is not None:
            raise ConfigError("a clipped sum has no parts to add to", hint='name it: Weighted({"name": (weight, sum)})')


def _multiply(self: Grader, weight: float) -> Weighted:
    return Weighted.of(self) * weight


def _add(self: Grader, other: Grader) -> Weighted:
    return Weighted.of(self) + other if isinstance(other, Grader) else NotImplemented


_grader: Any = Grader
_grader.__mul__ = _grader.__rmul__ = _multiply
_grader.__add__ = _add

_ANY = (-math.inf, math.inf)


def _times(weight: float, end: float) -> float:
    return 0.0 if weight == 0 else weight * end


def _split(name: str, value: Any) -> tuple[Reward, list[Reward]]:
    """A part's primary reward, and the others."""
    try:
        rewards = as_rewards(value)
    except RewardError as error:
        raise failure(f"the part {name!r}: {error.message}", hint=error.hint) from error
    return next(r for r in rewards if r.primary), [r for r in rewards if not r.primary]


def _free(name: str, parts: Mapping[str, Any]) -> str:
    if name not in parts:
        return name
    return next(f"{name}_{n}" for n in range(2, len(parts) + 3) if f"{name}_{n}" not in parts)

"""Base classes of graders (options, a stated range, a call that returns a value within it), and weighted sums.

Invariant: what is not the agent's fault is an error, never a low value.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, Self

from agl.errors import ConfigError, RewardError
from agl.extras import install_line
from agl.mdp.types import Reward
from agl.options import checked_options
from agl.rewards.emit import as_rewards
from agl.rewards.function import RewardCaller
from agl.rewards.trace import Trace
from agl.tracing.threads import in_thread
from agl.trainer.graders.fields import Extractor, Field, extract, failure, references, text_of


@dataclass(frozen=True, kw_only=True)
class Named:
    """Something with options that rewards are named after. Threads may share one.

    Attributes:
        name: its name in a sum; the class's name in lower case if None.
    """

    name: str | None = None

    needs: ClassVar[tuple[str, ...]] = ()
    """The packages that it imports, of the extra `rewards`."""

    @property
    def label(self) -> str:
        """`name`, or the class's name in lower case."""
        return self.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(self).__name__).lower()

    def named(self, name: str) -> Self:
        """The same under another name."""
        return replace(self, name=name)

    def __getstate__(self) -> dict[str, Any]:
        """The options alone: a copy makes new clients, caches and processes."""
        return {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)

    def _uninstalled(self, missing: ModuleNotFoundError) -> Exception:
        if missing.name is None or missing.name.partition(".")[0] not in self.needs:
            return missing
        return ConfigError(
            f"{type(self).__name__} needs the package {missing.name!r}, which is not installed",
            hint=install_line("rewards"),
        )


@dataclass(frozen=True, kw_only=True)
class Grader(Named):
    """A reward function with options: (task, output) -> float, within `range`.

    What the agent did badly is graded low. What is not its fault (no reference in the task, a database or a judge that
    cannot be reached) is a `RewardError`: the attempt is retried, and never trained on. Graders add up:
    `0.8 * a + 0.2 * b` is a `Weighted`. Threads may share one.

    Attributes:
        output: the part of the output that is graded: a key or dotted path, a pattern whose last match counts, or a
            function; all of it if None.
    """

    output: Extractor | None = None

    is_async: ClassVar[bool] = False
    """Whether it can only be awaited, by `call_async`."""
    waits: ClassVar[bool] = False
    """Whether a call takes long enough for an event loop to notice; then `call_async` does it in a thread."""

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        return 0.0, 1.0

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """The value. Subclasses define it; `output` is the part that `output=` picked."""
        raise NotImplementedError

    def __call__(self, task: Any, output: Any, trace: Trace | None = None) -> Any:
        """The value within `range`.

        Raises:
            RewardError: there is no value, through no fault of the agent.
            ConfigError: a required package is not installed.
        """
        try:
            value = self.grade(task, extract(output, self.output), trace)
        except ModuleNotFoundError as missing:
            raise self._uninstalled(missing) from missing
        return self._checked(value)

    async def call_async(self, task: Any, output: Any, trace: Trace | None = None) -> Any:
        """The same without blocking the event loop."""
        if self.waits:
            return await in_thread(lambda: self(task, output, trace))
        return self(task, output, trace)

    def __mul__(self, weight: float, /) -> Weighted:
        return Weighted.of(self) * weight

    __rmul__ = __mul__

    def __add__(self, other: Grader, /) -> Weighted:
        return Weighted.of(self) + other if isinstance(other, Grader) else NotImplemented

    def _checked(self, value: float) -> float:
        low, high = self.range
        value = float(value)
        if not math.isfinite(value) or not low - 1e-9 <= value <= high + 1e-9:
            raise failure(f"{self.label} gave {value}, outside of its range {low:g} to {high:g}")
        return min(max(value, low), high)

    def _trace(self, trace: Trace | None) -> Trace:
        trace = Trace.now() if trace is None else trace
        if trace is None:
            raise failure(
                f"{self.label} grades what an agent did, and no rollout runs here",
                hint="use it as reward= of a wrapped agent, call it inside a rollout, or pass trace=",
            )
        return trace


@dataclass(frozen=True, kw_only=True)
class AgainstReference(Grader):
    """A grader that compares the output with a reference in the task. Of several references, the best match counts.

    Attributes:
        answer: where the reference is: a key, a dotted path, or a function of the task; the first field present of
            "answer", "ground_truth", "solution", "expected", "reference", "target", "label", "result" if None. A list
            holds alternatives.
    """

    answer: Field | None = None

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """The best value over the references; the lowest where `output=` found nothing."""
        expected = references(task, self.answer, self.label)
        if output is None:
            return self.range[0]
        text = text_of(output)
        return max(self.compare(text, reference) for reference in expected)

    def compare(self, text: str, reference: str) -> float:
        """How well a text matches one reference."""
        raise NotImplementedError


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
            own = part.range if isinstance(part, Grader) else (-math.inf, math.inf)
            ends = sorted(0.0 if weight == 0 else weight * end for end in own)
            low = low + ends[0]
            high = high + ends[1]
        return (low, high) if self.clip is None else (max(low, self.clip[0]), min(high, self.clip[1]))

    @property
    def is_async(self) -> bool:  # type: ignore[override]
        """Whether a part is async."""
        return any(caller.is_async for caller in self._callers.values())

    def __mul__(self, weight: float, /) -> Weighted:
        if not isinstance(weight, Real):
            return NotImplemented
        self._unclipped()
        return replace(self, parts={name: (weight * factor, part) for name, (factor, part) in self.parts.items()})

    __rmul__ = __mul__

    def __add__(self, other: Grader, /) -> Weighted:
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
        total = 0.0
        parts = {}
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

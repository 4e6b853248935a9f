"""The base classes of graders: options, a stated range, and a call whose value lies in it.

Invariant: what is not the agent's fault is an error, never a low value.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from agl.errors import ConfigError
from agl.rewards.trace import Trace
from agl.trainer.graders.fields import Extractor, Field, extract, failure, references, text_of

if TYPE_CHECKING:
    from agl.trainer.graders.combine import Weighted


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
            hint='pip install "agl[rewards]"',
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
            return await asyncio.to_thread(self.__call__, task, output, trace)
        return self(task, output, trace)

    if TYPE_CHECKING:
        # `combine` defines the operators.
        def __mul__(self, weight: float, /) -> Weighted: ...
        def __rmul__(self, weight: float, /) -> Weighted: ...
        def __add__(self, other: Grader, /) -> Weighted: ...

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

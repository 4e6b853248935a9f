"""The grader of maths answers: equal as mathematics, however they are written."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from agl.errors import ConfigError
from agl.options import checked_options
from agl.rewards.trace import Trace
from agl.trainer.graders.base import AgainstReference
from agl.trainer.graders.fields import failure, references, text_of
from agl.trainer.processes.workers import WorkerDied, Workers, WorkerStuck, WorkerUnavailable

STUCK_SECONDS = 120.0
"""Wall-clock limit of a comparison, which normally ends after a few seconds of processor time."""

MOST_CHARACTERS = 20_000
"""Characters of an output that are read, from its end, where the answer is."""


@checked_options
@dataclass(frozen=True, kw_only=True)
class MathAnswer(AgainstReference):
    r"""1 if the output's final answer equals a reference as mathematics, else 0, by math-verify.

    It reads plain numbers, LaTeX (`\boxed{}` first), fractions, percentages, sets, equations, the text after "####"
    (GSM8K), and the letters A to E where the reference is one. Anything unreadable is a wrong answer. The comparison
    runs in a separate process (a few are shared), within limits of processor time and memory; an answer that exceeds
    them is wrong, too. Needs a POSIX system.

    Attributes:
        float_rounding: decimal places to which numbers are compared.
        strict: whether variables' names matter, and a set differs from a tuple.
        timeout: seconds of processor time.
    """

    waits = True
    needs = ("math_verify",)

    float_rounding: int = 6
    strict: bool = True
    timeout: float = 5.0

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ConfigError(f"MathAnswer(timeout={self.timeout!r})", hint="give seconds, more than 0")

    def grade(self, task: Any, output: Any, trace: Trace | None) -> float:
        """1 or 0.

        Raises:
            RewardError: no answer in a reference, or no process to compare in.
        """
        expected = references(task, self.answer, self.label)
        text = text_of(output)[-MOST_CHARACTERS:]
        if not text.strip():
            return 0.0
        job = {
            "references": expected,
            "answer": text.encode(errors="replace").decode(),
            "float_rounding": self.float_rounding,
            "strict": self.strict,
            "limit": self.timeout,
        }
        try:
            result = _workers().ask(job, STUCK_SECONDS)
        except WorkerDied:
            return 0.0
        except WorkerStuck as error:
            raise failure(f"comparing maths answers took more than {STUCK_SECONDS:g} s") from error
        except WorkerUnavailable as error:
            if "math_verify" in str(error):
                raise ModuleNotFoundError(str(error), name="math_verify") from error
            raise failure(f"the process that compares maths answers does not start: {error}") from error
        if "unreadable" in result:
            raise failure(
                f"{self.label} finds no mathematical answer in the reference {expected[result['unreadable']][:200]!r}",
                hint="answer= names the task's field; for plain texts use ExactMatch",
            )
        return float(result["equal"])


@functools.cache
def _workers() -> Workers:
    return Workers.of_module("agl.trainer.graders.maths_worker")

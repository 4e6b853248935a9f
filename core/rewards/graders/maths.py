"""The grader of maths answers: equal as mathematics, however they are written."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl.errors import ConfigError, checked_options
from agl.rewards.graders.base import AgainstReference
from agl.rewards.graders.fields import failure, references, text_of
from agl.rewards.graders.worker_pool import WorkerDied, Workers, WorkerStuck, WorkerUnavailable
from agl.rewards.trace import Trace

STUCK_SECONDS = 120.0
"""By the clock, for a comparison that stops itself after a few seconds of processor time."""

MOST_CHARACTERS = 20_000
"""Of an output; the answer stands at the end."""


@checked_options
@dataclass(frozen=True, kw_only=True)
class MathAnswer(AgainstReference):
    r"""1 if the output's final answer equals a reference as mathematics, else 0, by math-verify.

    Read are plain numbers, LaTeX (`\boxed{}` first), fractions, percentages, sets, equations, what follows "####"
    (GSM8K), and the letters A to E where the reference is one. Anything unreadable is a wrong answer. The comparison
    runs in a process of its own (a few are shared), within limits of processor time and memory; what exceeds them is a
    wrong answer too. Needs a POSIX system.

    Attributes:
        float_rounding: decimal places to which numbers are compared.
        strict: variables' names matter, and a set is no tuple.
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
        wanted = references(task, self.answer, self.label)
        given = text_of(output)[-MOST_CHARACTERS:]
        if not given.strip():
            return 0.0
        job = {
            "references": wanted,
            "given": given.encode(errors="replace").decode(),
            "float_rounding": self.float_rounding,
            "strict": self.strict,
            "limit": self.timeout,
        }
        try:
            told = _workers().ask(job, STUCK_SECONDS)
        except WorkerDied:
            return 0.0
        except WorkerStuck as error:
            raise failure(f"comparing maths answers took more than {STUCK_SECONDS:g} s of the clock") from error
        except WorkerUnavailable as error:
            if "math_verify" in str(error):
                raise ModuleNotFoundError(str(error), name="math_verify") from error
            raise failure(f"the process that compares maths answers does not start: {error}") from error
        if "unreadable" in told:
            raise failure(
                f"{self.label} finds no mathematical answer in the reference {wanted[told['unreadable']][:200]!r}",
                hint="answer= says where in the task it is; for plain texts there is ExactMatch",
            )
        return float(told["equal"])


@functools.cache
def _workers() -> Workers:
    return Workers(Path(__file__).with_name("maths_worker.py"))

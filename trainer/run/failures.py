"""Attempts that failed: how many and of what, and whether one fault of the user's code ended too many of a step.

Invariant: what failed is left out, so a step that lost attempts learns from those that are left. A log line and the
history say how many were lost; where one fault of the user's code has ended more than `SHARE` of them, nothing is
learned from the others, since which are left may depend on what the policy answered.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agl.errors import UserCodeError
from agl.trainer.runners.protocol import FAILURES, Failure, RolloutResult

SHARE = 0.25
"""Of a step's attempts; when one fault of the user's code has ended more of them, the run ends."""
ENOUGH = 3
"""Attempts that one fault has ended before it can end the run: fewer may be chance."""
_SHOWN_KINDS = 3
_SHOWN_CHARACTERS = 160
_SHOWN_LINES = 40


@dataclass(frozen=True, slots=True)
class _Fault:
    """What ended several attempts: one exception, or whatever one place in the user's code raised."""

    attempts: int
    what: str
    first: Failure


def failure_counts(results: Sequence[RolloutResult], mode: str) -> dict[str, int]:
    """How many attempts failed, also of rollouts that then succeeded, for `run.history`: "<mode>/failed_attempts", and
    by what failed below it."""
    kinds = Counter(failure.kind for result in results for failure in result.failures)
    by_kind = {f"{mode}/failed_attempts/{kind}": kinds[kind] for kind in FAILURES}
    return {f"{mode}/failed_attempts": kinds.total(), **by_kind}


def failures_line(results: Sequence[RolloutResult]) -> str | None:
    """How many attempts were lost, in how many groups, and of what, in one line; None if none was."""
    failures = [failure for result in results for failure in result.failures]
    if not failures:
        return None
    groups = {r.rollout.group for r in results}
    hit = {r.rollout.group for r in results if r.failures}
    lost = sum(r.error is not None for r in results)
    causes = Counter(_text(failure) for failure in failures).most_common()
    shown = [f"{n} x {cause}" for cause, n in causes[:_SHOWN_KINDS]]
    if others := causes[_SHOWN_KINDS:]:
        shown.append(f"{sum(n for _, n in others)} others")
    return (
        f"{len(failures)} of {_attempts(results)} attempts failed, in {len(hit)} of {len(groups)} groups; "
        f"{lost} of {len(results)} rollouts are left out: {'; '.join(shown)}"
    )


def require_sound(results: Sequence[RolloutResult], what: str, *, expected: int = 0) -> None:
    """Refuse results that one fault of the user's code has selected.

    Args:
        results: of a step, or of a part of it. what: the step, for the message.
        expected: rollouts of the whole step, where these are a part of it.

    Raises:
        UserCodeError: the same exception, or one place in the user's code, has ended more than `SHARE` of the attempts.
    """
    attempts = max(_attempts(results), expected)
    fault = _most_frequent(results)
    if fault is None or fault.attempts < ENOUGH or fault.attempts <= SHARE * attempts:
        return
    lines = fault.first.traceback.splitlines()[-_SHOWN_LINES:]
    raise UserCodeError(
        f"{fault.what} ended {fault.attempts} of {attempts} attempts of {what}; the first: "
        f"{fault.first.message}\n" + textwrap.indent("\n".join(lines), "    "),
        hint="correct it, then run again: the rollouts that are left may be the easy ones, so nothing was learned from "
        "them. A reward function returns a low reward for an output that it cannot read; an agent raises "
        "agl.PolicyFault where an answer of the policy is why; error_reward=x gives every run that raises a reward",
        rollout=fault.first.rollout_id,
        attempt=fault.first.attempt,
    )


def _most_frequent(results: Sequence[RolloutResult]) -> _Fault | None:
    """What of the user's code has ended the most attempts."""
    own = [failure for result in results for failure in result.failures if failure.of_user_code]
    alike: dict[str, list[Failure]] = {}
    for failure in own:
        alike.setdefault(f"message {failure.gist}", []).append(failure)
        if failure.place:
            alike.setdefault(f"place {failure.place}", []).append(failure)
    if not alike:
        return None
    most = max(alike.values(), key=len)
    one_message = len({failure.gist for failure in most}) == 1
    what = "the same exception in your code" if one_message else f"one place in your code, {most[0].place},"
    return _Fault(len(most), what, most[0])


def _attempts(results: Sequence[RolloutResult]) -> int:
    """Attempts that ended."""
    return sum(len(r.failures) + (r.error is None or not r.failures) for r in results)


def _text(failure: Failure) -> str:
    message = textwrap.shorten(failure.gist, _SHOWN_CHARACTERS, placeholder=" ...")
    return f"{message} ({failure.place})" if failure.place else message

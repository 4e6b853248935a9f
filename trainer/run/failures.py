"""Attempts that failed: how many and of what, and whether one fault of the user's code ended too many of a step.

Invariant: what failed is left out, so a step that lost attempts learns from those that are left. A log line and the
history say how many were lost. Where one fault of the user's code has ended attempts of more than `SHARE` of the
rollouts of a step, nothing is learned from the others, since which are left, or were tried again, may depend on what
the policy answered. A measurement that lost so many by a fault of its reward function has no result.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from agl.errors import UserCodeError
from agl.trainer.runners.protocol import FAILURES, Failure, RolloutResult

SHARE = 0.25
"""Of the rollouts of a step or a measurement; when one fault of the user's code has ended attempts of more of them, the
run ends."""
ENOUGH = 3
"""Rollouts that one fault has hit before it can end the run: fewer may be chance."""
_SHOWN_KINDS = 3
_SHOWN_CHARACTERS = 160
_SHOWN_LINES = 40


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

    Args: as of `selecting_fault`.

    Raises:
        UserCodeError: there is such a fault.
    """
    if (fault := selecting_fault(results, what, expected=expected)) is not None:
        raise fault


def selecting_fault(
    results: Sequence[RolloutResult], what: str, *, kinds: Collection[str] = ("agent", "reward"), expected: int = 0
) -> UserCodeError | None:
    """The same exception, or one place in the user's code, that has ended attempts of more than `SHARE` of rollouts.

    A rollout counts once, however often it was tried again.

    Args:
        results: of a step or a measurement, or of a part of it.
        what: its name, for the message.
        kinds: of what failed: the agent, its reward, or either.
        expected: rollouts of the whole step, where these are a part of it.
    """
    same: dict[tuple[str, str], dict[int, Failure]] = defaultdict(dict)
    for i, result in enumerate(results):
        for failure in result.failures:
            if failure.kind in kinds:
                same["exception", f"{failure.gist} {failure.place}"].setdefault(i, failure)
            if failure.kind in kinds and failure.place:
                same["place", failure.place].setdefault(i, failure)
    fault = max(same, key=lambda fault: len(same[fault]), default=("", ""))
    hit = len(same[fault])
    rollouts = max(len(results), expected)
    if hit < ENOUGH or hit <= SHARE * rollouts:
        return None
    first = next(iter(same[fault].values()))
    lines = "\n".join(first.traceback.splitlines()[-_SHOWN_LINES:])
    if fault[0] == "place":
        shown = f"one place in your code, {first.place},"
    else:
        shown = f"the same exception in your code, {_text(first)},"
    return UserCodeError(
        f"{shown} ended attempts of {hit} of the {rollouts} rollouts of {what}; the first: {first.message}\n"
        + textwrap.indent(lines, "    "),
        hint="correct it, then run again: the rollouts that are left may be the easy ones, so nothing was learned from "
        "them, and their mean is no result. A reward function returns a low reward for an output that it cannot read; "
        "an agent raises agl.PolicyFault where an answer of the policy is why; error_reward=x gives every run that "
        "raises a reward",
        rollout=first.rollout_id,
        attempt=first.attempt,
    )


def _attempts(results: Sequence[RolloutResult]) -> int:
    """Attempts that ended."""
    return sum(len(r.failures) + (r.error is None or not r.failures) for r in results)


def _text(failure: Failure) -> str:
    message = textwrap.shorten(failure.gist, _SHOWN_CHARACTERS, placeholder=" ...")
    return f"{message} ({failure.place})" if failure.place else message

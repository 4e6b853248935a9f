"""Which failures are not tried again: those of the user's own code that happen the same way each time."""

from __future__ import annotations

import math
from collections import defaultdict

from agl.errors import MainThreadError
from agl.trainer.store.types import Rollout

ENOUGH = 2
"""Rollouts of a step that failed alike at two attempts in a row, after which its others are not tried again."""


class Repeats:
    """What the attempts of a run ended with.

    Invariant: a failure after which another attempt of its rollout ended otherwise is a matter of chance, such as of
    what was sampled; for the rest of the step only a repetition in the same rollout counts.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._alike: dict[int, float] = defaultdict(float)

    def futile(self, rollout: Rollout, attempt: int, place: str | None, error: BaseException | None) -> str | None:
        """Why another attempt, which there is, would fail like this one; None if it may not. `place`: where `error` was
        raised; None where it is always tried again."""
        if isinstance(error, MainThreadError):
            return "it would be refused again" if attempt < rollout.config.max_attempts else None
        if error is not None and place is None:
            return None
        this = hash((rollout.step, place, getattr(error, "message", "")))
        before = self._last.pop(rollout.rollout_id, 0)
        if before:
            self._alike[before] += 1 if this == before else -math.inf
        if error is None or attempt >= rollout.config.max_attempts or "failed" not in rollout.config.retry_on:
            return None
        if this == before:
            return "the attempt before it failed in the same way"
        if rollout.step is not None and self._alike[this] >= ENOUGH:
            return f"{ENOUGH} rollouts of this step failed in the same way, twice in a row"
        self._last[rollout.rollout_id] = this
        return None

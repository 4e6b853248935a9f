"""Time in the store: a clock that never jumps, and how long attempts ran and were silent as seen by this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

_TICK: Final = 1e-6


class Clock:
    """Seconds since the epoch, taken once from the database or this machine and carried on by a steady counter.

    A clock that is set while the process runs changes nothing here. No two calls give the same time.

    Args:
        wall: seconds since the epoch. steady: seconds since any moment, which only ever pass.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self.steady = wall, steady
        self._lock = threading.Lock()
        self.set(None)

    def set(self, now: float | None) -> None:
        """Go on from `now`; None for what this machine's clock says."""
        with self._lock:
            self._ahead = (self._wall() if now is None else now) - self.steady()
            self._last = 0.0

    def now(self) -> float:
        with self._lock:
            self._last = max(self.steady() + self._ahead, self._last + _TICK)
            return self._last


@dataclass(slots=True)
class _Seen:
    beat: float
    beat_at: float
    started_at: float


_Key = tuple[str, int]


class Observer:
    """Ages of attempts by this process's own watching, as a lease's followers do in Kubernetes' leader election.

    Times that other machines wrote, or that were written before a clock was set, are only compared with each other.
    A process that was down has heard nothing, so silence counts from its first look.

    Args:
        steady: seconds since any moment, which only ever pass.
    """

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._seen: dict[_Key, _Seen] = {}

    def look(self, open_attempts: Iterable[tuple[str, int, float, float]]) -> dict[_Key, tuple[float, float]]:
        """See all open attempts as (rollout id, attempt, started at, last heartbeat at).

        Returns:
            For each, the seconds that it has run and the seconds since its last heartbeat.
        """
        at = self._steady()
        seen: dict[_Key, _Seen] = {}
        for rollout_id, attempt, started_at, beat in open_attempts:
            key = (rollout_id, attempt)
            known = self._seen.get(key)
            if known is None:
                known = _Seen(beat, at, at - max(0.0, beat - started_at))
            elif known.beat != beat:
                known.beat, known.beat_at = beat, at
            seen[key] = known
        self._seen = seen
        return {key: (at - known.started_at, at - known.beat_at) for key, known in seen.items()}

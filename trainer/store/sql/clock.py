"""Time in the store: a clock that never jumps, and the ages of attempts as this process observes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

_TICK: Final = 1e-6


class Clock:
    """Seconds since the epoch, read once from the database or this machine and then advanced by a monotonic counter.

    Setting the machine's clock has no effect. No two calls return the same time.

    Args:
        wall: seconds since the epoch. steady: monotonic seconds since any moment.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self.steady = wall, steady
        self._lock = threading.Lock()
        self.set(None)

    def set(self, now: float | None) -> None:
        """Continue from `now`; None for the time of this machine's clock."""
        with self._lock:
            self._ahead = (self._wall() if now is None else now) - self.steady()
            self._last = 0.0

    def now(self) -> float:
        with self._lock:
            self._last = max(self.steady() + self._ahead, self._last + _TICK)
            return self._last


@dataclass(slots=True)
class _Observation:
    """When this process saw the last heartbeat change (`beat_at`) and the attempt start, by its steady counter."""

    beat: float
    beat_at: float
    started_at: float


_Key = tuple[str, int]


class Observer:
    """Ages of attempts as observed by this process, as in Kubernetes' leader election.

    Times that other machines wrote, or that were written before a clock was set, are only compared with each other.
    A process that was down has received no heartbeats, so silence counts from its first look.

    Args:
        steady: monotonic seconds since any moment.
    """

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._observations: dict[_Key, _Observation] = {}

    def look(self, open_attempts: Iterable[tuple[str, int, float, float]]) -> dict[_Key, tuple[float, float]]:
        """Observe all open attempts: (rollout id, attempt, started at, last heartbeat at).

        Returns:
            For each, the seconds that it has run and the seconds since its last heartbeat.
        """
        at = self._steady()
        observations: dict[_Key, _Observation] = {}
        for rollout_id, attempt, started_at, beat in open_attempts:
            key = (rollout_id, attempt)
            observation = self._observations.get(key)
            if observation is None:
                observation = _Observation(beat, at, at - max(0.0, beat - started_at))
            elif observation.beat != beat:
                observation.beat, observation.beat_at = beat, at
            observations[key] = observation
        self._observations = observations
        return {key: (at - o.started_at, at - o.beat_at) for key, o in observations.items()}

"""Time in the store: the moment for labels, and how long things take as this process observes them.

A label is what the wall clock says at that moment, also after it was set. Nothing is expired or subtracted by it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final

_TICK: Final = 1e-6
_STEP: Final = 1.0
"""A clock that was set back by less than this many seconds stands still meanwhile."""
REMEMBERED: Final = 200_000
"""The most beginnings that a process remembers."""
STALE_SECONDS: Final = 10.0
"""How long the time of a database is advanced by this process, before it is read again."""


class Clock:
    """Seconds since the epoch, by the database's clock or by this machine's. Two calls return different times.

    Args:
        wall: seconds since the epoch; of this machine if None.
        steady: monotonic seconds since any moment.
    """

    def __init__(self, wall: Callable[[], float] | None = None, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall or time.time
        self.steady = steady
        self._lock = threading.Lock()
        self._last = 0.0
        self.set(None)

    def set(self, now: float | None) -> None:
        """Continue from the database's time; None to follow this machine's clock."""
        with self._lock:
            self._read_at = self.steady()
            self._ahead = None if now is None else now - self._read_at

    @property
    def is_stale(self) -> bool:
        """Whether the database's time is to be read again: its clock may have been set."""
        return self._ahead is not None and self.steady() - self._read_at > STALE_SECONDS

    def now(self) -> float:
        with self._lock:
            now = self._wall() if self._ahead is None else self.steady() + self._ahead
            if 0 <= self._last - now < _STEP:
                now = self._last + _TICK
            self._last = now
            return now


@dataclass(slots=True)
class _Observation:
    """When this process saw the last heartbeat change (`beat_at`) and the attempt start, by its steady counter."""

    beat: float
    beat_at: float
    started_at: float


_Key = tuple[str, int]


class Observer:
    """Ages of attempts as observed by this process, as in Kubernetes' leader election.

    The times of heartbeats are labels, of which it only matters whether they change: between two of them a clock may
    have been set by hours. A process that was down has received none, so everything counts from its first look.

    Args:
        steady: monotonic seconds since any moment.
    """

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._observations: dict[_Key, _Observation] = {}

    def look(self, open_attempts: Iterable[tuple[str, int, float]]) -> dict[_Key, tuple[float, float]]:
        """Observe all open attempts: (rollout id, attempt, last heartbeat at).

        Returns:
            For each, the seconds since it was first seen and since its heartbeat was seen to change.
        """
        at = self._steady()
        observations: dict[_Key, _Observation] = {}
        for rollout_id, attempt, beat in open_attempts:
            key = (rollout_id, attempt)
            observation = self._observations.get(key)
            if observation is None:
                observation = _Observation(beat, at, at)
            elif observation.beat != beat:
                observation.beat = beat
                observation.beat_at = at
            observations[key] = observation
        self._observations = observations
        return {key: (at - o.started_at, at - o.beat_at) for key, o in observations.items()}


class Beginnings:
    """When rollouts and attempts began, by the steady counter of the process that saw it.

    An end is stored as the label of the beginning plus the seconds that have passed since, as ends of spans and calls
    are. So the difference of the two is how long it took, although the wall clock was set in between. What another
    process began ends by the wall clock.

    Args:
        steady: monotonic seconds since any moment.
    """

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._lock = threading.Lock()
        self._began: OrderedDict[Hashable, float] = OrderedDict()

    def began(self, key: Hashable, at: float) -> None:
        """It began `at`, by the steady counter. Only the first beginning of a key counts."""
        with self._lock:
            self._began.setdefault(key, at)
            if len(self._began) > REMEMBERED:
                self._began.popitem(last=False)

    def seconds(self, key: Hashable) -> float | None:
        """How long ago it began; None if this process has not seen it."""
        with self._lock:
            began = self._began.get(key)
        return None if began is None else max(0.0, self._steady() - began)

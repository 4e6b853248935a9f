"""Tracks which workers have reported; the others cannot hold up a run by leasing rollouts and not running them.

Anyone with the runner key can lease under any name, so a worker that has reported takes precedence.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

FIRST_HEARTBEAT_SECONDS = 20.0
"""How long after the lease a worker's first heartbeat may come; four of its intervals."""
PATIENCE_SECONDS = 60.0
"""The least time that a worker without a report has for an attempt while one that has reported waits for work."""
_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 600.0
_BETWEEN_SECONDS = 5.0
"""How long a worker may take from its report to its next request."""
_MOST_WORKERS = 10_000


class LeaseGuard:
    """Remembers which workers reported and which lost their leases.

    Args:
        patience: see `PATIENCE_SECONDS`.
        first_heartbeat: see `FIRST_HEARTBEAT_SECONDS`.
        steady: monotonic seconds.
    """

    def __init__(
        self,
        patience: float = PATIENCE_SECONDS,
        first_heartbeat: float = FIRST_HEARTBEAT_SECONDS,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.first_heartbeat = first_heartbeat
        self._patience = patience
        self._steady = steady
        self._proven: OrderedDict[str, None] = OrderedDict()
        self._losses: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._last_report = float("-inf")
        self._durations: deque[float] = deque(maxlen=64)

    @property
    def patience(self) -> float:
        """Seconds that a worker without a report has for an attempt while one that has reported waits for work: three
        times the longest of the last 64 attempts."""
        return max(self._patience, 3.0 * max(self._durations, default=0.0))

    def is_proven(self, worker: str) -> bool:
        """Whether a worker has reported on an attempt since it last lost one."""
        return worker in self._proven

    def is_one_proven(self, busy: Iterable[str]) -> bool:
        """Whether a worker that has reported is there: among these, or between its report and its next request."""
        return self._steady() - self._last_report < _BETWEEN_SECONDS or any(map(self.is_proven, busy))

    def pause(self, worker: str) -> float:
        """For how many seconds a worker gets no lease; doubles with every lease that it loses."""
        n, since = self._losses.get(worker, (0, 0.0))
        pause = min(_PAUSE_SECONDS * 2 ** min(n - 1, 10), _LONGEST_PAUSE_SECONDS) if n else 0.0
        return max(0.0, since + pause - self._steady())

    def reported(self, worker: str, seconds: float) -> None:
        """A worker has reported on an attempt that it leased so long ago."""
        self._losses.pop(worker, None)
        self._durations.append(seconds)
        self._last_report = self._steady()
        _put(self._proven, worker, None)

    def lost(self, worker: str) -> None:
        """A worker's attempt was given up: it was silent, or too slow."""
        self._proven.pop(worker, None)
        n, _ = self._losses.get(worker, (0, 0.0))
        _put(self._losses, worker, (n + 1, self._steady()))


def _put(table: OrderedDict[str, T], worker: str, value: T) -> None:
    table[worker] = value
    table.move_to_end(worker)
    while len(table) > _MOST_WORKERS:
        table.popitem(last=False)

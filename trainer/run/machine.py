"""What a run takes of its machine: processors and memory of its processes, step by step."""

from __future__ import annotations

import time


class Machine:
    """Counts from its making, and from each `since` on. Processes are this one and all that it has started."""

    def __init__(self) -> None:
        self._used, _ = _usage()
        self._began = time.monotonic()

    def since(self) -> dict[str, float]:
        """What was used since the last time.

        Returns:
            "machine/cores": processors in use, on average. "machine/memory_gb": resident memory now, in 10^9 bytes;
            what processes share counts in each of them.
        """
        (used, memory), now = _usage(), time.monotonic()
        # A process that nobody has waited for takes its seconds along when it ends.
        cores = max(0.0, used - self._used) / max(1e-9, now - self._began)
        self._used = used
        self._began = now
        return {"machine/cores": cores, "machine/memory_gb": memory / 1e9}


def _usage() -> tuple[float, int]:
    """Seconds of processor time so far, and bytes of memory."""
    import psutil  # of agl[local]: a run elsewhere has no steps of its own

    own = psutil.Process()
    seconds = 0.0
    memory = 0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
            resident = process.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
        memory += resident
    return seconds, memory

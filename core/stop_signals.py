"""The signals by which people and machines stop a program: all of them are Ctrl-C.

`timeout`, `docker stop`, Slurm and systemd send SIGTERM, often to every process of a program; a terminal that is closed
sends SIGHUP. The program decides what ends when, so the processes that it has started do not heed them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNCLAIMED = (signal.SIG_DFL, signal.default_int_handler)
"""The handlers of a signal that neither the user's program nor whoever started it (`nohup`, a shell's `&`) has set."""


@contextlib.contextmanager
def stop_signals_to(stop: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Within the block, `stop` is called with each of these signals, in the main thread. Elsewhere than there, and for
    signals that the user's program handles or that are ignored, nothing changes."""
    unclaimed = []
    if threading.current_thread() is threading.main_thread():
        unclaimed = [number for number in STOP_SIGNALS if signal.getsignal(number) in _UNCLAIMED]
    before = {number: signal.signal(number, lambda n, _: stop(signal.Signals(n))) for number in unclaimed}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_event() -> asyncio.Event:
    """An event that one of these signals sets, unless it is ignored; for a server on the main thread's event loop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop.set)
    return stop


def ignore_stop_signals() -> None:
    """Leave the end of this process to the one that has started it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def restore_stop_signals() -> None:
    """Before the user's code runs in a process that was forked from one that ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in STOP_SIGNALS[1:]:
        signal.signal(number, signal.SIG_DFL)

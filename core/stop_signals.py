"""The signals by which people and machines stop a program: all of them are Ctrl-C.

`timeout`, `docker stop`, Slurm and systemd send SIGTERM, often to every process of a program; a terminal that is closed
sends SIGHUP. The program decides what ends when, so the processes that it has started do not heed them.

Code of the user's forks, too, and ends its children by SIGTERM, as a pool of multiprocessing does. So a forked process
has the handlers that the program had without us, and so has a program that a process of ours executes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNCLAIMED = (signal.SIG_DFL, signal.default_int_handler)
"""The handlers of a signal that neither the user's program nor whoever started it (`nohup`, a shell's `&`) has set."""
_replaced: dict[signal.Signals, Any] = {}
"""Signal -> the handler that ours stands for."""


@contextlib.contextmanager
def stop_signals_to(stop: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Within the block, `stop` is called with each of these signals, in the main thread. Elsewhere than there, and for
    signals that the user's program handles or that are ignored, nothing changes."""
    unclaimed = []
    if threading.current_thread() is threading.main_thread():
        unclaimed = [number for number in STOP_SIGNALS if signal.getsignal(number) in _UNCLAIMED]
    for number in unclaimed:
        _replace(number, lambda n, _: stop(signal.Signals(n)))
    try:
        yield
    finally:
        for number in unclaimed:
            signal.signal(number, _replaced.pop(number))


def stop_event() -> asyncio.Event:
    """An event that one of these signals sets, unless it is ignored; for a server on the main thread's event loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop.set)
    return stop


def ignore_stop_signals() -> None:
    """Leave the end of this process to the one that has started it."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            # A handler, as programs that are executed would go on to ignore what is ignored.
            _replace(number, lambda *_: None)


def _replace(number: signal.Signals, handler: Callable[..., object]) -> None:
    _replaced.setdefault(number, signal.getsignal(number))
    signal.signal(number, handler)


def _restore() -> None:
    for number, handler in _replaced.items():
        signal.signal(number, handler)
    _replaced.clear()


os.register_at_fork(after_in_child=_restore)

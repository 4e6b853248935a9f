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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNCLAIMED = (signal.SIG_DFL, signal.default_int_handler)
"""The handlers of a signal that neither the user's program nor whoever started it (`nohup`, a shell's `&`) has set."""
_replaced: dict[signal.Signals, Any] = {}
"""Signal -> the handler that ours stands for."""
_ours: set[Any] = set()
"""Our handlers of the blocks that are open."""
_AFTERWARDS = (signal.SIGTERM, signal.SIGHUP)
"""What is ignored by a program that ends anyway. A third Ctrl-C is somebody's who has waited long enough."""
_ends_when_stopped = False


def end_when_stopped() -> None:
    """This program ends with the first of these signals. Whoever sends SIGTERM or SIGHUP again while it does changes
    nothing, so that its exit status is what it is."""
    global _ends_when_stopped
    _ends_when_stopped = True


@contextlib.contextmanager
def stop_signals_to(stop: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Within the block, `stop` is called with each of these signals, in the main thread; that of an inner block in its
    place. Elsewhere than there, and for signals that the user's program handles or that are ignored, nothing
    changes."""
    unclaimed = []
    if threading.current_thread() is threading.main_thread():
        unclaimed = [n for n in STOP_SIGNALS if signal.getsignal(n) in _UNCLAIMED or signal.getsignal(n) in _ours]
    with _handled(unclaimed, stop):
        yield


@contextlib.contextmanager
def interrupted_by_stop_signals() -> Iterator[None]:
    """Within the block each of these signals raises KeyboardInterrupt, so that `finally` and `with` have their say.
    Further SIGTERM and SIGHUP change nothing."""
    received: list[signal.Signals] = []

    def interrupt(number: signal.Signals) -> None:
        received.append(number)
        if number is signal.SIGINT or len(received) == 1:
            raise KeyboardInterrupt(number.name)

    with stop_signals_to(interrupt):
        yield


@contextlib.contextmanager
def stop_event() -> Iterator[asyncio.Event]:
    """Within the block, an event that one of these signals sets, unless that is ignored. For a server on the main
    thread's event loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # The event loop's own handler of Ctrl-C, too, which would cancel what is to end in order.
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    with _handled(heeded, lambda number: loop.call_soon_threadsafe(stop.set)):
        yield stop


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], stop: Callable[[signal.Signals], object]) -> Iterator[None]:
    received: list[int] = []

    def handle(number: int, _: Any) -> None:
        received.append(number)
        stop(signal.Signals(number))

    outer = {number: signal.getsignal(number) for number in numbers}
    _ours.add(handle)
    for number in numbers:
        _replace(number, handle)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        # It ends, perhaps since a program that it had started was stopped, to which the signals went.
        received.append(signal.SIGINT)
        raise
    finally:
        _ours.discard(handle)
        for number in numbers:
            before = outer[number]
            if before not in _ours:
                _replaced.pop(number, None)
            # An inner block may have received it.
            stopped = received or signal.getsignal(number) is signal.SIG_IGN
            if _ends_when_stopped and stopped and number in _AFTERWARDS:
                # Ignored: the interpreter resets handlers of Python's a moment before the process's end.
                before = signal.SIG_IGN
            signal.signal(number, before)


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

"""Runs the launched command with this process's terminal, signals and exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from agl.trainer.processes.environment import hide_process

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit statuses of a shell for a command that does not start."""
GRACE_SECONDS = 1.0
"""How long after Ctrl-C the command may run before it gets the signal from here."""
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a command ended: its exit status (-n for signal n, as `subprocess` has it), and the error if it failed."""

    status: int
    error: str | None

    @property
    def exit_status(self) -> int:
        """As a shell reports it: 128 + n for signal n."""
        return self.status if self.status >= 0 else 128 - self.status


def run(command: Sequence[str], environment: Mapping[str, str]) -> ProcessExit:
    """Run a command to its end, with this process's standard streams. From the main thread."""
    hide_process()
    processes: list[subprocess.Popen[bytes]] = []
    with _signals_forwarded_to(processes):
        try:
            process = subprocess.Popen(command, env=dict(environment))
        except FileNotFoundError:
            return ProcessExit(NOT_FOUND, f"there is no command {command[0]!r}")
        except OSError as error:
            return ProcessExit(NOT_EXECUTABLE, f"{command[0]!r} cannot be run: {error.strerror}")
        processes.append(process)
        status = process.wait()
    if status == 0:
        return ProcessExit(0, None)
    if status > 0:
        return ProcessExit(status, f"the command ended with exit status {status}")
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return ProcessExit(status, f"the command was ended by {name}")


@contextlib.contextmanager
def _signals_forwarded_to(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Forwards signals that reach this process alone to the child.

    Ctrl-C in a terminal reaches both. For an interrupt from another source that is unknown, so it is forwarded after
    a second, which the child gets to end.
    """

    def send(number: int) -> None:
        for process in processes:
            # `send_signal` does nothing once the process has ended.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def forward(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:
            send(number)
        elif not _in_terminal():
            timer = threading.Timer(GRACE_SECONDS, send, (number,))
            timer.daemon = True
            timer.start()

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, *_FORWARDED)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_terminal() -> bool:
    """Whether this process is in the foreground of a terminal, which sends Ctrl-C to all foreground processes."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False

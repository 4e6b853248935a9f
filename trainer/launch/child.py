"""Runs the launched command with this process's terminal, signals and exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from agl.trainer.processes.environment import hide_process

NOT_FOUND = 127
NOT_EXECUTABLE = 126
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


class ForwardedSignals:
    """Within the block, signals that reach this process go to the command. Before it runs they are noted and it is not
    started; after its end they change nothing, while what it did is recorded. What is ignored, as under `nohup`, stays
    ignored, by the command too.

    Ctrl-C in a terminal reaches both. For an interrupt from another source that is unknown, so it is forwarded after
    a second, which the command gets to end.

    Attributes:
        early: those that came before the command ran.
    """

    def __init__(self) -> None:
        self.early: list[signal.Signals] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> ForwardedSignals:
        for number in (signal.SIGINT, *_FORWARDED):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def begin(self, process: subprocess.Popen[bytes]) -> None:
        """The command runs from now on."""
        self._process = process
        for number in self.early:
            self._forward(number)

    def _received(self, number: int, _: FrameType | None) -> None:
        if self._process is None:
            self.early.append(signal.Signals(number))
        else:
            self._forward(number)

    def _forward(self, number: int) -> None:
        if number != signal.SIGINT:
            self._send(number)
        elif not _in_terminal():
            timer = threading.Timer(GRACE_SECONDS, self._send, (number,))
            timer.daemon = True
            timer.start()

    def _send(self, number: int) -> None:
        # `send_signal` does nothing once the process has ended.
        with contextlib.suppress(ProcessLookupError):
            assert self._process is not None
            self._process.send_signal(number)


def run(command: Sequence[str], environment: Mapping[str, str]) -> ProcessExit:
    """Run a command to its end, with this process's standard streams. From the main thread."""
    with ForwardedSignals() as signals:
        return run_with(signals, command, environment)


def run_with(signals: ForwardedSignals, command: Sequence[str], environment: Mapping[str, str]) -> ProcessExit:
    """As `run`, within the block of `signals`."""
    hide_process()
    if signals.early:
        return ProcessExit(-signals.early[0], f"{signals.early[0].name} came before the command was started")
    try:
        process = subprocess.Popen(command, env=dict(environment))
    except FileNotFoundError:
        return ProcessExit(NOT_FOUND, f"there is no command {command[0]!r}")
    except OSError as error:
        return ProcessExit(NOT_EXECUTABLE, f"{command[0]!r} cannot be run: {error.strerror}")
    signals.begin(process)
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


def _in_terminal() -> bool:
    """Whether this process is in the foreground of a terminal, which sends Ctrl-C to all foreground processes."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False

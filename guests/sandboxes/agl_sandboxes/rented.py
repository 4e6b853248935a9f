"""A sandbox on a machine that somebody rents out: a bridge on this machine carries the streams of its command.

The bridge is a process of its own, so that what it speaks with the provider never stands in the way of the trainer. It
ends the machine when its input ends. If it is killed itself, the machine ends at its time limit. A machine that is lost
before its command has ended is reported as lost: no program fails because of its provider.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, Protocol

from agl.trainer.processes.sandbox import Sandbox, Walls, piped
from agl_sandboxes import inside

SECONDS = 600
"""How long a machine lives on without its bridge."""
_PASSED = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_PART = 1 << 20
"""Bytes of input that one request carries."""
_SILENCE = 5 * inside.BEAT_SECONDS
"""Seconds without a line after which a machine is lost, whatever its connection looks like."""
_LOST = b"\n\n\n\n"
"""What the news of a lost machine begins with: as the length of a report it is more than any has."""


class Machine(Protocol):
    """A rented machine with one command on it."""

    def send(self, data: bytes) -> None:
        """Write to the command's standard input, which is read as soon as it has written something."""
        ...

    def follow(self, output: Callable[[str], object], errors: Callable[[str], object]) -> None:
        """Pass on what the command writes to its standard output and error, until it ends."""
        ...

    def keep(self) -> None:
        """Have it live for another `seconds`."""
        ...

    def end(self) -> None:
        """Give the machine back, with all that runs on it."""
        ...


class Rented(Sandbox):
    """A machine of its own for each command.

    Args:
        seconds: after which the provider ends a machine whose bridge is gone.
        settings: what else `rent` needs.

    Attributes:
        package: the provider's SDK.
        key: the variable of the provider's key.
        prefix: of all its variables.
    """

    python = "python3"
    package: str
    key: str
    prefix: str

    def __init__(self, *, seconds: int, **settings: Any) -> None:
        self.settings = {"seconds": seconds, **settings}

    @classmethod
    @abstractmethod
    def rent(cls, command: str, settings: dict[str, Any]) -> Machine:
        """Rent a machine, and start a shell command on it as root."""

    def problem(self) -> str | None:
        if find_spec(self.package) is None:
            line = f'pip install "./guests/sandboxes[{self.name}]"'
            return f"{self.package} is not installed: in the root of the agl clone: {line}"
        return None if os.environ.get(self.key) else f"{self.key} is not set: it is your API key of {self.name}"

    def start(self, command: Sequence[str], walls: Walls) -> subprocess.Popen[bytes]:
        job = {"command": list(command), "environment": dict(walls.environment), "scratch_mb": walls.scratch_mb}
        sent = json.dumps({"job": job, "folders": dict(walls.folders), "settings": self.settings})
        names = [n for n in os.environ if n in _PASSED or n.startswith(self.prefix) or n.lower().endswith("_proxy")]
        environment = {name: os.environ[name] for name in names} | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
        }
        start = f"from {type(self).__module__} import {type(self).__name__} as it; it.bridge()"
        return piped([sys.executable, "-c", start, sent], environment)

    @classmethod
    def bridge(cls) -> None:
        """Carry the streams of the command that the arguments name, until either side ends. Runs in the bridge."""
        sent = json.loads(sys.argv[1])
        files = {
            f"{place}/{path.relative_to(folder)}": base64.b64encode(path.read_bytes()).decode()
            for place, folder in sent["folders"].items()
            for path in Path(folder).rglob("*.py")
        }
        job = json.dumps({**sent["job"], "files": files}).encode() + b"\n"
        try:
            machine = cls.rent(f"python3 -u -c {shlex.quote(Path(inside.__file__).read_text())}", sent["settings"])
        except Exception as error:
            sys.exit(f"no machine of {cls.name}: {_line(error)}")
        _Bridge(cls.name, machine, job, sent["settings"]["seconds"] / 3).carry()


class _Bridge:
    """Between a machine and this process's streams. Each way out of it gives the machine back and ends the process.

    Args:
        job: the first line of the machine's input.
        every: seconds from one `keep` to the next.
    """

    def __init__(self, name: str, machine: Machine, job: bytes, every: float) -> None:
        self._name = name
        self._machine = machine
        self._job = job
        self._every = every
        self._begun: list[str] = []
        self._errors: collections.deque[str] = collections.deque(maxlen=100)
        self._ending = threading.Lock()
        self._silent = 0.0
        # What an SDK prints is not the command's.
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        self._streams = {"1": os.dup(1), "2": os.dup(2)}
        for fd in (1, 2):
            os.dup2(self._nowhere, fd)

    def carry(self) -> NoReturn:
        try:
            self._machine.follow(self._read, self._errors.append)
            why = "its command was cut off"
        except Exception as error:
            why = _line(error)
        self._lose(why)

    def _read(self, text: str) -> None:
        self._silent = -math.inf  # what follows may have to wait for the reader of this process
        self._begun.append(text)
        if "\n" in text:
            *lines, rest = "".join(self._begun).split("\n")
            self._begun = [rest]
            for line in filter(None, lines):
                self._pass(line)
        self._silent = 0.0

    def _pass(self, line: str) -> None:
        if line == inside.STARTED:
            self._machine.send(self._job)
            for work in (self._feed, self._keep, self._watch):
                threading.Thread(target=work, daemon=True).start()
        elif line == inside.ENDED:
            self._end()
        else:
            _write(self._streams[line[0]], base64.b64decode(line[1:]))

    def _feed(self) -> None:
        try:
            while data := os.read(0, _PART):
                self._machine.send(base64.b64encode(data) + b"\n")
        except Exception as error:
            time.sleep(1)  # a command that has ended reads nothing either, and its output says so
            self._lose(_line(error))
        self._end()

    def _keep(self) -> None:
        while True:
            time.sleep(self._every)
            with contextlib.suppress(Exception):  # the next time may be in time, too
                self._machine.keep()

    def _watch(self) -> None:
        while self._silent < _SILENCE:
            time.sleep(inside.BEAT_SECONDS)
            self._silent += inside.BEAT_SECONDS  # not by a clock: a process that got no time has not listened
        self._lose(f"it has been silent for {_SILENCE} s")

    def _lose(self, why: str) -> NoReturn:
        errors = "".join(self._errors).strip().splitlines()
        text = f"lost a machine of {self._name}: {why}" + (f" ({errors[-1]})" if errors else "")
        self._end(_LOST + text.encode()[:4000])

    def _end(self, news: bytes = b"") -> NoReturn:
        self._ending.acquire()  # for ever: one of the threads is the first
        with contextlib.suppress(OSError):
            _write(self._streams["2"], news)
        for fd in self._streams.values():  # their reader is not to wait for the provider
            os.dup2(self._nowhere, fd)
        with contextlib.suppress(Exception):
            self._machine.end()
        os._exit(0)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]

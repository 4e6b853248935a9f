"""A sandbox on a machine that somebody rents out: a bridge on this machine carries the streams of its command.

The bridge is a process of its own, so that what it speaks with the provider never stands in the way of the trainer. It
ends the machine when its input ends. If it is killed itself, the machine ends at its time limit.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from agl.trainer.processes.sandbox import Sandbox, Walls, piped
from agl_sandboxes import inside

_PASSED = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_PART = 1 << 20
"""Bytes of input that one request carries."""


class Machine(Protocol):
    """A rented machine with one command on it."""

    def send(self, data: bytes) -> None:
        """Write to the command's standard input."""
        ...

    def output(self) -> Iterator[str]:
        """What the command writes to its standard output, until it ends."""
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
        seconds: after which the provider ends a machine whose bridge is gone. settings: what else `rent` needs.

    Attributes:
        package: the provider's SDK. key: the variable of the provider's key. prefix: of all its variables.
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
            return f"{self.package} is not installed: in the root of the agl clone: pip install ./guests/sandboxes"
        return None if os.environ.get(self.key) else f"{self.key} is not set"

    def start(self, command: Sequence[str], walls: Walls) -> subprocess.Popen[bytes]:
        job = {"command": list(command), "environment": dict(walls.environment), "scratch_mb": walls.scratch_mb}
        sent = json.dumps({"job": job, "folders": dict(walls.folders), "settings": self.settings})
        names = [n for n in os.environ if n in _PASSED or n.startswith(self.prefix) or n.lower().endswith("_proxy")]
        environment = {name: os.environ[name] for name in names} | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
        }
        start = f"from {type(self).__module__} import {type(self).__name__} as it; it.bridge()"
        return piped([sys.executable, "-c", start, sent], environment)

    # -- in the bridge ------------------------------------------------------------------------------------------------
    @classmethod
    def bridge(cls) -> None:
        """Carry the streams of the command that the arguments name, until either side ends."""
        sent = json.loads(sys.argv[1])
        files = {
            f"{place}/{path.relative_to(folder)}": base64.b64encode(path.read_bytes()).decode()
            for place, folder in sent["folders"].items()
            for path in Path(folder).rglob("*.py")
        }
        try:
            machine = cls.rent(f"exec python3 -u -c {shlex.quote(Path(inside.__file__).read_text())}", sent["settings"])
        except Exception as error:
            sys.exit(f"no machine of {cls.name}: {type(error).__name__}: {' '.join(str(error).split())}")
        try:
            machine.send(json.dumps({**sent["job"], "files": files}).encode() + b"\n")
            threading.Thread(target=_feed, args=(machine,), daemon=True).start()
            threading.Thread(target=_keep, args=(machine, sent["settings"]["seconds"] / 3), daemon=True).start()
            rest = ""
            for text in machine.output():
                *lines, rest = (rest + text).split("\n")
                for line in lines:
                    _write(int(line[:1]), base64.b64decode(line[1:]))
        finally:
            machine.end()
            os._exit(0)


def _feed(machine: Machine) -> None:
    try:
        while data := os.read(0, _PART):
            machine.send(base64.b64encode(data) + b"\n")
    finally:
        machine.end()
        os._exit(0)


def _keep(machine: Machine, every: float) -> None:
    while True:
        time.sleep(every)
        with contextlib.suppress(Exception):  # the next time may be in time, too
            machine.keep()


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]

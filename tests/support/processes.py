"""Programs of a test: started as a person starts them, watched through what they print, and ended whatever happens."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agl.trainer.http import local_key

AGL = [sys.executable, "-c", "from agl.trainer.cli import main; main()"]


class Programs:
    """Programs in one directory, with one environment."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.directory = directory
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AGL_", "OTEL_", "LIGHTNING_"))}
        self.environment = {**clean, **environment}
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *words: object, log: str, **pipes: int) -> subprocess.Popen[str]:
        """Start one; what it prints goes to the file `log`, but for `pipes` (stdin, stdout)."""
        file = (self.directory / log).open("a")
        program = subprocess.Popen(
            list(map(str, words)), cwd=self.directory, env=self.environment, stderr=file, text=True,
            start_new_session=True, **{"stdout": file, **pipes},
        )  # fmt: skip
        self.running.append(program)
        return program

    def text(self, log: str) -> str:
        file = self.directory / log
        return file.read_text() if file.exists() else ""

    def until(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """Wait for a condition; fails with what all programs printed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if found := condition():
                    return found
            except (OSError, KeyError, ValueError):
                pass
            time.sleep(0.1)
        logs = "\n".join(f"-- {f.name}\n{f.read_text()}" for f in sorted(self.directory.glob("*.log")))
        raise AssertionError(f"waited {seconds:g} s for {what}\n{logs}")

    def end(self) -> None:
        for program in self.running:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()


@contextmanager
def programs(directory: Path, **environment: str) -> Iterator[Programs]:
    """Programs that are all ended with the block."""
    started = Programs(directory, environment)
    try:
        yield started
    finally:
        started.end()


def fetch(url: str, body: Any = None, *, method: str | None = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of an answer. A server's own key is sent to it, as agl's clients do."""
    if (key := local_key.find(url)) is not None:
        headers = {"authorization": f"Bearer {key}", **headers}
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def gateway_processes() -> list[int]:
    """Ids of this process's children that are gateways."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"gateway.processes.worker" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError, IndexError):
            pass
    return found


def family(pid: int, depth: int = 0) -> Iterator[tuple[int, int]]:
    """A process and all that it started, children after their parents: pid, generations below the first."""
    yield pid, depth
    children: list[str] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += task.read_text().split()
    for child in children:
        yield from family(int(child), depth + 1)

"""What servers of rented machines share: HTTP, and machines that are real, too. Each is a bubblewrap with namespaces of
its own, in which commands are root, as on a rented machine."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Machine:
    """A machine, as it was requested. ended: whether it was given back, or its time was over. hidden: a program that it
    cannot run."""

    id: str
    request: dict[str, Any]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    user: str = ""
    ended: bool = False
    timer: threading.Timer | None = None
    hidden: str | None = None

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        system = [
            path for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives") if Path(path).exists()
        ]
        walls = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent", "--cap-add", "ALL"]
        walls += [option for path in system for option in ("--ro-bind", path, path)]
        walls += ["--bind", str(self.folder), "/agl", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        walls += ["--tmpfs", "/var", "--tmpfs", "/run", "--clearenv"]
        walls += ["--setenv", "PATH", "/usr/bin:/bin:/usr/sbin:/sbin"]
        for folder in ("/usr/bin", "/bin") if self.hidden else ():
            walls += ["--ro-bind", "/dev/null", f"{folder}/{self.hidden}"]
        walls += ["--", "sh", "-c", 'readlink /proc/self/ns/net >/agl/network; exec "$@"', "sh"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([*walls, *command], stdin=pipe, stdout=pipe, stderr=pipe)
        return self.process

    def keep(self, seconds: float) -> None:
        """Have it end after this time."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = threading.Timer(seconds, self.end)
        self.timer.daemon = True
        self.timer.start()

    def end(self) -> None:
        self.ended = True
        assert self.timer is not None
        self.timer.cancel()
        if self.process is not None:
            self.process.kill()


class Server(ThreadingHTTPServer):
    """Listens as long as `serving` runs.

    Attributes:
        machines: those that were rented, by their ids. folder: a folder for each of them, their /agl.
        minute: how many seconds of this clock a minute of the provider's has. flows: whether output gets through.
    """

    daemon_threads = True
    minute = 60.0
    hidden: str | None = None

    def __init__(self, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.machines: dict[str, Machine] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="agl-rented-"))
        self.flows = threading.Event()
        self.flows.set()
        self.connections: set[socket.socket] = set()
        self._numbers = itertools.count(1)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may leave: a bridge ends as soon as its machine has been given back."""

    def rent(self, request: dict[str, Any], seconds: float) -> Machine:
        id = f"machine{next(self._numbers)}"
        (self.folder / id).mkdir(0o700)
        self.machines[id] = Machine(id, request, self.folder / id, hidden=self.hidden)
        self.machines[id].keep(seconds)
        return self.machines[id]

    def die(self) -> None:
        """Hang up on everybody, and listen no more."""
        self.shutdown()
        self.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """Reads and answers requests of JSON."""

    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def answer(self, status: int, value: Any = None) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(handler: type[Handler]) -> Iterator[Server]:
    """A server for as long as the block runs."""
    server = Server(handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.die()
        server.flows.set()
        for machine in server.machines.values():
            machine.end()
        shutil.rmtree(server.folder, ignore_errors=True)

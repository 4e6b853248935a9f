"""A server that speaks what e2b's SDK speaks: its REST API, and envd's processes in Connect's JSON. The machines are
real, too: each is a bubblewrap with namespaces of its own, in which commands are root, as on a machine of e2b."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "e2b_0123456789abcdef"
VERSION = "0.6.2"
"""Of envd."""


@dataclass
class Machine:
    """A machine, as it was asked for. ended: whether it was given back."""

    request: dict[str, Any]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    user: str = ""
    ended: bool = False
    timer: threading.Timer | None = None

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        system = [
            path for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives") if Path(path).exists()
        ]
        walls = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent", "--cap-add", "ALL"]
        walls += [option for path in system for option in ("--ro-bind", path, path)]
        walls += ["--bind", str(self.folder), "/agl", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        walls += [
            "--tmpfs",
            "/var",
            "--tmpfs",
            "/run",
            "--clearenv",
            "--setenv",
            "PATH",
            "/usr/bin:/bin:/usr/sbin:/sbin",
        ]
        self.process = subprocess.Popen(
            [*walls, "--", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        return self.process

    def keep(self, seconds: float) -> None:
        """Have it end after this time, as e2b does."""
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


@dataclass
class Server:
    """The machines that were rented, by their ids."""

    url: str = ""
    machines: dict[str, Machine] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class _Listening(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may leave: a bridge ends as soon as its machine has been given back."""


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def _answer(self, status: int, value: Any = None) -> None:
            body = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer(204 if self.path == "/health" else 404)

        def do_DELETE(self) -> None:
            self._body()
            machine = server.machines.get(self.path.rpartition("/")[2])
            if machine is not None:
                machine.end()
            self._answer(404 if machine is None else 204)

        def do_POST(self) -> None:
            body = self._body()
            if self.path == "/v2/sandboxes":
                if self.headers.get("x-api-key") != KEY:
                    return self._answer(401, {"code": 401, "message": "invalid API key"})
                id = f"machine{next(server.ids)}"
                server.machines[id] = Machine(json.loads(body), Path(tempfile.mkdtemp(prefix="agl-e2b-")))
                server.machines[id].keep(server.machines[id].request["timeout"])
                about = {"templateID": "base", "sandboxID": id, "clientID": "c", "envdVersion": VERSION}
                return self._answer(201, about | {"envdAccessToken": f"token-{id}"})
            if self.path.endswith("/timeout"):
                server.machines[self.path.split("/")[2]].keep(json.loads(body)["timeout"])
                return self._answer(204)
            id = self.headers.get("e2b-sandbox-id", "")
            if self.headers.get("x-access-token") != f"token-{id}":
                return self._answer(401, {"code": "unauthenticated", "message": "no such token"})
            machine = server.machines[id]
            if self.path == "/process.Process/Start":
                return self._start(machine, json.loads(body[5:]))
            assert self.path == "/process.Process/SendInput", self.path
            process = machine.process
            assert process is not None
            assert process.stdin is not None
            sent = json.loads(body)
            assert sent["process"] == {"pid": process.pid}
            try:
                process.stdin.write(base64.b64decode(sent["input"]["stdin"]))
                process.stdin.flush()
            except BrokenPipeError:
                return self._answer(404, {"code": "not_found", "message": "the process has ended"})
            self._answer(200, {})

        def _start(self, machine: Machine, sent: dict[str, Any]) -> None:
            name = base64.b64decode(self.headers.get("authorization", "Basic ").partition(" ")[2])
            machine.user = name.decode().partition(":")[0]
            process = machine.start([sent["process"]["cmd"], *sent["process"]["args"]])
            assert process.stdout is not None
            self.send_response(200)
            self.send_header("content-type", "application/connect+json")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self._event({"start": {"pid": process.pid}})
            while data := process.stdout.read1(1 << 15):  # type: ignore[attr-defined]
                self._event({"data": {"stdout": base64.b64encode(data).decode()}})
            code = process.wait()
            self._event({"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}})
            self._frame(2, {})
            self.wfile.write(b"0\r\n\r\n")

        def _event(self, event: dict[str, Any]) -> None:
            self._frame(0, {"event": event})

        def _frame(self, flags: int, value: dict[str, Any]) -> None:
            text = json.dumps(value).encode()
            data = struct.pack(">BI", flags, len(text)) + text
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    return Handler


@contextmanager
def serving() -> Iterator[Server]:
    """A server for as long as the block runs."""
    server = Server()
    listening = _Listening(("127.0.0.1", 0), _handler(server))
    server.url = f"http://127.0.0.1:{listening.server_port}"
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        listening.shutdown()
        for machine in server.machines.values():
            machine.end()
            shutil.rmtree(machine.folder, ignore_errors=True)

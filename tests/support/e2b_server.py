"""Speaks what e2b's SDK speaks: its REST API, and envd's processes in Connect's JSON."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import rented_machines

KEY_VARIABLE = "E2B_API_KEY"
KEY = "e2b_0123456789abcdef"
VERSION = "0.6.2"
"""Of envd."""
REQUEST = {"allow_internet_access": False, "timeout": 600}
"""What a request for a machine must contain."""

REFUSED = "AuthenticationException"
"""Of another key."""


def variables(url: str) -> dict[str, str]:
    """What leads the SDK to a server."""
    return {KEY_VARIABLE: KEY, "E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_HTTP_VERSION": "1.1"}


class Handler(rented_machines.Handler):
    def do_GET(self) -> None:
        self.answer(204 if self.path == "/health" else 404)

    def do_DELETE(self) -> None:
        self.body()
        machine = self.server.machines.get(self.path.rpartition("/")[2])
        if machine is not None:
            machine.end()
        self.answer(404 if machine is None else 204)

    def do_POST(self) -> None:
        body = self.body()
        if self.path == "/v2/sandboxes":
            if self.headers.get("x-api-key") != KEY:
                return self.answer(401, {"code": 401, "message": "invalid API key"})
            machine = self.server.rent(request := json.loads(body), request["timeout"])
            about = {"templateID": "base", "sandboxID": machine.id, "clientID": "c", "envdVersion": VERSION}
            return self.answer(201, about | {"envdAccessToken": f"token-{machine.id}"})
        if self.path.endswith("/timeout"):
            self.server.machines[self.path.split("/")[2]].keep(json.loads(body)["timeout"])
            return self.answer(204)
        id = self.headers.get("e2b-sandbox-id", "")
        if self.headers.get("x-access-token") != f"token-{id}":
            return self.answer(401, {"code": "unauthenticated", "message": "no such token"})
        machine = self.server.machines[id]
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
            return self.answer(404, {"code": "not_found", "message": "the process has ended"})
        self.answer(200, {})

    def _start(self, machine: rented_machines.Machine, sent: dict[str, Any]) -> None:
        name = base64.b64decode(self.headers.get("authorization", "Basic ").partition(" ")[2])
        machine.user = name.decode().partition(":")[0]
        process = machine.start([sent["process"]["cmd"], *sent["process"]["args"]])
        assert process.stdout is not None
        assert process.stderr is not None
        self.send_response(200)
        self.send_header("content-type", "application/connect+json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._event({"start": {"pid": process.pid}})
        while data := process.stdout.read1(1 << 15):  # type: ignore[attr-defined]
            self._event({"data": {"stdout": base64.b64encode(data).decode()}})
        if errors := process.stderr.read():
            self._event({"data": {"stderr": base64.b64encode(errors).decode()}})
        code = process.wait()
        self._event({"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}})
        self._frame(2, {})
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.server.flows.wait()
        self._frame(0, {"event": event})

    def _frame(self, flags: int, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        data = struct.pack(">BI", flags, len(text)) + text
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

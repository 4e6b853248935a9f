"""Speaks what Daytona's SDK speaks: the REST API of its sandboxes, that of their sessions, and logs by WebSocket.

Sessions are as Daytona's: a shell reads commands from its input; a command reads from a named pipe, which is there only
when it has begun, and what it writes is kept in a file, a mark before each line, from which the logs are read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import select
import uuid

import rented_machines
from rented_machines import Machine
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping

KEY_VARIABLE = "DAYTONA_API_KEY"
KEY = "dtn_0123456789abcdef"
REQUEST = {
    "networkBlockAll": True,
    "ttlMinutes": 10,
    "autoStopInterval": 0,
    "autoDeleteInterval": 0,
    "user": "root",
}
"""What a request for a machine must contain."""
REFUSED = "DaytonaAuthenticationError: Failed to create sandbox: Invalid credentials"
"""Of another key."""
COMMAND = r"""
mkfifo {0}/in {0}/out {0}/err
sed -u 's/^/\x01\x01\x01/' <{0}/out >>{0}/log & out=$!
sed -u 's/^/\x02\x02\x02/' <{0}/err >>{0}/log & err=$!
sleep infinity >{0}/in & holder=$!
{{ . {0}/command; }} <{0}/in >{0}/out 2>{0}/err; code=$?
kill $holder; wait $out $err; echo $code >{0}/exit
"""
_SANDBOX = re.compile(r"/api/sandbox/(\w+)(?:/ttl/(\d+))?")
_SESSION = re.compile(r"/toolbox/(\w+)/process/session(?:/(\w+)/(exec|command/(\S+)/(input|logs)))?(?:\?follow=true)?")


def variables(url: str) -> dict[str, str]:
    """What leads the SDK to a server."""
    return {KEY_VARIABLE: KEY, "DAYTONA_API_URL": f"{url}/api"}


class Handler(rented_machines.Handler):
    def do_GET(self) -> None:
        self._do()

    def do_POST(self) -> None:
        self._do()

    def do_DELETE(self) -> None:
        self._do()

    def _do(self) -> None:
        body = json.loads(self.body() or b"{}")
        if self.headers.get("authorization") != f"Bearer {KEY}":
            return self.answer(401, {"statusCode": 401, "message": "Invalid credentials"})
        if self.path == "/api/sandbox":
            return self.answer(
                200, self._about(self.server.rent(body, body["ttlMinutes"] * self.server.minute), "creating")
            )
        path = _SANDBOX.fullmatch(self.path) or _SESSION.fullmatch(self.path)
        machine = self.server.machines.get(path[1]) if path else None
        if path is None or machine is None or machine.ended:
            return self.answer(404, {"statusCode": 404, "message": f"there is no {self.path}"})
        if path.re is _SESSION:
            return self._session(machine, body, *path.groups()[1:])
        if path[2]:
            machine.keep(int(path[2]) * self.server.minute)
        if self.command == "DELETE":
            machine.end()
        self.answer(200, self._about(machine, "destroyed" if machine.ended else "started"))

    def _about(self, machine: Machine, state: str) -> dict[str, object]:
        named = {"id": machine.id, "organizationId": "o", "name": machine.id, "user": "daytona", "target": "here"}
        size = {"cpu": 1, "gpu": 0, "memory": 1, "disk": 3, "kvm": False, "public": False, "networkBlockAll": True}
        proxy = {"toolboxProxyUrl": f"{self.server.url}/toolbox"}
        return named | size | proxy | {"env": {}, "labels": machine.request["labels"], "state": state}

    def _session(
        self, machine: Machine, body: dict[str, str], session: str | None, what: str | None, id: str, way: str | None
    ) -> None:
        folder = machine.folder / str(id)
        if session is None:
            machine.start(["sh"])
            return self.answer(201)
        assert machine.process is not None
        assert machine.process.stdin is not None
        if what == "exec":
            assert body["runAsync"]
            assert body["suppressInputEcho"]
            folder = machine.folder / uuid.uuid4().hex
            folder.mkdir()
            (folder / "log").touch()
            (folder / "command").write_text(body["command"])
            machine.process.stdin.write(COMMAND.format(f"/agl/{folder.name}").encode())
            machine.process.stdin.flush()
            return self.answer(202, {"cmdId": folder.name})
        if way == "logs":
            return self._logs(machine, folder)
        try:
            with open(os.open(folder / "in", os.O_WRONLY), "wb") as pipe:
                pipe.write(body["data"].encode())
        except OSError as error:
            return self.answer(500, {"message": f"cannot open the command's input: {error}"})
        self.answer(204)

    def _logs(self, machine: Machine, folder: rented_machines.Path) -> None:
        accept = hashlib.sha1(f"{self.headers['sec-websocket-key']}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode())
        self.send_response(101)
        self.send_header("upgrade", "websocket")
        self.send_header("connection", "upgrade")
        self.send_header("sec-websocket-accept", base64.b64encode(accept.digest()).decode())
        self.end_headers()
        self.close_connection = True
        socket = Connection(ConnectionType.SERVER)
        with open(folder / "log", "rb") as log:
            while self.server.flows.wait() and not machine.ended:
                ended = (folder / "exit").exists()
                while data := log.read(1 << 10):
                    self.wfile.write(socket.send(BytesMessage(data)))
                if ended:
                    self.wfile.write(socket.send(CloseConnection(1000)))
                    return
                if select.select([self.connection], [], [], 0.02)[0]:
                    if not (data := self.connection.recv(1 << 12)):
                        return
                    socket.receive_data(data)
                    for event in socket.events():
                        if isinstance(event, Ping):
                            self.wfile.write(socket.send(event.response()))
                        elif isinstance(event, CloseConnection):
                            return

"""A TCP proxy in front of a gateway that loses answers, as networks do: resets, cuts, delays."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

RESET = "reset before the answer"
REFUSE = "reset before the request is passed on"
HEADERS = "reset after the headers"
CUT = "cut in mid-answer"
LAST = "cut before the last bytes"
LATE = "later than the client waits"
WHOLE = "whole"
LOSSES = (RESET, REFUSE, HEADERS, CUT, LAST, LATE)

WAIT_SECONDS = 0.4
"""How long clients wait for an answer; one that is late comes after twice that."""


@dataclass
class LossyProxy:
    """Passes requests on, one a connection, and loses the answers that its plan says.

    Attributes:
        port: of the gateway. plan: what becomes of each request's answer, in order; then all arrive whole.
        url: where it listens. seen: the bytes of each request.
    """

    port: int
    plan: Iterable[str] = ()
    url: str = ""
    seen: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._plan = itertools.chain(self.plan, itertools.repeat(WHOLE))
        self._lock = threading.Lock()

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            request = _request(connection)
            if not request:
                return
            with self._lock:
                self.seen.append(request)
                how = next(self._plan)
            if how == REFUSE:
                return _reset(connection)
            answer = self._answer(request)
            if not answer:  # The server has ended.
                return _reset(connection)
            if how == LATE:
                time.sleep(2 * WAIT_SECONDS)
            head = answer.index(b"\r\n\r\n") + 4
            kept = {RESET: 0, HEADERS: head, CUT: (head + len(answer)) // 2, LAST: len(answer) - 3}
            connection.sendall(answer[: kept.get(how, len(answer))])
            if how in kept:
                # The client reads what was sent before it meets the reset.
                time.sleep(0.05)
                _reset(connection)

    def _answer(self, request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as gateway:
            head, body = request.split(b"\r\n\r\n", 1)
            lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
            gateway.sendall(b"\r\n".join([*lines, b"connection: close"]) + b"\r\n\r\n" + body)
            answer = bytearray()
            while chunk := gateway.recv(65536):
                answer += chunk
        return bytes(answer)


def _request(connection: socket.socket) -> bytes:
    received = bytearray()
    while b"\r\n\r\n" not in received:
        if not (chunk := connection.recv(65536)):
            return b""
        received += chunk
    head = bytes(received).split(b"\r\n\r\n", 1)[0]
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    size = len(head) + 4 + (int(lengths[0].partition(b":")[2]) if lengths else 0)
    while len(received) < size:
        received += connection.recv(65536)
    return bytes(received)


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextlib.contextmanager
def losing(port: int, *plan: str) -> Iterator[LossyProxy]:
    """A proxy in front of a gateway's port; it stops listening afterwards."""
    proxy = LossyProxy(port, plan)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
        yield proxy
        listener.shutdown(socket.SHUT_RDWR)

"""A receiver of OTLP over HTTP: decodes what it gets with OpenTelemetry's own protobuf classes."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Receiver:
    """What came in.

    Attributes:
        url: where to send. requests: path, headers and body of each that was taken; refused: how many were not.
        statuses: of the next answers; 200 once they are used up. rejects: how many spans of each request are rejected.
    """

    url: str = ""
    requests: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    refused: int = 0
    rejects: int = 0

    @property
    def spans(self) -> list[Any]:
        """Protobuf spans, in order of arrival."""
        scopes = [s for _, _, body in self.requests for r in body.resource_spans for s in r.scope_spans]
        return [span for scope in scopes for span in scope.spans]


@contextlib.contextmanager
def receiving(statuses: Sequence[int] = (), rejects: int = 0) -> Iterator[Receiver]:
    """A receiver that listens on loopback."""
    receiver = Receiver(statuses=list(statuses), rejects=rejects)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = receiver.statuses.pop(0) if receiver.statuses else 200
            if status == 200:
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                receiver.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, request))
                answer = ExportTraceServiceResponse()
                if receiver.rejects:
                    answer.partial_success.rejected_spans = receiver.rejects
                    answer.partial_success.error_message = "too old"
                text = answer.SerializeToString()
            else:
                receiver.refused += 1
                text = b"not like this"
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf" if status == 200 else "text/plain")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

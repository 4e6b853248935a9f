"""Stands for a strong model behind an API: a server on this machine that uses the calculator and reads its result."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4


@contextmanager
def strong_model() -> Iterator[str]:
    """Runs the server inside the block; yields its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's next message."""
    last = messages[-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": last["content"]}
    problem = re.search(r"\d+ [-+*/] \d+", last["content"])
    arguments = json.dumps({"expression": problem[0] if problem else ""})
    call = {"id": f"call_{uuid4().hex}", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = answer(request["messages"])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        body = json.dumps(
            {
                "id": f"chatcmpl-{uuid4().hex}",
                "object": "chat.completion",
                "created": 0,
                "model": request["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass

"""A small real HTTP server that stands for a provider (or for the gateway): it answers by script and keeps what it got.

Chat Completions (with n), Responses, Anthropic Messages and Google's API, streaming and not, with tools; embeddings.
Whatever path is in front.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agl.messages import ToolResult, read
from agl.tracing.http_hooks import GOOGLE


@dataclass(frozen=True)
class Seen:
    """A received request: header names in lower case, body parsed and `raw`."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes = field(default=b"", repr=False)

    @property
    def text(self) -> str:
        """Everything that was sent but the body, to search for what must not be there."""
        return self.path + json.dumps(self.headers)

    @property
    def traceparent_span(self) -> str:
        """The span id (hex) in the traceparent header."""
        return self.headers["traceparent"].split("-")[2]


@dataclass(frozen=True)
class Reply:
    """What to answer: text, tool calls as (name, arguments), an HTTP error status, or (status 0) nothing at all.

    An error's message is `content`, if there is one.

    `fails`: a stream that ends in an error event instead. `reasoning`: what the model thinks first, as far as the API
    shows it. `holds`: a stream sends its last event only once this is set. A tool `space/name` is one of a namespace
    (Responses). `cached`, `thought`: how many of the 7 tokens of input were cached, and how many of the 3 of output are
    reasoning. `whole`, `events`: the answer's body, and the events of its stream, in place of all else.
    """

    content: str | None = None
    tools: tuple[tuple[str, dict[str, Any]], ...] = ()
    status: int = 200
    fails: bool = False
    reasoning: str | None = None
    holds: threading.Event | None = None
    cached: int = 0
    thought: int = 0
    whole: dict[str, Any] | None = None
    events: tuple[dict[str, Any], ...] = ()


Script = Callable[[dict[str, Any]], Reply]


def says(text: str) -> Script:
    """Always this text."""
    return lambda body: Reply(text)


def last_said(body: dict[str, Any]) -> tuple[str, str]:
    """Who spoke last in a request of any dialect ("user" or "tool"), and the text."""
    last = read.body(body)[-1]
    result = last.parts[-1] if last.parts else None
    return ("tool", result.text) if isinstance(result, ToolResult) else (last.role, last.text)


def last_tool_call_id(body: dict[str, Any]) -> str:
    """Which call the result at the end of a request, of any dialect, answers."""
    return read.body(body)[-1].tool_results[-1].id


@dataclass
class Provider:
    """The running server.

    Attributes:
        url: base URL ending in /v1; `root` is without it (for Anthropic and as a gateway's base URL).
        script: body -> reply; may be replaced at any time.
        seen: every POST so far.
        replies: likewise, for those that a script answered.
    """

    root: str
    script: Script
    seen: list[Seen] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    @property
    def last(self) -> Seen:
        return self.seen[-1]

    def next_id(self, prefix: str) -> str:
        with self.lock:
            return f"{prefix}{next(self.ids)}"


@contextmanager
def serve(script: Script | None = None, port: int = 0) -> Iterator[Provider]:
    """A provider on a loopback port (0: a free one), stopped at the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are two packets; else the second waits up to 40 ms for the first one to be acknowledged.
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length", 0)))
            body = json.loads(raw or b"{}")
            with provider.lock:
                provider.seen.append(Seen(self.path, {k.lower(): v for k, v in self.headers.items()}, body, raw))
            _answer(self, provider, body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", port), Handler)
    provider = Provider(f"http://127.0.0.1:{server.server_port}", script or says("hi"))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(handler: BaseHTTPRequestHandler, provider: Provider, body: dict[str, Any]) -> None:
    path = handler.path.partition("?")[0]
    if path.endswith("/embeddings"):
        vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.5]}
        _send(handler, {"object": "list", "data": [vector], "model": "e", "usage": {"prompt_tokens": 1}})
        return
    reply = provider.script(body)
    provider.replies.append(reply)
    if reply.status == 0:
        handler.close_connection = True
    elif reply.status != 200:
        message = reply.content or f"scripted {reply.status}"
        _send(handler, {"error": {"message": message, "type": "scripted"}}, reply.status)
    elif reply.whole is not None:
        if body.get("stream") or path.endswith(GOOGLE[1]):
            done: list[tuple[str | None, Any]] = [(None, "[DONE]")] if path.endswith("/chat/completions") else []
            events = [*((event.get("type"), event) for event in reply.events), *done]
            _stream(handler, iter(events), reply.holds)
        else:
            _send(handler, reply.whole)
    elif path.endswith("/chat/completions"):
        _chat(handler, provider, body, reply)
    elif path.endswith("/responses"):
        _responses(handler, provider, body, reply)
    elif path.endswith("/messages"):
        _messages(handler, provider, body, reply)
    elif path.endswith(GOOGLE):
        _google(handler, provider, reply, stream=path.endswith(GOOGLE[1]))
    else:
        _send(handler, {"id": provider.next_id("other-"), "object": "other"})


def _send(handler: BaseHTTPRequestHandler, payload: dict[str, Any], status: int = 200) -> None:
    data = json.dumps(payload).encode()
    handler.send_response(status)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def _stream(
    handler: BaseHTTPRequestHandler,
    events: Iterator[tuple[str | None, dict[str, Any] | str]],
    holds: threading.Event | None,
) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()

    def write(text: str) -> None:
        data = text.encode()
        handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        handler.wfile.flush()

    try:
        *earlier, last = events
        for name, data in (*earlier, last):
            if data is last[1] and holds is not None:
                holds.wait(60)
            payload = data if isinstance(data, str) else json.dumps(data)
            write((f"event: {name}\n" if name else "") + f"data: {payload}\n\n")
        handler.wfile.write(b"0\r\n\r\n")
    except (BrokenPipeError, ConnectionResetError):
        handler.close_connection = True


def _chat(handler: BaseHTTPRequestHandler, provider: Provider, body: dict[str, Any], reply: Reply) -> None:
    head = {"id": provider.next_id("chatcmpl-"), "created": 1, "model": body.get("model", "m")}
    calls = [
        {"id": provider.next_id("call_"), "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
        for n, a in reply.tools
    ]
    reason = "tool_calls" if calls else "stop"
    usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    if reply.cached or reply.thought:
        usage["prompt_tokens_details"] = {"cached_tokens": reply.cached}
        usage["completion_tokens_details"] = {"reasoning_tokens": reply.thought}
    if not body.get("stream"):
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if calls:
            message["tool_calls"] = calls
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        choices = [{"index": i, "message": message, "finish_reason": reason} for i in range(body.get("n") or 1)]
        _send(handler, {**head, "object": "chat.completion", "choices": choices, "usage": usage})
        return

    def chunk(delta: dict[str, Any], finish: str | None = None) -> tuple[None, dict[str, Any]]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return None, {**head, "object": "chat.completion.chunk", "choices": [choice]}

    def events() -> Iterator[tuple[str | None, dict[str, Any] | str]]:
        yield chunk({"role": "assistant", "content": ""})
        if reply.reasoning is not None:
            yield chunk({"reasoning_content": reply.reasoning})
        for word in (reply.content or "").split(" ") if reply.content else ():
            yield chunk({"content": word + " "})
        for i, call in enumerate(calls):
            yield chunk({"tool_calls": [{"index": i, **call}]})
        if reply.fails:
            yield None, {"error": {"message": "scripted failure"}}
            return
        yield chunk({}, reason)
        if (body.get("stream_options") or {}).get("include_usage"):
            yield None, {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        yield None, "[DONE]"

    _stream(handler, events(), reply.holds)


def _responses(handler: BaseHTTPRequestHandler, provider: Provider, body: dict[str, Any], reply: Reply) -> None:
    output: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        summary = {"type": "summary_text", "text": reply.reasoning}
        output.append({"type": "reasoning", "id": provider.next_id("rs_"), "summary": [summary]})
    if reply.content is not None:
        part = {"type": "output_text", "text": reply.content, "annotations": []}
        output.append({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]})
    for name, arguments in reply.tools:
        call = {"type": "function_call", "id": provider.next_id("fc_"), "call_id": provider.next_id("call_")}
        space, _, name = name.rpartition("/")
        call |= {"namespace": space} if space else {}
        output.append(call | {"name": name, "arguments": json.dumps(arguments), "status": "completed"})
    response = {
        "id": provider.next_id("resp_"),
        "object": "response",
        "created_at": 1,
        "model": body.get("model", "m"),
        "status": "completed",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 7,
            "output_tokens": 3,
            "total_tokens": 10,
            "input_tokens_details": {"cached_tokens": reply.cached},
            "output_tokens_details": {"reasoning_tokens": reply.thought},
        },
    }
    if not body.get("stream"):
        _send(handler, response)
        return

    def events() -> Iterator[dict[str, Any]]:
        begun = {k: v for k, v in response.items() if k != "usage"} | {"status": "in_progress", "output": []}
        yield {"type": "response.created", "response": begun}
        for i, item in enumerate(output):
            at = {"output_index": i, "item_id": item["id"]}
            if item["type"] == "function_call":
                yield {"type": "response.output_item.added", "output_index": i, "item": item | {"arguments": ""}}
                arguments = {"arguments": item["arguments"], "name": item["name"]}
                yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
                yield {"type": "response.function_call_arguments.done", **at, **arguments}
            elif item["type"] == "reasoning":
                at["summary_index"] = 0
                [whole] = item["summary"]
                yield {"type": "response.output_item.added", "output_index": i, "item": item | {"summary": []}}
                yield {"type": "response.reasoning_summary_part.added", **at, "part": whole | {"text": ""}}
                yield {"type": "response.reasoning_summary_text.delta", **at, "delta": whole["text"]}
                yield {"type": "response.reasoning_summary_text.done", **at, "text": whole["text"]}
                yield {"type": "response.reasoning_summary_part.done", **at, "part": whole}
            else:
                at["content_index"] = 0
                [whole] = item["content"]
                yield {"type": "response.output_item.added", "output_index": i, "item": item | {"content": []}}
                yield {"type": "response.content_part.added", **at, "part": whole | {"text": ""}}
                yield {"type": "response.output_text.delta", **at, "delta": whole["text"], "logprobs": []}
                yield {"type": "response.output_text.done", **at, "text": whole["text"], "logprobs": []}
                yield {"type": "response.content_part.done", **at, "part": whole}
            yield {"type": "response.output_item.done", "output_index": i, "item": item}
        if reply.fails:
            yield {"type": "error", "code": "scripted", "message": "scripted failure", "param": None}
            return
        yield {"type": "response.completed", "response": response}

    _stream(handler, ((e["type"], e | {"sequence_number": n}) for n, e in enumerate(events())), reply.holds)


def _messages(handler: BaseHTTPRequestHandler, provider: Provider, body: dict[str, Any], reply: Reply) -> None:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "signed"})
    if reply.content is not None:
        blocks.append({"type": "text", "text": reply.content})
    for name, arguments in reply.tools:
        blocks.append({"type": "tool_use", "id": provider.next_id("toolu_"), "name": name, "input": arguments})
    reason = "tool_use" if reply.tools else "end_turn"
    usage: dict[str, Any] = {"input_tokens": 7 - reply.cached, "output_tokens": 3}
    if reply.cached or reply.thought:
        usage |= {"cache_read_input_tokens": reply.cached, "cache_creation_input_tokens": 0}
        usage["output_tokens_details"] = {"thinking_tokens": reply.thought}
    message = {
        "id": provider.next_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": body.get("model", "m"),
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": usage,
    }
    if not body.get("stream"):
        _send(handler, {**message, "content": blocks})
        return

    def events() -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
        for i, block in enumerate(blocks):
            if block["type"] == "text":
                empty: dict[str, Any] = {"text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            elif block["type"] == "thinking":
                empty = {"thinking": "", "signature": ""}
                delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            else:
                empty = {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_start", "index": i, "content_block": block | empty}
            yield {"type": "content_block_delta", "index": i, "delta": delta}
            yield {"type": "content_block_stop", "index": i}
        ended = {"stop_reason": reason, "stop_sequence": None}
        yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 3}}
        yield {"type": "message_stop"}

    _stream(handler, ((e["type"], e) for e in events()), reply.holds)


def _google(handler: BaseHTTPRequestHandler, provider: Provider, reply: Reply, *, stream: bool) -> None:
    parts: list[dict[str, Any]] = [] if reply.reasoning is None else [{"text": reply.reasoning, "thought": True}]
    parts += [] if reply.content is None else [{"text": reply.content}]
    for name, arguments in reply.tools:
        parts.append({"functionCall": {"id": provider.next_id("call_"), "name": name, "args": arguments}})
    head = {"responseId": provider.next_id("gen_"), "modelVersion": "m"}
    counts = {"promptTokenCount": 7, "candidatesTokenCount": 3 - reply.thought, "totalTokenCount": 10}
    if reply.cached or reply.thought:
        counts |= {"cachedContentTokenCount": reply.cached, "thoughtsTokenCount": reply.thought}
    usage = {"usageMetadata": counts}

    def response(parts: list[dict[str, Any]], **end: Any) -> dict[str, Any]:
        return {**head, "candidates": [{"index": 0, "content": {"role": "model", "parts": parts}, **end}]}

    def events() -> Iterator[tuple[None, dict[str, Any]]]:
        yield from ((None, response([part])) for part in parts)
        failure = {"error": {"code": 500, "message": "scripted failure", "status": "INTERNAL"}}
        yield None, failure if reply.fails else {**response([{"text": ""}], finishReason="STOP"), **usage}

    if stream:
        _stream(handler, events(), reply.holds)
    else:
        _send(handler, {**response(parts, finishReason="STOP"), **usage})

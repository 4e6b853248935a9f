"""What clients see of a server's own failures, on connections that are kept."""

from __future__ import annotations

import asyncio

import pytest
from scripted import in_loop, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl.errors import GatewayError
from agl.trainer.http.errors import describe_error, error_handlers
from agl.trainer.http.numbers import number_of
from agl.trainer.http.responses import answer
from agl.trainer.http.server import HttpServer


async def fail(request: Request) -> Response:
    raise ZeroDivisionError("by mistake")


async def fine(request: Request) -> Response:
    return answer({"fine": True})


async def exchanged(port: int, requests: list[bytes]) -> list[tuple[int, bytes]]:
    """Status and head of the answers to requests that are sent one after another on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = []
    try:
        for request in requests:
            writer.write(request)
            await writer.drain()
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l")
            )
            await reader.readexactly(length)
            answers.append((int(head.split(b" ", 2)[1]), head.lower()))
            await asyncio.sleep(0.05)  # a connection that is closed unannounced is closed by now
    finally:
        writer.close()
    return answers


@in_loop
async def test_a_connection_is_kept_after_the_servers_error():
    app = Starlette(
        routes=[Route("/fail", fail, methods=["GET", "POST"]), Route("/fine", fine)],
        exception_handlers=error_handlers(describe_error),
    )
    server = HttpServer(app, error=GatewayError)
    await server.start()
    bad, good = b"GET /fail HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", b"GET /fine HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    try:
        answers = await exchanged(server.port, [bad, good, bad, bad, good])
    finally:
        await server.stop()
    assert [status for status, _ in answers] == [500, 200, 500, 500, 200]
    assert all(b"connection: close" not in head for _, head in answers)


DIGITS = "7" * 5000


@pytest.mark.parametrize(
    ("path", "headers", "statuses"),
    [
        ("/rollouts/r/attempts/{digits}/agents/a/v1/chat/completions", "", (404,)),
        ("/rollouts/r/attempts/{digits}/agents/a/v1/models", "", (404,)),
        ("{own}/chat/completions", "x-stainless-retry-count: {digits}\r\n", (200,)),
        ("{own}/responses/none/input_items?limit={digits}", "", (400, 404)),
    ],
)
@in_loop
async def test_a_number_of_thousands_of_digits_is_no_error_of_the_servers(
    path: str, headers: str, statuses: tuple[int, ...]
):
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        own = attempt.url().removeprefix(rig.gateway.base_url)
        method = b"GET" if "items" in path or "models" in path else b"POST"
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        head = (
            f" {path.format(digits=DIGITS, own=own)} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {attempt.key}\r\n{headers.format(digits=DIGITS)}content-length: {len(body)}\r\n\r\n"
        )
        [(status, _)] = await exchanged(rig.server.port, [method + head.encode() + body])
    assert status in statuses


def test_numbers_of_clients():
    texts = ["0", "20", "9" * 18, "9" * 19, DIGITS, "", "-1", "1.0", "\u0663", "1_0", " 1"]
    assert [number_of(text) for text in texts] == [0, 20, int("9" * 18), *[None] * 8]

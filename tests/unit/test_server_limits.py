"""What slow, silent, greedy and idle clients can do to a server, with real sockets: nothing to anybody else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from scripted import in_loop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agl.errors import GatewayError
from agl.trainer.http.limits import Limits, parse_json
from agl.trainer.http.server import HttpServer


class Echo:
    """A server that says how long the body is, holds requests, or sends without end."""

    def __init__(self, **limits: Any) -> None:
        self.held = asyncio.Event()
        self.arrived = 0
        self.broke_off = asyncio.Event()
        app = Starlette(
            routes=[
                Route("/length", self._length, methods=["POST"]),
                Route("/hold", self._hold),
                Route("/flood", self._flood),
            ]
        )
        self.server = HttpServer(app, error=GatewayError, limits=Limits(**limits))

    async def _length(self, request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def _hold(self, _: Request) -> Response:
        self.arrived += 1
        await self.held.wait()
        return PlainTextResponse("ok")

    async def _flood(self, _: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 65536

        broke_off = self.broke_off

        class Flood(StreamingResponse):
            async def __call__(self, *asgi: Any) -> None:
                try:
                    await super().__call__(*asgi)
                finally:
                    broke_off.set()

        return Flood(chunks())


@contextlib.asynccontextmanager
async def echo(**limits: Any) -> AsyncIterator[Echo]:
    running = Echo(**limits)
    await running.server.start()
    try:
        yield running
    finally:
        running.held.set()
        await running.server.stop()


async def connect(running: Echo) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", running.server.port)


async def good(running: Echo) -> None:
    """An ordinary client is served."""
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        answer = await client.post(f"{running.server.url}/length", content=b"abc")
    assert (answer.status_code, answer.text) == (200, "3")


async def ends(reader: asyncio.StreamReader) -> bytes:
    """What a connection still says before the server closes it."""
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


@in_loop
async def test_a_head_that_never_ends_is_cut_off():
    async with echo(header_seconds=2.0) as running:
        silent, _ = await connect(running)
        reader, writer = await connect(running)

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                for byte in b"POST /length HTTP/1.1\r\nx-slow: " + b"a" * 1000:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        await good(running)
        assert (await ends(silent)).startswith(b"HTTP/1.1 408")
        # A drop that arrives after the end makes the system throw away what was not read yet.
        told = await ends(reader)
        assert told == b"" or told.startswith(b"HTTP/1.1 408")
        dripping.cancel()


@in_loop
async def test_a_second_request_on_a_connection_has_the_same_deadline():
    async with echo(header_seconds=2.0) as running:
        reader, writer = await connect(running)
        writer.write(b"POST /length HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\nab")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n2")
        writer.write(b"POST /length HT")
        assert (await ends(reader)).startswith(b"HTTP/1.1 408")


@in_loop
async def test_a_body_that_drips_is_cut_off():
    async with echo(body_seconds=2.0, body_rate=10_000) as running:
        reader, writer = await connect(running)
        writer.write(b"POST /length HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"a")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        told = await ends(reader)
        assert told == b"" or (told.startswith(b"HTTP/1.1 408") and b"connection: close" in told)
        dripping.cancel()
        await good(running)


@pytest.mark.parametrize(("size", "status"), [(10_000, b"200"), (10_001, b"431"), (60_000, b"431")])
@in_loop
async def test_a_head_may_have_as_many_bytes_as_the_limit_says(size, status):
    async with echo(header_bytes=10_000) as running:
        start, end = b"POST /length?q=1 HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\nx-a: ", b"\r\n\r\n"
        reader, writer = await connect(running)
        # In one piece, body and all.
        writer.write(start + b"a" * (size - len(start) - len(end)) + end + b"hi")
        assert (await ends(reader) if status == b"431" else await reader.read(12))[9:12] == status
        await good(running)


@in_loop
async def test_heads_bodies_and_all_bodies_together_are_bounded():
    async with echo(header_bytes=10_000, body_bytes=5000, buffered_bytes=8000) as running:
        reader, writer = await connect(running)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"GET / HTTP/1.1\r\n" if not _ else b"x-a: " + b"a" * 500 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
        assert (await ends(reader))[:12] in (b"HTTP/1.1 431", b"")
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(f"{running.server.url}/length", content=b"a" * 5001)
            assert answer.status_code == 413
            assert answer.text.startswith("the body has more than 5000 bytes: AGL_LIMIT_BODY_BYTES")
        holding = [await connect(running) for _ in range(2)]
        for _, writer in holding:
            writer.write(b"POST /length HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\n" + b"a" * 4500)
        answers = [asyncio.ensure_future(reader.read(12)) for reader, _ in holding]
        done, pending = await asyncio.wait(answers, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [b"HTTP/1.1 503"]
        for task in pending:
            task.cancel()
        for _, writer in holding:
            writer.transport.abort()
        # What they held is free again, once the server has seen them go.
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(20):
            while (answer := await client.post(f"{running.server.url}/length", content=b"a" * 4999)).text != "4999":
                assert answer.status_code == 503
                await asyncio.sleep(0.02)


@in_loop
async def test_requests_past_the_most_are_told_to_come_again():
    async with echo(requests=3) as running, httpx.AsyncClient(trust_env=False, timeout=20) as client:
        held = [asyncio.ensure_future(client.get(f"{running.server.url}/hold")) for _ in range(3)]
        while running.arrived < 3:
            await asyncio.sleep(0.01)
        refused = await client.get(f"{running.server.url}/hold")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        running.held.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 3
        await good(running)


@in_loop
async def test_a_client_that_does_not_read_its_answer_is_dropped():
    async with echo(write_seconds=0.5) as running:
        _, writer = await connect(running)
        writer.write(b"GET /flood HTTP/1.1\r\nhost: localhost\r\n\r\n")
        # asyncio's reader stops taking at its own limit, and then the kernel's buffers fill.
        await asyncio.wait_for(running.broke_off.wait(), 30)
        await good(running)
        writer.transport.abort()


@pytest.mark.parametrize("most", [300, 8192])
@in_loop
async def test_two_thousand_idle_connections_stop_nobody(most: int):
    async with echo(connections=most, header_seconds=60) as running:
        idle = []
        for _ in range(20):
            idle += await asyncio.gather(*(connect(running) for _ in range(100)))
        began = time.monotonic()
        for _ in range(3):
            await good(running)
        assert time.monotonic() - began < 20
        for _, writer in idle:
            writer.transport.abort()


@in_loop
async def test_busy_connections_are_never_dropped_for_new_ones():
    async with echo(connections=3) as running:
        busy = [await connect(running) for _ in range(3)]
        for _, writer in busy:
            writer.write(b"GET /hold HTTP/1.1\r\nhost: localhost\r\n\r\n")
        while running.arrived < 3:
            await asyncio.sleep(0.01)
        reader, _ = await connect(running)
        assert (await ends(reader)).startswith(b"HTTP/1.1 503")
        running.held.set()
        for reader, _ in busy:
            assert (await reader.read(15)) == b"HTTP/1.1 200 OK"


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_json_has_a_depth():
    assert parse_json(nested(100), 100) is not None
    for depth in (101, 5000, 1_000_000):
        with pytest.raises(ValueError, match=r"nested more than 100 deep|depth limit exceeded"):
            parse_json(nested(depth), 100)

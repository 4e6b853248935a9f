"""What one attempt's flood of large requests costs the others: their latency, quiet and flooded alternately in one run.

    python benchmarks/flood.py                  # every kind of flood
    python benchmarks/flood.py --kinds "20,000 messages"

A gateway with an engine that answers at once runs in a separate process. Attempts A and B send it short requests over
kept-alive connections, one at a time; attempt C sends large ones as fast as they are answered, 16 at a time. The ratio
is that of the medians; the memory is the server's largest resident size, above what it was before.

In "8 x 128 answers" a policy of 0.5M parameters answers. C wants 128 answers of 64 tokens to each of 8 requests at a
time, the others four tokens.

"to a sandbox" goes to the address that a sandboxed coding agent has, on the loop of that gateway.

In "... to a store" the server is that of a store (`agl store`): C sends spans of its rollout, the others one
span at a time. AGL_BENCHMARK_STORE is the URL of its database, for others than a SQLite file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import gzip
import itertools
import json
import multiprocessing
import os
import statistics
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = 262_144
STORE = os.environ.get("AGL_BENCHMARK_STORE")
"""URL of the store that is served; a SQLite file if None."""
_NUMBERS = itertools.count(os.getpid() << 32)
FLOODERS = 16
WORDS = "What is 12 + 34? Use the calculator, then say the result in a few words. "


def _spans(count: int) -> bytes:
    """Spans of about a kilobyte each, of the rollout `@rollout` and the trace `@number`, which `Sender` fills in."""
    same = {"trace_id": "@number", "parent_id": None, "rollout_id": "@rollout", "attempt": 1, "name": "chat"}
    same |= {"start": 0.0, "end": 1.0, "attributes": {"gen_ai.input.messages": WORDS * 13}}
    return json.dumps({"spans": [same | {"span_id": f"{i:016x}"} for i in range(count)]}).encode()


def _messages(count: int, text: str) -> bytes:
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}] * count}).encode()


def _lists(megabytes: int) -> bytes:
    return b"[" + b"[]," * (megabytes * 1_000_000 // 3) + b"[]]"


def _packed_spans() -> bytes:
    """60 MiB of empty spans in protobuf, packed: 58 KB."""
    spans = b"\x12\x00" * (30 << 20)
    for number in (2, 1):
        size, length = len(spans), b""
        while size > 127:
            size, length = size >> 7, length + bytes([size & 127 | 128])
        spans = bytes([number << 3 | 2]) + length + bytes([size]) + spans
    return gzip.compress(spans)


KINDS: dict[str, Callable[[], bytes]] = {
    # Refused: the first two are the requests that once stopped a server for 37 s and took 2.4 GB.
    "300,000 messages, 8 MB": lambda: _messages(300_000, "hi"),
    "empty lists, 38 MB": lambda: b'{"model":"policy","messages":[' + b"[]," * 12_600_000 + b"[]]}",
    "20,000 messages": lambda: _messages(20_000, "hi"),
    # Within the limits: rendered, tokenised and answered.
    "10,000 messages": lambda: _messages(9_999, "hi"),
    "200,000 tokens in one message": lambda: _messages(1, WORDS * 6_000),
    "4,000 tokens": lambda: _messages(8, WORDS * 15),
    # Sampled: one attempt that wants more rows than the engine has.
    (ANSWERS := "8 x 128 answers"): lambda: json.dumps(
        {"model": "policy", "messages": [{"role": "user", "content": WORDS}], "n": 128, "max_tokens": 64}
    ).encode(),
    (SPANS := "5,000 spans to a store"): lambda: _spans(5_000),
    # Refused: two bytes can be an object of a hundred.
    (SANDBOX := "60 MB of lists to a sandbox"): lambda: _lists(60),
    (LISTS := "60 MB of lists to a store"): lambda: _lists(60),
    (PACKED := "58 KB of packed OTLP to a store"): _packed_spans,
    # Within the limits, and no spans: parsed, and then refused.
    (OBJECTS := "120,000 objects to a store"): lambda: (
        b'{"spans":[' + b",".join(b'{"k%d":%d}' % (n, n) for n in range(120_000)) + b"]}"
    ),
}
_TO_STORE = (SPANS, LISTS, PACKED, OBJECTS)
_PROTOBUF = "content-type: application/x-protobuf\r\ncontent-encoding: gzip"


# -- the server -------------------------------------------------------------------------------------------------------


def serve(pipe: Any, kind: str) -> None:
    """A server in this process, and the URLs, keys and rollouts of three attempts, until `pipe` says so."""
    asyncio.run(_serve_store(pipe, kind) if kind in _TO_STORE else _serve(pipe, kind))


async def _serve_store(pipe: Any, kind: str) -> None:
    import tempfile

    from agl.trainer.http.auth import Keys
    from agl.trainer.store import open_store
    from agl.trainer.store.http.server import StoreServer
    from agl.trainer.store.types import NewRollout

    with tempfile.TemporaryDirectory() as directory:
        store = await open_store(STORE or f"sqlite:///{directory}/bench.db")
        server = StoreServer(store, port=0, keys=Keys())
        url = f"{await server.start()}/v1/store/add_spans"
        rollouts = await store.enqueue_rollouts([NewRollout(task="bench")] * 3)
        for _ in rollouts:
            await store.dequeue_rollout()
        gc.collect()  # as `agl store` does
        gc.freeze()
        *quiet, loud = [(url, "k", rollout.rollout_id) for rollout in rollouts]
        if kind == PACKED:
            loud = url.replace("/v1/store/add_spans", "/v1/traces"), *loud[1:]
        pipe.send([*quiet, loud])
        await asyncio.to_thread(pipe.recv)
        await server.stop()
        await store.close()


async def _serve(pipe: Any, kind: str) -> None:
    import tempfile

    from gateway import Instant  # the benchmark next to this one

    from agl.mdp.selection import select
    from agl.trainer.gateway.gateway import Gateway
    from agl.trainer.gateway.server import GatewayServer
    from agl.trainer.local.policy import LocalPolicy
    from agl.trainer.local.protocol import PolicySpec
    from agl.trainer.quickstart.policy import make_policy
    from agl.trainer.quickstart.tokenizer import build_tokenizer
    from agl.trainer.rendering.rendering import Rendering
    from agl.trainer.store import open_store
    from agl.trainer.store.types import NewRollout

    tokenizer = build_tokenizer()
    engine: Any = Instant(tokenizer)
    engine.max_context = CONTEXT
    with tempfile.TemporaryDirectory() as directory:
        if kind == ANSWERS:
            made = make_policy(f"{directory}/policy", stages=()).directory
            engine = await LocalPolicy.start(PolicySpec(str(made), device="cpu", threads=1))
        store = await open_store(f"sqlite:///{directory}/bench.db")
        gateway = Gateway(store)
        gateway.serve("policy", engine, Rendering(tokenizer))
        server = GatewayServer(gateway)
        await server.start()
        attempts = []
        for rollout in await store.enqueue_rollouts([NewRollout(task="bench")] * 3):
            await store.dequeue_rollout()
            access, key = gateway.open_attempt(rollout.rollout_id, 1, selection=select(None))
            attempts.append((f"{access.url}/agents/bench/v1/chat/completions", key, rollout.rollout_id))
        sandbox = None
        if kind == SANDBOX:
            from agl.errors import RolloutError
            from agl.trainer.http.server import HttpServer
            from agl_harnesses.front import Onward, front_app
            from agl_harnesses.mini import Mini

            front, (url, key, rollout_id) = Onward(Mini(), {}), attempts[-1]
            front.prefixes, front.addresses = {"openai": "/openai/v1"}, lambda _: {"openai": url}
            front.is_policy = lambda _: True
            sandbox = HttpServer(front_app(front), error=RolloutError)
            attempts[-1] = f"{await sandbox.start()}/openai/v1/chat/completions", key, rollout_id
        # As a run does (`Workplace.start`): a full collection would stop everything for a third of a second.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
        pipe.send(attempts)
        await asyncio.to_thread(pipe.recv)
        if sandbox is not None:
            await sandbox.stop()
        await server.stop()
        await store.close()
        if kind == ANSWERS:
            await engine.close()


def peak_bytes(pid: int) -> int:
    """The largest resident size of a process since `forget_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


# -- the load ---------------------------------------------------------------------------------------------------------


class Sender:
    """Posts to one attempt over a connection that is made again when the server closes it."""

    def __init__(self, url: str, key: str, rollout: str, kind: str = "content-type: application/json") -> None:
        self.kind = kind
        self.parts, self.key, self.rollout = urllib.parse.urlsplit(url), key, rollout.encode()
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> int:
        """The status of the answer; 0 if the connection broke before there was one."""
        body = body.replace(b"@rollout", self.rollout).replace(b"@number", f"{next(_NUMBERS):032x}".encode())
        try:
            if self.streams is None:
                self.streams = await asyncio.open_connection(self.parts.hostname, self.parts.port)
            reader, writer = self.streams
            head = (
                f"POST {self.parts.path} HTTP/1.1\r\nhost: {self.parts.netloc}\r\n"
                f"authorization: Bearer {self.key}\r\n{self.kind}\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            received = await reader.readuntil(b"\r\n\r\n")
            headers = dict(line.split(b": ", 1) for line in received.lower().split(b"\r\n")[1:-2])
            await reader.readexactly(int(headers[b"content-length"]))
            if headers.get(b"connection") == b"close":
                self.close()
            return int(received[9:12])
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return 0

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


def flood(attempt: tuple[str, str, str], kind: str, pipe: Any) -> None:
    """Send large requests until `pipe` says so; then the number of answers by status."""
    body = KINDS[kind]()

    async def one(counts: dict[int, int]) -> None:
        sender = Sender(*attempt, _PROTOBUF) if kind == PACKED else Sender(*attempt)
        while True:
            status = await sender.post(body)
            counts[status] = counts.get(status, 0) + 1

    async def main() -> dict[int, int]:
        counts: dict[int, int] = {}
        tasks = [asyncio.ensure_future(one(counts)) for _ in range(8 if kind == ANSWERS else FLOODERS)]
        await asyncio.to_thread(pipe.recv)
        for task in tasks:
            task.cancel()
        return counts

    pipe.send(len(body))
    pipe.send(asyncio.run(main()))


async def latencies(attempts: list[tuple[str, str, str]], seconds: float, kind: str) -> list[float]:
    """Milliseconds of each short request of these attempts, each sending one at a time."""
    found: list[float] = []
    end = time.perf_counter() + seconds

    async def one(attempt: tuple[str, str, str]) -> None:
        sender, number = Sender(*attempt), 0
        while time.perf_counter() < end:
            number += 1
            messages = [{"role": "user", "content": f"{WORDS} {number}"}]
            request = {"model": "policy", "messages": messages, "max_tokens": 4 if kind == ANSWERS else None}
            body = _spans(1) if kind in _TO_STORE else json.dumps(request).encode()
            started = time.perf_counter()
            assert await sender.post(body) == 200
            found.append(1e3 * (time.perf_counter() - started))
            # An agent works on each answer, and two that never wait would only measure each other.
            await asyncio.sleep(0.005)

    await asyncio.gather(*(one(attempt) for attempt in attempts))
    return sorted(found)


def percentile(values: list[float], q: float) -> float:
    return values[min(len(values) - 1, int(len(values) * q))]


# -- the report -------------------------------------------------------------------------------------------------------


def measured(kind: str, rounds: int, seconds: float) -> dict[str, Any]:
    """One kind of flood: its figures."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, kind), daemon=True)
    server.start()
    assert server.pid is not None
    *quiet_attempts, loud = here.recv()
    asyncio.run(latencies(quiet_attempts, 2.0, kind))
    phases: dict[str, list[float]] = {"quiet": [], "flooded": []}
    counts: dict[int, int] = {}
    forget_peak(server.pid)
    before, size = peak_bytes(server.pid), 0
    for _ in range(rounds):
        phases["quiet"] += asyncio.run(latencies(quiet_attempts, seconds, kind))
        mine, other = context.Pipe()
        flooder = context.Process(target=flood, args=(loud, kind, other), daemon=True)
        flooder.start()
        size = mine.recv()
        time.sleep(0.5)
        phases["flooded"] += asyncio.run(latencies(quiet_attempts, seconds, kind))
        mine.send(None)
        for status, count in mine.recv().items():
            counts[status] = counts.get(status, 0) + count
        flooder.join(30)
    peak = peak_bytes(server.pid)
    here.send(None)
    server.join(30)
    quiet, flooded = sorted(phases["quiet"]), sorted(phases["flooded"])
    return {
        "kind": kind,
        "megabytes": size / 1e6,
        "quiet_p50_ms": statistics.median(quiet),
        "flooded_p50_ms": statistics.median(flooded),
        "ratio": statistics.median(flooded) / statistics.median(quiet),
        "quiet_p99_ms": percentile(quiet, 0.99),
        "flooded_p99_ms": percentile(flooded, 0.99),
        "quiet_worst_ms": quiet[-1],
        "flooded_worst_ms": flooded[-1],
        "answers": counts,
        "memory_mb": (peak - before) / 1e6,
    }


def main(options: argparse.Namespace) -> None:
    print(
        f"{'flood':32}{'MB':>6}{'quiet p50, p99, worst ms':>29}{'flooded p50, p99, worst ms':>29}{'ratio':>7}"
        f"{'memory MB':>11}  answers"
    )
    rows = []
    for kind in options.kinds or KINDS:
        f = measured(kind, options.rounds, options.seconds)
        rows.append(f)
        print(
            f"{kind:32}{f['megabytes']:6.1f}{f['quiet_p50_ms']:11.2f}{f['quiet_p99_ms']:9.2f}{f['quiet_worst_ms']:9.2f}"
            f"{f['flooded_p50_ms']:11.2f}{f['flooded_p99_ms']:9.2f}{f['flooded_worst_ms']:9.2f}{f['ratio']:7.2f}"
            f"{f['memory_mb']:11.0f}  {f['answers']}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=3, help="of quiet and flooded, alternately")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each phase")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    main(parser.parse_args())

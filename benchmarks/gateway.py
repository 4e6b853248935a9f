"""What the gateway costs: against the engine alone, and against the LiteLLM proxy before an equally trivial server.

    python benchmarks/gateway.py                       # both comparisons, 1 and 64 concurrent requests
    python benchmarks/gateway.py --no-rival            # without LiteLLM
    python benchmarks/gateway.py --rival-venv DIR      # the environment of LiteLLM; made if missing
    python benchmarks/gateway.py --dialects            # Responses, Messages and Google's API against Chat

The engine of the first comparison is the local engine with a random model of quickstart size; in both arms the same
prompts are sampled with the same lengths. The second one has an engine that answers at once: what is measured is the
gateway, which renders, tokenises, parses and records each request in a store, and LiteLLM, which passes it on. Requests
come from a separate process, over kept-alive connections. CPU is that of the serving process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ANSWER_TOKENS = 16
QUESTION = "What is 12 + 34? Use the calculator, then say the result in a few words. Question number {}."
CONCURRENT = (1, 64)
BODY = {"model": "policy", "max_tokens": ANSWER_TOKENS}
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
PATHS["google"] = "v1beta/models/policy:generateContent"


def body(number: int, dialect: str = "chat") -> bytes:
    """The request with this number; each begins a separate conversation."""
    messages = [{"role": "user", "content": QUESTION.format(number)}]
    if dialect == "responses":
        return json.dumps({"model": "policy", "max_output_tokens": ANSWER_TOKENS, "input": messages}).encode()
    if dialect == "google":
        contents = [{"role": "user", "parts": [{"text": messages[0]["content"]}]}]
        return json.dumps({"contents": contents, "generationConfig": {"maxOutputTokens": ANSWER_TOKENS}}).encode()
    return json.dumps({**BODY, "messages": messages}).encode()


# -- load -------------------------------------------------------------------------------------------------------------


async def worked_off(n: int, concurrent: int, one: Callable[[int, int], Awaitable[None]]) -> dict[str, float]:
    """Run `one(worker, number)` for n numbers, `concurrent` at a time; requests/s and latencies in ms."""
    numbers = iter(range(n))
    latencies: list[float] = []

    async def worker(k: int) -> None:
        for number in numbers:
            started = time.perf_counter()
            await one(k, number)
            latencies.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(worker(k) for k in range(concurrent)))
    seconds = time.perf_counter() - started
    latencies.sort()
    return {
        "per_second": n / seconds,
        "p50_ms": 1e3 * statistics.median(latencies),
        "p99_ms": 1e3 * latencies[min(n - 1, int(n * 0.99))],
    }


async def load(url: str, key: str, n: int, concurrent: int, dialect: str = "chat") -> dict[str, float]:
    """Post n requests over `concurrent` connections, by a client small enough not to be what is measured."""
    parts = urllib.parse.urlsplit(url)
    head = (
        f"POST {parts.path}/{PATHS[dialect]} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {key}\r\n"
        "content-type: application/json\r\ncontent-length: "
    )
    connections = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(concurrent)]

    async def one(k: int, number: int) -> None:
        reader, writer = connections[k]
        content = body(number, dialect)
        writer.write(f"{head}{len(content)}\r\n\r\n".encode() + content)
        received = await reader.readuntil(b"\r\n\r\n")
        headers = dict(line.split(b": ", 1) for line in received.lower().split(b"\r\n")[1:-2])
        answer = await reader.readexactly(int(headers[b"content-length"]))
        if b" 200 " not in received[:16]:
            raise SystemExit(f"{received[:16]!r} {answer[:500]!r}")

    try:
        return await worked_off(n, concurrent, one)
    finally:
        for _, writer in connections:
            writer.close()


async def loaded(url: str, key: str, n: int, concurrent: int, pid: int, dialect: str = "chat") -> dict[str, float]:
    """`load` in a separate process, with the CPU time per request of the process `pid`."""
    arguments = [sys.executable, __file__, "--load", url, key, str(n), str(concurrent), dialect]
    before = cpu_seconds(pid)
    child = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
    out, _ = await child.communicate()
    if child.returncode:
        raise SystemExit(f"the load on {url} failed")
    return {**json.loads(out), "cpu_ms": 1e3 * (cpu_seconds(pid) - before) / n}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- what is measured -------------------------------------------------------------------------------------------------


class Instant:
    """An engine that answers at once."""

    max_context = 4096

    def __init__(self, tokenizer: Any) -> None:
        from agl.trainer.engines.base import Completion

        ids = np.asarray(
            [*tokenizer.encode("The result is 46.")[: ANSWER_TOKENS - 1], tokenizer.eos_token_id], np.int32
        )
        self._completion = Completion(ids, np.full(ids.size, -0.1, np.float32), "stop", 0)

    async def generate(self, request: Any, **_: Any) -> Any:
        return self._completion


@contextlib.asynccontextmanager
async def gateway(engine: Any, rendering: Any) -> AsyncIterator[tuple[str, str]]:
    """A gateway over a store in a file; the URL and key of an open attempt."""
    from agl.mdp.selection import select
    from agl.trainer.gateway.gateway import Gateway
    from agl.trainer.gateway.server import GatewayServer
    from agl.trainer.store import open_store
    from agl.trainer.store.types import NewRollout

    with tempfile.TemporaryDirectory() as directory:
        store = await open_store(f"sqlite:///{directory}/bench.db")
        served = Gateway(store)
        served.serve("policy", engine, rendering)
        server = GatewayServer(served)
        await server.start()
        (rollout,) = await store.enqueue_rollouts([NewRollout(task="bench")])
        await store.dequeue_rollout()
        access, key = served.open_attempt(rollout.rollout_id, 1, selection=select(None))
        try:
            yield f"{access.url}/agents/bench/v1", key
        finally:
            await served.close_attempt(rollout.rollout_id, 1)
            await server.stop()
            await store.close()


async def measured(url: str, key: str, n: int, pid: int) -> dict[int, dict[str, float]]:
    """Each number of concurrent requests -> figures, after a warm-up."""
    await loaded(url, key, min(n, 100), max(CONCURRENT), pid)
    return {c: await loaded(url, key, n if c > 1 else n // 4, c, pid) for c in CONCURRENT}


async def against_engine(n: int) -> dict[str, dict[int, dict[str, float]]]:
    """The local engine, directly and through the gateway."""
    from agl.trainer.engines.base import Request, Sampling
    from agl.trainer.local.policy import LocalPolicy, PolicySpec
    from agl.trainer.quickstart.policy import Recipe, make_policy
    from agl.trainer.quickstart.tokenizer import build_tokenizer
    from agl.trainer.rendering.rendering import Rendering

    rendering = Rendering(build_tokenizer())
    with tempfile.TemporaryDirectory() as directory:
        make_policy(directory, threads=1, recipe=Recipe(capability_steps=0, mixed_steps=1))
        policy = await LocalPolicy.start(PolicySpec(directory, device="cpu", threads=1))
        try:

            async def one(_: int, number: int) -> None:
                sampling = Sampling(ANSWER_TOKENS, stop_token_ids=rendering.stop_token_ids, seed=number)
                await policy.generate(Request(prompts[number], sampling))

            prompts = [rendering.prompt(json.loads(body(i))["messages"]).ids for i in range(n)]
            await worked_off(min(n, 100), max(CONCURRENT), one)
            alone = {c: await worked_off(n if c > 1 else n // 4, c, one) for c in CONCURRENT}
            async with gateway(policy, rendering) as (url, key):
                through = await measured(url, key, n, os.getpid())
        finally:
            await policy.close()
    return {"engine alone": alone, "engine behind the gateway": through}


async def instant(n: int) -> dict[int, dict[str, float]]:
    """The gateway with an engine that answers at once."""
    from agl.trainer.quickstart.tokenizer import build_tokenizer
    from agl.trainer.rendering.rendering import Rendering

    tokenizer = build_tokenizer()
    async with gateway(Instant(tokenizer), Rendering(tokenizer)) as (url, key):
        return await measured(url, key, n, os.getpid())


async def dialects(n: int, rounds: int) -> dict[str, list[float]]:
    """CPU ms of a request in each dialect, in turns, with an engine that answers at once."""
    from agl.trainer.quickstart.tokenizer import build_tokenizer
    from agl.trainer.rendering.rendering import Rendering

    tokenizer = build_tokenizer()
    taken: dict[str, list[float]] = {dialect: [] for dialect in PATHS}
    async with gateway(Instant(tokenizer), Rendering(tokenizer)) as (url, key):
        for k in range(rounds + 1):
            for dialect in PATHS:
                figures = await loaded(url, key, n, 16, os.getpid(), dialect)
                taken[dialect] += [figures["cpu_ms"]] if k else []  # the first round warms up
    base = statistics.median(taken["chat"])
    for dialect, values in taken.items():
        print(
            f"{dialect:10} {statistics.median(values):6.2f} ms of CPU a request, {statistics.median(values) / base:.2f}"
        )
    return taken


# -- LiteLLM ----------------------------------------------------------------------------------------------------------


def upstream(port: int) -> None:
    """The trivial OpenAI-compatible server behind LiteLLM: one fixed answer."""
    import uvicorn

    message = {"role": "assistant", "content": "The result is 46."}
    answer = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 40, "completion_tokens": 8, "total_tokens": 48},
    }  # fmt: skip
    content = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    uvicorn.run(app, port=port, log_level="warning", access_log=False, lifespan="off")


@contextlib.contextmanager
def running(*arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block; its output is shown when it fails early."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env={**os.environ, **(env or {})})
        try:
            yield process
        finally:
            if process.poll() not in (None, 0):
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace")[-2000:])
            process.terminate()
            process.wait(20)


async def answers(process: subprocess.Popen[bytes], port: int, seconds: float = 120.0) -> None:
    """Wait until a process listens."""
    async with asyncio.timeout(seconds):
        while process.poll() is None:
            with contextlib.suppress(OSError):
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                return
            await asyncio.sleep(0.2)
    raise RuntimeError("it ended before it listened")


async def litellm(venv: Path, n: int) -> tuple[dict[int, dict[str, float]], str]:
    """The LiteLLM proxy, one worker, before the trivial server; and its version."""
    python = venv / "bin" / "python"
    if not (venv / "bin" / "litellm").exists():
        print(f"installing LiteLLM into {venv} ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "litellm[proxy]"], check=True)
    show = "import importlib.metadata as m; print(m.version('litellm'))"
    version = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout.strip()
    first, second = free_ports(2)
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.json"
        parameters = {"model": "openai/policy", "api_base": f"http://127.0.0.1:{first}/v1", "api_key": "none"}
        config.write_text(json.dumps({
            "model_list": [{"model_name": "policy", "litellm_params": parameters}],
            "general_settings": {"master_key": "sk-bench"},
            "litellm_settings": {"telemetry": False},
        }))  # fmt: skip
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True"}
        proxy_command = (str(venv / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1",
                         "--port", str(second), "--num_workers", "1")  # fmt: skip
        with (
            running(sys.executable, __file__, "--upstream", str(first)) as server,
            running(*proxy_command, env=environment) as proxy,
        ):
            await answers(server, first)
            await answers(proxy, second)
            return await measured(f"http://127.0.0.1:{second}/v1", "sk-bench", n, proxy.pid), version


def free_ports(n: int) -> list[int]:
    """Ports that nobody listens on."""
    import socket

    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


# -- the report -------------------------------------------------------------------------------------------------------


def show(title: str, rows: dict[str, dict[int, dict[str, float]]], base: str) -> None:
    print(f"\n{title}\n{'':28}{'concurrent':>11}{'req/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>9}{'req/s ratio':>13}")
    for c in CONCURRENT:
        for name, figures in rows.items():
            f = figures[c]
            ratio = f["per_second"] / rows[base][c]["per_second"]
            cpu = f"{f['cpu_ms']:9.2f}" if "cpu_ms" in f else f"{'':9}"
            print(f"{name:28}{c:11d}{f['per_second']:9.1f}{f['p50_ms']:9.2f}{f['p99_ms']:9.2f}{cpu}{ratio:13.2f}")


async def main(arguments: argparse.Namespace) -> None:
    facts: dict[str, Any] = {"cores": os.cpu_count(), "answer_tokens": ANSWER_TOKENS}
    n = arguments.requests
    if arguments.dialects:
        await dialects(n // 4, arguments.rounds)
        return
    facts["engine"] = await against_engine(n)
    show("The local engine, 16 tokens an answer", facts["engine"], "engine alone")
    rows = {"gateway": await instant(n)}
    if arguments.rival:
        try:
            rows["LiteLLM proxy"], facts["litellm"] = await litellm(arguments.rival_venv, n)
        except (subprocess.CalledProcessError, RuntimeError, TimeoutError, OSError) as error:
            print(f"LiteLLM could not be measured: {error}", file=sys.stderr)
            facts["rival_error"] = str(error)
    facts["instant"] = rows
    show("An engine that answers at once", rows, "LiteLLM proxy" if "LiteLLM proxy" in rows else "gateway")
    if arguments.json:
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agl" / "litellm"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="at 64 concurrent; a quarter of it at 1")
    parser.add_argument("--rival-venv", type=Path, default=cache, help="LiteLLM's environment (default: %(default)s)")
    parser.add_argument("--no-rival", dest="rival", action="store_false", help="leave LiteLLM out")
    parser.add_argument("--dialects", action="store_true", help="compare the dialects")
    parser.add_argument("--rounds", type=int, default=3, help="of --dialects")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--load", nargs=5, metavar=("URL", "KEY", "N", "CONCURRENT", "DIALECT"), help=argparse.SUPPRESS)
    parser.add_argument("--upstream", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        url, key, n, concurrent, dialect = options.load
        print(json.dumps(asyncio.run(load(url, key, int(n), int(concurrent), dialect))))
    elif options.upstream:
        upstream(options.upstream)
    else:
        asyncio.run(main(options))

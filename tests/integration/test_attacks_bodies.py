"""Bodies that are made to exhaust a server, sent to every route of every server of agl; and answers of providers.

Two bytes can be an object of a hundred. So a body is bounded in bytes, values and depth before any of it is an object,
and what is large is read on a thread, in the turn of whoever was authenticated.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import gzip
import json
import re
import sys
import threading
import tracemalloc
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from applications import SHOP
from applications import served as served_applications
from pydantic import ValidationError
from scripted import ScriptedEngine, in_loop, quick_tokenizer, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount, Route
from store_server import KEYS, OPERATOR, RUNNER

import agl.compat as al
from agl.errors import AglError, RolloutError
from agl.tracing import otlp
from agl.tracing.inferred import SpanInference
from agl.trainer.algorithms.options import Settings
from agl.trainer.dashboard.app import dashboard_app
from agl.trainer.dashboard.sources import Source
from agl.trainer.gateway import completions
from agl.trainer.gateway.completions import CompletionsBody, DetokenizeBody, TokenizeBody
from agl.trainer.gateway.gateway import Gateway
from agl.trainer.gateway.server import GatewayServer
from agl.trainer.http import limits as limits_module
from agl.trainer.http.auth import LEASE_HEADER
from agl.trainer.http.bodies import check_json_lines, unpacked
from agl.trainer.http.json_pieces import parse_in_pieces
from agl.trainer.http.limits import Limits, Refused
from agl.trainer.http.protobuf import check_protobuf, message_fields
from agl.trainer.http.server import HttpServer
from agl.trainer.http.turns import LARGE_BYTES, TurnsByLease
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.runners import recording_proxy
from agl.trainer.runners.recording_proxy import RecordingProxy
from agl.trainer.runners.remote.coordinator import coordinator_routes, key_check
from agl.trainer.runners.remote.serialization import METHODS as RUNNER_METHODS
from agl.trainer.store import open_store
from agl.trainer.store.http.protocol import BATCH_PATH
from agl.trainer.store.http.protocol import METHODS as STORE_METHODS
from agl.trainer.store.http.server import StoreServer
from agl.trainer.store.types import NewRollout
from agl.trainer.wire import methods
from agl_agentlightning import llm_proxy as llm_proxy_module
from agl_harnesses.front import Onward, front_app
from agl_harnesses.mini import Mini
from agl_service.server import serving as serve_service

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DENSE = b"[" + b"[]," * 260_000 + b"[]]"
"""0.8 MB, more values than any server takes; 60 MB were 3.6 GB of lists."""
DEEP = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
BODIES = {
    "dense": (DENSE, {}),
    "deep": (DEEP, {}),
    "dense, packed": (gzip.compress(DENSE), {"content-encoding": "gzip"}),
}


# -- what is watched --------------------------------------------------------------------------------------------------
@dataclass
class Watch:
    """What happens to bodies in this process.

    Attributes:
        readers: the files whose code reads the body of a request. wrong: parses that should not have been.
    """

    readers: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watched, stream = Watch(), Request.stream

    def watched_stream(request: Request) -> Any:
        watched.readers.add(str(Path(sys._getframe(1).f_code.co_filename).resolve().relative_to(ROOT)))
        return stream(request)

    def watched_parse(parse: Callable[..., Any]) -> Callable[..., Any]:
        def loads(text: Any, *args: Any, **options: Any) -> Any:
            data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
            objects = data.count(b"[") + data.count(b"{")
            if objects > Limits().body_values:
                watched.wrong.append(f"{objects} objects were made of a body")
            if len(data) >= LARGE_BYTES and not threading.current_thread().name.startswith("agl-requests"):
                watched.wrong.append(f"{len(data)} bytes were parsed on {threading.current_thread().name}")
            return parse(text, *args, **options)

        return loads

    monkeypatch.setattr(Request, "stream", watched_stream)
    monkeypatch.setattr(orjson, "loads", watched_parse(orjson.loads))
    monkeypatch.setattr(json, "loads", watched_parse(json.loads))
    # A piece is never large, but what is parsed in pieces is.
    for module in (limits_module, methods):
        monkeypatch.setattr(module, "parse_in_pieces", watched_parse(parse_in_pieces))
    return watched


# -- a provider, and a sandbox's address before it --------------------------------------------------------------------
KEY = "sk-kept-outside-0123456789"


@dataclass
class At:
    """A provider that listens.

    Attributes:
        url: where. seen: the heads of the requests that it got. answer: head and body of each of its answers.
    """

    url: str = ""
    seen: list[str] = field(default_factory=list)
    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@contextlib.asynccontextmanager
async def provider() -> AsyncIterator[At]:
    """Whatever is sent, as it comes: no library stands between the attack and what is asserted."""
    at = At()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = re.search(r"(?i)content-length: (\d+)", head)
                at.seen.append(head)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(at.answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=2**27)
    at.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield at
    finally:
        server.close()


@contextlib.asynccontextmanager
async def sandboxed() -> AsyncIterator[tuple[str, Onward, At]]:
    """The address of an untrained agent's sandbox: its URL, what is behind it, and the provider behind that."""
    async with provider() as at:
        keys = {
            "openai": [("authorization", f"Bearer {KEY}")],
            "anthropic": [("x-api-key", KEY)],
            "google": [("x-goog-api-key", KEY)],
        }
        one = Onward(Mini(), keys)
        one.prefixes = {
            "openai": "/openai/api.openai.com/v1",
            "anthropic": "/anthropic/api.anthropic.com",
            "google": "/google/generativelanguage.googleapis.com",
        }
        one.addresses = lambda _: {"openai": f"{at.url}/v1", "anthropic": at.url, "google": at.url}
        async with listening(front_app(one)) as url:
            yield url, one, at
        await one.close()


# -- every server of agl ----------------------------------------------------------------------------------------------
@dataclass
class Target:
    """A server that listens.

    Attributes:
        url: where. app: its application. headers: of requests that it admits. filled: path parameter -> value.
    """

    url: str
    app: Any
    headers: dict[str, str] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    server = HttpServer(app, error=RolloutError)
    try:
        yield await server.start()
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def gateway(_: Path) -> AsyncIterator[Target]:
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        filled = {"rollout": attempt.access.rollout_id, "attempt": "1", "agent": "a", "model": "m", "version": "v1beta"}
        yield Target(rig.server._server.url, rig.server._server.app, bearer(attempt.key), filled)


@contextlib.asynccontextmanager
async def applications(_: Path) -> AsyncIterator[Target]:
    async with served_applications(["x"], routes=completions.routes) as at:
        filled = {"rollout": "application", "attempt": "1", "agent": "application", "version": "v1beta"}
        yield Target(at.url, at.server._server.app, bearer(SHOP), filled)


@contextlib.asynccontextmanager
async def store(place: Path) -> AsyncIterator[Target]:
    opened = await open_store(f"sqlite:///{place}/s.db")
    server = StoreServer(opened, port=0, keys=KEYS)
    yield Target(await server.start(), server._server.app, bearer(OPERATOR))
    await server.stop()
    await opened.close()


@contextlib.asynccontextmanager
async def coordinator(place: Path) -> AsyncIterator[Target]:
    opened = await open_store(f"sqlite:///{place}/s.db")
    server = GatewayServer(Gateway(opened), extra_routes=coordinator_routes(lambda: None, key_check(KEYS)))
    yield Target(
        await server.start(), Starlette(routes=coordinator_routes(lambda: None, key_check(KEYS))), bearer(RUNNER)
    )
    await server.stop()
    await opened.close()


@contextlib.asynccontextmanager
async def dashboard(place: Path) -> AsyncIterator[Target]:
    opened = await open_store(f"sqlite:///{place}/s.db")
    [rollout] = await opened.enqueue_rollouts([NewRollout("t")])
    app = dashboard_app([Source("s", store=opened)], KEYS)
    async with listening(app) as url:
        filled = {"store": "0", "rollout": rollout.rollout_id, "run": "r", "step": "1", "mode": "train"}
        yield Target(url, app, bearer(OPERATOR), filled)
    await opened.close()


@contextlib.asynccontextmanager
async def service(place: Path) -> AsyncIterator[Target]:
    settings = Settings.of(
        {"model": str(place), "algorithm": "grpo", "directory": str(place / "out"), "port": 0}, "test"
    )
    async with serve_service(settings, KEYS, progress=False) as running:
        yield Target(running.mount.url, running.mount, bearer(OPERATOR), {"split": "train"})


@contextlib.asynccontextmanager
async def proxy(place: Path) -> AsyncIterator[Target]:
    """As `agl run` has it: beside a gateway."""
    async with provider() as at:
        opened = await open_store(f"sqlite:///{place}/s.db")
        await opened.enqueue_rollouts([NewRollout("t", rollout_id="ro")])
        await opened.dequeue_rollout()
        inference = SpanInference("ro", 1, "a" * 32, None)
        one = RecordingProxy(opened, inference, {"openai": f"{at.url}/v1", "anthropic": at.url, "google": at.url})
        server = GatewayServer(Gateway(opened), extra_routes=one.routes())
        filled = {"rollout": "ro", "attempt": "1", "key": one.secret, "agent": "a", "path": "chat/completions"}
        yield Target(await server.start(), Starlette(routes=one.routes()), bearer(one.secret), filled)
        await server.stop()
        await one.close()
        await opened.close()


@contextlib.asynccontextmanager
async def front(_: Path) -> AsyncIterator[Target]:
    async with sandboxed() as (url, one, _at):
        yield Target(url, front_app(one), {}, {"api": "openai", "rest": "api.openai.com/v1/chat/completions"})


@contextlib.asynccontextmanager
async def llm_proxy(_: Path) -> AsyncIterator[Target]:
    async with provider() as at:
        entry = {"model": "hosted_vllm/org/tiny", "api_base": f"{at.url}/v1", "api_key": "sk-its-own"}
        one = al.LLMProxy(
            model_list=[{"model_name": "small", "litellm_params": entry}], store=al.InMemoryLightningStore()
        )
        await one.start()
        calls = "/rollout/{rollout}/attempt/{attempt}/v1/{path:path}"
        routes = [Route(calls, lambda _: None, methods=["POST", "DELETE"])]
        filled = {"path": "chat/completions", "rollout": "r", "attempt": "1"}
        endpoint = one.server_launcher_args
        yield Target(f"http://127.0.0.1:{endpoint.port}", Starlette(routes=routes), {}, filled)
        await one.stop()


@contextlib.asynccontextmanager
async def verifiers(_: Path) -> AsyncIterator[Target]:
    pytest.importorskip("verifiers.legacy", reason="verifiers is not installed, or 0.4")
    from agl_environments.as_verifiers import _serve

    run, url = await _serve("key-of-this-rollout")
    yield Target(url, run.server.app, bearer("key-of-this-rollout"), {"path": "v1/chat/completions"})
    await run.end()


SERVERS = {
    each.__name__: each
    for each in (
        gateway, applications, store, coordinator, dashboard, service, proxy, front, llm_proxy, verifiers,
    )
}  # fmt: skip
WHERE = {
    "trainer/gateway/app.py": "gateway",
    "trainer/gateway/server.py": "gateway",
    "trainer/gateway/processes/worker.py": "gateway",
    "trainer/gateway/completions.py": "applications",
    "trainer/launch/serve.py": "applications",
    "trainer/wire/server.py": "store",
    "trainer/store/http/server.py": "store",
    "trainer/store/http/otlp.py": "store",
    "trainer/runners/remote/coordinator.py": "coordinator",
    "trainer/dashboard/app.py": "dashboard",
    "trainer/dashboard/server.py": "dashboard",
    "guests/service/agl_service/routes.py": "service",
    "guests/service/agl_service/server.py": "service",
    "trainer/runners/recording_proxy.py": "proxy",
    "trainer/runners/command_recorder.py": "proxy",
    "guests/harnesses/agl_harnesses/front.py": "front",
    "guests/harnesses/agl_harnesses/training.py": "front",
    "guests/harnesses/agl_harnesses/session.py": "front",
    "guests/agentlightning/agl_agentlightning/llm_proxy.py": "llm_proxy",
    "guests/environments/agl_environments/as_verifiers.py": "verifiers",
}
"""File that makes routes or listens -> the server above that has them."""
RELAYS = {
    "trainer/http/server.py": "what every server listens with",
    "guests/harnesses/agl_harnesses/inside.py": "passes bytes on, and reads the first line alone",
    "guests/service/agl_service/containers.py": "passes bytes on",
    "guests/service/agl_service/contained.py": "passes bytes on",
}
_SERVES = re.compile(
    r"\bStarlette\(|\bRoute\(|\bMount\(|FastAPI\(|HttpServer\(|aiohttp import web|aiohttp\.web|\bstart_server\(|"
    r"start_unix_server\(|\bfrom http\.server|\bimport http\.server|socketserver|create_server\("
)


def sources() -> Iterator[tuple[str, str]]:
    for folder in ("trainer", "guests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def test_every_file_that_serves_is_attacked_here() -> None:
    found = {name for name, text in sources() if _SERVES.search(text)}
    assert found - {*WHERE, *RELAYS} == set(), "add the server to SERVERS, and this file to WHERE"
    assert {*WHERE.values()} == {*SERVERS}


def test_one_module_reads_bodies() -> None:
    """`request.body()` and its like, and whatever unpacks, are nobody else's."""
    names = {"body", "stream", "form", "json"}
    readers = set()
    for name, text in sources():
        if name not in WHERE and "starlette" not in text and "aiohttp" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Await | ast.AsyncFor):
                call = node.value if isinstance(node, ast.Await) else node.iter
                is_read = (
                    isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names
                )
                if is_read and ast.unparse(call.func.value) in (
                    "request",
                    "http_request",
                    "self.request",
                    "self._request",
                ):
                    readers.add(name)
            if isinstance(node, ast.Attribute) and node.attr == "decompressobj":
                readers.add(name)
    assert readers == {"trainer/http/bodies.py"}


def routes_of(app: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(method, path) of each route that can have a body, of an application and what is within."""
    if isinstance(app, Starlette):
        for route in app.routes:
            if isinstance(route, Mount):
                yield from routes_of(route.app, prefix + route.path)
            elif isinstance(route, Route):
                for method in sorted({"POST", "PUT", "PATCH", "DELETE"} & (route.methods or {"POST"})):
                    yield method, prefix + route.path
        return
    for name in ("app", "idle", "mounted"):
        if (inner := getattr(app, name, None)) is not None:
            yield from routes_of(inner, prefix)


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("server", SERVERS)
def test_no_route_makes_objects_of_such_a_body(server: str, kind: str, tmp_path: Path, watch: Watch) -> None:
    async def main() -> None:
        content, headers = BODIES[kind]
        async with SERVERS[server](tmp_path) as target, httpx.AsyncClient(trust_env=False, timeout=60) as http:
            routes = sorted({*routes_of(target.app)})
            assert routes, "no route with a body was found"
            for method, path in routes:
                filled = re.sub(r"{(\w+)[^}]*}", lambda m: target.filled.get(m[1], "x"), path)
                sent = {"content-type": "application/json", **target.headers, **headers}
                response = await http.request(method, target.url + filled, content=content, headers=sent)
                assert 200 <= response.status_code < 500, (method, path, response.text)
                assert watch.wrong == [], (method, path)
            # Whatever was refused, an ordinary request is answered.
            assert (await http.get(f"{target.url}/health", headers=target.headers)).status_code < 500
        # A provider's answer is recorded after it was sent.
        assert watch.wrong == []

    asyncio.run(main())
    assert watch.readers <= {"trainer/http/bodies.py"}, "a route that reads a body by itself"


MADE_UP = 3_000
"""Characters of each name that nobody has."""


@pytest.mark.parametrize("server", SERVERS)
def test_no_server_keeps_what_a_client_makes_up(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`agl.LLMProxy` kept a client, its certificates and routes for each attempt that a URL named."""
    monkeypatch.setattr(llm_proxy_module, "_MOST_ATTEMPTS", 16)  # fewer than come before it is measured

    async def main() -> None:
        async with SERVERS[server](tmp_path) as target, httpx.AsyncClient(trust_env=False, timeout=60) as http:
            routes = sorted({*routes_of(target.app)})

            async def send(number: int) -> None:
                """One request, with names of its own wherever a route, a header or a body takes one."""
                name = f"{number:x}".ljust(MADE_UP, "x")
                method, path = routes[number % len(routes)]

                def fill(parameter: re.Match[str]) -> str:
                    known = target.filled.get(parameter[1])
                    kept = parameter[1] in ("version", "api", "path", "method", "rest", "store") or number % 2
                    return known if known is not None and kept else str(number) if known == "1" else name

                named = {LEASE_HEADER: name, "idempotency-key": name, "session-id": name, "x-request-id": name}
                keys = target.headers if number % 3 else bearer(name)
                body = {"model": name, "messages": [{"role": "user", "content": name}], "user": name,
                        "request_id": name, "worker_id": name, "previous_response_id": name, "session_id": name,
                        "prompt_cache_key": name}  # fmt: skip
                filled = re.sub(r"{(\w+)[^}]*}", fill, path)
                answered = await http.request(method, target.url + filled, json=body, headers={**keys, **named})
                assert answered.status_code < 500, (method, path, answered.text)

            for number in range(300):
                await send(number)
            tracemalloc.start()
            for number in range(300, 900):
                await send(number)
            urllib.parse.clear_cache()  # Python's own, of 128 URLs
            gc.collect()
            # What the provider of these tests keeps is not the server's.
            snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, __file__)])
            tracemalloc.stop()
            kept = sum(each.size for each in snapshot.statistics("filename"))
            assert kept < 600 * MADE_UP / 3, f"{kept / 600:.0f} bytes are kept of each request"

    asyncio.run(main())


@pytest.mark.parametrize("half", [b"", b'"\\ud800",'])
def test_a_long_body_is_parsed_in_pieces(half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """125,000 objects held the interpreter for a tenth of a second, and with half of a character for longer."""
    sizes: list[int] = []

    def watched(parse: Callable[..., Any]) -> Callable[..., Any]:
        def loads(text: Any) -> Any:
            sizes.append(text.count(b"{") if isinstance(text, bytes) else text.count("{"))
            return parse(text)

        return loads

    monkeypatch.setattr(orjson, "loads", watched(orjson.loads))
    monkeypatch.setattr(json, "loads", watched(json.loads))
    body = b"[" + half + b",".join(b'{"k%d":%d}' % (n, n) for n in range(120_000)) + b"]"
    assert len(methods.loads(body, 100)) >= 120_000
    assert sum(sizes) >= 120_000
    assert max(sizes) <= 4_000


WRONG = [{f"k{number}": number} for number in range(2_000)]
WIDE = {f"k{number}": number for number in range(2_000)}
WIDE_AND_DEEP = {f"k{number}": {} for number in range(2_000)}


COUNTED = {("add_metrics", "values")}
"""Methods and their arguments that have any names, of an operator's alone: their errors are counted, not written."""


def errors_of(validate: Callable[[Any], Any], value: Any) -> int:
    """How many errors pydantic collects."""
    try:
        validate(value)
    except ValidationError as error:
        return error.error_count()
    except ValueError:
        return 1
    return 0


@pytest.mark.parametrize("served", [STORE_METHODS, RUNNER_METHODS], ids=["store", "coordinator"])
def test_of_many_wrong_values_few_are_written_out(served: dict[str, Any]) -> None:
    """120,000 objects that are no spans were a million errors: a store stood for eight seconds, and took 1 GB."""
    for method in served.values():
        for argument in method.arguments.model_fields:
            for wrong in (WRONG, [WIDE], WIDE, WIDE_AND_DEEP):
                count = errors_of(method.arguments.model_validate, {argument: wrong})
                assert count <= 150 or (method.name, argument) in COUNTED, (method.name, argument)
        with pytest.raises(AglError, match="2000 fields") as refused:
            method.read(WIDE)
        assert len(refused.value.message) < 200


@pytest.mark.parametrize("body", [CompletionsBody, DetokenizeBody, TokenizeBody])
def test_of_many_wrong_values_of_a_text_few_are_written_out(body: Any) -> None:
    for name in body.model_fields:
        for wrong in (WRONG, [WRONG], WIDE):
            assert errors_of(body.model_validate, {name: wrong}) <= 10, name


@in_loop
async def test_operations_of_a_batch_are_read_off_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, threads = methods.Method.read, list[str]()

    def watched(method: methods.Method, arguments: Any) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return read(method, arguments)

    monkeypatch.setattr(methods.Method, "read", watched)
    operations = [{"method": "add_metrics", "arguments": {"values": WIDE_AND_DEEP}}, {"method": "no such"}, 1]
    async with store(tmp_path) as target, httpx.AsyncClient(trust_env=False, headers=target.headers) as http:
        answered = await http.post(f"{target.url}{BATCH_PATH}", json={"operations": operations})
    assert answered.status_code == 200
    found = [result["error"]["message"] for result in answered.json()["results"]]
    assert found[0].startswith("add_metrics: ")
    assert found[1:] == ["the store has no method 'no such'", "the store has no method None"]
    assert len(threads) == 1
    assert threads[0].startswith("agl-requests")


@in_loop
async def test_an_id_that_a_server_remembers_is_short(tmp_path: Path) -> None:
    """10,000 requests that were given back are remembered by their ids, each of which could have 60 MB."""
    async with store(tmp_path) as target, httpx.AsyncClient(trust_env=False, headers=bearer(RUNNER)) as http:
        for size, status in ((1_200, 200), (2_001, 409)):
            answered = await http.post(f"{target.url}/v1/store/give_back", json={"request_id": "x" * size})
            assert answered.status_code == status
        assert "request_id has 2001 characters, the limit is 2000" in answered.text


# -- who waits for whom ----------------------------------------------------------------------------------------------
def post_of(url: str, path: str, body: bytes, *, key: str, lease: str = "") -> bytes:
    """A request as bytes."""
    host = url.removeprefix("http://")
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\n{LEASE_HEADER}: {lease}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@in_loop
async def test_turns_are_those_of_a_lease_that_is_open_or_of_a_key() -> None:
    """A header that names a lease which is nobody's gave a sender a turn of its own, as many as it liked."""
    leased = {("ro", 1): "secret"}

    async def is_open(rollout_id: str, attempt: int, secret: str) -> bool:
        return leased.get((rollout_id, attempt)) == secret

    def request(lease: str) -> Request:
        return Request({"type": "http", "headers": [(LEASE_HEADER.encode(), lease.encode())]})

    turns = TurnsByLease(is_open)
    of_key = await turns.of(request(""), "runner")
    assert await turns.of(request("made up"), "runner") is of_key
    assert await turns.of(request("secret"), "runner") is of_key, "nobody knows whose it is"
    turns.know("secret", "ro", 1)
    of_lease = await turns.of(request("made up, secret"), "runner")
    assert of_lease is not of_key
    assert await turns.of(request("secret"), "operator") is of_lease
    leased.clear()
    assert await turns.of(request("secret"), "runner") is of_key, "its attempt has ended"
    assert await turns.of(request(""), "operator") is not of_key


@in_loop
async def test_a_made_up_lease_does_not_come_before_a_real_one(tmp_path: Path) -> None:
    """A runner without a lease sends large spans under sixteen names; one that has a lease waits for one of them."""
    opened = await open_store(f"sqlite:///{tmp_path}/s.db")
    await opened.enqueue_rollouts([NewRollout("t", rollout_id="ro")])
    ended: list[str] = []
    server = StoreServer(opened, port=0, keys=KEYS)
    url = await server.start()
    async with httpx.AsyncClient(trust_env=False, headers=bearer(RUNNER), timeout=60) as http:
        lease = (await http.post(f"{url}/v1/store/dequeue_rollout", json={})).json()["result"]
        span = {"trace_id": f"{1:032x}", "parent_id": None, "rollout_id": "ro", "attempt": 1, "name": "n",
                "start": 0.0, "end": 1.0}  # fmt: skip

        async def send(name: str, secret: str, count: int) -> int:
            spans = [span | {"span_id": f"{len(name) * 10**6 + i:016x}"} for i in range(count)]
            answered = await http.post(
                f"{url}/v1/store/add_spans", json={"spans": spans}, headers={LEASE_HEADER: secret}
            )
            ended.append(name)
            return answered.status_code

        greedy = [asyncio.ensure_future(send(f"greedy {n}", f"made up {n}", 5_000)) for n in range(16)]
        await asyncio.sleep(0.2)
        assert await send("honest", lease["secret"], 300) == 200
        assert {*await asyncio.gather(*greedy)} == {403}
    assert ended.index("honest") <= 3, ended
    await server.stop()
    await opened.close()


@in_loop
async def test_a_method_that_waits_does_not_keep_its_senders_turn(tmp_path: Path) -> None:
    """A list of many rollouts to wait for is a large body; whoever waited held up all other large ones."""
    opened = await open_store(f"sqlite:///{tmp_path}/s.db")
    rollouts = await opened.enqueue_rollouts([NewRollout("t")] * 600)
    server = StoreServer(opened, port=0, keys=KEYS)
    url = f"{await server.start()}/v1/store"
    async with httpx.AsyncClient(trust_env=False, headers=bearer(OPERATOR), timeout=60) as http:
        waiting = asyncio.ensure_future(
            http.post(f"{url}/wait_for_rollouts", json={"rollout_ids": [r.rollout_id for r in rollouts], "timeout": 60})
        )
        await asyncio.sleep(0.3)
        more = [{"task": "x" * 1000, "rollout_id": f"more-{n}"} for n in range(40)]
        assert (await http.post(f"{url}/enqueue_rollouts", json={"rollouts": more})).status_code == 200
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await server.stop()
    await opened.close()


@in_loop
async def test_each_application_has_turns_of_its_own() -> None:
    """Each of an application's requests began a conversation, and each conversation had turns of its own."""
    async with served_applications(["x"]) as at:
        one, other, desk = (
            at.gateway.find_attempt("", 1, {"authorization": f"Bearer {key}"})
            for key in (SHOP, SHOP, "desk-key-0123456789")
        )
        assert one is not other
        assert one.turns is other.turns
        assert one.turns is not desk.turns


LONG = "What is 12 + 34? " * 8_000
TEXTS: dict[str, Any] = {
    "/tokenize": {"prompt": LONG[:25_000], "return_token_strs": True},
    "/tokenize of a conversation": {"messages": [{"role": "user", "content": LONG}]},
    "/detokenize": {"tokens": [5] * 40_000},
    "/v1/completions": {"prompt": [LONG] * 3, "max_tokens": 1},
    "/v1/completions with an echo": {"prompt": [5] * 30_000, "max_tokens": 1, "echo": True},
}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_are_encoded_in_their_applications_turn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They went to threads that all senders share, as many at a time as came, and some of it to the event loop."""
    threads = set[str]()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return function(*args, **options)

        return call

    for name in ("encode", "decode", "prompt"):
        monkeypatch.setattr(Rendering, name, watched(getattr(Rendering, name)))
    ended: list[str] = []

    async def main() -> None:
        engine = ScriptedEngine(quick_tokenizer(), lambda _: "x", max_context=100_000)
        async with (
            served_applications(engine, routes=completions.routes) as at,
            httpx.AsyncClient(trust_env=False, base_url=at.url, timeout=120) as http,
        ):
            threads.clear()

            async def send(name: str, path: str, body: Any, key: str) -> None:
                answered = await http.post(path, json={"model": "policy", **body}, headers=bearer(key))
                assert answered.status_code == 200, answered.text
                ended.append(name)

            path = kind.partition(" ")[0]
            greedy = [asyncio.ensure_future(send(f"greedy {n}", path, TEXTS[kind], SHOP)) for n in range(12)]
            while not ended:
                await asyncio.sleep(0.01)
            await send("honest", "/tokenize", {"prompt": "Hello"}, "desk-key-0123456789")
            await asyncio.gather(*greedy)

    asyncio.run(main())
    assert {name.rpartition("_")[0] for name in threads} == {"agl-requests"}
    assert ended.index("honest") <= 4, ended


@in_loop
async def test_requests_for_tokens_count_as_an_applications_requests() -> None:
    async with served_applications(["x"], routes=completions.routes, most_requests=1) as at:
        at.gateway.admit_one("shop")
        async with httpx.AsyncClient(trust_env=False, base_url=at.url, headers=bearer(SHOP)) as http:
            for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
                assert (await http.post(path, json=body)).status_code == 429
                at.gateway.ended("shop")
                assert (await http.post(path, json=body)).status_code == 200
                assert (await http.post(path, json={"tokens": "no"})).status_code == 400
                at.gateway.admit_one("shop")
            many = {"messages": [{"role": "user", "content": "x"}] * 10_001}
            at.gateway.ended("shop")
            assert (await http.post("/tokenize", json=many)).status_code == 413


# -- what is packed, and what is no JSON ------------------------------------------------------------------------------
def test_what_is_packed_is_unpacked_to_a_bound() -> None:
    plain = b"x" * 100_000
    for encoding, packed in (("gzip", gzip.compress(plain)), ("x-gzip", gzip.compress(plain)), ("identity", plain)):
        assert unpacked(packed, encoding, 100_000) == plain
        if encoding != "identity":
            with pytest.raises(ValueError, match="more than 99999 bytes once unpacked: AGL_LIMIT_BODY_BYTES"):
                unpacked(packed, encoding, 99_999)
            with pytest.raises(ValueError, match="ends too soon"):
                unpacked(packed[:-9], encoding, 100_000)
    assert plain.startswith(unpacked(gzip.compress(plain)[:-9], "gzip", 100_000, whole=False))
    with pytest.raises(ValueError, match="unknown"):
        unpacked(plain, "br", 100_000)


def field_of(number: int, content: bytes) -> bytes:
    size, length = len(content), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def nested_value(depth: int) -> bytes:
    """A span whose attribute is so many lists in each other."""
    value = b""
    for _ in range(depth):
        value = field_of(5, field_of(1, value))
    return field_of(9, field_of(1, b"k") + field_of(2, value))


@pytest.mark.parametrize(
    ("spans", "status", "words"),
    [
        (field_of(2, b"") * 300_000, 413, "250001 fields or more, the limit is 250000: AGL_LIMIT_BODY_VALUES"),
        (field_of(2, field_of(9, b"") * 300_000), 413, "AGL_LIMIT_BODY_VALUES"),
        (field_of(2, b"\x10\x01" * 300_000), 413, "AGL_LIMIT_BODY_VALUES"),
        (field_of(2, nested_value(60) + field_of(5, b"x" * 600_000)), 400, "AGL_LIMIT_JSON_DEPTH"),
        (field_of(2, field_of(5, b"x" * 600_000)), 200, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
@in_loop
async def test_protobuf_is_counted_before_it_is_objects(
    spans: bytes, status: int, words: str, packed: bool, tmp_path: Path
) -> None:
    """58 KB of gzip, of a runner without a lease, were 60 MiB of spans, 1.7 GB of objects and 8.5 s."""
    body = field_of(1, field_of(2, spans))
    async with store(tmp_path) as target, httpx.AsyncClient(trust_env=False, timeout=60) as http:
        headers = {"content-type": "application/x-protobuf", **bearer(RUNNER)}
        if packed:
            body, headers["content-encoding"] = gzip.compress(body), "gzip"
        answered = await http.post(f"{target.url}/v1/traces", content=body, headers=headers)
    assert answered.status_code == status
    assert words.encode() in answered.content


def test_protobuf_is_counted_as_it_is_written() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add(name="n", start_time_unix_nano=1, flags=3)
    for number in range(50):
        attribute = span.attributes.add(key=f"k{number}")
        attribute.value.array_value.values.add(double_value=0.5)
        attribute.value.array_value.values.add(int_value=2**40)
    fields = message_fields(ExportTraceServiceRequest.DESCRIPTOR)
    # Three messages that hold one another, three fields of the span, and eight of each attribute.
    count = 3 + 3 + 50 * 8
    body = request.SerializeToString()
    check_protobuf(body, fields, Limits(body_values=count))
    with pytest.raises(Refused, match=f"{count} fields or more, the limit is {count - 1}"):
        check_protobuf(body, fields, Limits(body_values=count - 1))
    with pytest.raises(Refused, match="8 deep or more, the limit is 7"):
        check_protobuf(body, fields, Limits(body_values=count, json_depth=7))
    # What is cut off is left to the parser.
    for cut in range(len(body)):
        with contextlib.suppress(Refused):
            check_protobuf(body[:cut], fields, Limits(body_values=100))
    with pytest.raises(Refused, match="more than 10 bytes"):
        check_protobuf(b"\xff" * 300, fields, Limits(body_values=100))


@in_loop
async def test_text_in_another_encoding_hides_nothing(tmp_path: Path) -> None:
    """A character of UTF-16 has the byte of a quote, behind which nothing was counted; Python's parser guesses it."""
    hidden = '{"\u2200": [' + "[]," * 400_000 + '[]], "x": "\\ud800"}'
    async with store(tmp_path) as target, httpx.AsyncClient(trust_env=False, timeout=60) as http:
        headers = {"content-type": "application/json", **bearer(OPERATOR)}
        answered = await http.post(
            f"{target.url}/v1/store/get_rollout", content=hidden.encode("utf-16"), headers=headers
        )
    assert answered.status_code == 400
    assert "not JSON" in answered.json()["error"]["message"]


def test_lines_of_tasks_are_counted_together_and_one_by_one() -> None:
    limits = Limits(body_values=1_000)
    check_json_lines(b"[1,2,3]\n" * 4_000, limits)
    for lines, words in ((b"[1,2,3]\n" * 6_000, "20 times"), (b"[" + b"1," * 2_000 + b"1]", "AGL_LIMIT_BODY_VALUES"),
                         (b"[" * 101 + b"]" * 101, "AGL_LIMIT_JSON_DEPTH")):  # fmt: skip
        with pytest.raises(Refused, match=words):
            check_json_lines(lines, limits)


# -- calls of a sandboxed agent ---------------------------------------------------------------------------------------
OPENAI, ANTHROPIC, GOOGLE = (
    "/openai/api.openai.com/v1", "/anthropic/api.anthropic.com", "/google/generativelanguage.googleapis.com",
)  # fmt: skip
ALLOWED = [
    ("POST", f"{OPENAI}/chat/completions", "/v1/chat/completions"),
    ("POST", f"{OPENAI}/completions", "/v1/completions"),
    ("POST", f"{OPENAI}/responses", "/v1/responses"),
    ("POST", f"{OPENAI}/responses/compact", "/v1/responses/compact"),
    ("POST", f"{OPENAI}/responses/input_tokens", "/v1/responses/input_tokens"),
    ("GET", f"{OPENAI}/models", "/v1/models"),
    ("GET", f"{OPENAI}/models/org/model-1.5:free", "/v1/models/org/model-1.5:free"),
    ("POST", f"{ANTHROPIC}/v1/messages?beta=true", "/v1/messages?beta=true"),
    ("POST", f"{ANTHROPIC}/v1/messages/count_tokens", "/v1/messages/count_tokens"),
    ("GET", f"{ANTHROPIC}/v1/models?limit=5", "/v1/models?limit=5"),
    ("POST", f"{GOOGLE}/v1beta/models/g-2.5:streamGenerateContent?alt=sse&key=sk-mine",
     "/v1beta/models/g-2.5:streamGenerateContent?alt=sse"),
    ("POST", f"{GOOGLE}/v1/models/g-2.5:countTokens", "/v1/models/g-2.5:countTokens"),
]  # fmt: skip
REFUSED = [
    ("DELETE", f"{OPENAI}/files/abc"), ("GET", f"{OPENAI}/files"), ("POST", f"{OPENAI}/files"),
    ("POST", f"{OPENAI}/embeddings"), ("POST", f"{OPENAI}/fine_tuning/jobs"), ("DELETE", f"{OPENAI}/models/m"),
    ("DELETE", f"{OPENAI}/responses/resp_1"), ("PUT", f"{OPENAI}/chat/completions"),
    ("GET", f"{OPENAI}/chat/completions"), ("GET", f"{OPENAI}/organization/admin_api_keys"),
    ("POST", f"{OPENAI}/responses/resp_1/cancel"), ("OPTIONS", f"{OPENAI}/models"), ("TRACE", f"{OPENAI}/models"),
    ("GET", f"{OPENAI}/%2e%2e/%2e%2e/admin"), ("GET", f"{OPENAI}/../../admin"), ("GET", f"{OPENAI}/models/../files"),
    ("GET", f"{OPENAI}/models/%2e%2e/files"), ("GET", f"{OPENAI}/models/%252e%252e/files"),
    ("GET", f"{OPENAI}/models/..%2ffiles"), ("GET", f"{OPENAI}/models/..;/files"),
    ("GET", f"{OPENAI}/models/.%2e/files"), ("GET", f"{OPENAI}/models/..%5cfiles"),
    ("GET", f"{OPENAI}/models/a\\..\\files"), ("GET", f"{OPENAI}//models"), ("GET", f"{OPENAI}/models//"),
    ("GET", f"{OPENAI}/models;x=1"), ("POST", f"{OPENAI}/files;/chat/completions"),
    ("POST", f"{OPENAI}/files/abc/chat/completions"), ("POST", f"{OPENAI}/files%2fabc/chat/completions"),
    ("POST", f"{OPENAI}/files?/chat/completions"), ("POST", f"{OPENAI}/files%3f/chat/completions"),
    ("POST", f"{OPENAI}/files%23/chat/completions"), ("POST", f"{OPENAI}/chat/completions%00"),
    ("POST", f"{OPENAI}/chat/completions%0d%0a"), ("POST", f"{OPENAI}/chat/%63ompletions"),
    ("POST", "/openai/api.openai.com/v1chat/completions"), ("GET", "/openai/evil.example/v1/models"),
    ("POST", f"{ANTHROPIC}/v1/files"), ("DELETE", f"{ANTHROPIC}/v1/files/abc"),
    ("POST", f"{ANTHROPIC}/v1/messages/batches"), ("GET", f"{ANTHROPIC}/v1/organizations/users"),
    ("POST", f"{ANTHROPIC}/v1/complete"), ("POST", f"{GOOGLE}/v1beta/files"),
    ("POST", f"{GOOGLE}/upload/v1beta/files"), ("POST", f"{GOOGLE}/v1beta/cachedContents"),
    ("POST", f"{GOOGLE}/v1beta/models/g:batchGenerateContent"),
    ("POST", f"{GOOGLE}/v1beta/models/../files:countTokens"), ("DELETE", f"{GOOGLE}/v1beta/models/g"),
    ("POST", f"{GOOGLE}/v1beta/tunedModels"), ("GET", "/elsewhere/x/v1/models"),
]  # fmt: skip


async def raw(url: str, request: str) -> tuple[int, str]:
    """The status and the body of the first answer to exactly these bytes."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.encode("latin-1"))
    received = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while part := await asyncio.wait_for(reader.read(1 << 16), 0.5 if received else 10.0):
            received += part
    writer.close()
    head, _, body = received.decode().partition("\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def request_of(method: str, target: str, *headers: str, host: str = "127.0.0.1", body: str = "") -> str:
    kept = [f"host: {host}", "content-type: application/json", "connection: close", f"content-length: {len(body)}"]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *kept, *headers, "", body])


@in_loop
async def test_a_sandboxed_agent_calls_models_and_nothing_else_with_the_users_key() -> None:
    """`DELETE /v1/files/abc` and `/v1/%2e%2e/%2e%2e/admin` reached the provider, with the key."""
    async with sandboxed() as (url, one, at):
        for method, target, sent in ALLOWED:
            body = '{"model":"m"}' if method == "POST" else ""
            mine = ("authorization: Bearer sk-mine", "x-api-key: sk-mine", "x-http-method-override: DELETE")
            status, answered = await raw(url, request_of(method, target, *mine, body=body))
            assert status == 200, (target, answered)
            head = at.seen.pop()
            assert head.startswith(f"{method} {sent} HTTP/1.1\r\n"), head
            assert head.count(KEY) == 1
            assert "sk-mine" not in head, "what the agent has seen is not for another's account"
            assert "override" not in head.lower()
        # Left out of all of them, and nothing else.
        assert one.refused == {"header x-http-method-override": len(ALLOWED)}
        one.refused.clear()
        for method, target in REFUSED:
            status, answered = await raw(url, request_of(method, target))
            assert status in (400, 403, 404), (method, target, status)
            assert at.seen == [], (method, target)
            if status == 404:
                error = json.loads(answered)
                form = target.split("/")[1]
                assert ("type" in error) == (form == "anthropic"), answered
                assert ("status" in error["error"]) == (form == "google"), answered
        # Those below no prefix of an API are not calls of it, and malformed ones never become requests.
        assert one.refused["DELETE /files/abc"] == 1
        assert one.refused["GET /%2e%2e/%2e%2e/admin"] == 1
        assert sum(one.refused.values()) > 40
        for number in range(300):
            await raw(url, request_of("GET", f"{OPENAI}/files/{number}"))
        assert len(one.refused) <= 101
        assert one.refused["others"] > 200


@in_loop
async def test_a_sandboxed_agent_smuggles_nothing() -> None:
    """Requests that two servers would read in two ways, other hosts, other protocols."""
    hidden = "DELETE /v1/files/abc HTTP/1.1\r\nhost: x\r\n\r\n"
    call = f"POST {OPENAI}/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    chunked = f"{len(hidden):x}\r\n{hidden}\r\n0\r\n\r\n"
    models = f"{OPENAI}/models"
    attacks = [
        call + f"content-length: {len(chunked)}\r\ntransfer-encoding: chunked\r\n\r\n" + chunked,
        call + f"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n{hidden}",
        call + f"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n{hidden}",
        call + f"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n{hidden}",
        call + f"content-length: 0\r\ncontent-length: {len(hidden)}\r\n\r\n{hidden}",
        call + f"content-length: +0\r\n\r\n{hidden}",
        call + f"content-length : 0\r\n\r\n{hidden}",
        call + f"x: y\n\r\ncontent-length: 0\r\n\r\n{hidden}",
        call + f"content-length: 0\r\n\r\n{hidden}",
        request_of("GET", f"http://evil.example{models}"),
        request_of("GET", "http://evil.example/v1/models"),
        request_of("CONNECT", "evil.example:443"),
        request_of("GET", models, host="evil.example"),
        request_of("GET", models, "upgrade: websocket", "connection: upgrade", "sec-websocket-version: 13"),
        request_of("GET", models, "upgrade: h2c", "http2-settings: AAMAAABk"),
        request_of("GET", f"{models} HTTP/1.1\r\nx: /v1/files"),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    async with sandboxed() as (url, _, at):
        for attack in attacks:
            await raw(url, attack)
            for head in at.seen:
                line = head.partition("\r\n")[0]
                assert line in ("POST /v1/chat/completions HTTP/1.1", "GET /v1/models HTTP/1.1"), (attack, head)
                assert "evil" not in head
                assert "upgrade" not in head.lower()
                assert "transfer-encoding" not in head.lower()
            assert "abc" not in "".join(at.seen), attack
            at.seen.clear()


def test_the_calls_that_pass_are_those_that_the_gateway_knows() -> None:
    """A route that the gateway gets is one to decide about here."""
    from agl.trainer.gateway.app import build_app
    from agl.trainer.gateway.http import PREFIX
    from agl.trainer.runners.provider_calls import is_permitted

    app: Any = build_app(Gateway(object()))  # type: ignore[arg-type]
    place, refused = PREFIX.removesuffix("/v1"), set()
    names = {"response": "resp_1", "model": "m", "version": "v1beta", "method": "batchGenerateContent"}
    for route in app.app.routes:
        if not route.path.startswith(place):
            continue
        path = re.sub(r"{(\w+)[^}]*}", lambda m: names[m[1]], route.path.removeprefix(place))
        for method in route.methods - {"HEAD"}:
            ways = ("openai", path.removeprefix("/v1")), ("anthropic", path), ("google", path)
            if not any(is_permitted(api, method, each) for api, each in ways):
                refused.add((method, path))
    assert refused == {
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1beta/models/m:batchGenerateContent"),
        # A base URL that ends in /v1, to which a client adds its own.
        ("POST", "/v1/v1/messages"),
        ("POST", "/v1/v1/messages/count_tokens"),
        *{("POST", f"/v1/v1beta/models/m:{name}") for name in
          ("generateContent", "streamGenerateContent", "countTokens", "batchGenerateContent")},
    }  # fmt: skip


@in_loop
async def test_0_3s_proxy_passes_calls_of_models_alone() -> None:
    """It has the keys of its models, and whoever calls it has none."""
    async with provider() as at:
        entry = {"model": "hosted_vllm/org/tiny", "api_base": f"{at.url}/v1", "api_key": "sk-its-own"}
        one = al.LLMProxy(
            model_list=[{"model_name": "small", "litellm_params": entry}], store=al.InMemoryLightningStore()
        )
        await one.start()
        url = f"http://127.0.0.1:{one.server_launcher_args.port}"
        refused = ["DELETE files/abc", "POST files", "GET %2e%2e/%2e%2e/admin", "POST files%2f..%2fchat/completions",
                   "POST %2e%2e/x/chat/completions"]  # fmt: skip
        for method, path in map(str.split, refused):
            target = f"/rollout/r/attempt/1/v1/{path}"
            status, _ = await raw(url, request_of(method, target, body='{"model":"small"}'))
            assert status == 404, path
        assert at.seen == []
        assert sum(one.refused.values()) == 5
        target = "/rollout/r/attempt/1/v1/chat/completions"
        assert (await raw(url, request_of("POST", target, body='{"model":"small"}')))[0] == 200
        assert "sk-its-own" in at.seen[0]
        await one.stop()


@in_loop
async def test_no_path_leads_out_of_a_providers_url(tmp_path: Path) -> None:
    """A program with a key of its own calls what it likes, below the URL that it was given."""
    async with proxy(tmp_path) as target:
        path = f"/rollouts/ro/attempts/1/keys/{target.filled['key']}/agents/a"
        passed = ["openai/v1/files/abc", "openai/v1/embeddings", "openai/v1/a%2fb"]
        refused = ["openai/v1/%2e%2e/admin", "openai/v1/..%2fadmin", "anthropic/../admin", "openai/v1/..;/admin",
                   "openai/v1/x/%252e%252e/%252e%252e/admin"]  # fmt: skip
        for tail in [*passed, *refused]:
            status, _ = await raw(target.url, request_of("POST", f"{path}/{tail}", body="{}"))
            assert status == (200 if tail in passed else 404), tail


# -- answers of a hostile provider ------------------------------------------------------------------------------------
def answer_of(body: bytes, kind: str, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"content-type: {kind}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


CHAT = b'{"id":"c","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"well"}}]'
EVENT = b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"well"}}]}\n\n'
ANSWERS = {
    "dense": answer_of(CHAT + b',"x":' + DENSE + b"}", "application/json"),
    "deep": answer_of(CHAT + b',"x":' + DEEP + b"}", "application/json"),
    "packed": answer_of(
        gzip.compress(CHAT + b" " * 80_000_000 + b"}", 1), "application/json", "content-encoding: gzip"
    ),
    "no gzip": answer_of(CHAT + b"}", "application/json", "content-encoding: gzip"),
    "a line without end": answer_of(EVENT + b"data: " + b"x" * 20_000_000, "text/event-stream"),
    "empty lines": answer_of(EVENT + b"\n" * 4_000_000, "text/event-stream"),
    "dense events": answer_of(EVENT + (b"data: " + DENSE + b"\n\n") * 3, "text/event-stream"),
    "many events": answer_of(EVENT + (b"data: [" + b"[]," * 4_000 + b"[]]\n\n") * 300, "text/event-stream"),
    "deep events": answer_of(EVENT + b"data: " + DEEP[:12_000] + b"\n\n", "text/event-stream"),
}
"""Content that is recorded: only where it stands before what is not looked at."""
WELL = {"a line without end", "empty lines", "dense events", "many events", "deep events"}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_hostile_providers_answer_passes_and_is_recorded_to_a_bound(
    kind: str, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_proxy, "ANSWER_VALUES", 600_000)

    async def main() -> None:
        async with provider() as at:
            opened = await open_store(f"sqlite:///{tmp_path}/s.db")
            await opened.enqueue_rollouts([NewRollout("t", rollout_id="ro")])
            await opened.dequeue_rollout()
            one = RecordingProxy(opened, SpanInference("ro", 1, "a" * 32, None), {"openai": f"{at.url}/v1"})
            server = GatewayServer(Gateway(opened), extra_routes=one.routes())
            url = one.provider_urls(await server.start(), "a")["openai"]
            at.answer = ANSWERS[kind]
            async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
                async with http.stream("POST", f"{url}/chat/completions", json=body) as answered:
                    received = b"".join([part async for part in answered.aiter_raw()])
            assert received == at.answer.partition(b"\r\n\r\n")[2], "all of it passes"
            await server.stop()
            await one.close()
            [span] = await opened.query_spans("ro")
            assert ("well" in str(span.attributes.get("gen_ai.output.messages"))) == (kind in WELL)
            assert "hi" in str(span.attributes["gen_ai.input.messages"])
            await opened.close()

    asyncio.run(main())
    assert watch.wrong == []


def test_a_number_that_json_has_not_does_not_hide_an_answer() -> None:
    load = recording_proxy.answer_reader(Limits())
    assert load(b'{"choices":[{"logprob":NaN}]}')["choices"][0]["logprob"] != 0
    with pytest.raises(ValueError, match="deep"):
        load(b'{"x":NaN,"y":' + b"[" * 200 + b"]" * 200 + b"}")


@in_loop
async def test_spans_of_a_program_are_read_off_the_loop(tmp_path: Path, watch: Watch) -> None:
    """Within the limits, too: what is large is a thread's."""
    async with proxy(tmp_path) as target, httpx.AsyncClient(trust_env=False, timeout=60) as http:
        spans = [{"traceId": "a" * 32, "spanId": f"{n + 1:016x}", "name": "x" * 200, "startTimeUnixNano": "1",
                  "endTimeUnixNano": "2"} for n in range(500)]  # fmt: skip
        export = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
        assert len(otlp.decode(export, rollout_id="ro", attempt=1)) == 500
        url = f"{target.url}/rollouts/ro/attempts/1/v1/traces"
        assert (await http.post(url, json=export, headers=target.headers)).status_code == 200
    assert watch.wrong == []

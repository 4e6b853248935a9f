"""Model requests that no SDK makes: each client's is a `chat` span, and training says that it bypassed the gateway."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from running import fit

import agl
from agl import semconv, tracing
from agl.adapters.anthropic import AnthropicTracer
from agl.adapters.openai import OpenAITracer
from agl.errors import BypassedGatewayError
from agl.mdp.selection import select
from agl.testing.provider import Provider, says, serve
from agl.tracing.context import RolloutContext

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def by_httpx(url: str, body: Any) -> None:
    import httpx

    httpx.post(url, json=body).raise_for_status()


def by_httpx_async(url: str, body: Any) -> None:
    import httpx

    async def send() -> None:
        async with httpx.AsyncClient() as client, client.stream("POST", url, json=body) as answer:
            await answer.aread()

    asyncio.run(send())


def by_requests(url: str, body: Any) -> None:
    import requests

    requests.post(url, json=body).raise_for_status()


def by_aiohttp(url: str, body: Any) -> None:
    import aiohttp

    async def send() -> None:
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            await answer.read()

    asyncio.run(send())


def by_urllib(url: str, body: Any) -> None:
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        answer.read()


def by_urllib3(url: str, body: Any) -> None:
    import urllib3

    urllib3.PoolManager().request("POST", url, body=json.dumps(body).encode())


def by_http_client(url: str, body: Any) -> None:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    connection.request("POST", parts.path, json.dumps(body))
    connection.getresponse().read()
    connection.close()


CLIENTS: list[tuple[Callable[[str, Any], None], str]] = [
    (by_httpx, "httpx.Client"),
    (by_httpx_async, "httpx.AsyncClient"),
    (by_requests, "requests.Session"),
    (by_aiohttp, "aiohttp.ClientSession"),
    (by_urllib, "urllib.request.OpenerDirector"),
    (by_urllib3, "urllib3.connectionpool.HTTPConnectionPool"),
    (by_http_client, "http.client.HTTPConnection"),
]


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(says("hello")) as server:
        yield server


@pytest.fixture
def anything() -> Iterator[str]:
    """The URL of a server that answers {} to whatever it gets."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "main", select(None))
    with OpenAITracer(), tracing.running(context):
        yield context


def chats(rollout: RolloutContext) -> list[dict[str, Any]]:
    return [dict(s.attributes) for s in rollout.spans if s.operation == semconv.CHAT]


def bedrock_by_anthropic(url: str) -> None:
    import anthropic

    keys = {"aws_access_key": "k", "aws_secret_key": "k", "aws_region": "us-east-1"}
    client = anthropic.AnthropicBedrock(base_url=url, max_retries=0, **keys)
    client.messages.create(model="claude", max_tokens=9, messages=[{"role": "user", "content": "hi"}])


def vertex_by_anthropic(url: str) -> None:
    import anthropic

    client = anthropic.AnthropicVertex(base_url=url, region="r", project_id="p", access_token="k", max_retries=0)
    client.messages.create(model="claude", max_tokens=9, messages=[{"role": "user", "content": "hi"}])


def bedrock_by_boto3(url: str) -> None:
    import boto3

    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "k", "region_name": "us-east-1"}
    client = boto3.client("bedrock-runtime", endpoint_url=url, **keys)
    client.converse(modelId="claude", messages=[{"role": "user", "content": [{"text": "hi"}]}])


def assistant_by_openai(url: str) -> None:
    openai.OpenAI(base_url=f"{url}/v1", api_key="k").beta.threads.runs.create("thread_1", assistant_id="claude")


@pytest.mark.parametrize("call", [bedrock_by_anthropic, vertex_by_anthropic, bedrock_by_boto3, assistant_by_openai])
def test_a_call_of_a_cloud_s_client_is_one_chat_span(
    call: Callable[[str], None], anything: str, rollout: RolloutContext
) -> None:
    with AnthropicTracer():
        call(anything)
    [chat] = chats(rollout)
    assert chat[semconv.REQUEST_MODEL] == "claude"
    assert chat[semconv.URL].startswith(anything)


@pytest.mark.parametrize(("send", "client"), CLIENTS, ids=[client for _, client in CLIENTS])
def test_a_request_of_any_client_is_one_chat_span(
    send: Callable[[str, Any], None], client: str, provider: Provider, rollout: RolloutContext
) -> None:
    send(f"{provider.url}/chat/completions", BODY)
    [chat] = chats(rollout)
    assert chat[semconv.CLIENT] == client
    assert chat[semconv.URL] == f"{provider.url}/chat/completions"
    assert chat[semconv.REQUEST_MODEL] == "m"
    assert chat[semconv.AGENT_NAME] == "main"
    [seen] = provider.seen
    assert seen.body == BODY


def test_an_sdk_request_is_seen_once(provider: Provider, rollout: RolloutContext) -> None:
    from openai import OpenAI

    OpenAI(base_url=provider.url, api_key="k").chat.completions.create(model="m", messages=BODY["messages"])  # type: ignore[call-overload]
    [chat] = chats(rollout)
    assert chat[semconv.CLIENT] == "OpenAI"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embeddings", BODY),  # no generation
        ("/api/messages", BODY),  # somebody else's messages
        ("/v1/messages", {"text": "hi"}),  # no model
        ("/v1/messages", ["model"]),
        ("/v1/messages", "model"),
    ],
)
def test_other_requests_are_none(path: str, body: Any, anything: str, rollout: RolloutContext) -> None:
    import httpx

    httpx.post(anything + path, json=body).raise_for_status()
    httpx.get(f"{anything}/v1/chat/completions").raise_for_status()
    httpx.post(f"{anything}/v1/chat/completions", content=b"not JSON").raise_for_status()
    assert chats(rollout) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("models/gemini-x:streamGenerateContent?alt=sse", {"contents": []}),
        ("interactions?alt=sse", {"model": "gemini-x", "input": "q"}),
    ],
)
def test_googles_requests_are_model_requests(
    path: str, body: dict[str, Any], anything: str, rollout: RolloutContext
) -> None:
    import httpx

    httpx.post(f"{anything}/v1beta/{path}", json=body)
    [chat] = chats(rollout)
    assert chat[semconv.REQUEST_MODEL] == "gemini-x"
    assert "alt" not in chat[semconv.URL]


def test_a_failure_is_recorded_and_raised_unchanged(rollout: RolloutContext) -> None:
    import httpx

    with pytest.raises(httpx.ConnectError):
        httpx.post("http://127.0.0.1:9/v1/chat/completions", json=BODY)
    [span] = [s for s in rollout.spans if s.operation == semconv.CHAT]
    assert span.attributes[semconv.ERROR_TYPE] == "ConnectError"


def test_nothing_stays_patched() -> None:
    import httpx

    before = httpx.Client.send
    with OpenAITracer():
        assert httpx.Client.send is not before
    assert httpx.Client.send is before


def test_a_selected_agent_that_mixes_clients_is_told(provider: Provider, tmp_path: Path) -> None:
    """Half of its calls would have been trained, and the other half not, without a word."""

    async def mixed(task: Any) -> float:
        import httpx
        from openai import AsyncOpenAI

        await AsyncOpenAI(base_url=provider.url, api_key="k").chat.completions.create(**BODY)  # type: ignore[call-overload]
        async with httpx.AsyncClient() as client:
            await client.post(f"{provider.url}/responses", json={"model": "m", "input": "hi"})
        return 1.0

    with pytest.raises(BypassedGatewayError, match=r"1 LLM call.*httpx\.AsyncClient.*/v1/responses"):
        fit(agl.rollout(mixed), [{}], tmp_path)


def test_a_judge_of_another_client_may_stay(provider: Provider, tmp_path: Path) -> None:
    async def judged(task: Any) -> float:
        import httpx
        from openai import AsyncOpenAI

        await AsyncOpenAI(base_url=provider.url, api_key="k").chat.completions.create(**BODY)  # type: ignore[call-overload]
        with agl.tracing.untrained("judge"):
            async with httpx.AsyncClient() as client:
                await client.post(f"{provider.url}/responses", json={"model": "m", "input": "hi"})
        return 1.0

    algorithm = fit(agl.rollout(judged), [{}], tmp_path)
    [calls] = algorithm.calls
    assert [call.agent for call in calls] == ["judged"]
    judges = [s for s in algorithm.spans[0] if s.operation == semconv.CHAT and s.agent == "judge"]
    assert [s.attributes[semconv.CLIENT] for s in judges] == ["httpx.AsyncClient"]

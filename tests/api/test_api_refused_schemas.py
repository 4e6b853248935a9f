"""A schema that answers cannot be held to, and a conversation that is too long, are refused in the words of each API:
by the field where the API has it, and without agl's own grammar."""

from __future__ import annotations

import functools
from typing import Any

import httpx
import pytest
from scripted import Attempt, Completion, ScriptedEngine, in_loop, quick_tokenizer, serving

from agl.trainer.engines.base import OnTokens, Request
from agl.trainer.local.grammar import Grammars

pytest.importorskip("llguidance")

BAD = {"type": "object", "properties": {"a": {"type": "strange"}}}
USER = {"role": "user", "content": "hi"}
CONTENT = {"role": "user", "parts": [{"text": "hi"}]}
JSON = {"responseMimeType": "application/json"}
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "google": "/v1beta/models/m:generateContent",
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER]},
    "responses": {"input": [USER]},
    "messages": {"max_tokens": 9, "messages": [USER]},
    "google": {"contents": [CONTENT]},
}
NAMED = {"type": "json_schema", "name": "n", "schema": BAD}
FORMATS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "chat": [
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": BAD}}})
    ],
    "responses": [("text.format", {"text": {"format": NAMED}})],
    "messages": [
        ("output_config.format", {"output_config": {"format": {"type": "json_schema", "schema": BAD}}}),
        ("output_format", {"output_format": {"type": "json_schema", "schema": BAD}}),
    ],
    "google": [
        ("generationConfig.responseJsonSchema", {"generationConfig": {**JSON, "responseJsonSchema": BAD}}),
        ("generationConfig.responseSchema", {"generationConfig": {**JSON, "responseSchema": BAD}}),
    ],
}  # fmt: skip
"""API -> each field that can hold the schema of an answer, and the fields of a body with one there."""
UNREADABLE = {"type": "object", "properties": {"a": {"enum": "x"}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": "count", "parameters": UNREADABLE, "strict": True}}],
    "responses": [{"type": "function", "name": "count", "parameters": UNREADABLE, "strict": True}],
    "messages": [{"name": "count", "input_schema": UNREADABLE, "strict": True}],
}
OWN_WORDS = ("%json", "x-guidance", "form0", "json0")
"""Of agl's grammar."""


@functools.cache
def grammars() -> Grammars:
    tokenizer = quick_tokenizer()
    return Grammars(tokenizer, len(tokenizer))


class HoldingEngine(ScriptedEngine):
    """Holds answers to schemas, as agl's own engine does."""

    grammars = True

    async def generate(self, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
        if request.sampling.grammar:
            await grammars().admitted(request.sampling.grammar, None)
        return await super().generate(request, on_tokens=on_tokens)


async def refusal(http: httpx.AsyncClient, attempt: Attempt, api: str, more: dict[str, Any]) -> dict[str, Any]:
    url = attempt.url().removesuffix("/v1") + PATHS[api]
    headers = {"authorization": f"Bearer {attempt.key}"}
    answer = await http.post(url, json=BODIES[api] | more, headers=headers)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("api", FORMATS)
@in_loop
async def test_the_schema_of_an_answer_is_named_by_its_field(api: str) -> None:
    async with serving(HoldingEngine(quick_tokenizer(), ["{}"])) as rig, httpx.AsyncClient(trust_env=False) as http:
        attempt = await rig.attempt()
        for field, more in FORMATS[api]:
            error = await refusal(http, attempt, api, more)
            assert f"(the schema of {field}, at $.properties.a)" in error["message"]
            assert "strange" in error["message"].lower()
            assert not any(word in error["message"] for word in OWN_WORDS)
            # LangChain looks for these words.
            openai = api in ("chat", "responses")
            assert error["message"].startswith("Invalid schema for response_format: ") == openai
            assert error.get("param", field) == field


@pytest.mark.parametrize("api", TOOLS)
@in_loop
async def test_the_schema_of_a_tool_is_named_by_the_tool(api: str) -> None:
    async with serving(HoldingEngine(quick_tokenizer(), ["{}"])) as rig, httpx.AsyncClient(trust_env=False) as http:
        error = await refusal(http, await rig.attempt(), api, {"tools": TOOLS[api]})
    assert "(the schema of tool 'count', at $.properties.a)" in error["message"]
    assert error["message"].startswith("Invalid schema for function 'count': ") == (api != "messages")
    assert not any(word in error["message"] for word in OWN_WORDS)


@pytest.mark.parametrize(("api", "field"), [("chat", "messages"), ("responses", "input")])
@in_loop
async def test_a_conversation_that_is_too_long_is_named_by_its_field(api: str, field: str) -> None:
    engine = ScriptedEngine(quick_tokenizer(), ["x"], max_context=20)
    async with serving(engine) as rig, httpx.AsyncClient(trust_env=False) as http:
        attempt = await rig.attempt()
        for text in ("9 " * 60, "9 " * 60_000):
            for stream in (False, True):
                more = {field: [{"role": "user", "content": text}], "stream": stream}
                error = await refusal(http, attempt, api, more)
                assert (error["code"], error["param"]) == ("context_length_exceeded", field)

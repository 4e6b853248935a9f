"""Neighbouring messages of one role are answered in every API that allows them, whatever the policy's chat template."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from scripted import Attempt, ScriptedEngine, in_loop, serving
from tiny_tokenizers import TEMPLATE_TOKENS, published_templates, published_tokenizer, template_tokenizer

ALTERNATES = ["mistral_v3", "trl_gemma", "trl_gemma3"]
"""Templates that refuse two user messages in a row."""
TEMPLATES = [*TEMPLATE_TOKENS, *(name for name in ALTERNATES if name in published_templates())]
TURNS = (
    (["user", "user"], ["user"]),
    (["user", "user", "user"], ["user", "user"]),
    (["user", "assistant", "assistant", "user"], ["user", "user"]),
)
"""Roles of a first request, and of what is added to it and its answer."""


pytestmark = pytest.mark.full


def tokenizer_of(name: str) -> Any:
    return template_tokenizer(name) if name in TEMPLATE_TOKENS else published_tokenizer(name)


def requests(history: list[tuple[str, str]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """API -> path and body of a request with these messages."""
    messages = [{"role": role, "content": text} for role, text in history]
    roles = {"assistant": "model"}
    contents = [{"role": roles.get(role, role), "parts": [{"text": text}]} for role, text in history]
    return {
        "chat": ("/v1/chat/completions", {"messages": messages}),
        "responses": ("/v1/responses", {"input": messages}),
        "messages": ("/v1/messages", {"max_tokens": 99, "messages": messages}),
        "google": ("/v1beta/models/m:generateContent", {"contents": contents}),
    }


@pytest.mark.parametrize("name", TEMPLATES)
@in_loop
async def test_neighbours_are_answered_and_continued(name: str) -> None:
    tokenizer = tokenizer_of(name)
    engine = ScriptedEngine(tokenizer, ["Plain."])
    async with serving(engine, tokenizer) as rig, httpx.AsyncClient(trust_env=False) as http:
        for first, then in TURNS:
            for api in requests([]):
                attempt = await rig.attempt()
                history = [(role, f"text {i}") for i, role in enumerate(first)]
                await send(http, attempt, requests(history)[api])
                history += [("assistant", "Plain."), *((role, f"told {i}") for i, role in enumerate(then))]
                await send(http, attempt, requests(history)[api])
                calls = await attempt.close()
                assert [call.error for call in calls] == [None, None], (api, first)
                shown = tokenizer.decode(calls[1].prompt_ids.tolist())
                assert all(text in shown for _, text in history)
                if calls[1].fork_cause is None:
                    before = [*calls[0].prompt_ids.tolist(), *calls[0].response_ids.tolist()]
                    assert calls[1].prompt_ids[: len(before)].tolist() == before
                assert name not in ALTERNATES or calls[1].fork_cause is None


async def send(http: httpx.AsyncClient, attempt: Attempt, request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    answer = await http.post(
        attempt.url().removesuffix("/v1") + path, json=body, headers={"authorization": f"Bearer {attempt.key}"}
    )
    assert answer.status_code == 200, answer.text


REFUSES = ["mistral_v3"]
"""Templates that refuse a user message right after a tool's result, as Mistral's own API does."""
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


def requests_after_a_result() -> dict[str, tuple[str, dict[str, Any]]]:
    """API -> path and body of a request that ends with a tool's result and a message of the user's."""
    function = {"name": "f", "arguments": "{}"}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "a dozen"}
    asked, then = {"role": "user", "content": "how many?"}, {"role": "user", "content": "go on"}
    items = [
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": "a dozen"},
    ]
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    results = [{"type": "tool_result", "tool_use_id": "c", "content": "a dozen"}, {"type": "text", "text": "go on"}]
    call = {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]}
    response = {"functionResponse": {"name": "f", "response": {"result": "a dozen"}}}
    parts = [response, {"text": "go on"}]
    tool = {"name": "f", "parameters": SCHEMA}
    return {
        "chat": (
            "/v1/chat/completions",
            {"messages": [asked, called, result, then], "tools": [{"type": "function", "function": tool}]},
        ),
        "responses": ("/v1/responses", {"input": [asked, *items, then], "tools": [{"type": "function", **tool}]}),
        "messages": (
            "/v1/messages",
            {
                "max_tokens": 99, "messages": [asked, use, {"role": "user", "content": results}],
                "tools": [{"name": "f", "input_schema": SCHEMA}],
            },
        ),
        "google": (
            "/v1beta/models/m:generateContent",
            {
                "contents": [{"role": "user", "parts": {"text": "how many?"}}, call, {"role": "user", "parts": parts}],
                "tools": [{"functionDeclarations": [tool]}],
            },
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@in_loop
async def test_a_message_after_a_result_is_answered_or_refused_by_its_roles(name: str) -> None:
    tokenizer = tokenizer_of(name)
    engine = ScriptedEngine(tokenizer, ["Plain."])
    async with serving(engine, tokenizer) as rig, httpx.AsyncClient(trust_env=False) as http:
        without_tools = rig.gateway.served(None).rendering.tools_refusal
        for api, (path, body) in requests_after_a_result().items():
            attempt = await rig.attempt()
            url = attempt.url().removesuffix("/v1") + path
            answer = await http.post(url, json=body, headers={"authorization": f"Bearer {attempt.key}"})
            (call,) = await attempt.close()
            if name in REFUSES:
                assert answer.status_code == 400, (api, answer.text)
                assert "the chat template refuses these messages" in answer.text
                assert "their roles are: user, assistant, tool, user" in answer.text
            elif without_tools:
                assert answer.status_code == 400, (api, answer.text)
                assert without_tools.message in answer.text
            else:
                assert answer.status_code == 200, (api, answer.text)
                shown = tokenizer.decode(call.prompt_ids.tolist())
                assert shown.index("how many?") < shown.index("a dozen") < shown.index("go on"), api

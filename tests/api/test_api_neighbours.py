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

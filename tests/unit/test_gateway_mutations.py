"""Valid requests of the four APIs, changed anywhere: each is answered or refused, and none is the server's error.

The template takes tools, and the engine holds answers to schemas, as a policy's own does.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import httpx
import numpy as np
import pytest
from changed_json import changed
from scripted import in_loop, serving
from tiny_tokenizers import template_tokenizer

pytest.importorskip("llguidance")

from agl.errors import EngineError
from agl.trainer.engines.base import Completion, OnTokens, Request
from agl.trainer.local.grammar import Grammars

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,5}$"}, "days": {"$ref": "#/$defs/days"}},
    "$defs": {"days": {"type": "integer", "minimum": 1, "enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
        {"role": "user", "content": "and?", "name": "ann"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "weather", "description": "d", "strict": True, "parameters": PARAMETERS},
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": False,
    "max_tokens": 3,
    "n": 1,
    "stop": ["x"],
    "temperature": 1.0,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": False,
}
SCHEMA_CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_completion_tokens": 3,
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": PARAMETERS}},
    "tools": [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}],
    "tool_choice": "auto",
}
RESPONSES = {
    "model": "m",
    "instructions": "short",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
    ],
    "tools": [{"type": "function", "name": "weather", "strict": True, "parameters": PARAMETERS}],
    "tool_choice": {"type": "function", "name": "weather"},
    "text": {"format": {"type": "json_schema", "name": "s", "schema": PARAMETERS}, "verbosity": "low"},
    "max_output_tokens": 3,
    "include": ["reasoning.encrypted_content"],
    "store": False,
    "metadata": {"a": "b"},
}
MESSAGES = {
    "model": "m",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "short", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "a"}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "12"}]}],
        },
    ],
    "tools": [{"name": "weather", "description": "d", "strict": True, "input_schema": PARAMETERS}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
    "stop_sequences": ["x"],
    "temperature": 1.0,
}
GOOGLE = {
    "systemInstruction": {"parts": [{"text": "short"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "hi"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {"city": "a"}, "id": "c1"}}]},
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": "weather", "response": {"output": "12"}, "id": "c1"}}],
        },
    ],
    "tools": [{"functionDeclarations": [{"name": "weather", "description": "d", "parametersJsonSchema": PARAMETERS}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["weather"]}},
    "generationConfig": {
        "maxOutputTokens": 3,
        "stopSequences": ["x"],
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True}}},
        "candidateCount": 1,
    },
}
VALID = [
    ("chat/completions", CHAT),
    ("chat/completions", SCHEMA_CHAT),
    ("responses", RESPONSES),
    ("messages", MESSAGES),
    ("v1beta/models/m:generateContent", GOOGLE),
]
VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 2**70, "", "x", "text", "weather", "\ud800", "\0", [], {}, ["text"], [["x"]],
    {"type": ["text"]}, {"type": "object"}, {"a": {"b": []}}, [None], "data:,x", {"$ref": "#"}, {"type": "string"},
    "9" * 5000, [{"text": 1}],
]  # fmt: skip


class DrawingEngine:
    """Draws up to three tokens of an answer within its grammar, as the local policy does; fails as it does, too."""

    max_context, grammars = 2048, True

    def __init__(self, tokenizer: Any) -> None:
        self._grammars, self._size = Grammars(tokenizer, len(tokenizer)), len(tokenizer)

    async def generate(self, request: Request, *, on_tokens: OnTokens | None = None) -> Completion:
        try:
            ids = await self._drawn(request)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise EngineError(f"generate failed: {type(error).__name__}: {error}") from error
        logprobs = [-1.0] * len(ids)
        if on_tokens is not None:
            on_tokens(ids, logprobs, [[(i, -1.0)] for i in ids])
        top = [[(i, -1.0)] for i in ids] if request.sampling.top_logprobs else ()
        return Completion(np.int32(ids), np.float32(logprobs), "length", 0, top)

    async def _drawn(self, request: Request) -> list[int]:
        grammar, ids = request.sampling.grammar, list[int]()
        answer = (await self._grammars.admitted(grammar, request.owner)).begin() if grammar else None
        for _ in range(min(3, request.sampling.max_tokens)):
            words = self._grammars.everything(1) if answer is None else self._grammars.bits([answer.matcher])
            ids.append(int(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: self._size])[-1]))
            if answer is not None:
                answer.add(ids[-1])
        return ids


async def answered(requests: int, seed: int) -> dict[str, str]:
    """Send so many changed requests; the texts of the server's errors, by the request."""
    dice, wrong = random.Random(seed), dict[str, str]()
    tokenizer = template_tokenizer("qwen3")
    async with serving(DrawingEngine(tokenizer), tokenizer) as rig:
        attempt = await rig.attempt()
        headers = {"authorization": f"Bearer {attempt.key}", "content-type": "application/json"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=120) as client:
            statuses: dict[int, int] = {}
            for _ in range(requests):
                path, valid = dice.choice(VALID)
                body = json.dumps(changed(valid, dice, VALUES))
                answer = await client.post(f"{attempt.url()}/{path}", content=body)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                if answer.status_code >= 500 or answer.status_code not in (200, 400, 404, 413):
                    wrong[f"{path} {body}"] = f"{answer.status_code} {answer.text}"
            # Both happen, or the changes show nothing.
            assert statuses.get(200, 0) > requests // 20, statuses
            assert statuses.get(400, 0) > requests // 20, statuses
    return wrong


@in_loop
async def test_valid_requests_are_answered():
    tokenizer = template_tokenizer("qwen3")
    async with serving(DrawingEngine(tokenizer), tokenizer) as rig:
        attempt = await rig.attempt()
        headers = {"authorization": f"Bearer {attempt.key}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=120) as client:
            for path, valid in VALID:
                answer = await client.post(f"{attempt.url()}/{path}", json=valid)
                assert answer.status_code == 200, (path, answer.text)


def altered(body: Any, value: Any, *path: Any) -> Any:
    """A copy of a request with another value at a place."""
    body = copy.deepcopy(body)
    container = body
    for key in path[:-1]:
        container = container[key]
    container[path[-1]] = value
    return body


FUNCTION = ("tools", 0, "function", "parameters")
FOUND = [
    (VALID[4][0], altered(GOOGLE, {"type": ["text"]}, "contents", 0, "parts", 0)),
    (VALID[4][0], altered(GOOGLE, {"type": {"text": "hi"}}, "contents", 0, "parts", 0)),
    (VALID[0][0], altered(CHAT, [{"city": {"type": "string"}}], *FUNCTION, "properties")),
    (VALID[1][0], altered(SCHEMA_CHAT, [[{"type": "string"}]], *FUNCTION, "properties")),
    (VALID[1][0], altered(SCHEMA_CHAT, {"a": 1}, *FUNCTION, "required")),
]


@pytest.mark.parametrize(("path", "body"), FOUND)
@in_loop
async def test_what_was_found_before_is_refused(path: str, body: Any):
    tokenizer = template_tokenizer("qwen3")
    async with serving(DrawingEngine(tokenizer), tokenizer) as rig:
        attempt = await rig.attempt()
        async with httpx.AsyncClient(trust_env=False, headers={"authorization": f"Bearer {attempt.key}"}) as client:
            answer = await client.post(f"{attempt.url()}/{path}", json=body, timeout=120)
    assert answer.status_code == 400, answer.text


def test_no_changed_request_is_the_servers_error():
    assert asyncio.run(answered(100, seed=0)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_none_of_thousands_of_changed_requests_is_the_servers_error(seed: int):
    assert asyncio.run(answered(1000, seed)) == {}

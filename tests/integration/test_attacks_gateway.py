"""Requests that are made to exhaust the gateway: each is refused by a limit that its error names, in its API's form.

Others are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import orjson
import pytest
from scripted import Attempt, ScriptedEngine, in_loop, quick_tokenizer, serving

from agl.errors import ConfigError
from agl.trainer.http.limits import Limits, Refused, check_json

USER = {"role": "user", "content": "hi"}
GOOGLE = "v1beta/models/m:generateContent"
PATHS = {"chat/completions": "messages", "responses": "input", "messages": "messages", GOOGLE: "contents"}
LARGE = 262_144


async def post(attempt: Attempt, path: str, body: bytes, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        known = {"authorization": f"Bearer {attempt.key}", "content-type": "application/json"}
        return await http.post(f"{attempt.url()}/{path}", content=body, headers=known | headers)


def body_of(path: str, items: list[Any], **fields: Any) -> bytes:
    needed = {"max_tokens": 4} if path == "messages" else {}
    if path == GOOGLE:
        items = [google(item) for item in items]
    return orjson.dumps({"model": "m", PATHS[path]: items, **needed, **fields})


def google(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a content of Google's; of text, with one part."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return {"role": message["role"], "parts": parts} if "role" in message else message


def error_of(path: str, response: httpx.Response) -> str:
    """The message of an error, which must be in the form of its API."""
    data = response.json()
    if path == "messages":
        assert data["type"] == "error", data
        assert data["error"]["type"], data
    elif path == GOOGLE:
        assert {"message", "status", "code"} == set(data["error"]), data
    else:
        assert {"message", "type", "param", "code"} <= set(data["error"]), data
    return data["error"]["message"]


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_each_limit_names_itself_the_value_and_the_setting(path: str) -> None:
    limits = Limits(messages=100, tools=10, request_bytes=200_000, json_values=1_000, bytes_per_token=4)
    tool = {"type": "function", "name": "t", "input_schema": {}, "function": {"name": "t", "parameters": {}}}
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], max_context=LARGE), limits=limits) as rig:
        attempt = await rig.attempt()
        many = [USER] * 101
        parts = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100}]
        for body, status, words in (
            # A message of Google's has a part, which counts like a message.
            (body_of(path, many), 413, ("202" if path == GOOGLE else "101", "100", "AGL_LIMIT_MESSAGES")),
            (body_of(path, parts), 413, ("101", "100", "AGL_LIMIT_MESSAGES")),
            (body_of(path, [USER], tools=[tool] * 11), 413, ("11", "10", "AGL_LIMIT_TOOLS")),
            (body_of(path, [USER], metadata={"x": nested(200)}), 400, ("100",)),
            (body_of(path, [USER, {"x": "y" * 20_000, "z": nested(120)}]), 400, ("100", "AGL_LIMIT_JSON_DEPTH")),
            (body_of(path, [{}] * 10_000), 413, ("1000", "AGL_LIMIT_JSON_VALUES")),
            (body_of(path, [{"role": "user", "content": "x" * 200_000}]), 413, ("200000", "AGL_LIMIT_REQUEST_BYTES")),
        ):
            response = await post(attempt, path, body)
            message = error_of(path, response)
            assert response.status_code == status, (message, words)
            assert all(word in message for word in words), message
        assert rig.engine.asked == []
        # Whatever was refused, the next request is answered.
        assert (await attempt.chat()).choices[0].message.content == "x"


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_rendered(path: str) -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], max_context=256)) as rig:
        attempt = await rig.attempt()
        response = await post(attempt, path, body_of(path, [{"role": "user", "content": "x" * 100_000}]))
        message = error_of(path, response)
        assert response.status_code == 400
        assert "256 tokens" in message
        assert "AGL_LIMIT_BYTES_PER_TOKEN" in message
        if path in ("chat/completions", "responses"):
            assert response.json()["error"]["code"] == "context_length_exceeded"


@in_loop
async def test_a_body_without_a_length_is_counted_as_it_comes() -> None:
    async with serving(["x"], limits=Limits(request_bytes=100_000)) as rig:
        attempt = await rig.attempt()

        async def chunks() -> Any:
            for _ in range(40):
                yield b" " * 10_000

        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            headers = {"authorization": f"Bearer {attempt.key}", "content-type": "application/json"}
            response = await http.post(f"{attempt.url()}/chat/completions", content=chunks(), headers=headers)
        assert response.status_code == 413
        assert "AGL_LIMIT_REQUEST_BYTES" in response.json()["error"]["message"]


@in_loop
async def test_a_prompt_of_256k_tokens_is_answered() -> None:
    tokenizer = quick_tokenizer()
    text = "hello there you " * 30_000
    async with serving(ScriptedEngine(tokenizer, ["x"], max_context=2 * LARGE)) as rig:
        attempt = await rig.attempt()
        messages = [{"role": "user", "content": text[i : i + 48_000]} for i in range(0, len(text), 48_000)]
        answer = await attempt.chat(messages)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens >= LARGE


@in_loop
async def test_others_are_answered_while_large_requests_are_worked_on() -> None:
    """The largest that is allowed, sixteen at a time, against short ones of another attempt."""
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], max_context=LARGE)) as rig:
        loud, quiet = await rig.attempt(), await rig.attempt()
        body = body_of("chat/completions", [USER] * 9_999)
        flood = [asyncio.ensure_future(post(loud, "chat/completions", body)) for _ in range(16)]
        await asyncio.sleep(0.2)
        answered, worst = 0, 0.0
        while not all(task.done() for task in flood) and answered < 200:
            started = time.perf_counter()
            await quiet.chat()
            worst = max(worst, time.perf_counter() - started)
            answered += 1
        # On the event loop, rendering alone takes seconds in one piece.
        assert worst < 5.0
        assert answered >= 20
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


@in_loop
async def test_an_attempt_that_gives_up_its_requests_keeps_its_one_turn() -> None:
    """Cancelling large requests in mid-work starts no further work before theirs has ended."""
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], max_context=LARGE)) as rig:
        loud, other = await rig.attempt(), await rig.attempt()
        body = body_of("chat/completions", [USER] * 9_999)
        for _ in range(8):
            task = asyncio.ensure_future(post(loud, "chat/completions", body))
            await asyncio.sleep(0.15)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        response = await post(other, "chat/completions", body_of("chat/completions", [USER] * 1_000))
        assert response.status_code == 200
        response = await post(loud, "chat/completions", body_of("chat/completions", [USER] * 1_000))
        assert response.status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("path", [*PATHS, "messages/count_tokens"])
@in_loop
async def test_a_model_takes_json_alone(path: str, kind: str) -> None:
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        dialect = path.partition("/count")[0]
        response = await post(attempt, path, body_of(dialect, [USER]), **{"content-type": kind})
        assert response.status_code == 415
        assert "application/json" in error_of(dialect, response)


# -- the shape of JSON ------------------------------------------------------------------------------------------------
def shape(value: Any) -> tuple[int, int]:
    """(values besides the first of each list and object, depth), by walking."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [shape(v) for v in (value.values() if isinstance(value, dict) else value)]
    return 1 + max(0, len(inner) - 1) + sum(n for n, _ in inner), 1 + max((d for _, d in inner), default=0)


@pytest.mark.parametrize(
    "value",
    [
        [], {}, [[], {}], {"a": [1, {"b": [2, 3]}]}, "[{,",
        ["a\\", "[["], ['"', "[", "\\\"[", "\\\\"], {'"[{': '\\"[,'},
        ["x" * 300_000, "[[[[", {"y": ["z", "\\" * 1001, "[,"]}], nested(90), ["é[" * 5000, "\u2028,"],
    ],
)  # fmt: skip
def test_the_shape_of_json_is_exact(value: Any) -> None:
    body = orjson.dumps(value)
    count, depth = shape(value)
    check_json(body, depth, count)
    if depth:
        with pytest.raises(Refused):
            check_json(body, depth - 1, count)
        with pytest.raises(Refused):
            check_json(body, depth, count - 1)


def test_limits_are_read_from_the_environment() -> None:
    limits = Limits.of_environment({"AGL_LIMIT_MESSAGES": "20000", "AGL_LIMIT_BODY_SECONDS": "1.5", "OTHER": "x"})
    assert (limits.messages, limits.body_seconds) == (20_000, 1.5)
    for name, text, word in (
        ("MESAGES", "1", "messages"), ("MESSAGES", "many", "10000"),
        ("TOOLS", "-1", "1000"), ("JSON_DEPTH", "500", "100"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            Limits.of_environment({f"AGL_LIMIT_{name}": text})

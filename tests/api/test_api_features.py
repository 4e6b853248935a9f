"""What agents ask for, sent by the providers' SDKs: answered, and the answer fits the provider's own types, or refused
by an error that the SDK reads and that names the field. The rows are those of a table in docs/adapters.md, which
`AGL_API_TABLE=docs/adapters.md pytest tests/api/test_api_features.py` writes."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_features import APIS, FEATURES, NO_EFFECT, REFUSED, ROUTES, USER, Case, table
from late import installed
from paths import ROOT
from pydantic import TypeAdapter
from scripted import Asked, Attempt, ScriptedEngine, in_loop, quick_tokenizer, serving
from sdk_clients import anthropic_client, google_client, openai_client

from agl.testing.capabilities import between, written

pytestmark = pytest.mark.full

PAGE = "AGL_API_TABLE"

adapter = functools.cache(TypeAdapter)


def check(kind: Any, value: Any) -> Any:
    """The value, once it fits an SDK's own type; SDKs themselves take what they get."""
    sent = value.model_dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
    adapter(kind).validate_python(sent)
    return value


async def chat(client: Any, body: Any, stream: bool) -> list[Any]:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    asked: dict[str, Any] = {"model": "m", "messages": [USER], "extra_body": body}
    if not stream:
        return [check(ChatCompletion, await client.chat.completions.create(**asked))]
    chunks = await client.chat.completions.create(**asked, stream=True)
    return [check(ChatCompletionChunk, chunk) async for chunk in chunks]


async def responses(client: Any, body: Any, stream: bool) -> list[Any]:
    from openai.types.responses import Response, ResponseStreamEvent

    asked: dict[str, Any] = {"model": "m", "input": [USER], "extra_body": body}
    if not stream:
        return [by_open_responses(check(Response, await client.responses.create(**asked)))]
    events = await client.responses.create(**asked, stream=True)
    return [by_open_responses(check(ResponseStreamEvent, event)) async for event in events]


def by_open_responses(answer: Any) -> Any:
    """A response, or an event of one, once what it holds fits the types of the published schema."""
    if installed("openresponses_types"):
        from openresponses_types import ResponseResource

        response = getattr(answer, "response", answer)
        if getattr(response, "object", None) == "response":
            found = response.model_dump(mode="json", by_alias=True)
            # The published schema has null in the place of a format's schema; OpenAI repeats it.
            if "schema" in found["text"]["format"]:
                found["text"]["format"]["schema"] = None
            ResponseResource.model_validate(found)
    return answer


async def messages(client: Any, body: Any, stream: bool) -> list[Any]:
    from anthropic.types import Message, RawMessageStreamEvent

    asked: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": [USER], "extra_body": body}
    if not stream:
        return [check(Message, await client.messages.create(**asked))]
    events = await client.messages.create(**asked, stream=True)
    return [check(RawMessageStreamEvent, event) async for event in events]


async def google(client: Any, body: Any, stream: bool) -> list[Any]:
    config = {"http_options": {"extra_body": body}}
    asked: dict[str, Any] = {"model": "m", "contents": USER["content"], "config": config}
    # The SDK validates by its types, which forbid any other field.
    if not stream:
        return [await client.models.generate_content(**asked)]
    return [chunk async for chunk in await client.models.generate_content_stream(**asked)]


SEND: dict[str, Callable[[Any, Any, bool], Awaitable[list[Any]]]] = {
    "chat": chat, "responses": responses, "messages": messages, "google": google
}  # fmt: skip
CLIENTS: dict[str, Callable[[Attempt], Any]] = {
    "chat": openai_client, "responses": openai_client, "messages": anthropic_client, "google": google_client
}  # fmt: skip


class Policy:
    """Samples the same line until it gets another one, and remembers its last prompt."""

    def __init__(self) -> None:
        self.line = self.prompt = ""

    def __call__(self, asked: Asked) -> str:
        self.prompt = quick_tokenizer().decode(asked.prompt_ids.tolist())
        return self.line


async def show(case: Case, api: str, client: Any, policy: Policy, stream: bool) -> None:
    policy.line, policy.prompt = case.line, ""
    if case.cell == REFUSED:
        with pytest.raises(Exception, match="400") as raised:
            await SEND[api](client, case.body, stream)
        error: Any = raised.value
        assert getattr(error, "status_code", getattr(error, "code", None)) == 400
        assert case.error in str(error)
        assert policy.prompt == ""
        return
    answer = await SEND[api](client, case.body, stream)
    for text in case.sees:
        assert text in policy.prompt
    for text in case.hides:
        assert text not in policy.prompt
    # It is in every line; of a call, it is the argument.
    assert "12" in "".join(texts([part.model_dump(mode="json") for part in answer]))


def texts(value: Any, name: str = "") -> Iterator[str]:
    """What the policy wrote, in parts of an answer."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from texts(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner, name)
    elif isinstance(value, str) and name in ("content", "text", "delta", "arguments", "partial_json", "n"):
        yield value


@pytest.mark.parametrize("api", APIS)
@in_loop
async def test_what_agents_ask_for(api: str) -> None:
    policy, failed = Policy(), {}
    async with serving(ScriptedEngine(quick_tokenizer(), policy)) as rig:
        attempt = await rig.attempt()
        client = CLIENTS[api](attempt)
        shown = [(name, cases[api]) for name, cases in FEATURES.items() if api in cases and cases[api].readable()]
        for name, case in shown:
            for stream in (False, True):
                try:
                    await show(case, api, client, policy, stream)
                except (Exception, pytest.fail.Exception) as error:
                    failed[name, stream] = f"{type(error).__name__}: {error}"[:600]
        calls = await attempt.close()
    assert failed == {}
    # A refusal is a failed call.
    refused = 2 * sum(case.cell == REFUSED for _, case in shown)
    assert sum(call.finish_reason == "error" for call in calls) == refused


@pytest.mark.parametrize("api", APIS)
@in_loop
async def test_what_has_no_effect_leaves_the_answer_as_it_is(api: str) -> None:
    async with serving(["12 apples"]) as rig:
        attempt = await rig.attempt()
        client = CLIENTS[api](attempt)
        await SEND[api](client, {}, False)
        for cases in FEATURES.values():
            if api in cases and cases[api].cell == NO_EFFECT:
                await SEND[api](client, cases[api].body, False)
        await attempt.close()
    first, *others = rig.engine.asked
    assert others
    for asked in others:
        assert asked.prompt_ids.tolist() == first.prompt_ids.tolist()
        # The seed is the call's own.
        assert replace(asked.sampling, seed=0) == replace(first.sampling, seed=0)


@in_loop
async def test_a_websocket_is_refused_with_the_reason() -> None:
    exceptions = pytest.importorskip("websockets.exceptions")
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        client = openai_client(attempt)
        if not hasattr(client.responses, "connect"):
            pytest.skip("this release has no WebSockets")
        with pytest.raises(exceptions.InvalidStatus) as raised:
            async with asyncio.timeout(20), client.responses.connect():
                pass
    response = raised.value.response
    assert response.status_code == 405
    assert b"over HTTP, not over a WebSocket" in response.body


@pytest.mark.parametrize("name", ROUTES)
@in_loop
async def test_a_path_that_is_not_served_says_why(name: str) -> None:
    row = ROUTES[name]
    async with serving(["x"]) as rig:
        attempt = await rig.attempt()
        headers = {"authorization": f"Bearer {attempt.key}", **row.headers}
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.request(row.method, f"{attempt.url()}/{row.path}", headers=headers)
        assert await attempt.close() == []
    assert answer.status_code in (404, 405)
    assert row.error in answer.json()["error"]["message"]


def test_the_page_has_the_table() -> None:
    if page := os.environ.get(PAGE):
        file = Path(page)
        file.write_text(written(file.read_text(), "requests", table()))
    shown = between((ROOT / "docs" / "adapters.md").read_text(), "requests")
    assert shown == table(), f"run: {PAGE}=docs/adapters.md pytest tests/api/test_api_features.py"

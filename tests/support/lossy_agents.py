"""Agents on the SDKs of OpenAI, Anthropic and Google that ask again until they get an answer, in all four APIs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from lossy_proxy import WAIT_SECONDS

History = list[tuple[str, str]]
"""(role, text) of a conversation."""


class Chat:
    """Chat Completions."""

    def __init__(self, url: str, key: str) -> None:
        import openai

        options: Any = {"base_url": url, "api_key": key, "max_retries": 3, "timeout": WAIT_SECONDS}
        self.client = openai.OpenAI(http_client=openai.DefaultHttpxClient(trust_env=False), **options)
        self.async_client = openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(trust_env=False), **options)

    def fields(self, history: History) -> dict[str, Any]:
        return {"model": "m", "messages": [{"role": role, "content": text} for role, text in history]}

    def method(self, *, stream: bool, is_async: bool) -> Callable[..., Any]:
        return (self.async_client if is_async else self.client).chat.completions.create

    def whole(self, answer: Any) -> str:
        return answer.choices[0].message.content

    def part(self, chunk: Any) -> str:
        return (chunk.choices[0].delta.content or "") if chunk.choices else ""

    def ask(self, history: History, *, stream: bool) -> str:
        answer = self.method(stream=stream, is_async=False)(**self.fields(history), **self.streamed(stream))
        return "".join(map(self.part, answer)) if stream else self.whole(answer)

    async def ask_async(self, history: History, *, stream: bool) -> str:
        answer = await self.method(stream=stream, is_async=True)(**self.fields(history), **self.streamed(stream))
        return "".join([self.part(chunk) async for chunk in answer]) if stream else self.whole(answer)

    def streamed(self, stream: bool) -> dict[str, Any]:
        return {"stream": True} if stream else {}


class Responses(Chat):
    """Responses."""

    def fields(self, history: History) -> dict[str, Any]:
        return {"model": "m", "input": [{"role": role, "content": text} for role, text in history]}

    def method(self, *, stream: bool, is_async: bool) -> Callable[..., Any]:
        return (self.async_client if is_async else self.client).responses.create

    def whole(self, answer: Any) -> str:
        return answer.output_text

    def part(self, chunk: Any) -> str:
        return chunk.delta if chunk.type == "response.output_text.delta" else ""


class Messages(Chat):
    """Anthropic's Messages."""

    def __init__(self, url: str, key: str) -> None:
        import anthropic

        url = url.removesuffix("/v1")
        options: Any = {"base_url": url, "api_key": key, "max_retries": 3, "timeout": WAIT_SECONDS}
        self.client = anthropic.Anthropic(http_client=anthropic.DefaultHttpxClient(trust_env=False), **options)
        http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
        self.async_client = anthropic.AsyncAnthropic(http_client=http, **options)

    def fields(self, history: History) -> dict[str, Any]:
        return {**super().fields(history), "max_tokens": 100}

    def method(self, *, stream: bool, is_async: bool) -> Callable[..., Any]:
        return (self.async_client if is_async else self.client).messages.create

    def whole(self, answer: Any) -> str:
        return answer.content[0].text

    def part(self, chunk: Any) -> str:
        return chunk.delta.text if chunk.type == "content_block_delta" else ""


class Google(Chat):
    """Google's generateContent, whose SDK asks once."""

    def __init__(self, url: str, key: str) -> None:
        from google import genai

        arguments = {"client_args": {"trust_env": False}, "async_client_args": {"trust_env": False}}
        wait = int(WAIT_SECONDS * 1000)
        options: Any = {"base_url": url.removesuffix("/v1"), "timeout": wait, **arguments}
        self.client = self.async_client = genai.Client(api_key=key, http_options=options)

    def fields(self, history: History) -> dict[str, Any]:
        roles = {"user": "user", "assistant": "model"}
        return {"model": "m", "contents": [{"role": roles[role], "parts": [{"text": text}]} for role, text in history]}

    def method(self, *, stream: bool, is_async: bool) -> Callable[..., Any]:
        models = self.client.aio.models if is_async else self.client.models
        return models.generate_content_stream if stream else models.generate_content

    def whole(self, answer: Any) -> str:
        return answer.text or ""

    def part(self, chunk: Any) -> str:
        return chunk.text or ""

    def streamed(self, stream: bool) -> dict[str, Any]:
        return {}


APIS: dict[str, type[Chat]] = {"chat": Chat, "responses": Responses, "messages": Messages, "google": Google}


def converse(api: Chat, turns: int, *, stream: bool, is_async: bool, tries: int = 8) -> list[str]:
    """The answers that an agent gets in one conversation. What its SDK gives up on, it asks again itself."""

    async def ask(history: History) -> str:
        for _ in range(tries - 1):
            with contextlib.suppress(Exception):
                return await once(history)
        return await once(history)

    async def once(history: History) -> str:
        return await api.ask_async(history, stream=stream) if is_async else api.ask(history, stream=stream)

    async def in_loop() -> list[str]:
        history: History = [("user", "begin")]
        answers = []
        for _ in range(turns):
            answers.append(await ask(history))
            history += [("assistant", answers[-1]), ("user", "go on")]
        return answers

    return asyncio.run(in_loop())

"""The span of a bare client's call ends with the call, however a stream of it is read, broken off or forgotten."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from agl import semconv, tracing
from agl.adapters.openai import OpenAITracer
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.messages import read
from agl.testing.provider import Provider, Reply, says, serve
from agl.tracing.context import RolloutContext

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
STREAM: dict[str, Any] = {**ASK, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(says("one two three")) as server:
        yield server


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "solver", select(None))
    with OpenAITracer(), tracing.running(context):
        yield context


@pytest.fixture
def client(provider: Provider) -> openai.OpenAI:
    return openai.OpenAI(base_url=provider.url, api_key="k", max_retries=0)


def async_client(provider: Provider) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=provider.url, api_key="k", max_retries=0)


def chats(rollout: RolloutContext) -> list[Span]:
    return [s for s in rollout.spans if s.operation == semconv.CHAT]


def test_read_to_the_end(client: openai.OpenAI, rollout: RolloutContext) -> None:
    stream = client.chat.completions.create(**STREAM)
    assert chats(rollout) == []
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == "one two three "
    [span] = chats(rollout)
    assert (span.status, span.attributes[semconv.OUTPUT_TOKENS]) == ("unset", 3)
    assert list(span.attributes[semconv.FINISH_REASONS]) == ["stop"]


def test_closed_early(client: openai.OpenAI, rollout: RolloutContext) -> None:
    with client.chat.completions.create(**STREAM) as stream:
        next(iter(stream))
        assert chats(rollout) == []
    [span] = chats(rollout)
    assert (span.status, str(span.attributes[semconv.RESPONSE_ID])[:9]) == ("unset", "chatcmpl-")


@pytest.mark.parametrize("read", [0, 1])
def test_forgotten(read: int, client: openai.OpenAI, rollout: RolloutContext) -> None:
    stream = client.chat.completions.create(**STREAM)
    for _ in range(read):
        next(stream)
    del stream
    gc.collect()
    assert len(chats(rollout)) == 1


def test_still_held_at_the_end_of_the_rollout(client: openai.OpenAI) -> None:
    context = RolloutContext("ro", 1, "solver", select(None))
    with OpenAITracer(), tracing.running(context):
        stream = client.chat.completions.create(**STREAM)
        next(stream)
    assert len(chats(context)) == 1
    assert len([*stream]) > 1
    assert len(chats(context)) == 1


def test_failed_in_the_middle(client: openai.OpenAI, provider: Provider, rollout: RolloutContext) -> None:
    provider.script = lambda body: Reply("half of", fails=True)
    with pytest.raises(openai.APIError, match="scripted failure"):
        list(client.chat.completions.create(**STREAM))
    [span] = chats(rollout)
    assert (span.status, span.attributes[semconv.ERROR_TYPE]) == ("error", "APIError")


def test_async(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        create = async_client(provider).chat.completions.create
        async for _ in await create(**STREAM):
            pass
        assert len(chats(rollout)) == 1
        async with await create(**STREAM) as stream:
            await anext(aiter(stream))
        assert len(chats(rollout)) == 2
        stream = await create(**STREAM)
        async for _ in stream:
            break
        del stream
        for _ in range(200):  # the loop closes the generators it finds in tasks of its own, and only then lets go
            gc.collect()
            if len(chats(rollout)) == 3:
                break
            await asyncio.sleep(0.01)
        assert len(chats(rollout)) == 3

        async def read() -> None:
            stream = await create(**STREAM)
            await anext(aiter(stream))
            await asyncio.sleep(60)

        task = asyncio.create_task(read())
        while len(provider.seen) < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()
    assert len(chats(rollout)) == 4


def test_an_async_call_cancelled_while_it_waits(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        task = asyncio.create_task(async_client(provider).chat.completions.create(**ASK))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    [span] = chats(rollout)
    assert (span.status, span.attributes[semconv.ERROR_TYPE]) == ("error", "CancelledError")


def test_raw_responses(client: openai.OpenAI, provider: Provider, rollout: RolloutContext) -> None:
    raw = client.chat.completions.with_raw_response.create(**ASK)
    [span] = chats(rollout)
    assert span.attributes[semconv.RESPONSE_ID] == raw.parse().id
    with client.chat.completions.with_streaming_response.create(**ASK) as response:
        assert len(chats(rollout)) == 1
        response.parse()
    assert len(chats(rollout)) == 2
    with client.chat.completions.with_streaming_response.create(**ASK) as response:
        assert response.json()["choices"]
    with client.chat.completions.with_streaming_response.create(**STREAM) as response:
        assert "data: [DONE]" in response.iter_lines()
    parsed, whole, iterated = chats(rollout)[1:]
    for name in (semconv.OUTPUT_MESSAGES, semconv.FINISH_REASONS):
        assert parsed.attributes[name] == whole.attributes[name]
    assert iterated.attributes[semconv.FINISH_REASONS] == parsed.attributes[semconv.FINISH_REASONS]
    assert [m.text.strip() for m in read.said(iterated)] == [m.text for m in read.said(whole)]
    del rollout.spans[2:]
    stream = client.chat.completions.with_raw_response.create(**STREAM).parse()
    gc.collect()
    assert len(chats(rollout)) == 2
    assert len([*stream]) > 1  # type: ignore[misc]
    assert len(chats(rollout)) == 3


def test_responses_api(client: openai.OpenAI, rollout: RolloutContext) -> None:
    answer = client.responses.create(model="m", input="q")
    [span] = chats(rollout)
    assert span.attributes[semconv.RESPONSE_ID] == answer.id
    assert (span.attributes[semconv.INPUT_TOKENS], span.attributes[semconv.OUTPUT_TOKENS]) == (7, 3)

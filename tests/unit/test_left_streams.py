"""An async stream that is left by `break` leaves the same generators to its event loop as without agl.

asyncio closes them all at once when the loop ends, and complains of those that another one closes (docs/mistakes.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import openai
import pytest

from agl import tracing
from agl.adapters.anthropic import AnthropicTracer
from agl.adapters.google_genai import GoogleGenAITracer
from agl.adapters.openai import OpenAITracer
from agl.mdp.selection import select
from agl.testing.provider import Provider, says, serve
from agl.tracing.context import RolloutContext

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "q"}], "stream": True}


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(says("one two three")) as server:
        yield server


async def chat(provider: Provider) -> Any:
    return await openai.AsyncOpenAI(base_url=provider.url, api_key="k").chat.completions.create(**ASK)


async def responses(provider: Provider) -> Any:
    client = openai.AsyncOpenAI(base_url=provider.url, api_key="k")
    return await client.responses.create(model="m", input="q", stream=True)


async def messages(provider: Provider) -> Any:
    import anthropic

    client = anthropic.AsyncAnthropic(base_url=provider.root, api_key="k")
    return await client.messages.create(max_tokens=9, **ASK)


async def google(provider: Provider) -> Any:
    from google import genai

    client = genai.Client(api_key="k", http_options={"base_url": provider.root})
    return await client.aio.models.generate_content_stream(model="m", contents="q")


Opening = Callable[[Provider], Coroutine[Any, Any, Any]]


@contextlib.contextmanager
def traced() -> Iterator[RolloutContext]:
    rollout = RolloutContext("ro", 1, "solver", select("nobody"))
    with OpenAITracer(), AnthropicTracer(), GoogleGenAITracer(), tracing.running(rollout):
        yield rollout


async def left(stream: Any) -> Counter[str]:
    """The generators that the loop still has to close, after the first piece of the stream."""
    async for _ in stream:
        break
    loop: Any = asyncio.get_running_loop()
    return Counter(generator.__qualname__ for generator in [*loop._asyncgens])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opening", [chat, responses, messages, google])
def test_the_same_generators_are_left(opening: Opening, provider: Provider) -> None:
    async def leave() -> Counter[str]:
        stream = await opening(provider)
        found = await left(stream)
        if hasattr(stream, "close"):
            await stream.close()
        return found

    plain = asyncio.run(leave())
    with traced():
        assert asyncio.run(leave()) == plain


def test_a_stream_that_is_closed_leaves_none(provider: Provider) -> None:
    client = openai.AsyncOpenAI(base_url=provider.url, api_key="k")

    async def leave() -> None:
        async with await client.chat.completions.create(**ASK) as stream:
            async for _ in stream:
                break

    with traced() as rollout:
        asyncio.run(leave())
    assert [s.status for s in rollout.spans if s.name == "chat m"] == ["unset"]

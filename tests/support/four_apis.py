"""The same question to a gateway by each of the four APIs, with the providers' own SDKs, whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from scripted import Attempt

QUESTION = "hi"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMES = ("weather", "population")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]
"""In the form of Chat Completions."""

_END = {
    "stop": "stop",
    "length": "cut",
    "tool_calls": "calls",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "cut",
    "model_context_window_exceeded": "cut",
    "tool_use": "calls",
    "STOP": "stop",
    "MAX_TOKENS": "cut",
    "completed": "stop",
    "incomplete": "cut",
}


@dataclass
class Answer:
    """What an agent gets.

    Attributes:
        end: "cut"; "calls" where the API says that there are tool calls; else "stop".
        reason: what the API itself calls that. stop_text: the one that ended it, where the API says which.
        calls: names and arguments. usage: the SDK's object. raw: the SDK's whole answer, or its events.
    """

    end: str = ""
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    usage: Any = None
    raw: Any = None
    reason: str = ""
    stop_text: str | None = None


@asynccontextmanager
async def clients(attempt: Attempt) -> AsyncIterator[dict[str, Any]]:
    """An SDK's client for each API."""
    import anthropic
    from google import genai

    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    base = attempt.url().removesuffix("/v1")
    own: Any = {"base_url": base, "client_args": {"trust_env": False}, "async_client_args": {"trust_env": False}}
    openai = attempt.client()
    async with anthropic.AsyncAnthropic(
        base_url=base, api_key=attempt.key, http_client=http, max_retries=0
    ) as messages:
        google = genai.Client(api_key=attempt.key, http_options=own)
        async with google.aio as aio:
            yield {"chat": openai, "responses": openai, "messages": messages, "google": aio}


async def chat(client: Any, stream: bool, max_tokens: int, tools: bool, stop: str = "") -> Answer:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields = {"max_tokens": max_tokens} | ({"tools": TOOLS} if tools else {}) | ({"stop": stop} if stop else {})
    if not stream:
        raw = await client.chat.completions.create(model="m", messages=messages, **fields)
        message = raw.choices[0].message
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
        reasoning = getattr(message, "reasoning_content", None) or ""
        reason = raw.choices[0].finish_reason
        return Answer(_END[reason], message.content or "", reasoning, calls, raw.usage, raw, reason)
    answer, made = Answer(raw=[]), {}
    async for chunk in await client.chat.completions.create(
        model="m", messages=messages, stream=True, stream_options={"include_usage": True}, **fields
    ):
        answer.raw.append(chunk)
        answer.usage = chunk.usage or answer.usage
        for choice in chunk.choices:
            answer.text += choice.delta.content or ""
            answer.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                name, arguments = made.get(call.index, ("", ""))
                made[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
            answer.reason = choice.finish_reason or answer.reason
    answer.end = _END[answer.reason]
    answer.calls = [(name, json.loads(arguments)) for name, arguments in made.values()]
    return answer


async def responses(client: Any, stream: bool, max_tokens: int, tools: bool, stop: str = "") -> Answer:
    assert not stop, "this API has no stop texts"
    fields: dict[str, Any] = {"max_output_tokens": max_tokens}
    if tools:
        fields["tools"] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    events: list[Any] = []
    if stream:
        events = [e async for e in await client.responses.create(model="m", input=QUESTION, stream=True, **fields)]
        found = events[-1].response
        assert events[-1].type == f"response.{found.status}"
    else:
        found = await client.responses.create(model="m", input=QUESTION, **fields)
    assert (found.incomplete_details is not None) == (found.status == "incomplete")
    answer = Answer(_END[found.status], found.output_text, usage=found.usage, raw=events or found)
    answer.reason = found.incomplete_details.reason if found.incomplete_details else found.status
    for item in found.output:
        if item.type == "reasoning":
            answer.reasoning += "".join(part.text for part in item.content)
        if item.type == "function_call":
            answer.calls.append((item.name, json.loads(item.arguments)))
    if answer.calls and answer.end == "stop":
        answer.end = "calls"
    return answer


async def messages(client: Any, stream: bool, max_tokens: int, tools: bool, stop: str = "") -> Answer:
    fields: dict[str, Any] = {"model": "m", "max_tokens": max_tokens, "thinking": {"type": "adaptive"}}
    fields["messages"] = [{"role": "user", "content": QUESTION}]
    if tools:
        fields["tools"] = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
    if stop:
        fields["stop_sequences"] = [stop]
    events: list[Any] = []
    if stream:
        async with client.messages.stream(**fields) as stream_of:
            events = [e async for e in stream_of]
            found = await stream_of.get_final_message()
    else:
        found = await client.messages.create(**fields)
    answer = Answer(_END[found.stop_reason], usage=found.usage, raw=events or found)
    answer.reason = found.stop_reason
    answer.stop_text = found.stop_sequence
    for block in found.content:
        if block.type == "text":
            answer.text += block.text
        elif block.type == "thinking":
            answer.reasoning += block.thinking
        else:
            answer.calls.append((block.name, block.input))
    return answer


async def google(client: Any, stream: bool, max_tokens: int, tools: bool, stop: str = "") -> Answer:
    config: dict[str, Any] = {"max_output_tokens": max_tokens, "thinking_config": {"include_thoughts": True}}
    if tools:
        declared = [{"name": name, "parameters_json_schema": PARAMETERS} for name in NAMES]
        config |= {"tools": [{"function_declarations": declared}]}
        config |= {"automatic_function_calling": {"disable": True}}
    if stop:
        config |= {"stop_sequences": [stop]}
    fields = {"model": "m", "contents": QUESTION, "config": config}
    if stream:
        chunks = [chunk async for chunk in await client.models.generate_content_stream(**fields)]
    else:
        chunks = [await client.models.generate_content(**fields)]
    answer = Answer(usage=chunks[-1].usage_metadata, raw=chunks if stream else chunks[0])
    for chunk in chunks:
        for part in chunk.candidates[0].content.parts or ():
            if part.function_call:
                answer.calls.append((part.function_call.name, part.function_call.args))
            elif part.thought:
                answer.reasoning += part.text
            else:
                answer.text += part.text or ""
    answer.reason = chunks[-1].candidates[0].finish_reason.value
    answer.end = _END[answer.reason]
    if answer.calls and answer.end == "stop":
        answer.end = "calls"
    return answer


APIS: dict[str, Callable[..., Awaitable[Answer]]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "google": google,
}
"""API -> asks `QUESTION`: with which client, whether as a stream, for how many tokens, whether with `TOOLS`, and with
which stop text."""

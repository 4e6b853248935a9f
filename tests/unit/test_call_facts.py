"""What the `chat` span of an SDK's call says of its request and its answer, over HTTP."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from answer_forms import KINDS, Part, cutter, events, whole

from agl import semconv, tracing
from agl.adapters.anthropic import AnthropicTracer
from agl.adapters.google_genai import GoogleGenAITracer
from agl.adapters.langchain import LangChainTracer
from agl.adapters.openai import OpenAITracer
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.messages import read
from agl.testing.provider import Provider, Reply, serve
from agl.tracing.context import RolloutContext
from agl.tracing.provider_formats import ResponseAccumulator

TEXTS: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve() as server:
        yield server


def recorded(call: Callable[[], Any]) -> Span:
    """The only `chat` span of a call."""
    rollout = RolloutContext("ro", 1, "solver", select("nobody"), prompts=True)
    with OpenAITracer(), AnthropicTracer(), GoogleGenAITracer(), tracing.running(rollout):
        call()
    [chat] = [span for span in rollout.spans if span.operation == semconv.CHAT]
    return chat


def ask(api: str, provider: Provider, *, stream: bool = False, leave_after: int | None = None, **options: Any) -> None:
    """Send a request of an API, and read its answer; of a stream, only so many chunks."""
    import anthropic
    from google import genai

    more: dict[str, Any] = {"stream": True} if stream else {}
    match api:
        case "chat":
            client = openai.OpenAI(base_url=provider.url, api_key="k", max_retries=0)
            answer: Any = client.chat.completions.create(model="m", messages=TEXTS, **more, **options)
        case "responses":
            client = openai.OpenAI(base_url=provider.url, api_key="k", max_retries=0)
            answer = client.responses.create(model="m", input="hi", **more, **options)
        case "messages":
            options = {"max_tokens": 9, **options}
            claude = anthropic.Anthropic(base_url=provider.root, api_key="k", max_retries=0)
            answer = claude.messages.create(model="m", messages=TEXTS, **more, **options)
        case _:
            gemini = genai.Client(api_key="k", http_options={"base_url": provider.root})
            generate: Any = gemini.models.generate_content_stream if stream else gemini.models.generate_content
            answer = generate(model="m", contents="hi", config=options or None)
    if stream:
        for n, _ in enumerate(answer, 1):
            if n == leave_after:
                answer.close()
                break


SAMPLING = {
    semconv.REQUEST_TEMPERATURE: 0.5,
    semconv.REQUEST_TOP_P: 0.9,
    semconv.REQUEST_MAX_TOKENS: 9,
}
_SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
REQUESTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "chat",
        {
            "temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 9, "seed": 3, "stop": "end", "n": 2,
            "frequency_penalty": 0.25, "presence_penalty": -1, "response_format": {"type": "json_object"},
        },
        {
            **SAMPLING, semconv.REQUEST_SEED: 3, semconv.REQUEST_STOP_SEQUENCES: ("end",), semconv.REQUEST_CHOICES: 2,
            semconv.REQUEST_FREQUENCY_PENALTY: 0.25, semconv.REQUEST_PRESENCE_PENALTY: -1, semconv.OUTPUT_TYPE: "json",
        },
    ),
    ("chat", {"modalities": ["text", "audio"]}, {semconv.OUTPUT_TYPE: "speech"}),
    ("chat", {"n": 1, "response_format": {"type": "text"}}, {semconv.OUTPUT_TYPE: "text"}),
    (
        "responses",
        {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 9, "text": {"format": _SCHEMA}},
        {**SAMPLING, semconv.OUTPUT_TYPE: "json"},
    ),
    (
        "messages",
        # The SDK has no arguments for options that newer models refuse.
        {"extra_body": {"temperature": 0.5, "top_p": 0.9, "top_k": 4}, "stop_sequences": ["a", "b"]},
        {**SAMPLING, semconv.REQUEST_TOP_K: 4, semconv.REQUEST_STOP_SEQUENCES: ("a", "b")},
    ),
    (
        "google",
        {
            "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 9, "top_k": 4, "seed": 3, "candidate_count": 2,
            "stop_sequences": ["end"], "frequency_penalty": 0.25, "presence_penalty": -1.0,
            "response_mime_type": "application/json",
        },
        {
            **SAMPLING, semconv.REQUEST_TOP_K: 4, semconv.REQUEST_SEED: 3, semconv.REQUEST_CHOICES: 2,
            semconv.REQUEST_STOP_SEQUENCES: ("end",), semconv.REQUEST_FREQUENCY_PENALTY: 0.25,
            semconv.REQUEST_PRESENCE_PENALTY: -1.0, semconv.OUTPUT_TYPE: "json",
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("api", "options", "expected"), REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_can_be_sent_again_as_it_was(
    provider: Provider, api: str, options: dict[str, Any], expected: dict[str, Any], stream: bool
) -> None:
    attributes = recorded(lambda: ask(api, provider, stream=stream, **options)).attributes
    said = {k: v for k, v in attributes.items() if k.startswith(("gen_ai.request.", "gen_ai.output.type"))}
    assert bool(said.pop(semconv.REQUEST_STREAM, False)) == stream
    assert (
        said
        == {semconv.REQUEST_MODEL: "m", **({semconv.REQUEST_MAX_TOKENS: 9} if api == "messages" else {})} | expected
    )


ANSWERS: dict[str, list[Part]] = {
    "chat": [
        ("reasoning", "hm"), ("text", "so it is"), ("refusal", "no"), ("audio", "hello", "AAAA"),
        ("call", "call_1", "add", {"a": 1}), ("call", "call_2", "mul", {"a": 2}),
    ],
    "responses": [
        ("reasoning", "hm"), ("cited", "so it is"), ("refusal", "no"), ("call", "call_1", "add", {"a": 1}),
        ("custom", "call_2", "shell", "ls -l"), ("server", "call_3", {"q": "x"}),
    ],
    "messages": [
        ("reasoning", "hm"), ("cited", "so it is"), ("server", "call_3", {"q": "x"}),
        ("call", "call_1", "add", {"a": 1}), ("call", "call_2", "mul", {}),
    ],
    "google": [
        ("reasoning", "hm"), ("text", "so it is"), ("call", "call_1", "add", {"a": 1}), ("text", "and"),
        ("server", "call_3", {"q": "x"}), ("call", "call_2", "mul", {"a": 2}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("api", KINDS)
def test_the_sdk_s_streams_are_recorded_like_unstreamed_answers(provider: Provider, api: str) -> None:
    parts = ANSWERS[api]
    chunks = tuple(events(api, parts, cutter(1), "all index 0"))
    provider.script = lambda body: Reply(whole=whole(api, parts), events=chunks)
    [unstreamed] = read.said(recorded(lambda: ask(api, provider)))
    streamed = recorded(lambda: ask(api, provider, stream=True))
    assert read.said(streamed) == [unstreamed]
    assert streamed.attributes[semconv.TIME_TO_FIRST_CHUNK] >= 0
    assert unstreamed.text.startswith("so it is")
    assert len(unstreamed.tool_calls) == 2
    left = recorded(lambda: ask(api, provider, stream=True, leave_after=len(chunks) // 2))
    [beginning] = read.said(left)
    assert beginning.parts
    assert beginning.reasoning + beginning.text in unstreamed.reasoning + unstreamed.text
    assert left.status == "unset"


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_langchain_stream_had_said_when_it_was_left(provider: Provider, api: str, is_async: bool) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    parts: list[Part] = [("text", "so it is and more")]
    chunks = tuple(events(api, parts, lambda text: [text[:3], text[3:9], text[9:]]))
    provider.script = lambda body: Reply(whole={}, events=chunks)

    def model() -> Any:
        if api == "messages":
            return ChatAnthropic(model_name="m", base_url=provider.root, api_key="k", stop=None, timeout=None)
        return ChatOpenAI(model="m", base_url=provider.url, api_key="k", use_responses_api=api == "responses")

    def read_some() -> None:
        said = ""
        for chunk in model().stream("hi"):
            said += chunk.text
            if said == "so it is ":
                break

    async def read_some_async() -> None:
        said, stream = "", model().astream("hi")
        async for chunk in stream:
            said += chunk.text
            if said == "so it is ":
                break
        await stream.aclose()

    with LangChainTracer():
        chat = recorded(lambda: asyncio.run(read_some_async()) if is_async else read_some())
    assert (chat.status, chat.events) == ("unset", ())
    assert [message.text for message in read.said(chat)] == ["so it is "]


@pytest.mark.parametrize("way", ["retrieve", "retrieve its stream", "cancel", "never"])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_that_is_retrieved_later_is_the_call_s(way: str, is_async: bool) -> None:
    """`background=True`, polled by GET."""
    states = iter(["queued", "in_progress", "cancelled" if way == "cancel" else "completed"])
    parts: list[Part] = [("text", "so it is")]
    body = whole("responses", parts)
    streamed = "".join(f"data: {json.dumps(event)}\n\n" for event in events("responses", parts, cutter(1)))

    def answer(request: httpx.Request) -> httpx.Response:
        if "stream" in request.url.params:
            return httpx.Response(200, text=streamed, headers={"content-type": "text/event-stream"})
        state = next(states)
        done = state in ("completed", "cancelled")
        return httpx.Response(200, json={**body, "status": state, "output": body["output"] if done else []})

    transport = httpx.MockTransport(answer)
    kinds: list[str] = []

    async def run() -> None:
        # The sync client's results are no awaitables.
        async def wait(value: Any) -> Any:
            return await value if inspect.isawaitable(value) else value

        client: Any
        if is_async:
            client = openai.AsyncOpenAI(api_key="k", http_client=httpx.AsyncClient(transport=transport))
        else:
            client = openai.OpenAI(api_key="k", http_client=httpx.Client(transport=transport))
        begun = await wait(client.responses.create(model="m", input="hi", background=True))
        here = tracing.current()
        assert here is not None
        kinds.append(here.kind)
        if way == "never":
            return
        assert (await wait(client.responses.retrieve(begun.id))).status == "in_progress"
        if way == "cancel":
            await wait(client.responses.cancel(begun.id))
        elif way == "retrieve":
            assert (await wait(client.responses.retrieve(begun.id))).output_text == "so it is"
        else:
            stream = await wait(client.responses.retrieve(begun.id, stream=True))
            _ = [each async for each in stream] if is_async else [*stream]

    chat = recorded(lambda: asyncio.run(run()))
    # What follows does not lie within the call.
    assert kinds == [semconv.INVOKE_AGENT]
    assert chat.attributes[semconv.WIRE_CALLS] == 1
    assert [message.text for message in read.said(chat)] == ([] if way == "never" else ["so it is"])


def test_the_provider_s_numbers_of_tokens_count(provider: Provider) -> None:
    """LangChain says 0 tokens of input for this stream, of which four were cached."""
    from langchain_anthropic import ChatAnthropic

    provider.script = lambda body: Reply("yes", cached=4)

    async def run() -> None:
        model = ChatAnthropic(model_name="m", base_url=provider.root, api_key="k", stop=None, timeout=None)
        async for _ in model.astream("hi"):
            pass

    with LangChainTracer():
        attributes = recorded(lambda: asyncio.run(run())).attributes
    assert (attributes[semconv.INPUT_TOKENS], attributes[semconv.CACHE_READ_TOKENS]) == (7, 4)


_COUNTED = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def _chunks(last: dict[str, Any], *, finish: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """A stream of Chat Completions whose last chunk, and the choice in it, have further fields."""
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    text = {"index": 0, "delta": {"role": "assistant", "content": "yes"}, "finish_reason": None}
    return (
        {**head, "choices": [text]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop", **finish}], **last},
    )


@pytest.mark.parametrize("framework", [False, True], ids=["sdk", "langchain"])
@pytest.mark.parametrize(
    "events",
    [
        _chunks({"x_groq": {"id": "r", "usage": _COUNTED}}, finish={}),
        _chunks({}, finish={"usage": _COUNTED}),
        _chunks({"usage": _COUNTED}, finish={}),
    ],
    ids=["groq", "moonshot", "openai"],
)
def test_usage_is_found_where_servers_stream_it(
    provider: Provider, events: tuple[dict[str, Any], ...], framework: bool
) -> None:
    from langchain_openai import ChatOpenAI

    provider.script = lambda body: Reply(whole={}, events=events)

    def run() -> None:
        if framework:
            [*ChatOpenAI(model="m", base_url=provider.url, api_key="k", stream_usage=False).stream("hi")]  # type: ignore[arg-type]
        else:
            ask("chat", provider, stream=True)

    with LangChainTracer():
        attributes = recorded(run).attributes
    assert [attributes.get(name) for name in _USAGE] == [7, 3, 4]


_USAGE = (semconv.INPUT_TOKENS, semconv.OUTPUT_TOKENS, semconv.CACHE_READ_TOKENS)


def test_nulls_in_a_stream_s_last_usage_take_nothing_back(provider: Provider) -> None:
    """What servers of Anthropic's API send that count the input at the beginning alone."""
    began = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0, "output_tokens": 1}
    message = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    provider.script = lambda body: Reply(
        whole={},
        events=(
            {"type": "message_start", "message": {**message, "usage": began}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "yes"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": end, "usage": dict.fromkeys(began) | {"output_tokens": 3}},
            {"type": "message_stop"},
        ),
    )
    chat = recorded(lambda: ask("messages", provider, stream=True))
    assert [chat.attributes.get(name) for name in _USAGE] == [7, 3, 4]


def test_finish_reasons_are_in_the_order_of_the_choices() -> None:
    answer = ResponseAccumulator()
    answer.event({"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": "length"}]})
    answer.event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]})
    facts = answer.facts(content=True)
    assert facts[semconv.FINISH_REASONS] == ["stop", "length"]
    assert [m["finish_reason"] for m in json.loads(facts[semconv.OUTPUT_MESSAGES])] == ["stop", "length"]


FAILED_RESPONSE: dict[str, Any] = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "failed", "output": [],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    "error": {"code": "server_error", "message": "boom"},
}  # fmt: skip
FAILED_CHAT: dict[str, Any] = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "error", "message": {"role": "assistant", "content": "par"}}],
}  # fmt: skip
FAILED_CHUNK: dict[str, Any] = {
    "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "error", "delta": {"content": "par"}}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("api", "stream", "body", "said"),
    [
        ("responses", False, FAILED_RESPONSE, "boom"),
        ("responses", False, {**FAILED_RESPONSE, "error": None}, "has failed"),
        ("chat", False, FAILED_CHAT, "finish_reason is 'error'"),
        ("chat", True, FAILED_CHUNK, "finish_reason is 'error'"),
    ],
)
def test_an_answer_that_says_it_failed_is_an_error(api: str, stream: bool, body: dict[str, Any], said: str) -> None:
    """Status 200 alone is no success."""
    reply = Reply(whole=body, events=(body,))
    with serve(lambda _: reply) as provider:
        span = recorded(lambda: ask(api, provider, stream=stream))
    assert span.status == "error"
    assert said in (span.status_message or "")

"""Bare Anthropic clients, and LangChain's: one `chat` span per call, however it is made."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted import Attempt, in_loop, serving, tool_call

import agl
from agl import semconv, tracing
from agl.adapters.anthropic import AnthropicTracer, wrap
from agl.adapters.google_genai import GoogleGenAITracer
from agl.adapters.langchain import LangChainTracer
from agl.adapters.openai import OpenAITracer
from agl.agents.agent import Outcome, RolloutInfo
from agl.agents.frameworks import ImportedFrameworks
from agl.mdp.selection import select
from agl.mdp.spans import Span
from agl.messages import Message, Text, read
from agl.testing.provider import Provider, Reply, says, serve
from agl.tracing.context import RolloutContext

anthropic = pytest.importorskip("anthropic")

KEY = "sk-ant-provider"
ASK: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "q"}]}
CALCULATOR: dict[str, Any] = {"name": "calculator", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serve(says("sum 5")) as server:
        yield server


@pytest.fixture
def gateway() -> Iterator[Provider]:
    with serve(says("sum 5")) as server:
        yield server


def sync_client(provider: Provider) -> Any:
    return anthropic.Anthropic(base_url=provider.root, api_key=KEY, max_retries=0)


def async_client(provider: Provider) -> Any:
    return anthropic.AsyncAnthropic(base_url=provider.root, api_key=KEY, max_retries=0)


def context(gateway: Provider | None = None, *, agents: Any = None, id: str = "ro") -> RolloutContext:
    return RolloutContext(id, 1, "solver", select(agents), gateway.root if gateway else None, "agl-key")


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    with AnthropicTracer(), tracing.running(running := context()):
        yield running


def chats(rollout: RolloutContext) -> list[Span]:
    return [s for s in rollout.spans if s.operation == semconv.CHAT]


# -- every way to make a call -----------------------------------------------------------------------------------------


def invoke(provider: Provider, question: str = "q") -> str:
    return sync_client(provider).messages.create(**ASK | _asks(question)).content[0].text


def streamed(provider: Provider, question: str = "q") -> str:
    with sync_client(provider).messages.stream(**ASK | _asks(question)) as stream:
        return stream.get_final_text()


def raw_stream(provider: Provider, question: str = "q") -> str:
    events = sync_client(provider).messages.create(**ASK | _asks(question), stream=True)
    return "".join(e.delta.text for e in events if e.type == "content_block_delta")


def beta(provider: Provider, question: str = "q") -> str:
    return sync_client(provider).beta.messages.create(**ASK | _asks(question)).content[0].text


async def ainvoke(provider: Provider, question: str = "q") -> str:
    return (await async_client(provider).messages.create(**ASK | _asks(question))).content[0].text


async def astreamed(provider: Provider, question: str = "q") -> str:
    async with async_client(provider).messages.stream(**ASK | _asks(question)) as stream:
        return await stream.get_final_text()


def _asks(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}]}


WAYS = (invoke, streamed, raw_stream, beta, ainvoke, astreamed)
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)


def do(way: Callable[..., Any], provider: Provider) -> str:
    done = way(provider)
    return asyncio.run(done) if asyncio.iscoroutine(done) else done


@every_way
def test_every_call_has_a_chat_span_joined_to_the_wire_by_id(
    way: Callable[..., Any], provider: Provider, gateway: Provider
) -> None:
    with AnthropicTracer(), tracing.running(running := context(gateway)):
        assert do(way, provider) == "sum 5"
    assert provider.seen == []
    [span] = chats(running)
    [seen] = gateway.seen
    assert seen.path.partition("?")[0] == "/rollouts/ro/attempts/1/agents/solver/v1/messages"
    assert seen.traceparent_span == span.span_id
    assert KEY not in seen.text
    attributes = span.attributes
    assert (span.name, span.agent, span.status) == ("chat m", "solver", "unset")
    assert (attributes[semconv.PROVIDER_NAME], attributes[semconv.REQUEST_MODEL]) == ("anthropic", "m")
    assert (attributes[semconv.RESPONSE_ID], attributes[semconv.RESPONSE_MODEL]) == ("msg_1", "m")
    assert list(attributes[semconv.FINISH_REASONS]) == ["end_turn"]
    assert (attributes[semconv.INPUT_TOKENS], attributes[semconv.OUTPUT_TOKENS]) == (7, 3)
    assert attributes[semconv.WIRE_CALLS] == 1


@every_way
def test_an_unselected_agent_keeps_its_provider_and_is_traced(
    way: Callable[..., Any], provider: Provider, gateway: Provider
) -> None:
    with AnthropicTracer(), tracing.running(running := context(gateway, agents="nobody")):
        assert do(way, provider) == "sum 5"
    assert gateway.seen == []
    [seen] = provider.seen
    # The newest SDK sends its key as a bearer.
    assert KEY in seen.headers.get("x-api-key", seen.headers.get("authorization"))
    [span] = chats(running)
    assert not [ours for ours in ("agl", span.trace_id, span.span_id) if ours in seen.text]
    assert semconv.ROUTED not in span.attributes


@every_way
def test_a_failed_call_is_recorded_and_raised_unchanged(
    way: Callable[..., Any], provider: Provider, rollout: RolloutContext
) -> None:
    provider.script = lambda body: Reply(status=400)
    with pytest.raises(anthropic.BadRequestError, match="scripted 400"):
        do(way, provider)
    [span] = chats(rollout)
    assert (span.status, span.attributes[semconv.ERROR_TYPE]) == ("error", "BadRequestError")
    assert [e.name for e in span.events] == ["exception"]


def test_counting_tokens_is_no_call(provider: Provider, gateway: Provider) -> None:
    with AnthropicTracer(), tracing.running(running := context(gateway)):
        sync_client(provider).messages.count_tokens(model="m", messages=ASK["messages"])
    assert [s.path for s in gateway.seen] == ["/rollouts/ro/attempts/1/agents/solver/v1/messages/count_tokens"]
    assert chats(running) == []


def test_captured_text_can_be_switched_off(provider: Provider, rollout: RolloutContext) -> None:
    invoke(provider)
    rollout.capture_content = False
    invoke(provider)
    with_text, without = chats(rollout)
    assert read.said(with_text) == [Message("assistant", (Text("sum 5"),))]
    assert semconv.OUTPUT_MESSAGES not in without.attributes


# -- streams ----------------------------------------------------------------------------------------------------------


def test_closed_early(provider: Provider, rollout: RolloutContext) -> None:
    with sync_client(provider).messages.create(**ASK, stream=True) as stream:
        next(iter(stream))
        assert chats(rollout) == []
    [span] = chats(rollout)
    assert (span.status, span.attributes[semconv.RESPONSE_ID]) == ("unset", "msg_1")


@pytest.mark.parametrize("read", [0, 1])
def test_a_forgotten_stream_ends_as_early_as_without_us(read: int, provider: Provider) -> None:
    client = sync_client(provider)

    def forget() -> bool:
        """Whether a stream that was dropped is gone before the garbage is collected; in anthropic < 1 it is not."""
        stream = client.messages.create(**ASK, stream=True)
        for _ in range(read):
            next(stream)
        response = weakref.ref(stream.response)
        del stream
        return response() is None

    gc.collect()
    gc.disable()
    try:
        at_once = forget()
        with AnthropicTracer(), tracing.running(rollout := context()):
            assert forget() is at_once
            if not at_once:
                gc.collect()
            assert len(chats(rollout)) == 1
    finally:
        gc.enable()


def test_failed_in_the_middle(rollout: RolloutContext) -> None:
    async def main() -> None:
        async with serving([[5, 6]], hold_timeout=0.0) as rig:
            attempt = await rig.attempt()
            rig.engine.resume.clear()
            client = anthropic.AsyncAnthropic(base_url=f"{attempt.access.url}/agents/a", api_key=attempt.key)
            stream = await client.messages.create(**ASK, stream=True)
            await anext(stream)
            await attempt.close()
            async for _ in stream:
                pass

    with pytest.raises(anthropic.APIError, match="attempt has ended"):
        asyncio.run(main())
    [span] = chats(rollout)
    assert (span.status, span.attributes[semconv.ERROR_TYPE]) == ("error", "APIStatusError")


def test_async_streams(provider: Provider, rollout: RolloutContext) -> None:
    async def main() -> None:
        create = async_client(provider).messages.create
        async with await create(**ASK, stream=True) as stream:
            await anext(aiter(stream))
        assert len(chats(rollout)) == 1
        stream = await create(**ASK, stream=True)
        async for _ in stream:
            break
        del stream
        for _ in range(200):
            gc.collect()
            if len(chats(rollout)) == 2:
                break
            await asyncio.sleep(0.01)
        assert len(chats(rollout)) == 2
        task = asyncio.create_task(create(**ASK))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert chats(rollout)[2].attributes[semconv.ERROR_TYPE] == "CancelledError"


def test_raw_responses(provider: Provider, rollout: RolloutContext) -> None:
    client = sync_client(provider)
    raw = client.messages.with_raw_response.create(**ASK)
    [span] = chats(rollout)
    assert span.attributes[semconv.RESPONSE_ID] == raw.parse().id
    with client.messages.with_streaming_response.create(**ASK) as response:
        assert len(chats(rollout)) == 1
        assert response.parse().content[0].text == "sum 5"
    assert len(chats(rollout)) == 2

    async def read_lines() -> list[str]:
        create = async_client(provider).messages.with_streaming_response.create
        async with create(**ASK, stream=True) as response:
            return [line async for line in response.iter_lines()]

    assert "event: message_stop" in asyncio.run(read_lines())
    parsed, iterated = chats(rollout)[1:]
    assert [m.text.strip() for m in read.said(iterated)] == [m.text for m in read.said(parsed)] == ["sum 5"]
    del rollout.spans[2:]
    stream = client.messages.with_raw_response.create(**ASK, stream=True).parse()
    assert len(chats(rollout)) == 2
    assert len([*stream]) > 1
    assert len(chats(rollout)) == 3


# -- rollouts, instrumentation ----------------------------------------------------------------------------------------


def alone(rollout: RolloutContext, gateway: Provider) -> None:
    """That a rollout has its own spans and nothing of anybody else's."""
    [seen] = [s for s in gateway.seen if f"/rollouts/{rollout.rollout_id}/" in s.path]
    assert seen.body["messages"][0]["content"] == rollout.rollout_id
    span, root = rollout.spans
    assert (span.span_id, span.parent_id) == (seen.traceparent_span, root.span_id)
    assert {s.rollout_id for s in rollout.spans} == {rollout.rollout_id}


def test_twenty_rollouts_in_threads_never_mix(provider: Provider, gateway: Provider) -> None:
    rollouts = [context(gateway, id=f"ro-{i:02}") for i in range(20)]
    barrier = threading.Barrier(len(rollouts))
    client = sync_client(provider)

    def run(rollout: RolloutContext) -> None:
        barrier.wait(10)
        with tracing.running(rollout):
            client.messages.create(**ASK | _asks(rollout.rollout_id))

    with AnthropicTracer():
        threads = [threading.Thread(target=run, args=(r,)) for r in rollouts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rollout in rollouts:
        alone(rollout, gateway)


def test_twenty_rollouts_in_tasks_never_mix(provider: Provider, gateway: Provider) -> None:
    rollouts = [context(gateway, id=f"ro-{i:02}") for i in range(20)]

    async def main() -> None:
        client = async_client(provider)

        async def run(rollout: RolloutContext) -> None:
            with tracing.running(rollout):
                async with client.messages.stream(**ASK | _asks(rollout.rollout_id)) as stream:
                    await stream.get_final_message()

        await asyncio.gather(*map(run, rollouts))

    with AnthropicTracer():
        asyncio.run(main())
    for rollout in rollouts:
        alone(rollout, gateway)


def test_without_effect_when_off_and_outside_rollouts(provider: Provider, gateway: Provider) -> None:
    with tracing.running(running := context(gateway)):
        assert invoke(provider) == "sum 5"
    assert [s.operation for s in running.spans] == [semconv.INVOKE_AGENT]
    with AnthropicTracer():
        assert invoke(provider) == "sum 5"
        assert do(astreamed, provider) == "sum 5"
    assert gateway.seen == []
    assert not [s for s in provider.seen[1:] if "agl" in s.text or "traceparent" in s.headers]


def test_twice_is_once_and_uninstrument_restores(provider: Provider) -> None:
    def hooks() -> Any:
        return anthropic.Anthropic.__dict__.get("request"), anthropic.AsyncAnthropic.__dict__.get("request")

    before = hooks()
    first, second = AnthropicTracer().instrument(), AnthropicTracer().instrument()
    with OpenAITracer(), tracing.running(running := context()):
        invoke(provider)
    assert len(chats(running)) == 1
    assert first.instrumented
    second.uninstrument()
    assert (hooks(), first.instrumented) == (before, False)
    first.uninstrument()
    assert hooks() == before


def test_importing_the_adapter_imports_no_sdk() -> None:
    code = "import sys, agl.adapters.anthropic; print([m for m in ('anthropic', 'openai') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_sdks_own_spans_go_to_the_users_provider_as_ever(provider: Provider, rollout: RolloutContext) -> None:
    exporter = InMemorySpanExporter()
    theirs = TracerProvider()
    theirs.add_span_processor(SimpleSpanProcessor(exporter))
    options = {"open_telemetry": {"tracer_provider": theirs}}
    try:
        client = anthropic.Anthropic(base_url=provider.root, api_key=KEY, max_retries=0, **options)
    except TypeError:
        pytest.skip("this version of the SDK makes no spans")
    with theirs.get_tracer("user").start_as_current_span("around"):
        client.messages.create(**ASK)
        with client.messages.stream(**ASK) as stream:
            stream.get_final_message()
    first, second, around = exporter.get_finished_spans()
    assert {s.parent.span_id for s in (first, second) if s.parent} == {around.context.span_id}
    assert [s.headers["traceparent"].split("-")[2] for s in provider.seen] == [
        f"{s.context.span_id:016x}" for s in (first, second)
    ]
    assert len(chats(rollout)) == 2


@pytest.mark.parametrize("wrapped", [agl.wrap, wrap])
def test_a_function_is_wrapped_with_both_sdks_traced(wrapped: Callable[..., Any], provider: Provider) -> None:
    def answer(task: Any) -> str:
        return invoke(provider, task["question"])

    agent = wrapped(answer, lambda task, output: len(output))
    assert {type(t) for t in agent.tracers} == {AnthropicTracer, OpenAITracer, GoogleGenAITracer, ImportedFrameworks}
    assert (agent.name, agent.run({"question": "q"}, {}, RolloutInfo("ro", 1))) == ("answer", Outcome(5, "sum 5"))


# -- through the gateway ----------------------------------------------------------------------------------------------


def at(attempt: Attempt, url: str) -> RolloutContext:
    access = attempt.access
    return RolloutContext(access.rollout_id, access.attempt, "solver", select(None), url, attempt.key)


@in_loop
async def test_a_bare_clients_conversation_is_one_session() -> None:
    async with serving([tool_call("1 + 1"), "two"]) as rig:
        attempt = await rig.attempt()
        with AnthropicTracer(), tracing.running(running := at(attempt, rig.gateway.base_url)):
            client = anthropic.AsyncAnthropic(base_url="http://provider.invalid", api_key=KEY)
            first = await client.messages.create(**ASK, tools=[CALCULATOR])
            result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "2"}
            history = [*ASK["messages"], {"role": "assistant", "content": first.content}]
            history.append({"role": "user", "content": [result]})
            async with client.messages.stream(**ASK | {"messages": history}, tools=[CALCULATOR]) as stream:
                assert await stream.get_final_text() == "two"
        before, after = await attempt.close()
    assert after.parent_id == before.id
    assert [(s.span_id, s.attributes[semconv.RESPONSE_ID]) for s in chats(running)] == [
        (c.span_id, c.id) for c in (before, after)
    ]
    # The whole prompt, though Anthropic tells what was continued apart.
    assert chats(running)[1].attributes[semconv.INPUT_TOKENS] == after.prompt_ids.size


@pytest.mark.parametrize("way", ["ainvoke", "astream"])
@in_loop
async def test_langchains_anthropic_model(way: str) -> None:
    models = pytest.importorskip("langchain_anthropic")
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    @tool
    def calculator(expression: str) -> str:
        """Work out a sum."""
        return str(sum(map(int, expression.split(" + "))))

    lines = [line for i in range(3) for line in ("I look.\n" + tool_call(f"{i} + {i}"), f"It is {2 * i}")]
    async with serving(lines) as rig:
        attempt = await rig.attempt()
        with AnthropicTracer(), LangChainTracer(), tracing.running(running := at(attempt, rig.gateway.base_url)):
            model = models.ChatAnthropic(model="m", base_url="http://provider.invalid", api_key=KEY, max_tokens=100)
            agent = create_agent(model, [calculator], system_prompt="Use it!", name="writer")
            messages: list[Any] = []
            for i in range(3):
                messages.append({"role": "user", "content": f"what is {i} + {i}?"})
                if way == "ainvoke":
                    state = await agent.ainvoke({"messages": messages})
                else:
                    state = [s async for s in agent.astream({"messages": messages}, stream_mode="values")][-1]
                messages = state["messages"]
        calls = await attempt.close()
    assert messages[-1].text == "It is 4"
    assert [c.parent_id for c in calls] == [None, *(c.id for c in calls[:-1])]
    assert {c.agent for c in calls} == {"writer"}
    spans = chats(running)
    assert [s.span_id for s in spans] == [c.span_id for c in calls]
    assert {s.attributes[semconv.PROVIDER_NAME] for s in spans} == {"anthropic"}
    tools = [s for s in running.spans if s.operation == semconv.EXECUTE_TOOL]
    assert [(s.attributes[semconv.TOOL_CALL_ID],) for s in tools] == [c.tool_call_ids for c in calls[::2]]

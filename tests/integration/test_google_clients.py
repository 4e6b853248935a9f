"""Google's own clients against the gateway: google-genai, redirected or by its address, and an agent of google-adk.

google-adk clashes with the packages of the `dev` extra; the nightly script gives it an environment of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from late import installed
from scripted import Attempt, ScriptedEngine, in_loop, quick_tokenizer, serving, tool_call

from agl import semconv, tracing
from agl.adapters.google_genai import GoogleGenAITracer
from agl.errors import EngineError
from agl.mdp.builder import build_trajectory
from agl.mdp.selection import select
from agl.mdp.sequence import merge, merge_report
from agl.mdp.span_index import SpanIndex
from agl.mdp.types import Call
from agl.testing.provider import Reply, serve
from agl.tracing.context import RolloutContext

if not installed("google.genai"):
    pytest.skip("google-genai is not installed", allow_module_level=True)

LINES = [
    "I look.\n" + tool_call("1 + 2") + "\n" + tool_call("3 * 4"),
    "It is 3 and 12.",
    tool_call("5 - 4"),
    "It is 1.",
]


def calculator(expression: str) -> str:
    """Work out a sum."""
    if expression == "1 / 0":
        raise ZeroDivisionError("no such number")
    return str(eval(expression))


# Types, not their names, which releases of 1.x do not read.
calculator.__annotations__ = {"expression": str, "return": str}


def client(attempt: Attempt, key: str | None = None, base: str | None = None) -> Any:
    """The SDK's client, as an agent would make it."""
    from google import genai

    options = {"client_args": {"trust_env": False}, "async_client_args": {"trust_env": False}}
    return genai.Client(api_key=key or attempt.key, http_options={"base_url": base or attempt.url(), **options})


def point(monkeypatch: pytest.MonkeyPatch, attempt: Attempt, agent: str) -> None:
    """Have clients that name no address use the gateway."""
    monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", f"{attempt.access.url}/agents/{agent}")
    monkeypatch.setenv("GEMINI_API_KEY", attempt.key)
    monkeypatch.delenv("GOOGLE_API_KEY", raising=False)


def rows(calls: list[Call]) -> tuple[int, dict[str, int]]:
    """How many training rows the calls make, and their forks."""
    built = build_trajectory(calls[0].rollout_id, 1, "group", SpanIndex(calls, []), select(None))
    (trajectory,) = built.trajectories.values()
    report = merge_report([trajectory], merge(trajectory, dict.fromkeys((c.id for c in calls), 1.0)))
    return report.rows, dict(report.forks)


def check(calls: list[Call]) -> None:
    """Two questions with their tools are one row, and each result is that of its call."""
    assert [c.request.get("tool_results") for c in calls] == [
        None,
        [{"id": i, "name": "calculator", "failed": False} for i in calls[0].tool_call_ids],
        None,
        [{"id": i, "name": "calculator", "failed": False} for i in calls[2].tool_call_ids],
    ]
    assert [m["content"] for m in calls[1].request["messages"]] == ["3", "12"]
    assert rows(calls) == (1, {})


async def chat_async(own: Any, config: Any, questions: list[str]) -> list[str]:
    chat = own.aio.chats.create(model="m", config=config)
    return [(await chat.send_message(question)).text for question in questions]


async def chat_async_streamed(own: Any, config: Any, questions: list[str]) -> list[str]:
    chat = own.aio.chats.create(model="m", config=config)
    answers = []
    for question in questions:
        chunks = [chunk async for chunk in await chat.send_message_stream(question)]
        answers.append("".join(chunk.text or "" for chunk in chunks).removeprefix("I look."))
    return answers


async def chat_sync(own: Any, config: Any, questions: list[str]) -> list[str]:
    def talk() -> list[str]:
        chat = own.chats.create(model="m", config=config)
        return [chat.send_message(question).text for question in questions]

    return await asyncio.to_thread(talk)


async def chat_sync_streamed(own: Any, config: Any, questions: list[str]) -> list[str]:
    def talk() -> list[str]:
        chat = own.chats.create(model="m", config=config)
        texts = ["".join(c.text or "" for c in chat.send_message_stream(question)) for question in questions]
        return [text.removeprefix("I look.") for text in texts]

    return await asyncio.to_thread(talk)


every_way = pytest.mark.parametrize("talk", [chat_sync, chat_async, chat_sync_streamed, chat_async_streamed])
CONFIG = {"system_instruction": "be brief", "tools": [calculator], "temperature": 0.5}


def running(attempt: Attempt, agents: Any = None) -> RolloutContext:
    """The attempt, as a runner runs an agent in it."""
    access = attempt.access
    gateway = access.url.partition("/rollouts/")[0]
    return RolloutContext(access.rollout_id, access.attempt, "agent", select(agents), gateway, attempt.key)


@every_way
@in_loop
async def test_a_client_of_another_provider_is_redirected_and_each_call_is_a_span(talk: Any) -> None:
    from google import genai

    own = genai.Client(vertexai=False, api_key="AIza-own", http_options={"base_url": "http://provider.invalid"})
    async with serving(LINES) as rig:
        attempt = await rig.attempt()
        with GoogleGenAITracer(), tracing.running(rollout := running(attempt)):
            counted = await own.aio.models.count_tokens(model="m", contents="hi")
            answers = await talk(own, CONFIG, ["1 + 2 and 3 * 4?", "and 5 - 4?"])
        calls = await attempt.close()
    assert 0 < counted.total_tokens < calls[0].prompt_ids.size
    assert answers == ["It is 3 and 12.", "It is 1."]
    check(calls)
    chats = [span for span in rollout.spans if span.operation == semconv.CHAT]
    assert [span.attributes[semconv.RESPONSE_ID] for span in chats] == [call.id for call in calls]
    assert [(call.agent, call.span_id) for call in calls] == [("agent", span.span_id) for span in chats]


@in_loop
async def test_a_client_of_vertex_ai_is_redirected_without_its_credentials() -> None:
    from google import genai
    from google.auth.credentials import AnonymousCredentials

    own = genai.Client(vertexai=True, project="p", location="l", credentials=AnonymousCredentials())
    async with serving(["hello"]) as rig:
        attempt = await rig.attempt()
        with GoogleGenAITracer(), tracing.running(running(attempt)):
            answer = await own.aio.models.generate_content(model="gemini-x", contents="hi")
        (call,) = await attempt.close()
    assert (answer.text, call.request["asked"]["model"]) == ("hello", "gemini-x")


@every_way
@in_loop
async def test_functions_that_the_sdk_calls_make_one_row(talk: Any) -> None:
    async with serving(LINES) as rig:
        attempt = await rig.attempt()
        answers = await talk(client(attempt), CONFIG, ["1 + 2 and 3 * 4?", "and 5 - 4?"])
        calls = await attempt.close()
    assert answers == ["It is 3 and 12.", "It is 1."]
    check(calls)
    assert [a.sampling.temperature for a in rig.engine.asked] == [0.5] * 4
    assert calls[0].request["messages"][0] == {"role": "system", "content": "be brief"}
    assert calls[0].request["tools"][0]["function"]["parameters"]["type"] == "object"


@in_loop
async def test_what_a_function_raises_is_a_failed_tool() -> None:
    async with serving([tool_call("1 / 0"), "There is none."]) as rig:
        attempt = await rig.attempt()
        await chat_async(client(attempt), {"tools": [calculator]}, ["1 / 0?"])
        _, call = await attempt.close()
    assert call.request["tool_results"][0]["failed"]
    assert "no such number" in call.request["messages"][0]["content"]


@in_loop
async def test_errors_are_the_sdks_own() -> None:
    from google.genai import errors, types

    async with serving(ScriptedEngine(quick_tokenizer(), [EngineError("no engine")])) as rig:
        attempt = await rig.attempt()
        image = types.Part.from_bytes(data=b"x", mime_type="image/png")
        config: Any = {"tools": [{"google_search": {}}]}
        for own, kind, status, contents, options in (
            (client(attempt, "wrong"), errors.ClientError, "UNAUTHENTICATED", "hi", None),
            (client(attempt), errors.ClientError, "INVALID_ARGUMENT", ["see", image], None),
            (client(attempt), errors.ClientError, "INVALID_ARGUMENT", "hi", config),
            (client(attempt), errors.ServerError, "UNAVAILABLE", "hi", None),
        ):
            with pytest.raises(kind) as caught:
                await own.aio.models.generate_content(model="m", contents=contents, config=options)
            assert caught.value.status == status
            with pytest.raises(kind) as caught:
                async for _ in await own.aio.models.generate_content_stream(
                    model="m", contents=contents, config=options
                ):
                    pass
            assert caught.value.status == status
        assert "inlineData" in str((await attempt.close())[0].error)


@in_loop
async def test_the_address_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from google import genai

    async with serving(["hello"]) as rig:
        attempt = await rig.attempt()
        point(monkeypatch, attempt, "writer")
        own = genai.Client()
        answer = await asyncio.to_thread(own.models.generate_content, model="gemini-x", contents="hi")
        assert answer.text == "hello"
        (call,) = await attempt.close()
    assert (call.agent, call.request["asked"]["model"]) == ("writer", "gemini-x")


def test_a_stream_that_fails_or_is_dropped_ends_its_span() -> None:
    from google import genai

    with serve(lambda body: Reply("a b", fails=True)) as provider, GoogleGenAITracer():
        own = genai.Client(vertexai=False, api_key="AIza-own", http_options={"base_url": provider.root})
        with tracing.running(rollout := RolloutContext("ro", 1, "agent", select(None))):
            with pytest.raises(genai.errors.ServerError, match="scripted failure"):
                list(own.models.generate_content_stream(model="m", contents="hi"))
            stream = own.models.generate_content_stream(model="m", contents="hi")
            assert next(stream).text == "a b"
            assert len(rollout.spans) == 1
            del stream
            assert len(rollout.spans) == 2
    failed, dropped = rollout.spans[:2]
    assert (failed.status, failed.status_message, dropped.status) == ("error", "scripted failure", "unset")


# -- google-adk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@in_loop
async def test_an_agent_of_adk_with_a_tool_makes_one_row(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("google.adk")
    from google.adk.agents import Agent
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    async with serving(LINES) as rig:
        attempt = await rig.attempt()
        point(monkeypatch, attempt, "solver")
        agent = Agent(name="solver", model="gemini-x", instruction="Be brief.", tools=[calculator])
        runner = InMemoryRunner(agent, app_name="sums")
        session = await runner.session_service.create_session(app_name="sums", user_id="u")
        mode = RunConfig(streaming_mode=StreamingMode.SSE if streams else StreamingMode.NONE)
        answers = []
        for question in ("1 + 2 and 3 * 4?", "and 5 - 4?"):
            message = types.Content(role="user", parts=[types.Part(text=question)])
            async for event in runner.run_async(
                user_id="u", session_id=session.id, new_message=message, run_config=mode
            ):
                if event.is_final_response():
                    answers.append("".join(p.text or "" for p in event.content.parts))
        calls = await attempt.close()
    assert answers == ["It is 3 and 12.", "It is 1."]
    check(calls)

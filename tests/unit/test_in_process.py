"""SDK clients that reach the gateway of their own process without a socket: everything is as it is over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpcore
import httpx
import openai
import orjson
import pytest
from scripted import Attempt, ScriptedEngine, in_loop, quick_tokenizer, serving, until

from agl import semconv, tracing
from agl.mdp.selection import select
from agl.tracing import in_process
from agl.tracing.context import RolloutContext, current

USER = {"role": "user", "content": "hi"}
ASK: dict[str, Any] = {"model": "m", "messages": [USER]}
KINDS = [
    {**ASK},
    {**ASK, "n": 2, "logprobs": True, "top_logprobs": 2},
    {**ASK, "stream": True, "stream_options": {"include_usage": True}},
    {**ASK, "messages": [{"role": "user", "content": 3}]},
    {**ASK, "messages": [{**USER, "content": "word " * 5000}]},
    {**ASK, "messages": [{**USER, "content": "word " * 5000}], "stream": True},
]


def client(attempt: Attempt, base: Any = openai.DefaultAsyncHttpxClient, **options: Any) -> Any:
    """A client whose requests fail if they are sent over a socket."""
    is_async = base is openai.DefaultAsyncHttpxClient
    http = in_process.client_class(base, is_async=is_async, prepare=lambda _: None)
    cls = openai.AsyncOpenAI if is_async else openai.OpenAI
    settings = {"base_url": attempt.url("writer/ä"), "api_key": attempt.key, "max_retries": 0, **options}
    return cls(http_client=http(trust_env=False, transport=object()), **settings)


def shown(value: Any) -> Any:
    """What a client gets, less what differs between two requests."""
    if isinstance(value, openai.APIStatusError):
        return value.status_code, value.body
    return value.model_dump(exclude={"id": True, "created": True})


async def answers(sdk: Any, request: dict[str, Any]) -> list[Any]:
    try:
        result = await sdk.chat.completions.create(**request)
        return [shown(chunk) async for chunk in result] if request.get("stream") else [shown(result)]
    except openai.APIStatusError as error:
        return [shown(error)]


@pytest.mark.parametrize("request_body", KINDS)
@in_loop
async def test_answers_streams_and_errors_are_those_of_http(request_body: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["one two three"], seconds=0.05)) as rig:
        over_http, direct = await rig.attempt(), await rig.attempt()
        expected = await answers(over_http.client("writer/ä"), request_body)
        assert await answers(client(direct), request_body) == expected
        recorded, other = await direct.close(), await over_http.close()

        def facts(calls: Any) -> Any:
            return [(c.agent, c.finish_reason, c.prompt_ids.tolist(), c.response_ids.tolist()) for c in calls]

        assert facts(recorded) == facts(other)
        assert recorded[0].agent == "writer/ä"


@in_loop
async def test_a_wrong_key_is_refused() -> None:
    async with serving(["x"]) as rig:
        with pytest.raises(openai.AuthenticationError):
            await client(await rig.attempt(), api_key="wrong").chat.completions.create(**ASK)


@in_loop
async def test_the_raw_response_has_status_headers_and_time() -> None:
    async with serving(["x"]) as rig:
        raw = await client(await rig.attempt()).chat.completions.with_raw_response.create(**ASK)
    assert (raw.status_code, raw.headers["content-type"], raw.http_version) == (200, "application/json", "HTTP/1.1")
    assert raw.elapsed.total_seconds() > 0


@in_loop
async def test_a_client_in_a_thread_gets_answers_and_streams() -> None:
    async with serving(["one two", "three four"]) as rig:
        sdk = client(attempt := await rig.attempt(), openai.DefaultHttpxClient)

        def ask() -> str:
            whole = sdk.chat.completions.create(**ASK).choices[0].message.content
            stream = sdk.chat.completions.create(**ASK, stream=True)
            return whole + ", " + "".join(c.choices[0].delta.content or "" for c in stream)

        assert await asyncio.to_thread(ask) == "one two, three four"
        assert len(await attempt.close()) == 2


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_client_that_gives_up_cancels_its_request(stream: bool) -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["one two three"], paused=True)) as rig:
        sdk = client(attempt := await rig.attempt())

        async def ask() -> None:
            result = await sdk.chat.completions.create(**ASK, stream=stream)
            async for _ in result:
                pass

        asking = asyncio.ensure_future(ask())
        await until(lambda: rig.engine.running == 1)
        asking.cancel()
        await until(lambda: rig.engine.cancelled == 1)
        with pytest.raises(openai.APITimeoutError):
            await sdk.chat.completions.create(**ASK, timeout=0.2)
        await until(lambda: rig.engine.cancelled == 2)
        assert [c.finish_reason for c in await attempt.close()] == ["cancelled", "cancelled"]


@in_loop
async def test_a_broken_off_stream_is_cancelled_at_the_gateway() -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["one two three"], paused=True)) as rig:
        stream = await client(await rig.attempt()).chat.completions.create(**ASK, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: rig.engine.cancelled == 1)


@in_loop
async def test_stopping_the_server_waits_for_open_requests_then_ends_them(monkeypatch: Any) -> None:
    monkeypatch.setattr("agl.trainer.http.server.STOP_SECONDS", 0.2)
    async with serving(ScriptedEngine(quick_tokenizer(), ["x"], paused=True)) as rig:
        attempt = await rig.attempt()
        waiting = asyncio.ensure_future(client(attempt).chat.completions.create(**ASK))
        await until(lambda: rig.engine.running == 1)
        await rig.server.stop()
        with pytest.raises(openai.InternalServerError, match="the gateway is stopping"):
            await waiting
        assert not in_process._servers


@in_loop
async def test_requests_run_outside_of_the_rollout_that_sends_them() -> None:
    seen: list[Any] = []

    def answer(_: Any) -> str:
        seen.append(current())
        return "x"

    async with serving(answer) as rig:
        sdk = client(await rig.attempt())
        with tracing.running(RolloutContext("ro-1", 1, "writer", select(None))):
            await sdk.chat.completions.create(**ASK)
    assert seen == [None]


@in_loop
async def test_a_bare_httpx_client_in_a_rollout_needs_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = httpx.HTTPTransport.handle_request, httpx.AsyncHTTPTransport.handle_async_request
    async with serving(["one two three"]) as rig:
        attempt = await rig.attempt()
        url = f"{attempt.url('writer')}/chat/completions"
        headers = {"authorization": f"Bearer {attempt.key}"}

        async def chunks() -> AsyncIterator[bytes]:
            yield orjson.dumps(ASK)

        async def ask(client: httpx.AsyncClient, **body: Any) -> Any:
            answer = await client.post(url, headers=headers, **(body or {"json": ASK}))
            assert answer.elapsed.total_seconds() > 0
            return {**answer.json(), "id": "", "created": 0}

        def ask_in_thread() -> list[str]:
            with httpx.Client(trust_env=False) as client, client.stream(
                "POST", url, headers=headers, json={**ASK, "stream": True}
            ) as answer:  # fmt: skip
                return [line for line in answer.iter_lines() if line]

        async with httpx.AsyncClient(trust_env=False) as client:
            over_http = await ask(client)
            with tracing.running(RolloutContext("ro-1", 1, "writer", select(None))):
                as_json = {"content-type": "application/json", **headers}
                assert (await client.post(url, headers=as_json, content=chunks())).status_code == 200
                for pool in (httpcore.ConnectionPool, httpcore.AsyncConnectionPool):
                    monkeypatch.setattr(pool, "handle_request", None, raising=False)
                    monkeypatch.setattr(pool, "handle_async_request", None, raising=False)
                assert await ask(client) == over_http
                assert (await client.post(url, json=ASK)).status_code == 401
                assert (await asyncio.to_thread(ask_in_thread))[-1] == "data: [DONE]"
            # Outside of a rollout there is a socket.
            with pytest.raises(TypeError):
                await ask(client)
        assert len(await attempt.close()) == 4
    assert (httpx.HTTPTransport.handle_request, httpx.AsyncHTTPTransport.handle_async_request) == plain


@in_loop
async def test_a_client_whose_loop_is_closed_has_hung_up() -> None:
    async with serving(ScriptedEngine(quick_tokenizer(), ["one two three"], paused=True)) as rig:
        sdk = client(await rig.attempt())

        def ask_and_leave() -> None:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(sdk.chat.completions.create(**ASK, stream=True))
            loop.close()

        await asyncio.to_thread(ask_and_leave)
        rig.engine.resume.set()
        await until(lambda: rig.engine.running == 0)


@contextlib.contextmanager
def application(app: Any) -> Iterator[str]:
    """An ASGI application on a loop in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> None:
        in_process.listen("127.0.0.1", 9, app, set())

    asyncio.run_coroutine_threadsafe(begin(), loop).result()
    try:
        yield "http://127.0.0.1:9/v1"
    finally:
        in_process.close("127.0.0.1", 9)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("parts", [0, 1])
def test_an_application_that_fails_is_a_lost_connection(parts: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(parts):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
        raise ValueError("broken")

    cls = in_process.client_class(openai.DefaultHttpxClient, is_async=False, prepare=lambda _: None)
    with application(app) as url, contextlib.closing(cls()) as http:
        with pytest.raises(Exception, match="ended without a response") as lost:
            http.post(f"{url}/chat/completions", json={})
        assert type(lost.value).__name__ == "RemoteProtocolError"


def test_work_that_begins_after_the_client_has_gone_is_cancelled() -> None:
    called = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope["extensions"][semconv.WHEN_GONE](called.set)

    cls = in_process.client_class(openai.DefaultHttpxClient, is_async=False, prepare=lambda _: None)
    with application(app) as url, contextlib.closing(cls()) as http:
        with pytest.raises(Exception, match="sent nothing in time"):
            http.post(f"{url}/chat/completions", json={}, timeout=0.05)
        assert called.wait(10)


def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    with application(app):
        child = os.fork()
        if child == 0:
            os._exit(len(in_process._servers))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

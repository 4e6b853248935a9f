"""Model calls over WebSockets: each is a `chat` span, and training says that it bypassed the gateway."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
from late import installed
from running import fit
from websockets.sync.server import ServerConnection, serve

import agl
from agl import semconv, tracing
from agl.adapters.google_genai import GoogleGenAITracer
from agl.adapters.openai import OpenAITracer
from agl.adapters.openai_agents import OpenAIAgentsTracer
from agl.errors import BypassedGatewayError
from agl.mdp.selection import select
from agl.messages import read
from agl.testing.provider import says
from agl.testing.provider import serve as provider_of
from agl.tracing.context import RolloutContext


@pytest.fixture(scope="module", autouse=True)
def httpx_ws() -> None:
    """Import httpx-ws before a server's thread runs.

    pytest makes syntax trees of anyio's modules, which CPython 3.11 can fail to do in a program with threads
    (https://github.com/python/cpython/issues/106905).
    """
    if installed("httpx_ws"):
        import_module("httpx_ws")


USAGE = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}


def _response(status: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "output_text", "text": text, "annotations": []}]
    output = [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}]
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": status,
        "output": output if content else [], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        **({"usage": USAGE | {"input_tokens_details": {"cached_tokens": 4},
                              "output_tokens_details": {"reasoning_tokens": 2}}} if content else {}),
    }  # fmt: skip


def _answer(connection: ServerConnection) -> None:
    """Answer each request for a response, in the form of the connection's API."""
    assert connection.request is not None
    path = connection.request.path
    for text in connection:
        message = json.loads(text)
        if "BidiGenerateContent" in path:
            events: list[dict[str, Any]] = [{"setupComplete": {}}]
            if "setup" not in message:
                usage = {"promptTokenCount": 7, "responseTokenCount": 3, "totalTokenCount": 10}
                turn = {"role": "model", "parts": [{"text": "hello"}]}
                events = [{"serverContent": {"modelTurn": turn}}]
                events.append({"serverContent": {"turnComplete": True}, "usageMetadata": usage})
        elif message["type"] != "response.create":
            continue
        else:
            delta = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "item_id": "msg_1"}
            part = {"type": "output_text", "text": "", "annotations": []}
            added = {"type": "message", "id": "msg_1", "role": "assistant", "status": "in_progress", "content": []}
            last = "response.done" if "/realtime" in path else "response.completed"
            events = [
                {"type": "response.created", "response": _response("in_progress", None)},
                {"type": "response.output_item.added", "output_index": 0, "item": added},
                {**delta, "type": "response.content_part.added", "part": part},
                {**delta, "delta": "hel"},
                {**delta, "delta": "lo"},
                {"type": last, "response": _response("completed", "hello")},
            ]
        for n, event in enumerate(events):
            connection.send(json.dumps(event | ({"sequence_number": n} if "type" in event else {})))


@contextmanager
def server() -> Iterator[str]:
    """The address, without a scheme, of a provider that talks over WebSockets."""
    with serve(_answer, "127.0.0.1", 0) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{running.socket.getsockname()[1]}"
        running.shutdown()


def responses(address: str) -> None:
    client = openai.OpenAI(api_key="k", base_url=f"http://{address}/v1")
    with client.responses.connect() as connection:
        connection.response.create(model="m", input="hi", temperature=0.5, max_output_tokens=9)
        for event in connection:
            if event.type == "response.completed":
                break


def responses_async(address: str) -> None:
    async def run() -> None:
        client = openai.AsyncOpenAI(api_key="k", base_url=f"http://{address}/v1")
        async with client.responses.connect() as connection:
            await connection.response.create(model="m", input="hi", temperature=0.5, max_output_tokens=9)
            async for event in connection:
                if event.type == "response.completed":
                    break

    asyncio.run(run())


def realtime(address: str) -> None:
    client = openai.OpenAI(api_key="k", base_url=f"http://{address}/v1")
    with client.realtime.connect(model="m") as connection:
        connection.response.create()
        for event in connection:
            if event.type == "response.done":
                break


def live(address: str) -> None:
    from google import genai

    async def run() -> None:
        client = genai.Client(api_key="k", http_options={"base_url": f"http://{address}"})
        # The SDK talks to TLS alone.
        client._api_client._websocket_base_url = lambda *_: f"ws://{address}"  # type: ignore[method-assign]
        client._api_client._websocket_ssl_ctx = {}
        async with client.aio.live.connect(model="m", config={"temperature": 0.5}) as session:
            await session.send_client_content(turns={"role": "user", "parts": [{"text": "hi"}]})
            async for _ in session.receive():
                pass

    asyncio.run(run())


def agents_sdk(address: str) -> None:
    from agents import Agent, Runner
    from agents.models.openai_responses import OpenAIResponsesWSModel

    async def run() -> None:
        client = openai.AsyncOpenAI(api_key="k", base_url=f"http://{address}/v1")
        model = OpenAIResponsesWSModel(model="m", openai_client=client)
        result = await Runner.run(Agent(name="solver", model=model), "hi")
        assert result.final_output == "hello"

    asyncio.run(run())


def by_websocket_client(address: str) -> None:
    websocket = pytest.importorskip("websocket")
    connection = websocket.create_connection(f"ws://{address}/v1/realtime?model=m")
    connection.send(json.dumps({"type": "response.create"}))
    while json.loads(connection.recv())["type"] != "response.done":
        pass
    connection.close()


def by_websocket_app(address: str) -> None:
    websocket = pytest.importorskip("websocket")

    def received(app: Any, message: str) -> None:
        if json.loads(message)["type"] == "response.done":
            app.close()

    websocket.WebSocketApp(
        f"ws://{address}/v1/realtime?model=m",
        on_open=lambda app: app.send(json.dumps({"type": "response.create"})),
        on_message=received,
    ).run_forever()


def by_aiohttp(address: str) -> None:
    import aiohttp

    async def run() -> None:
        url = f"ws://{address}/v1/realtime?model=m"
        async with aiohttp.ClientSession() as session, session.ws_connect(url) as connection:
            await connection.send_json({"type": "response.create"})
            async for message in connection:
                if json.loads(message.data)["type"] == "response.done":
                    break

    asyncio.run(run())


def by_httpx_ws(address: str) -> None:
    httpx_ws = pytest.importorskip("httpx_ws")
    with httpx_ws.connect_ws(f"http://{address}/v1/realtime?model=m") as connection:
        connection.send_json({"type": "response.create"})
        while connection.receive_json()["type"] != "response.done":
            pass


def by_httpx_ws_async(address: str) -> None:
    httpx_ws = pytest.importorskip("httpx_ws")

    async def run() -> None:
        async with httpx_ws.aconnect_ws(f"http://{address}/v1/realtime?model=m") as connection:
            await connection.send_text(json.dumps({"type": "response.create"}))
            while (await connection.receive_json())["type"] != "response.done":
                pass

    asyncio.run(run())


def by_simple_websocket(address: str) -> None:
    simple_websocket = pytest.importorskip("simple_websocket")
    connection = simple_websocket.Client(f"ws://{address}/v1/realtime?model=m")
    connection.send(json.dumps({"type": "response.create"}))
    while json.loads(connection.receive())["type"] != "response.done":
        pass
    connection.close()


def by_simple_websocket_async(address: str) -> None:
    simple_websocket = pytest.importorskip("simple_websocket")

    async def run() -> None:
        connection = await simple_websocket.AioClient.connect(f"ws://{address}/v1/realtime?model=m")
        await connection.send(json.dumps({"type": "response.create"}))
        while json.loads(await connection.receive())["type"] != "response.done":
            pass
        await connection.close()

    asyncio.run(run())


def by_legacy_websockets(address: str) -> None:
    from websockets.legacy.client import connect

    async def run() -> None:
        async with connect(f"ws://{address}/v1/realtime?model=m") as connection:
            await connection.send(json.dumps({"type": "response.create"}))
            async for message in connection:
                if json.loads(message)["type"] == "response.done":
                    break

    asyncio.run(run())


OTHER_CLIENTS = [
    by_websocket_client,
    by_websocket_app,
    by_aiohttp,
    by_httpx_ws,
    by_httpx_ws_async,
    by_simple_websocket,
    by_simple_websocket_async,
    by_legacy_websockets,
]
CALLS = [responses, responses_async, realtime, live, agents_sdk, *OTHER_CLIENTS]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_a_chat_span_with_its_answer(call: Callable[[str], None]) -> None:
    rollout = RolloutContext("ro", 1, "solver", select("nobody"), prompts=True)
    tracers = OpenAITracer(), OpenAIAgentsTracer(), GoogleGenAITracer()
    with server() as address, tracers[0], tracers[1], tracers[2], tracing.running(rollout):
        call(address)
        assert tracing.current() is not None
        assert tracing.current().kind == semconv.INVOKE_AGENT
    [chat] = [s for s in rollout.spans if s.operation == semconv.CHAT]
    assert (chat.agent, chat.status) == ("solver", "unset")
    assert [m.text for m in read.said(chat)] == ["hello"]
    assert chat.attributes[semconv.REQUEST_MODEL] == "m"
    assert chat.attributes[semconv.URL].startswith(f"ws://{address}/")
    assert (chat.attributes[semconv.INPUT_TOKENS], chat.attributes[semconv.OUTPUT_TOKENS]) == (7, 3)
    if call in (responses, responses_async):
        assert chat.attributes[semconv.REQUEST_TEMPERATURE] == 0.5
        assert chat.attributes[semconv.REQUEST_MAX_TOKENS] == 9
        assert chat.attributes[semconv.CACHE_READ_TOKENS] == 4
        assert [m.text for m in read.sent(chat)] == ["hi"]


def test_a_connection_that_is_left_in_mid_answer_leaves_nothing_open() -> None:
    def leave(address: str) -> None:
        client = openai.OpenAI(api_key="k", base_url=f"http://{address}/v1")
        with client.responses.connect() as connection:
            connection.response.create(model="m", input="hi")
            assert next(iter(connection)).type == "response.created"

    rollout = RolloutContext("ro", 1, "solver", select("nobody"), prompts=True)
    with server() as address, OpenAITracer(), tracing.running(rollout):
        leave(address)
        gc.collect()
        assert [scope.kind for scope in rollout.open] == [semconv.INVOKE_AGENT]
    [chat] = [s for s in rollout.spans if s.operation == semconv.CHAT]
    assert chat.status == "unset"


@pytest.mark.parametrize("call", [responses, agents_sdk])
def test_a_selected_agent_with_a_routed_call_and_one_over_a_websocket_does_not_train(
    tmp_path: Path, call: Callable[[str], None]
) -> None:
    with server() as address, provider_of(says("4")) as provider:

        def solver(task: str) -> str:
            client = openai.OpenAI(api_key="k", base_url=provider.url)
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": task}])
            call(address)
            return "4"

        agent = agl.wrap(solver, reward=lambda task, output: 1.0)
        why = r"1 LLM call.* of agent 'solver' bypassed the gateway.*ws://.*/v1/responses.*`client.responses.create"
        with pytest.raises(BypassedGatewayError, match=f"(?s){why}"):
            fit(agent, ["2 + 2"], tmp_path)


def test_nothing_is_patched_outside_rollouts() -> None:
    from aiohttp import ClientWebSocketResponse
    from websockets.sync.client import ClientConnection

    before = dict(vars(ClientConnection)), dict(vars(ClientWebSocketResponse))
    with OpenAITracer():
        assert vars(ClientConnection)["send"] is not before[0].get("send")
        assert vars(ClientWebSocketResponse)["receive"] is not before[1]["receive"]
    assert (dict(vars(ClientConnection)), dict(vars(ClientWebSocketResponse))) == before

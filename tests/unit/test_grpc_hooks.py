"""Model calls over gRPC: each is a `chat` span, and training says that it bypassed the gateway."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

import openai
import pytest
from running import fit

import agl
from agl import semconv, tracing
from agl.adapters.openai import OpenAITracer
from agl.errors import BypassedGatewayError
from agl.mdp.selection import select
from agl.testing.provider import says
from agl.testing.provider import serve as provider_of
from agl.tracing.context import RolloutContext

grpc = pytest.importorskip("grpc")

SERVICE = "google.cloud.aiplatform.v1.PredictionService"
MODEL = "projects/p/locations/l/publishers/google/models/m"
CODING = {
    "request_serializer": lambda message: json.dumps(asdict(message)).encode(),
    "response_deserializer": json.loads,
}


@dataclass
class Ask:
    """A request, in the place of protobuf's."""

    model: str = MODEL
    text: str = "hi"


ASK = Ask()


@contextmanager
def server(held: Event | None = None) -> Iterator[str]:
    """The address of a model over gRPC, whose streams wait for `held` after their first piece."""

    def whole(request: bytes, call: Any) -> bytes:
        if b"refuse" in request:
            call.abort(grpc.StatusCode.INVALID_ARGUMENT, "patient 7 is refused")
        return b'{"text": "hello"}'

    def pieces(request: Any, call: Any) -> Iterator[bytes]:
        ended = Event()
        # Before the first piece: a client that leaves then has this not go on.
        call.add_callback(lambda: None if held is None or held.is_set() else cancelled.set())
        call.add_callback(ended.set)
        yield b'{"text": "hel"}'
        if held is not None:
            while not held.is_set() and not ended.wait(0.01):
                pass
        yield b'{"text": "lo"}'

    methods = {
        "GenerateContent": grpc.unary_unary_rpc_method_handler(whole),
        "Predict": grpc.unary_unary_rpc_method_handler(whole),
        "StreamGenerateContent": grpc.unary_stream_rpc_method_handler(pieces),
        "BidiGenerateContent": grpc.stream_stream_rpc_method_handler(pieces),
    }
    cancelled.clear()
    pool = ThreadPoolExecutor(4)
    running = grpc.server(pool, [grpc.method_handlers_generic_handler(SERVICE, methods)])
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        running.stop(0).wait()
        pool.shutdown()


cancelled = Event()
"""Set by the server when a client has left a stream."""


def unary(address: str, ask: Ask = ASK) -> None:
    with grpc.insecure_channel(address) as channel:
        assert channel.unary_unary(f"/{SERVICE}/GenerateContent", **CODING)(ask) == {"text": "hello"}


def with_call(address: str, ask: Ask = ASK) -> None:
    with grpc.insecure_channel(address) as channel:
        channel.unary_unary(f"/{SERVICE}/GenerateContent", **CODING).with_call(ask)


def future(address: str, ask: Ask = ASK) -> None:
    with grpc.insecure_channel(address) as channel:
        channel.unary_unary(f"/{SERVICE}/GenerateContent", **CODING).future(ask).result()


def intercepted(address: str, ask: Ask = ASK) -> None:
    class Interceptor(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            return continuation(details, request)

    with grpc.insecure_channel(address) as channel:
        channel = grpc.intercept_channel(channel, Interceptor())
        channel.unary_unary(f"/{SERVICE}/GenerateContent", **CODING)(ask)


def stream(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        answer = channel.unary_stream(f"/{SERVICE}/StreamGenerateContent", **CODING)(ASK)
        assert [piece["text"] for piece in answer] == ["hel", "lo"]


def both_ways(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        answer = channel.stream_stream(f"/{SERVICE}/BidiGenerateContent", **CODING)(iter([ASK]))
        assert [piece["text"] for piece in answer] == ["hel", "lo"]


def unary_async(address: str, ask: Ask = ASK) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            assert await channel.unary_unary(f"/{SERVICE}/GenerateContent", **CODING)(ask) == {"text": "hello"}

    asyncio.run(run())


def intercepted_async(address: str, ask: Ask = ASK) -> None:
    class Interceptor(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            return await continuation(details, request)

    async def run() -> None:
        async with grpc.aio.insecure_channel(address, interceptors=[Interceptor()]) as channel:
            await channel.unary_unary(f"/{SERVICE}/GenerateContent", **CODING)(ask)

    asyncio.run(run())


def stream_async(address: str) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            answer = channel.unary_stream(f"/{SERVICE}/StreamGenerateContent", **CODING)(ASK)
            assert [piece["text"] async for piece in answer] == ["hel", "lo"]

    asyncio.run(run())


def both_ways_async(address: str) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            answer = channel.stream_stream(f"/{SERVICE}/BidiGenerateContent", **CODING)(iter([ASK]))
            assert [piece["text"] async for piece in answer] == ["hel", "lo"]

    asyncio.run(run())


ANSWERS: list[Callable[..., None]] = [unary, with_call, future, intercepted, unary_async, intercepted_async]
STREAMS: list[Callable[[str], None]] = [stream, stream_async, both_ways, both_ways_async]


@pytest.fixture
def rollout() -> Iterator[RolloutContext]:
    context = RolloutContext("ro", 1, "solver", select("nobody"))
    with OpenAITracer(), tracing.running(context):
        yield context


def only_its_own_scope(rollout: RolloutContext) -> bool:
    """Whether only the rollout's scope is open, once gRPC's threads have noticed a call's end."""
    until = time.monotonic() + 30
    while len(rollout.open) > 1 and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return len(rollout.open) == 1


@pytest.mark.parametrize("call", [*ANSWERS, *STREAMS])
def test_a_call_is_a_chat_span(call: Callable[[str], None], rollout: RolloutContext) -> None:
    with server() as address:
        call(address)
        here = tracing.current()
        assert here is not None
        assert here.kind == semconv.INVOKE_AGENT
        assert only_its_own_scope(rollout)
    [chat] = [s for s in rollout.spans if s.operation == semconv.CHAT]
    assert (chat.agent, chat.status) == ("solver", "unset")
    assert chat.attributes[semconv.URL].endswith("GenerateContent")
    # The messages of a call in both directions have no names before they are sent.
    if call not in (both_ways, both_ways_async):
        assert chat.attributes[semconv.REQUEST_MODEL] == "m"


@pytest.mark.parametrize("call", ANSWERS)
@pytest.mark.parametrize("content", [True, False])
def test_a_refused_call_is_an_error_and_raises_as_without_agl(
    call: Callable[..., None], content: bool, rollout: RolloutContext
) -> None:
    rollout.capture_content = content
    with server() as address:
        with pytest.raises(grpc.RpcError, match="patient 7"):
            call(address, Ask(text="refuse"))
        assert only_its_own_scope(rollout)
    [chat] = [s for s in rollout.spans if s.operation == semconv.CHAT]
    assert chat.status == "error"
    assert ("patient 7" in str(chat.status_message) + str(chat.events)) == content


def test_a_stream_that_is_dropped_is_cancelled_as_without_agl(rollout: RolloutContext) -> None:
    with server(Event()) as address, grpc.insecure_channel(address) as channel:
        answer = channel.unary_stream(f"/{SERVICE}/StreamGenerateContent", **CODING)(ASK)
        next(answer)
        del answer
        assert cancelled.wait(30)
        assert only_its_own_scope(rollout)
    [chat] = [s for s in rollout.spans if s.operation == semconv.CHAT]
    assert chat.status == "unset"


def test_an_async_stream_ends_with_its_channel_at_the_latest(rollout: RolloutContext) -> None:
    async def leave(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.unary_stream(f"/{SERVICE}/StreamGenerateContent", **CODING)(ASK).read()
            assert len(rollout.open) == 2

    with server(Event()) as address:
        asyncio.run(leave(address))
        assert only_its_own_scope(rollout)
    [chat] = [s for s in rollout.spans if s.operation == semconv.CHAT]
    assert chat.status == "unset"


def test_other_methods_are_no_model_calls(rollout: RolloutContext) -> None:
    with server() as address, grpc.insecure_channel(address) as channel:
        channel.unary_unary(f"/{SERVICE}/Predict", **CODING)(ASK)
    assert [s.name for s in rollout.spans] == []


@pytest.mark.parametrize(
    ("method", "is_call"),
    [
        ("/google.ai.generativelanguage.v1beta.GenerativeService/StreamGenerateContent", True),
        ("/google.cloud.aiplatform.v1beta1.LlmBidiService/BidiGenerateContent", True),
        ("/google.cloud.aiplatform.v1.PredictionService/StreamRawPredict", True),
        ("/xai_api.Chat/GetCompletion", True),
        ("/yandex.cloud.ai.foundation_models.v1.TextGenerationService/Completion", True),
        ("/google.ai.generativelanguage.v1beta.GenerativeService/EmbedContent", False),
        ("/mine.ReportService/Generate", False),
    ],
)
def test_which_methods_ask_a_model(method: str, is_call: bool) -> None:
    from agl.tracing.grpc_hooks import _METHODS

    assert (_METHODS.search(method) is not None) == is_call


def test_a_selected_agent_with_a_routed_call_and_one_over_grpc_does_not_train(tmp_path: Path) -> None:
    with server() as address, provider_of(says("4")) as provider:

        def solver(task: str) -> str:
            client = openai.OpenAI(api_key="k", base_url=provider.url)
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": task}])
            unary(address)
            return "4"

        agent = agl.wrap(solver, reward=lambda task, output: 1.0)
        why = r"1 LLM call.* of agent 'solver' bypassed the gateway.*grpc://.*PredictionService/GenerateContent"
        with pytest.raises(BypassedGatewayError, match=f"(?s){why}"):
            fit(agent, ["2 + 2"], tmp_path)


def test_nothing_is_patched_outside_rollouts() -> None:
    classes = (grpc._channel._UnaryUnaryMultiCallable, grpc.aio._channel.UnaryStreamMultiCallable)
    before = [dict(vars(cls)) for cls in classes]
    with OpenAITracer():
        assert all(vars(cls)["__call__"] is not old["__call__"] for cls, old in zip(classes, before, strict=True))
    assert [dict(vars(cls)) for cls in classes] == before

"""What `overhead.py` times: real SDK and framework code over a transport that answers in this process, traced or not.

    python benchmarks/overhead_cases.py CASE VARIANT

runs one pair as a worker: its first line of output says what it is; then it reads a number of runs per line of input
and answers each with their times.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import gc
import importlib
import importlib.util
import json
import logging
import pstats
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT = (
    "You are given two numbers. Add them with the tool that you have, then say what came out, in one sentence. " * 4
)
ANSWER = "The sum of the two numbers that you gave me is five, as the tool that adds numbers has just told me so. " * 2
URL = "http://provider.invalid/v1"
CHUNKS = 20
"""Pieces of content in the streamed answer."""
COUNTED = 10
"""Runs of which the function calls are counted."""


# -- the provider -----------------------------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 96, "completion_tokens": 24, "total_tokens": 120}
CHAT = {"id": "chatcmpl-1", "created": 1, "model": "m"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}


def _completion(message: dict[str, Any], reason: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return json.dumps({**CHAT, "object": "chat.completion", "choices": [choice], "usage": USAGE}).encode()


def _chunks() -> bytes:
    step = len(ANSWER) // CHUNKS
    pieces = [{"content": ANSWER[i * step : (i + 1) * step]} for i in range(CHUNKS)]
    choices = [
        *({"index": 0, "delta": delta, "finish_reason": None} for delta in ({"role": "assistant"}, *pieces)),
        {"index": 0, "delta": {}, "finish_reason": "stop"},
    ]
    lines = [json.dumps({**CHAT, "object": "chat.completion.chunk", "choices": [choice]}) for choice in choices]
    return "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()


SAYS = _completion({"content": ANSWER}, "stop")
CALLS = _completion({"content": None, "tool_calls": [CALL]}, "tool_calls")
STREAM = _chunks()
RESPONSE = json.dumps(
    {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed",
        "output": [
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": ANSWER, "annotations": []}]}
        ],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "usage": {"input_tokens": 96, "output_tokens": 24, "total_tokens": 120,
                  "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
    }
).encode()  # fmt: skip
MESSAGE = json.dumps(
    {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": ANSWER}],
        "usage": {"input_tokens": 96, "output_tokens": 24},
    }
).encode()  # fmt: skip


def _http(sdk: str, *, is_async: bool) -> Any:
    """A client of the HTTP library that the SDK is on; what it sends is answered here.

    An agent calls its tool first: a Chat Completions request with tools and without a tool's result gets a tool call.
    """
    base = getattr(importlib.import_module(sdk), "DefaultAsyncHttpxClient" if is_async else "DefaultHttpxClient")
    httpx = importlib.import_module(
        next(c.__module__.partition(".")[0] for c in base.__mro__ if "httpx" in c.__module__)
    )

    def answer(request: Any) -> Any:
        path, body = request.url.path, request.content
        if path.endswith("/responses"):
            content = RESPONSE
        elif path.endswith("/messages"):
            content = MESSAGE
        elif b'"stream":true' in body:
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=STREAM)
        else:
            content = CALLS if b'"tools":' in body and b'"tool_call_id":' not in body else SAYS
        return httpx.Response(200, headers={"content-type": "application/json"}, content=content)

    client = httpx.AsyncClient if is_async else httpx.Client
    return client(transport=httpx.MockTransport(answer))


def _openai(*, is_async: bool) -> Any:
    import openai

    cls = openai.AsyncOpenAI if is_async else openai.OpenAI
    return cls(api_key="k", base_url=URL, http_client=_http("openai", is_async=is_async), max_retries=0)


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Something to run.

    Attributes:
        build: makes it; what comes out is called for one run, and awaited where it gives an awaitable.
        tracer: agl's adapter, module and class.
        calls: LLM calls in a run.
        agent: whether a run is a whole agent's, and so a rollout; otherwise it is one call of many in a rollout.
        prepare: called before anything is traced.
    """

    build: Callable[[], Callable[[], Any]]
    tracer: tuple[str, str]
    calls: int = 1
    agent: bool = False
    prepare: Callable[[], None] = lambda: None


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


MESSAGES: Any = [{"role": "user", "content": PROMPT}]


def openai_sync() -> Callable[[], Any]:
    create = _openai(is_async=False).chat.completions.create
    return lambda: create(model="m", messages=MESSAGES)


def openai_async() -> Callable[[], Any]:
    create = _openai(is_async=True).chat.completions.create
    return lambda: create(model="m", messages=MESSAGES)


def openai_stream() -> Callable[[], Any]:
    create = _openai(is_async=False).chat.completions.create
    return lambda: sum(1 for _ in create(model="m", messages=MESSAGES, stream=True))


def openai_async_stream() -> Callable[[], Any]:
    create = _openai(is_async=True).chat.completions.create

    async def read() -> int:
        return len([chunk async for chunk in await create(model="m", messages=MESSAGES, stream=True)])

    return read


def openai_responses() -> Callable[[], Any]:
    create = _openai(is_async=False).responses.create
    return lambda: create(model="m", input=PROMPT)


def anthropic_messages() -> Callable[[], Any]:
    import anthropic

    client = anthropic.Anthropic(api_key="k", base_url=URL, http_client=_http("anthropic", is_async=False))
    return lambda: client.messages.create(model="m", max_tokens=64, messages=MESSAGES)


def _chat_openai() -> Any:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    clients = {"http_client": _http("openai", is_async=False), "http_async_client": _http("openai", is_async=True)}
    return ChatOpenAI(model="m", base_url=URL, api_key=SecretStr("k"), max_retries=0, **clients)


def langchain() -> Callable[[], Any]:
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    agent = create_agent(_chat_openai(), [tool(add)], name="solver")
    return lambda: agent.ainvoke({"messages": MESSAGES})


def langgraph() -> Callable[[], Any]:
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langgraph.graph import START, MessagesState, StateGraph

    graph = StateGraph(MessagesState)
    graph.add_node("solver", create_agent(_chat_openai(), [tool(add)]))
    graph.add_edge(START, "solver")
    compiled = graph.compile(name="solver")
    return lambda: compiled.ainvoke({"messages": MESSAGES})


def no_export() -> None:
    """Without the Agents SDK's exporter to OpenAI's servers."""
    from agents.tracing import set_trace_processors

    set_trace_processors([])


def openai_agents() -> Callable[[], Any]:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool

    model = OpenAIChatCompletionsModel("m", _openai(is_async=True))
    agent = Agent(name="solver", tools=[function_tool(add)], model=model)
    return lambda: Runner.run(agent, PROMPT)


def agent_framework() -> Callable[[], Any]:
    from agent_framework import Agent, tool
    from agent_framework.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(model="m", async_client=_openai(is_async=True))
    agent = Agent(client, name="solver", tools=[tool(add)])
    return lambda: agent.run(PROMPT)


def strands() -> Callable[[], Any]:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client=_openai(is_async=True), model_id="m", stream=False)
    agent = Agent(model=model, tools=[tool(add)], name="solver", callback_handler=None)

    def run() -> Awaitable[Any]:
        agent.messages.clear()
        return agent.invoke_async(PROMPT)

    return run


def autogen() -> Callable[[], Any]:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core import CancellationToken
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True,
    }  # fmt: skip
    client = OpenAIChatCompletionClient(
        model="m", base_url=URL, api_key="k", model_info=info, http_client=_http("openai", is_async=True)
    )
    agent = AssistantAgent("solver", model_client=client, tools=[add], reflect_on_tool_use=True)

    async def run() -> Any:
        await agent.on_reset(CancellationToken())
        return await agent.run(task=PROMPT)

    return run


def ag2() -> Callable[[], Any]:
    from ag2 import Agent, tool
    from ag2.config import OpenAIConfig

    client = _http("openai", is_async=True)
    config = OpenAIConfig(model="m", base_url=URL, api_key="k", streaming=False, max_retries=0, http_client=client)
    agent = Agent("solver", prompt="be brief", config=config, tools=[tool(add)])
    return lambda: agent.ask(PROMPT)


OPENAI = ("agl.adapters.openai", "OpenAITracer")
AUTOGEN = ("agl.adapters.autogen", "AutoGenTracer")
CASES: dict[str, Case] = {
    "openai": Case(openai_sync, OPENAI),
    "openai async": Case(openai_async, OPENAI),
    "openai stream": Case(openai_stream, OPENAI),
    "openai async stream": Case(openai_async_stream, OPENAI),
    "openai responses": Case(openai_responses, OPENAI),
    "anthropic": Case(anthropic_messages, ("agl.adapters.anthropic", "AnthropicTracer")),
    "langchain": Case(langchain, ("agl.adapters.langchain", "LangChainTracer"), 2, True),
    "langgraph": Case(langgraph, ("agl.adapters.langgraph", "LangGraphTracer"), 2, True),
    "openai-agents": Case(openai_agents, ("agl.adapters.openai_agents", "OpenAIAgentsTracer"), 2, True, no_export),
    "agent-framework": Case(agent_framework, ("agl.adapters.agent_framework", "AgentFrameworkTracer"), 2, True),
    "strands": Case(strands, ("agl.adapters.strands", "StrandsTracer"), 2, True),
    "autogen": Case(autogen, AUTOGEN, 2, True),
    "ag2": Case(ag2, AUTOGEN, 2, True),
}


# -- variants ---------------------------------------------------------------------------------------------------------

Around = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Tracing:
    """How a case is traced.

    Attributes:
        around: a context for one rollout.
        spans: spans recorded so far.
    """

    around: Around = contextlib.nullcontext
    spans: Callable[[], int] = lambda: 0


def _agl_outside(case: Case) -> Tracing:
    module, name = case.tracer
    getattr(importlib.import_module(module), name)().instrument()
    return Tracing()


def _agl(case: Case) -> Tracing:
    """Every call is recorded, is checked for a gateway, and goes to its own provider: no agent is selected."""
    from agl import tracing
    from agl.mdp.selection import select

    _agl_outside(case)
    selection = select("nobody")
    recorded = 0

    @contextlib.contextmanager
    def rollout() -> Iterator[None]:
        nonlocal recorded
        context = tracing.RolloutContext("ro-1", 1, "solver", selection, "http://gateway.invalid", "key")
        with tracing.running(context):
            yield
        recorded += len(context.spans)

    return Tracing(rollout, lambda: recorded)


def _provider(*before: Any) -> tuple[Any, Callable[[], int]]:
    """A provider as a user sets one up, whose exporter drops what it gets, and its count of spans.

    Args:
        before: span processors that come first.
    """
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        count = 0

        def export(self, spans: Any) -> SpanExportResult:
            self.count += len(spans)
            return SpanExportResult.SUCCESS

    provider, exporter = TracerProvider(), Nowhere()
    for processor in (*before, BatchSpanProcessor(exporter, max_queue_size=100_000)):
        provider.add_span_processor(processor)

    def exported() -> int:
        provider.force_flush()
        return exporter.count

    return provider, exported


def _instrumentor(module: str, name: str) -> Callable[[Case], Tracing]:
    def install(case: Case) -> Tracing:
        provider, exported = _provider()
        instrumentor = getattr(importlib.import_module(module), name)()
        instrumentor.instrument(tracer_provider=provider)
        return Tracing(spans=exported)

    return install


def _openinference_strands(case: Case) -> Tracing:
    from openinference.instrumentation.strands_agents import StrandsAgentsToOpenInferenceProcessor

    return _converted(StrandsAgentsToOpenInferenceProcessor())


def _openinference_agent_framework(case: Case) -> Tracing:
    from agent_framework.observability import enable_instrumentation
    from openinference.instrumentation.agent_framework import AgentFrameworkToOpenInferenceProcessor

    enable_instrumentation(enable_sensitive_data=True)
    return _converted(AgentFrameworkToOpenInferenceProcessor())


def _converted(processor: Any) -> Tracing:
    """The framework's own spans, which go to the global provider, rewritten by a processor."""
    from opentelemetry import trace

    provider, exported = _provider(processor)
    trace.set_tracer_provider(provider)
    return Tracing(spans=exported)


def _openinference(name: str, cls: str) -> Callable[[Case], Tracing]:
    return _instrumentor(f"openinference.instrumentation.{name}", cls)


def _traceloop(name: str, cls: str) -> Callable[[Case], Tracing]:
    return _instrumentor(f"opentelemetry.instrumentation.{name}", cls)


VARIANTS: dict[str, Callable[[Case], Tracing]] = {
    "nothing": lambda case: Tracing(),
    "agl outside": _agl_outside,
    "agl": _agl,
}
_OPENAI = {
    "openinference": _openinference("openai", "OpenAIInstrumentor"),
    "opentelemetry": _traceloop("openai", "OpenAIInstrumentor"),
}
_LANGCHAIN = {
    "openinference": _openinference("langchain", "LangChainInstrumentor"),
    "opentelemetry": _traceloop("langchain", "LangchainInstrumentor"),
}
RIVALS: dict[str, dict[str, Callable[[Case], Tracing]]] = {
    "openai": _OPENAI,
    "openai async": _OPENAI,
    "openai stream": _OPENAI,
    "openai async stream": _OPENAI,
    "openai responses": _OPENAI,
    "anthropic": {
        "openinference": _openinference("anthropic", "AnthropicInstrumentor"),
        "opentelemetry": _traceloop("anthropic", "AnthropicInstrumentor"),
    },
    "langchain": _LANGCHAIN,
    "langgraph": _LANGCHAIN,
    "openai-agents": {
        "openinference": _openinference("openai_agents", "OpenAIAgentsInstrumentor"),
        "opentelemetry": _traceloop("openai_agents", "OpenAIAgentsInstrumentor"),
    },
    "agent-framework": {"openinference": _openinference_agent_framework},
    "strands": {"openinference": _openinference_strands},
    "autogen": {"openinference": _openinference("autogen_agentchat", "AutogenAgentChatInstrumentor")},
    # Neither project instruments ag2 1.x: these see its requests, and nothing of its agents and tools.
    "ag2": _OPENAI,
}
"""Case -> the rivals that trace it."""


# -- the worker -------------------------------------------------------------------------------------------------------


def main(name: str, variant: str) -> None:
    """Take numbers of runs from standard input; for each, say how many seconds of CPU (all threads) and of wall time a
    run took, and how many spans it made. At `count`, say how many functions a run calls."""
    logging.disable()
    case = CASES[name]
    case.prepare()
    traced = (VARIANTS | RIVALS[name])[variant](case)
    run = case.build()

    async def runs(n: int) -> None:
        # Bare calls are many in one rollout; an agent's run is a rollout.
        with contextlib.nullcontext() if case.agent else traced.around():
            for _ in range(n):
                with traced.around() if case.agent else contextlib.nullcontext():
                    result = run()
                    if hasattr(result, "__await__"):
                        await result

    with asyncio.Runner() as loop:
        loop.run(runs(3))
        gc.collect()
        gc.freeze()  # what the frameworks are made of need not be walked at each round
        print("ready", flush=True)
        for line in sys.stdin:
            if line == "count\n":
                profiler = cProfile.Profile()
                profiler.runcall(loop.run, runs(COUNTED))
                print(json.dumps({name: count / COUNTED for name, count in _entered(profiler).items()}), flush=True)
                continue
            n, spans = int(line), traced.spans()
            gc.collect()
            gc.disable()
            cpu, wall = time.process_time(), time.perf_counter()
            loop.run(runs(n))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            gc.enable()
            print(json.dumps({"cpu": cpu / n, "wall": wall / n, "spans": (traced.spans() - spans) / n}), flush=True)


def _entered(profiler: cProfile.Profile) -> dict[str, int]:
    """How many functions were called in this thread, and how many of them are agl's."""
    stats: Any = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    folders = tuple(str(Path(spec.origin).parent) for name in ("agl", "agl.adapters") if (spec := _spec(name)))
    return {
        "all": sum(calls for _, calls, _, _, _ in stats.values()),
        "agl": sum(calls for (file, _, _), (_, calls, _, _, _) in stats.items() if file.startswith(folders)),
    }


def _spec(name: str) -> Any:
    return importlib.util.find_spec(name) if "agl" in sys.modules else None


if __name__ == "__main__":
    main(*sys.argv[1:])

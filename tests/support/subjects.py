"""The adapters under test, each behind one small face: an agent with a tool `add`, run in every way its framework has.

A new adapter is added to the conformance suite by one more subclass of `Subject`: ours in `all_subjects`, another
distribution's by `--subject` (docs/write-an-adapter.md).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, ClassVar

from provider import Reply, last_said

from agl.adapters.base import InstrumentedTracer
from agl.adapters.langchain import LangChainTracer

KEY = "sk-provider"


NO_NUMBERS = "no numbers today"


class ToolFailed(Exception):
    """What the tool raises when asked for a negative number."""


GAPS = {
    "response_facts": (
        "The framework drops the answer's finish reason or id from what it tells its hooks. Nothing that is trained "
        "depends on them: the gateway's own record has both."
    ),
    "tool_errors": (
        "The framework itself tells the model of a tool's exception, or wraps it in one of its own. Where it tells the "
        "model, the tool's span is an error all the same."
    ),
    "tool_reports": "The framework has no way for a tool to say that it failed but to raise.",
    "mcp": "MCP tools need a package that is not installed.",
    "call_errors": "The framework wraps the SDK's exception in one of its own; the span has the one that was raised.",
}
"""What a framework itself does otherwise, in words for the capability matrix (docs/adapters.md)."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a < 0:
        raise ToolFailed("a is negative")
    return a + b


def uses_add(a: int = 2, b: int = 3) -> Callable[[dict[str, Any]], Reply]:
    """A policy that calls `add` once, where it has tools, and then repeats the result."""

    def script(body: dict[str, Any]) -> Reply:
        who, text = last_said(body)
        if who == "tool":
            return Reply(f"sum {text}")
        if body.get("tools"):
            return Reply(None, (("add", {"a": a, "b": b}),))
        return Reply(f"you said {text}")

    return script


class Subject:
    """A framework's agent with the tool `add`.

    Attributes:
        tracer: the adapter. adapter: the name of its entry point; the subject's own if empty.
        requires: modules without which the subject is left out.
        frameworks: modules that importing the adapter must not import.
        names_agents: whether the framework tells an agent's name; otherwise the rollout's is used.
        prompt: the system prompt of the agents that `agent` makes; None = none, or one of the framework's.
        takes_prompt: whether `agent` heeds `prompt`.
        traces_tools: whether tools run by the framework, so that there are tool spans.
        sdk: whose client makes the calls, which is also their `gen_ai.provider.name`.
        response_id: how the provider's ids of responses begin.
        finish_reasons: of the call that asks for a tool, and of the one that answers.
        ways: how an agent can be run, by method name; each returns the final text.
        async_ways: the same, awaited.
        gaps: what the framework itself does otherwise (`GAPS`), tested in the adapter's own tests.
    """

    name: ClassVar[str]
    adapter: ClassVar[str] = ""
    tracer: ClassVar[type[InstrumentedTracer]]
    requires: ClassVar[tuple[str, ...]]
    frameworks: ClassVar[tuple[str, ...]]
    names_agents: ClassVar[bool] = True
    prompt: str | None = None
    takes_prompt: ClassVar[bool] = False
    traces_tools: ClassVar[bool] = True
    sdk: ClassVar[str] = "openai"
    response_id: ClassVar[str] = "chatcmpl-"
    finish_reasons: ClassVar[tuple[str, str]] = ("tool_calls", "stop")
    ways: ClassVar[tuple[str, ...]]
    async_ways: ClassVar[tuple[str, ...]]
    gaps: ClassVar[frozenset[str]] = frozenset()

    def agent(self, url: str, name: str) -> Any:
        """An agent of that name whose model is at `url`, which ends in /v1."""
        raise NotImplementedError

    def wrappable(self, url: str, name: str) -> Any:
        """What a user hands to `agl.wrap`."""
        return self.agent(url, name)

    def reporting(self, url: str, name: str) -> Any:
        """The same agent with a tool `add` that, in its framework's way, says `NO_NUMBERS` instead of raising."""
        raise NotImplementedError

    async def with_mcp(self, url: str, name: str, question: str) -> str:
        """What the agent answers whose tool `add` is that of `mcp_server`."""
        raise NotImplementedError

    def changed(self) -> Any:
        """What instrumentation changes, to compare before and after."""
        return sdk_requests()

    def bad_request(self) -> type[Exception]:
        """What the SDK raises at status 400."""
        return importlib.import_module(self.sdk).BadRequestError


def sdk_requests() -> list[Any]:
    """The `request` that each installed SDK's clients have of their own."""
    clients = (("openai", "OpenAI", "AsyncOpenAI"), ("anthropic", "Anthropic", "AsyncAnthropic"))
    return [
        vars(getattr(importlib.import_module(sdk), name)).get("request")
        for sdk, *names in clients
        if importlib.util.find_spec(sdk) is not None
        for name in names
    ]


class Loop:
    """The loop that everyone writes around a bare client: ask, run the tools, ask again; in every way there is to ask.

    `raw` is `with_raw_response`, `raw_stream` the same of a stream, `raw_body` is `with_streaming_response`.
    """

    ways: ClassVar[tuple[str, ...]] = ("invoke", "stream", "raw", "raw_stream", "raw_body")
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream", "araw", "araw_stream", "araw_body")
    prompt: str | None = None
    final: ClassVar[str]
    """The method of the streaming helper that gives the whole answer."""

    def resource(self, *, is_async: bool) -> Any:
        """What has `create`."""
        raise NotImplementedError

    def helper(self, *, is_async: bool) -> Any:
        """The SDK's own `stream()`, which puts an answer together."""
        return self.resource(is_async=is_async).stream

    def request(self, history: list[Any]) -> dict[str, Any]:
        raise NotImplementedError

    def collect(self, events: Iterable[Any]) -> Any:
        """The answer that a stream's events make."""
        raise NotImplementedError

    def step(self, history: list[Any], answer: Any) -> str | None:
        """Run the tools that were asked for and note their results in the history; or else the text."""
        raise NotImplementedError

    def function(self, name: str) -> Callable[[Any], str]:
        """The loop as a function of a task."""

        def answer(task: Any) -> str:
            return self.invoke(task["question"])

        answer.__name__ = name
        return answer

    def run(self, question: str, ask: Callable[[dict[str, Any]], Any]) -> str:
        history: list[Any] = [{"role": "user", "content": question}]
        while True:
            if (text := self.step(history, ask(self.request(history)))) is not None:
                return text.strip()

    async def arun(self, question: str, ask: Callable[[dict[str, Any]], Awaitable[Any]]) -> str:
        history: list[Any] = [{"role": "user", "content": question}]
        while True:
            if (text := self.step(history, await ask(self.request(history)))) is not None:
                return text.strip()

    def invoke(self, question: str) -> str:
        return self.run(question, lambda request: self.resource(is_async=False).create(**request))

    async def ainvoke(self, question: str) -> str:
        return await self.arun(question, lambda request: self.resource(is_async=True).create(**request))

    def stream(self, question: str) -> str:
        def ask(request: dict[str, Any]) -> Any:
            with self.helper(is_async=False)(**request) as stream:
                return getattr(stream, self.final)()

        return self.run(question, ask)

    async def astream(self, question: str) -> str:
        async def ask(request: dict[str, Any]) -> Any:
            async with self.helper(is_async=True)(**request) as stream:
                return await getattr(stream, self.final)()

        return await self.arun(question, ask)

    def raw(self, question: str) -> str:
        create = self.resource(is_async=False).with_raw_response.create
        return self.run(question, lambda request: create(**request).parse())

    async def araw(self, question: str) -> str:
        create = self.resource(is_async=True).with_raw_response.create

        async def ask(request: dict[str, Any]) -> Any:
            return await _now(await create(**request))

        return await self.arun(question, ask)

    def raw_stream(self, question: str) -> str:
        create = self.resource(is_async=False).with_raw_response.create
        return self.run(question, lambda request: self.collect(create(**request, stream=True).parse()))

    async def araw_stream(self, question: str) -> str:
        create = self.resource(is_async=True).with_raw_response.create

        async def ask(request: dict[str, Any]) -> Any:
            return self.collect([e async for e in await _now(await create(**request, stream=True))])

        return await self.arun(question, ask)

    def raw_body(self, question: str) -> str:
        create = self.resource(is_async=False).with_streaming_response.create

        def ask(request: dict[str, Any]) -> Any:
            with create(**request) as response:
                return response.parse()

        return self.run(question, ask)

    async def araw_body(self, question: str) -> str:
        create = self.resource(is_async=True).with_streaming_response.create

        async def ask(request: dict[str, Any]) -> Any:
            async with create(**request) as response:
                return await response.parse()

        return await self.arun(question, ask)


async def _now(raw: Any) -> Any:
    """What a raw response of an async client holds; reading it is async in some versions."""
    parsed = raw.parse()
    return await parsed if inspect.isawaitable(parsed) else parsed


class LangChain(Subject):
    name = "langchain"
    tracer = LangChainTracer
    requires = ("langchain", "langchain_openai")
    frameworks = ("langchain", "langchain_core", "langgraph", "openai")
    takes_prompt = True
    ways = ("invoke", "stream", "batch")
    async_ways = ("ainvoke", "astream", "astream_events", "abatch")
    gaps: ClassVar[frozenset[str]] = frozenset({"mcp"})

    def reporting(self, url: str, name: str) -> Any:
        from langchain.agents import create_agent

        return _Graph(create_agent(chat_model(url), [no_numbers()], name=name))

    def agent(self, url: str, name: str) -> Any:
        from langchain.agents import create_agent
        from langchain_core.tools import tool

        return _Graph(create_agent(self.model(url), [tool(add)], name=name, system_prompt=self.prompt))

    def model(self, url: str) -> Any:
        return chat_model(url)

    def wrappable(self, url: str, name: str) -> Any:
        return self.agent(url, name).graph

    def changed(self) -> Any:
        from langchain_core.tracers.context import _configure_hooks

        return sdk_requests(), [*_configure_hooks]


def no_numbers() -> Any:
    """A LangChain tool `add` whose message says that it failed."""
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import InjectedToolCallId, tool

    def failing(a: int, b: int, call_id: str) -> ToolMessage:
        """Add two numbers."""
        return ToolMessage(NO_NUMBERS, tool_call_id=call_id, status="error")

    failing.__annotations__ = {"a": int, "b": int, "call_id": Annotated[str, InjectedToolCallId], "return": ToolMessage}
    return tool("add")(failing)


def chat_model(url: str, **options: Any) -> Any:
    """A `ChatOpenAI` whose model is at `url`."""
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    return ChatOpenAI(model="m", base_url=url, api_key=SecretStr(KEY), max_retries=0, **options)


class _Graph:
    def __init__(self, graph: Any) -> None:
        self.graph = graph

    @staticmethod
    def ask(question: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}]}

    @staticmethod
    def last(result: dict[str, Any]) -> str:
        return result["messages"][-1].text.strip()

    def invoke(self, question: str) -> str:
        return self.last(self.graph.invoke(self.ask(question)))

    async def ainvoke(self, question: str) -> str:
        return self.last(await self.graph.ainvoke(self.ask(question)))

    def stream(self, question: str) -> str:
        return self.last([*self.graph.stream(self.ask(question), stream_mode="values")][-1])

    async def astream(self, question: str) -> str:
        tokens = [t async for t, _ in self.graph.astream(self.ask(question), stream_mode="messages")]
        return "".join(t.text for t in tokens if t.type != "tool").strip()

    async def astream_events(self, question: str) -> str:
        events = [e async for e in self.graph.astream_events(self.ask(question), version="v2")]
        return self.last(events[-1]["data"]["output"])

    def batch(self, question: str) -> str:
        return self.last(self.graph.batch([self.ask(question)])[0])

    async def abatch(self, question: str) -> str:
        return self.last((await self.graph.abatch([self.ask(question)]))[0])

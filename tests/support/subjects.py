"""What the subjects of our own adapters share; each adapter's own are in `subject_*.py`, all in `all_subjects`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Annotated, Any, ClassVar

from agl.adapters.langchain import LangChainTracer
from agl.testing.subject import KEY, NO_NUMBERS, Decision, Subject, add, sdk_requests


class Loop:
    """The loop that everyone writes around a bare client: ask, run the tools, ask again; in every way there is to ask.

    `raw` is `with_raw_response`, `raw_stream` the same of a stream, `raw_body` is `with_streaming_response`.
    """

    ways: ClassVar[tuple[str, ...]] = ("invoke", "stream", "raw", "raw_stream", "raw_body")
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream", "araw", "araw_stream", "araw_body")
    sync_reads: ClassVar[tuple[str, ...]] = ("pieces", "raw_pieces")
    async_reads: ClassVar[tuple[str, ...]] = ("apieces", "araw_pieces")
    prompt: str | None = None
    final: ClassVar[str]
    """The method of the streaming helper that gives the whole answer."""

    def resource(self, *, is_async: bool) -> Any:
        """What has `create`."""
        raise NotImplementedError

    def helper(self, *, is_async: bool) -> Any:
        """The SDK's own `stream()`, which puts an answer together."""
        return self.resource(is_async=is_async).stream

    def opening(self, question: Any) -> list[Any]:
        """The history that begins with a question."""
        return [{"role": "user", "content": question}]

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
        history = self.opening(question)
        while True:
            if (text := self.step(history, ask(self.request(history)))) is not None:
                return text.strip()

    async def arun(self, question: str, ask: Callable[[dict[str, Any]], Awaitable[Any]]) -> str:
        history = self.opening(question)
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

    def pieces(self, question: Any) -> Iterator[Any]:
        """The events of the first answer."""
        return iter(self.resource(is_async=False).create(**self.request(self.opening(question)), stream=True))

    def raw_pieces(self, question: Any) -> Iterator[Any]:
        create = self.resource(is_async=False).with_raw_response.create
        return iter(create(**self.request(self.opening(question)), stream=True).parse())

    async def apieces(self, question: Any) -> AsyncIterator[Any]:
        async for event in await self.resource(is_async=True).create(
            **self.request(self.opening(question)), stream=True
        ):
            yield event

    async def araw_pieces(self, question: Any) -> AsyncIterator[Any]:
        create = self.resource(is_async=True).with_raw_response.create
        async for event in await _now(await create(**self.request(self.opening(question)), stream=True)):
            yield event


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
    image_question: ClassVar[Any] = [
        {"type": "text", "text": "what is 2+3?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    ways = ("invoke", "stream", "batch")
    async_ways = ("ainvoke", "astream", "astream_events", "abatch")
    sync_reads = ("pieces",)
    async_reads = ("apieces", "apieces_of_events")
    approvals = True
    parallel_calls = True
    gaps: ClassVar[frozenset[str]] = frozenset({"mcp", "reasoning"})

    def reporting(self, url: str, name: str) -> Any:
        from langchain.agents import create_agent

        return _Graph(create_agent(chat_model(url), [no_numbers()], name=name))

    def agent(self, url: str, name: str) -> Any:
        from langchain.agents import create_agent
        from langchain_core.tools import tool

        return _Graph(create_agent(self.model(url), [tool(add)], name=name, system_prompt=self.prompt))

    async def with_approval(self, url: str, name: str, question: str, decision: Decision) -> str | None:
        from langchain.agents import create_agent
        from langchain.agents.middleware import HumanInTheLoopMiddleware
        from langchain_core.tools import tool
        from langgraph.checkpoint.memory import InMemorySaver

        agent = create_agent(
            self.model(url),
            [tool(add)],
            name=name,
            middleware=[HumanInTheLoopMiddleware(interrupt_on={"add": True})],
            checkpointer=InMemorySaver(),
        )
        answer: Any = {"decisions": [{"type": "approve" if decision == "approved" else "reject"}]}
        return await resumed(agent, question, None if decision == "unanswered" else answer)

    async def with_equal_calls(self, url: str, name: str, question: str, tool: Any) -> str:
        from langchain.agents import create_agent
        from langchain_core.tools import StructuredTool

        tools = [StructuredTool.from_function(coroutine=tool, name="add", description="Add two numbers.")]
        return await _Graph(create_agent(self.model(url), tools, name=name)).ainvoke(question)

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


async def resumed(graph: Any, question: str, answer: Any) -> str | None:
    """A graph's answer after its interrupt was answered; None, and no further run, without one."""
    from langgraph.types import Command

    config: Any = {"configurable": {"thread_id": "1"}}
    paused = await graph.ainvoke(_Graph.ask(question), config)
    assert paused["__interrupt__"]
    return None if answer is None else _Graph.last(await graph.ainvoke(Command(resume=answer), config))


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

    def pieces(self, question: str) -> Iterator[Any]:
        return self.graph.stream(self.ask(question), stream_mode="messages", subgraphs=True)

    def apieces(self, question: str) -> AsyncIterator[Any]:
        return self.graph.astream(self.ask(question), stream_mode="messages", subgraphs=True)

    def apieces_of_events(self, question: str) -> AsyncIterator[Any]:
        return self.graph.astream_events(self.ask(question), version="v2")

    def batch(self, question: str) -> str:
        return self.last(self.graph.batch([self.ask(question)])[0])

    async def abatch(self, question: str) -> str:
        return self.last((await self.graph.abatch([self.ask(question)]))[0])

"""The adapters under test, each behind one small face: an agent with a tool `add`, run in every way its framework has.

A new adapter is added to the conformance suite by one more subclass of `Subject` in `all_subjects`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

from provider import Reply, last_said

from agl.adapters.base import InstrumentedTracer
from agl.adapters.langchain import LangChainTracer
from agl.adapters.openai import OpenAITracer

KEY = "sk-provider"


class ToolFailed(Exception):
    """What the tool raises when asked for a negative number."""


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
        tracer: the adapter. frameworks: modules that importing the adapter must not import.
        names_agents: whether the framework tells an agent's name; otherwise the rollout's is used.
        traces_tools: whether tools run by the framework, so that there are tool spans.
        ways: how an agent can be run, by method name; each returns the final text.
        async_ways: the same, awaited.
        gaps: what the framework itself does otherwise, tested in the adapter's own tests: "tool_errors" (told to the
            model, or wrapped, instead of raised), "call_errors" (wrapped in its own), "response_facts" (finish reason
            or response id are dropped).
    """

    name: ClassVar[str]
    tracer: ClassVar[type[InstrumentedTracer]]
    frameworks: ClassVar[tuple[str, ...]]
    names_agents: ClassVar[bool] = True
    traces_tools: ClassVar[bool] = True
    ways: ClassVar[tuple[str, ...]]
    async_ways: ClassVar[tuple[str, ...]]
    gaps: ClassVar[frozenset[str]] = frozenset()

    def agent(self, url: str, name: str) -> Any:
        """An agent of that name whose model is at `url`."""
        raise NotImplementedError

    def wrappable(self, url: str, name: str) -> Any:
        """What a user hands to `agl.wrap`."""
        return self.agent(url, name)

    def changed(self) -> Any:
        """What instrumentation changes, to compare before and after."""
        raise NotImplementedError


class BareOpenAI(Subject):
    name = "openai"
    tracer = OpenAITracer
    frameworks = ("openai",)
    names_agents = False
    traces_tools = False
    ways = ("invoke", "stream")
    async_ways = ("ainvoke", "astream")

    def agent(self, url: str, name: str) -> Any:
        return _Loop(url)

    def wrappable(self, url: str, name: str) -> Any:
        loop = self.agent(url, name)

        def answer(task: Any) -> str:
            return loop.invoke(task["question"])

        answer.__name__ = name
        return answer

    def changed(self) -> Any:
        import openai

        return openai.OpenAI.__dict__.get("request"), openai.AsyncOpenAI.__dict__.get("request")


class _Loop:
    """The loop that everyone writes around a bare client."""

    tools: ClassVar[list[Any]] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    def __init__(self, url: str) -> None:
        import openai

        self.client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
        self.async_client = openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)

    @staticmethod
    def step(messages: list[Any], message: Any) -> str | None:
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        return None

    def invoke(self, question: str) -> str:
        messages: list[Any] = [{"role": "user", "content": question}]
        while True:
            answer = self.client.chat.completions.create(model="m", messages=messages, tools=self.tools)
            if (text := self.step(messages, answer.choices[0].message)) is not None:
                return text

    async def ainvoke(self, question: str) -> str:
        messages: list[Any] = [{"role": "user", "content": question}]
        while True:
            answer = await self.async_client.chat.completions.create(model="m", messages=messages, tools=self.tools)
            if (text := self.step(messages, answer.choices[0].message)) is not None:
                return text

    def stream(self, question: str) -> str:
        messages: list[Any] = [{"role": "user", "content": question}]
        while True:
            with self.client.chat.completions.stream(model="m", messages=messages, tools=self.tools) as stream:
                message = stream.get_final_completion().choices[0].message
            if (text := self.step(messages, message)) is not None:
                return text.strip()

    async def astream(self, question: str) -> str:
        messages: list[Any] = [{"role": "user", "content": question}]
        while True:
            create = self.async_client.chat.completions.stream
            async with create(model="m", messages=messages, tools=self.tools) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            if (text := self.step(messages, message)) is not None:
                return text.strip()


class LangChain(Subject):
    name = "langchain"
    tracer = LangChainTracer
    frameworks = ("langchain", "langchain_core", "langgraph", "openai")
    ways = ("invoke", "stream", "batch")
    async_ways = ("ainvoke", "astream", "astream_events", "abatch")

    def agent(self, url: str, name: str) -> Any:
        from langchain.agents import create_agent
        from langchain_core.tools import tool

        return _Graph(create_agent(chat_model(url), [tool(add)], name=name))

    def wrappable(self, url: str, name: str) -> Any:
        return self.agent(url, name).graph

    def changed(self) -> Any:
        import openai
        from langchain_core.tracers.context import _configure_hooks

        return openai.OpenAI.__dict__.get("request"), openai.AsyncOpenAI.__dict__.get("request"), [*_configure_hooks]


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
        return result["messages"][-1].content.strip()

    def invoke(self, question: str) -> str:
        return self.last(self.graph.invoke(self.ask(question)))

    async def ainvoke(self, question: str) -> str:
        return self.last(await self.graph.ainvoke(self.ask(question)))

    def stream(self, question: str) -> str:
        return self.last([*self.graph.stream(self.ask(question), stream_mode="values")][-1])

    async def astream(self, question: str) -> str:
        tokens = [t async for t, _ in self.graph.astream(self.ask(question), stream_mode="messages")]
        return "".join(t.content for t in tokens if t.type != "tool").strip()

    async def astream_events(self, question: str) -> str:
        events = [e async for e in self.graph.astream_events(self.ask(question), version="v2")]
        return self.last(events[-1]["data"]["output"])

    def batch(self, question: str) -> str:
        return self.last(self.graph.batch([self.ask(question)])[0])

    async def abatch(self, question: str) -> str:
        return self.last((await self.graph.abatch([self.ask(question)]))[0])

"""tinyagents under agl's conformance suite: an agent with the tool `add`."""

from __future__ import annotations

from typing import Any, ClassVar

from agl_tinyagents import TinyAgentsTracer

from agl.testing.conformance import KEY, Conformance, Subject, add


class TinyAgents(Subject):
    name = "tinyagents"
    tracer = TinyAgentsTracer
    frameworks = ("tinyagents", "openai")
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_reports", "mcp"})
    takes_prompt = True
    ways: ClassVar[tuple[str, ...]] = ("invoke", "stream")
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream")

    def agent(self, url: str, name: str) -> Any:
        return _Runs(self.wrappable(url, name))

    def wrappable(self, url: str, name: str) -> Any:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI
        from tinyagents import Agent

        settings: Any = {"base_url": url, "api_key": KEY, "max_retries": 0}
        # A connection kept open would outlive the event loop that it was made in.
        http = DefaultAsyncHttpxClient(headers={"connection": "close"})
        clients: Any = {"client": OpenAI(**settings), "async_client": AsyncOpenAI(**settings, http_client=http)}
        return Agent(name, "m", tools=[add], instructions=self.prompt or "", **clients)

    def changed(self) -> Any:
        import tinyagents

        return super().changed(), [*tinyagents._listeners]


class _Runs:
    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def invoke(self, question: str) -> str:
        return self.agent.run(question)

    async def ainvoke(self, question: str) -> str:
        return await self.agent.arun(question)

    def stream(self, question: str) -> str:
        return "".join(self.agent.stream(question)).strip()

    async def astream(self, question: str) -> str:
        return "".join([text async for text in self.agent.astream(question)]).strip()


class TestTinyAgents(Conformance):
    subjects = (TinyAgents(),)

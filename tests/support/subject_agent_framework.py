"""Agent Framework under the conformance suite: an agent with the tool `add`, over both of its wires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from agl.adapters.agent_framework import AgentFrameworkTracer
from agl.testing.mcp_server import ARGUMENTS, COMMAND
from agl.testing.subject import KEY, NO_NUMBERS, Decision, Subject, add, sdk_requests


class AgentFramework(Subject):
    name = "agent_framework"
    tracer = AgentFrameworkTracer
    requires = ("agent_framework", "agent_framework_openai")
    frameworks = ("agent_framework", "agent_framework_openai", "openai")
    takes_prompt = True
    ways: ClassVar[tuple[str, ...]] = ("invoke",)
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream")
    async_reads: ClassVar[tuple[str, ...]] = ("apieces",)
    approvals = True
    parallel_calls = True
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_errors", "call_errors", "reasoning"})

    def agent(self, url: str, name: str) -> Any:
        from agent_framework import Agent, tool

        return _Runs(Agent(self.model(url), self.prompt, name=name, tools=[tool(add)]))

    def model(self, url: str) -> Any:
        return chat_client(url)

    def reporting(self, url: str, name: str) -> Any:
        from agent_framework import Agent, Content, tool

        @tool(name="add")
        def failing(a: int, b: int) -> Content:
            """Add two numbers."""
            return Content.from_error(message=NO_NUMBERS)

        return _Runs(Agent(self.model(url), name=name, tools=[failing]))

    async def with_mcp(self, url: str, name: str, question: str) -> str:
        # Its core asks for them only with `[all]`.
        for package in ("mcp", "tenacity"):
            pytest.importorskip(package)
        from agent_framework import Agent, MCPStdioTool

        async with MCPStdioTool("numbers", COMMAND, args=ARGUMENTS, load_prompts=False) as tool:
            return await _Runs(Agent(self.model(url), name=name, tools=[tool])).ainvoke(question)

    async def with_approval(self, url: str, name: str, question: str, decision: Decision) -> str | None:
        from agent_framework import Agent, Message, tool

        made = tool(add, approval_mode="always_require")
        agent = Agent(self.model(url), name=name, tools=[made])
        session = agent.create_session()
        paused = await agent.run(question, session=session)
        assert paused.user_input_requests
        if decision == "unanswered":
            return None
        approved = decision == "approved"
        answers = [request.to_function_approval_response(approved) for request in paused.user_input_requests]
        return (await agent.run(Message("user", answers), session=session)).text.strip()

    async def with_equal_calls(self, url: str, name: str, question: str, tool: Any) -> str:
        from agent_framework import Agent
        from agent_framework import tool as made

        return await _Runs(Agent(self.model(url), name=name, tools=[made(tool, name="add")])).ainvoke(question)

    def wrappable(self, url: str, name: str) -> Any:
        return self.agent(url, name).agent

    def changed(self) -> Any:
        from agent_framework import Executor, FunctionTool, RawAgent
        from agent_framework.observability import AgentTelemetryLayer, ChatTelemetryLayer

        methods = [
            c.__dict__[m]
            for c, m in (
                (FunctionTool, "invoke"), (RawAgent, "run"), (AgentTelemetryLayer, "run"),
                (ChatTelemetryLayer, "get_response"), (Executor, "execute"),
            )
        ]  # fmt: skip
        return sdk_requests(), *methods


class AgentFrameworkResponses(AgentFramework):
    name = "agent_framework_responses"
    adapter = "agent_framework"
    response_id = "resp_"
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_errors", "call_errors"})

    def model(self, url: str) -> Any:
        return responses_client(url)


def chat_client(url: str) -> Any:
    """A Chat Completions client whose model is at `url`."""
    from agent_framework.openai import OpenAIChatCompletionClient

    return OpenAIChatCompletionClient(model="m", async_client=_client(url))


def responses_client(url: str) -> Any:
    """A Responses client whose model is at `url`."""
    from agent_framework.openai import OpenAIChatClient

    return OpenAIChatClient(model="m", async_client=_client(url))


def _client(url: str) -> Any:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    # A connection kept open would outlive the event loop that it was made in.
    http = DefaultAsyncHttpxClient(headers={"connection": "close"})
    return AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=http)


class _Runs:
    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def invoke(self, question: str) -> str:
        return asyncio.run(self.ainvoke(question))

    async def ainvoke(self, question: str) -> str:
        return (await self.agent.run(question)).text.strip()

    async def astream(self, question: str) -> str:
        stream = self.agent.run(question, stream=True)
        async for _ in stream:
            pass
        return (await stream.get_final_response()).text.strip()

    async def apieces(self, question: str) -> AsyncIterator[Any]:
        async for update in self.agent.run(question, stream=True):
            yield update

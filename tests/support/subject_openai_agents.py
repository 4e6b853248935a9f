"""The OpenAI Agents SDK under the conformance suite: an agent with the tool `add`, over both of its wires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from agl.adapters.openai_agents import OpenAIAgentsTracer
from agl.testing.mcp_server import ARGUMENTS, COMMAND
from agl.testing.subject import KEY, NO_NUMBERS, Decision, Subject, add, sdk_requests


class OpenAIAgents(Subject):
    name = "openai_agents"
    tracer = OpenAIAgentsTracer
    requires = ("agents",)
    frameworks = ("agents", "openai")
    takes_prompt = True
    ways: ClassVar[tuple[str, ...]] = ("invoke", "stream")
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream")
    async_reads: ClassVar[tuple[str, ...]] = ("apieces",)
    approvals = True
    parallel_calls = True
    limits_tools = True
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_errors", "response_facts"})

    def agent(self, url: str, name: str) -> Any:
        from agents import Agent, function_tool

        tool = function_tool(add, failure_error_function=None)
        return _Runs(Agent(name=name, instructions=self.prompt, tools=[tool], model=self.model(url)))

    def model(self, url: str) -> Any:
        return chat_model(url)

    def wrappable(self, url: str, name: str) -> Any:
        return self.agent(url, name).agent

    def reporting(self, url: str, name: str) -> Any:
        from agents import Agent, function_tool

        # As every tool does that is not told otherwise, but for the text.
        tool = function_tool(add, failure_error_function=lambda context, error: NO_NUMBERS)
        return _Runs(Agent(name=name, tools=[tool], model=self.model(url)))

    async def with_mcp(self, url: str, name: str, question: str) -> str:
        from agents import Agent
        from agents.mcp import MCPServerStdio

        async with MCPServerStdio({"command": COMMAND, "args": ARGUMENTS}, client_session_timeout_seconds=60) as server:
            return await _Runs(Agent(name=name, mcp_servers=[server], model=self.model(url))).ainvoke(question)

    async def with_approval(self, url: str, name: str, question: str, decision: Decision) -> str | None:
        from agents import Agent, Runner, function_tool

        agent = Agent(name=name, tools=[function_tool(add, needs_approval=True)], model=self.model(url))
        result = await Runner.run(agent, question)
        if decision == "unanswered":
            return None
        state = result.to_state()
        for item in result.interruptions:
            if decision == "approved":
                state.approve(item)
            else:
                state.reject(item)
        return (await Runner.run(agent, state)).final_output

    async def with_equal_calls(self, url: str, name: str, question: str, tool: Any) -> str:
        from agents import Agent, function_tool

        return await _Runs(Agent(name=name, tools=[function_tool(tool)], model=self.model(url))).ainvoke(question)

    async def with_time_limit(self, url: str, name: str, question: str, tool: Any) -> str:
        from agents import Agent, function_tool

        made = function_tool(tool, timeout=0.05)
        return await _Runs(Agent(name=name, tools=[made], model=self.model(url))).ainvoke(question)

    def changed(self) -> Any:
        from agents.mcp.util import MCPUtil
        from agents.tool_context import ToolContext
        from agents.tracing import get_trace_provider

        provider: Any = get_trace_provider()
        processors = provider._multi_processor._processors
        made = ToolContext.__dict__["from_agent_context"]
        return sdk_requests(), provider, processors, MCPUtil.__dict__.get("_extract_custom_data"), made


class OpenAIAgentsResponses(OpenAIAgents):
    name = "openai_agents_responses"
    adapter = "openai_agents"
    response_id = "resp_"
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_errors"})

    def model(self, url: str) -> Any:
        return responses_model(url)


def chat_model(url: str) -> Any:
    """A Chat Completions model at `url`."""
    from agents import OpenAIChatCompletionsModel

    return OpenAIChatCompletionsModel("m", _client(url))


def responses_model(url: str) -> Any:
    """A Responses model at `url`."""
    from agents import OpenAIResponsesModel

    return OpenAIResponsesModel("m", _client(url))


def _client(url: str) -> Any:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    # A connection kept open would outlive the event loop that it was made in.
    http = DefaultAsyncHttpxClient(headers={"connection": "close"})
    return AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=http)


class _Runs:
    def __init__(self, agent: Any) -> None:
        self.agent = agent

    async def ainvoke(self, question: str) -> str:
        from agents import Runner, UserError

        try:
            return (await Runner.run(self.agent, question)).final_output
        except UserError as error:
            raise error.__cause__ or error from None

    def invoke(self, question: str) -> str:
        from agents import Runner, UserError

        try:
            return Runner.run_sync(self.agent, question).final_output
        except UserError as error:
            raise error.__cause__ or error from None

    async def astream(self, question: str) -> str:
        from agents import Runner, UserError

        result = Runner.run_streamed(self.agent, question)
        try:
            async for _ in result.stream_events():
                pass
        except UserError as error:
            raise error.__cause__ or error from None
        return str(result.final_output).strip()

    def stream(self, question: str) -> str:
        return asyncio.run(self.astream(question))

    async def apieces(self, question: str) -> AsyncIterator[Any]:
        from agents import Runner

        async for event in Runner.run_streamed(self.agent, question).stream_events():
            yield event

"""Pydantic AI under the conformance suite: an agent with the tool `add`, over both of OpenAI's wires."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

from agl.adapters.pydantic_ai import PydanticAITracer
from agl.testing.subject import KEY, NO_NUMBERS, Decision, Subject, add, sdk_requests


class PydanticAI(Subject):
    name = "pydantic_ai"
    tracer = PydanticAITracer
    requires = ("pydantic_ai", "openai")
    frameworks = ("pydantic_ai", "openai")
    takes_prompt = True
    ways: ClassVar[tuple[str, ...]] = ("invoke", "stream")
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream", "astream_events")
    sync_reads: ClassVar[tuple[str, ...]] = ("pieces",)
    async_reads: ClassVar[tuple[str, ...]] = ("apieces", "apieces_of_events", "nodes")
    closes_reads = True
    approvals = True
    parallel_calls = True
    limits_tools = True
    gaps: ClassVar[frozenset[str]] = frozenset({"mcp", "call_errors"})

    def agent(self, url: str, name: str) -> Any:
        return _Runs(self.wrappable(url, name))

    def wrappable(self, url: str, name: str) -> Any:
        return build(self.model(url), name, add, self.prompt)

    def reporting(self, url: str, name: str) -> Any:
        return _Runs(build(self.model(url), name, no_numbers()))

    async def with_approval(self, url: str, name: str, question: str, decision: Decision) -> str | None:
        from pydantic_ai import Agent, ApprovalRequired, DeferredToolRequests, DeferredToolResults, RunContext, Tool

        def asking(ctx: RunContext[None], a: int, b: int) -> int:
            """Add two numbers."""
            if not ctx.tool_call_approved:
                raise ApprovalRequired
            return add(a, b)

        asking.__annotations__["ctx"] = RunContext[None]
        agent = Agent(
            self.model(url), name=name, tools=[Tool(asking, name="add")], output_type=[str, DeferredToolRequests]
        )
        paused = await agent.run(question)
        if decision == "unanswered":
            return None
        assert isinstance(paused.output, DeferredToolRequests)
        decisions = {call.tool_call_id: decision == "approved" for call in paused.output.approvals}
        results = DeferredToolResults(approvals={**decisions})
        return str((await agent.run(message_history=paused.all_messages(), deferred_tool_results=results)).output)

    async def with_equal_calls(self, url: str, name: str, question: str, tool: Any) -> str:
        from pydantic_ai import Tool

        return await _Runs(build(self.model(url), name, Tool(tool, name="add"))).ainvoke(question)

    async def with_time_limit(self, url: str, name: str, question: str, tool: Any) -> str:
        from pydantic_ai import Tool

        made: Any = Tool(tool, name="add", timeout=0.05)
        return await _Runs(build(self.model(url), name, made)).ainvoke(question)

    def model(self, url: str) -> Any:
        return chat_model(url)

    def changed(self) -> Any:
        from pydantic_ai import Agent

        return sdk_requests(), dict(vars(Agent))


class PydanticAIResponses(PydanticAI):
    name = "pydantic_ai_responses"
    adapter = "pydantic_ai"
    response_id = "resp_"

    def model(self, url: str) -> Any:
        from pydantic_ai.models.openai import OpenAIResponsesModel

        return OpenAIResponsesModel("m", provider=_provider(url))


def build(model: Any, name: str, tool: Any, prompt: str | None = None) -> Any:
    """An agent of that name with one tool."""
    from pydantic_ai import Agent

    return Agent(model, name=name, system_prompt=prompt or (), tools=[tool])


def no_numbers() -> Any:
    """A tool `add` that asks the model to call it otherwise."""
    from pydantic_ai import ModelRetry, Tool

    def failing(a: int, b: int) -> int:
        """Add two numbers."""
        raise ModelRetry(NO_NUMBERS)

    return Tool(failing, name="add")


def chat_model(url: str, name: str = "m") -> Any:
    """A Chat Completions model at `url`."""
    from pydantic_ai.models.openai import OpenAIChatModel

    return OpenAIChatModel(name, provider=_provider(url))


def _provider(url: str) -> Any:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    from pydantic_ai.providers.openai import OpenAIProvider

    # A connection kept open would outlive the event loop that it was made in.
    http = DefaultAsyncHttpxClient(headers={"connection": "close"})
    return OpenAIProvider(openai_client=AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=http))


class _Runs:
    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def invoke(self, question: str) -> str:
        return self.agent.run_sync(question).output

    async def ainvoke(self, question: str) -> str:
        return (await self.agent.run(question)).output

    def stream(self, question: str) -> str:
        return str(self.agent.run_stream_sync(question).get_output()).strip()

    async def astream(self, question: str) -> str:
        async with self.agent.run_stream(question) as result:
            return "".join([text async for text in result.stream_text(delta=True)]).strip()

    async def astream_events(self, question: str) -> str:
        from pydantic_ai import AgentRunResultEvent

        async with self.agent.run_stream_events(question) as events:
            return [e async for e in events if isinstance(e, AgentRunResultEvent)][-1].result.output.strip()

    def pieces(self, question: str) -> Iterator[Any]:
        return self.agent.run_stream_sync(question).stream_text(delta=True)

    async def apieces(self, question: str) -> AsyncIterator[Any]:
        async with self.agent.run_stream(question) as result:
            async for text in result.stream_text(delta=True):
                yield text

    async def apieces_of_events(self, question: str) -> AsyncIterator[Any]:
        async with self.agent.run_stream_events(question) as events:
            async for event in events:
                yield event

    async def nodes(self, question: str) -> AsyncIterator[Any]:
        async with self.agent.iter(question) as run:
            async for node in run:
                yield node

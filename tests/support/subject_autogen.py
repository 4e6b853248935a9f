"""AutoGen under the conformance suite: an `AssistantAgent` with the tool `add`, a new one for each run.

MCP: autogen-ext 0.7 needs mcp 1; its `McpWorkbench` answers as the workbench of `reporting` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from agl.adapters.autogen import AutoGenTracer
from agl.testing.subject import KEY, NO_NUMBERS, Subject, add, sdk_requests


class AutoGen(Subject):
    name = "autogen"
    tracer = AutoGenTracer
    requires = ("autogen_agentchat", "autogen_ext")
    frameworks = ("autogen_agentchat", "autogen_core", "autogen_ext", "openai")
    takes_prompt = True
    ways: ClassVar[tuple[str, ...]] = ("invoke", "stream")
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream")
    async_reads: ClassVar[tuple[str, ...]] = ("apieces",)
    parallel_calls = True
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_errors", "mcp"})
    raises_tool_errors: ClassVar[bool] = False
    """AutoGen tells the model of a tool's exception and goes on."""

    def agent(self, url: str, name: str) -> Any:
        return _Runs(url, name, prompt=self.prompt)

    def reporting(self, url: str, name: str) -> Any:
        return _Runs(url, name, no_numbers())

    async def with_equal_calls(self, url: str, name: str, question: str, tool: Any) -> str:
        return (await assistant(url, name, (tool,)).run(task=question)).messages[-1].content

    def wrappable(self, url: str, name: str) -> Any:
        return assistant(url, name)

    def changed(self) -> Any:
        from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
        from autogen_core import BaseAgent
        from autogen_core.tools import BaseTool, Workbench

        classes = (BaseChatAgent, AssistantAgent, BaseAgent, BaseTool, Workbench)
        requests = sdk_requests()
        return requests, [{k: v for k, v in vars(c).items() if not k.startswith("_abc")} for c in classes]


def model_client(url: str) -> Any:
    """A Chat Completions client at `url`."""
    from autogen_ext.models.openai import OpenAIChatCompletionClient
    from openai import DefaultAsyncHttpxClient

    # A connection kept open would outlive the event loop that it was made in.
    http: Any = DefaultAsyncHttpxClient(headers={"connection": "close"})
    info: Any = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True,
    }  # fmt: skip
    settings: Any = {"model_info": info, "http_client": http}
    return OpenAIChatCompletionClient(model="m", base_url=url, api_key=KEY, max_retries=0, **settings)


def assistant(url: str, name: str = "solver", tools: Any = (add,), **options: Any) -> Any:
    """An agent that calls its tools once and then reflects on their results."""
    from autogen_agentchat.agents import AssistantAgent

    settings: Any = {"reflect_on_tool_use": bool(tools)} | options
    return AssistantAgent(name, model_client=model_client(url), tools=[*tools] or None, **settings)


def no_numbers() -> Any:
    """A workbench with the tool `add`, whose result says that it failed."""
    from autogen_core.tools import FunctionTool, StaticWorkbench, TextResultContent, ToolResult, Workbench

    class Failing(StaticWorkbench):
        async def call_tool(self, name: str, *args: Any, **kwargs: Any) -> ToolResult:
            return ToolResult(name=name, result=[TextResultContent(content=NO_NUMBERS)], is_error=True)

    class Remote(Workbench):
        """One whose tools run elsewhere."""

        def __init__(self) -> None:
            self.inner = Failing([FunctionTool(add, "Add two numbers.")])

        async def list_tools(self) -> Any:
            return await self.inner.list_tools()

        async def call_tool(
            self, name: str, arguments: Any = None, cancellation_token: Any = None, call_id: str | None = None
        ) -> ToolResult:
            return await self.inner.call_tool(name)

        async def start(self) -> None: ...

        async def stop(self) -> None: ...

        async def reset(self) -> None: ...

        async def save_state(self) -> dict[str, Any]:
            return {}

        async def load_state(self, state: Any) -> None: ...

    return Remote()


class _Runs:
    def __init__(self, url: str, name: str, workbench: Any = None, prompt: str | None = None) -> None:
        # Without a prompt, the first message is the question.
        self.url, self.name, self.prompt = url, name, prompt
        # An agent has tools or a workbench.
        self.tools: dict[str, Any] = (
            {} if workbench is None else {"tools": (), "workbench": workbench, "reflect_on_tool_use": True}
        )

    async def ainvoke(self, question: str) -> str:
        agent = assistant(self.url, self.name, system_message=self.prompt, **self.tools)
        return (await agent.run(task=question)).messages[-1].content

    async def astream(self, question: str) -> str:
        agent = assistant(self.url, self.name, system_message=self.prompt, model_client_stream=True, **self.tools)
        events: AsyncIterator[Any] = agent.run_stream(task=question)
        return [e async for e in events][-1].messages[-1].content.strip()

    def invoke(self, question: str) -> str:
        return asyncio.run(self.ainvoke(question))

    def stream(self, question: str) -> str:
        return asyncio.run(self.astream(question))

    def apieces(self, question: str) -> AsyncIterator[Any]:
        agent = assistant(self.url, self.name, system_message=self.prompt, model_client_stream=True, **self.tools)
        return agent.run_stream(task=question)

"""AutoGen under the conformance suite: an `AssistantAgent` with the tool `add`, a new one for each run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from subjects import KEY, Subject, add, sdk_requests

from agl.adapters.autogen import AutoGenTracer


class AutoGen(Subject):
    name = "autogen"
    tracer = AutoGenTracer
    requires = ("autogen_agentchat", "autogen_ext")
    frameworks = ("autogen_agentchat", "autogen_core", "autogen_ext", "openai")
    ways: ClassVar[tuple[str, ...]] = ("invoke", "stream")
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream")
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_errors"})
    raises_tool_errors: ClassVar[bool] = False
    """AutoGen tells the model of a tool's exception and goes on."""

    def agent(self, url: str, name: str) -> Any:
        return _Runs(url, name)

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
    return AssistantAgent(name, model_client=model_client(url), tools=[*tools], **settings)


class _Runs:
    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name

    async def ainvoke(self, question: str) -> str:
        # The first message is the question.
        agent = assistant(self.url, self.name, system_message=None)
        return (await agent.run(task=question)).messages[-1].content

    async def astream(self, question: str) -> str:
        agent = assistant(self.url, self.name, model_client_stream=True)
        events: AsyncIterator[Any] = agent.run_stream(task=question)
        return [e async for e in events][-1].messages[-1].content.strip()

    def invoke(self, question: str) -> str:
        return asyncio.run(self.ainvoke(question))

    def stream(self, question: str) -> str:
        return asyncio.run(self.astream(question))

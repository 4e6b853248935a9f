"""ag2 1.x under the conformance suite: an agent with the tool `add`, over both of its wires."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from agl.adapters.autogen import AutoGenTracer
from agl.testing.subject import KEY, Decision, Subject, add, sdk_requests


class AG2(Subject):
    name = "ag2"
    adapter = "autogen"
    tracer = AutoGenTracer
    requires = ("ag2.middleware",)
    frameworks = ("ag2", "openai")
    takes_prompt = True
    ways: ClassVar[tuple[str, ...]] = ("invoke",)
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream")
    approvals = True
    parallel_calls = True
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_errors", "tool_reports", "mcp"})
    config: ClassVar[str] = "OpenAIConfig"

    def agent(self, url: str, name: str) -> Any:
        return _Runs(lambda stream: self.build(url, name, stream=stream))

    def wrappable(self, url: str, name: str) -> Any:
        return self.build(url, name, stream=False)

    async def with_approval(self, url: str, name: str, question: str, decision: Decision) -> str | None:
        from ag2 import tool
        from ag2.middleware import approval_required

        if decision == "unanswered":
            pytest.skip("ag2 asks the person within the run")
        made = tool(add, middleware=[approval_required()])
        agent = self.build(url, name, stream=False, tools=[made])
        answer = "y" if decision == "approved" else "n"
        return (await agent.ask(question, hitl_hook=lambda: answer)).body.strip()

    async def with_equal_calls(self, url: str, name: str, question: str, tool: Any) -> str:
        from ag2 import tool as made

        return (await self.build(url, name, stream=False, tools=[made(tool)]).ask(question)).body.strip()

    def build(self, url: str, name: str, *, stream: bool, tools: Any = None) -> Any:
        from ag2 import Agent, config, tool
        from openai import DefaultAsyncHttpxClient

        # A connection kept open would outlive the event loop that it was made in.
        http = DefaultAsyncHttpxClient(headers={"connection": "close"})
        make = getattr(config, self.config)
        model = make(model="m", base_url=url, api_key=KEY, streaming=stream, max_retries=0, http_client=http)
        return Agent(name, prompt=self.prompt or "be brief", config=model, tools=tools or [tool(add)])

    def changed(self) -> Any:
        from ag2 import Agent

        return sdk_requests(), vars(Agent)["_turn_scope"]


class AG2Responses(AG2):
    name = "ag2_responses"
    response_id = "resp_"
    config = "OpenAIResponsesConfig"


class _Runs:
    def __init__(self, build: Any) -> None:
        self.build = build

    def invoke(self, question: str) -> str:
        return asyncio.run(self.ainvoke(question))

    async def ainvoke(self, question: str) -> str:
        return (await self.build(False).ask(question)).body.strip()

    async def astream(self, question: str) -> str:
        return (await self.build(True).ask(question)).body.strip()

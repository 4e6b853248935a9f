"""ag2 1.x under the conformance suite: an agent with the tool `add`, over both of its wires; and `autogen.beta`."""

from __future__ import annotations

import asyncio
import importlib
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
    package: ClassVar[str] = "ag2"

    def agent(self, url: str, name: str) -> Any:
        return _Runs(lambda stream: self.build(url, name, stream=stream))

    def wrappable(self, url: str, name: str) -> Any:
        return self.build(url, name, stream=False)

    async def with_approval(self, url: str, name: str, question: str, decision: Decision) -> str | None:
        if decision == "unanswered":
            pytest.skip("ag2 asks the person within the run")
        approval_required = importlib.import_module(f"{self.package}.middleware").approval_required
        made = importlib.import_module(self.package).tool(add, middleware=[approval_required()])
        agent = self.build(url, name, stream=False, tools=[made])
        answer = "y" if decision == "approved" else "n"
        return (await agent.ask(question, hitl_hook=lambda: answer)).body.strip()

    async def with_equal_calls(self, url: str, name: str, question: str, tool: Any) -> str:
        made = importlib.import_module(self.package).tool(tool)
        return (await self.build(url, name, stream=False, tools=[made]).ask(question)).body.strip()

    def build(self, url: str, name: str, *, stream: bool, tools: Any = None) -> Any:
        from openai import DefaultAsyncHttpxClient

        package, config = (importlib.import_module(f"{self.package}{part}") for part in ("", ".config"))
        # A connection kept open would outlive the event loop that it was made in.
        http = DefaultAsyncHttpxClient(headers={"connection": "close"})
        make = getattr(config, self.config)
        model = make(model="m", base_url=url, api_key=KEY, streaming=stream, max_retries=0, http_client=http)
        return package.Agent(name, prompt=self.prompt or "be brief", config=model, tools=tools or [package.tool(add)])

    def changed(self) -> Any:
        return sdk_requests(), vars(importlib.import_module(self.package).Agent)["_turn_scope"]


class AG2Responses(AG2):
    name = "ag2_responses"
    response_id = "resp_"
    config = "OpenAIResponsesConfig"


class AutoGenBeta(AG2):
    """What ag2 was before 1.0, within classic AutoGen."""

    name = "autogen_beta"
    requires = ("autogen.beta.middleware",)
    frameworks = ("autogen", "openai")
    package = "autogen.beta"

    async def with_approval(self, url: str, name: str, question: str, decision: Decision) -> str | None:
        if decision == "rejected":
            pytest.skip("what it returns for a refusal cannot be told from a result")
        return await super().with_approval(url, name, question, decision)


class _Runs:
    def __init__(self, build: Any) -> None:
        self.build = build

    def invoke(self, question: str) -> str:
        return asyncio.run(self.ainvoke(question))

    async def ainvoke(self, question: str) -> str:
        return (await self.build(False).ask(question)).body.strip()

    async def astream(self, question: str) -> str:
        return (await self.build(True).ask(question)).body.strip()

"""ag2 1.x under the conformance suite: an agent with the tool `add`, over both of its wires."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from agl.adapters.autogen import AutoGenTracer
from agl.testing.subject import KEY, Subject, add, sdk_requests


class AG2(Subject):
    name = "ag2"
    adapter = "autogen"
    tracer = AutoGenTracer
    requires = ("ag2.middleware",)
    frameworks = ("ag2", "openai")
    takes_prompt = True
    ways: ClassVar[tuple[str, ...]] = ("invoke",)
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream")
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_errors", "tool_reports", "mcp"})
    config: ClassVar[str] = "OpenAIConfig"

    def agent(self, url: str, name: str) -> Any:
        return _Runs(lambda stream: self.build(url, name, stream=stream))

    def wrappable(self, url: str, name: str) -> Any:
        return self.build(url, name, stream=False)

    def build(self, url: str, name: str, *, stream: bool) -> Any:
        from ag2 import Agent, config, tool
        from openai import DefaultAsyncHttpxClient

        # A connection kept open would outlive the event loop that it was made in.
        http = DefaultAsyncHttpxClient(headers={"connection": "close"})
        make = getattr(config, self.config)
        model = make(model="m", base_url=url, api_key=KEY, streaming=stream, max_retries=0, http_client=http)
        return Agent(name, prompt=self.prompt or "be brief", config=model, tools=[tool(add)])

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

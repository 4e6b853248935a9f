"""Strands under the conformance suite: an agent with the tool `add`, made anew for each run, as its history asks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

from agl.adapters.strands import StrandsTracer
from agl.testing.mcp_server import ARGUMENTS, COMMAND
from agl.testing.subject import KEY, NO_NUMBERS, Decision, Subject, add, sdk_requests


class Strands(Subject):
    name = "strands"
    tracer = StrandsTracer
    requires = ("strands", "openai")
    frameworks = ("strands", "openai")
    takes_prompt = True
    ways: ClassVar[tuple[str, ...]] = ("invoke",)
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream")
    async_reads: ClassVar[tuple[str, ...]] = ("apieces",)
    approvals = True
    parallel_calls = True
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_errors", "response_facts"})

    def agent(self, url: str, name: str) -> Any:
        return _Runs(url, name, prompt=self.prompt)

    def reporting(self, url: str, name: str) -> Any:
        return _Runs(url, name, (no_numbers(),))

    async def with_mcp(self, url: str, name: str, question: str) -> str:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client
        from strands.tools.mcp import MCPClient

        with MCPClient(lambda: stdio_client(StdioServerParameters(command=COMMAND, args=ARGUMENTS))) as client:
            return await _Runs(url, name, tuple(client.list_tools_sync())).ainvoke(question)

    async def with_approval(self, url: str, name: str, question: str, decision: Decision) -> str | None:
        from strands.hooks import BeforeToolCallEvent

        def ask(event: BeforeToolCallEvent) -> None:
            if event.interrupt("approval", reason="may it add?") != "approved":
                event.cancel_tool = "a person refused it"

        agent = build(url, name)
        agent.add_hook(ask, BeforeToolCallEvent)
        paused = await agent.invoke_async(question)
        assert paused.stop_reason == "interrupt"
        if decision == "unanswered":
            return None
        answers = [{"interruptResponse": {"interruptId": i.id, "response": decision}} for i in paused.interrupts]
        return str(await agent.invoke_async(answers)).strip()

    async def with_equal_calls(self, url: str, name: str, question: str, tool: Any) -> str:
        from strands import tool as made

        return await _Runs(url, name, (made(name="add")(tool),)).ainvoke(question)

    def wrappable(self, url: str, name: str) -> Any:
        return build(url, name, stream=False)

    def changed(self) -> Any:
        from strands import Agent
        from strands.middleware._registry import MiddlewareRegistry

        stages = MiddlewareRegistry.__dict__["compose"], Agent.__dict__["structured_output_async"]
        return sdk_requests(), *stages


def no_numbers() -> Any:
    """A tool `add` whose result says that it failed."""
    from strands import tool

    @tool(name="add")
    def failing(a: int, b: int) -> dict[str, Any]:
        """Add two numbers."""
        return {"status": "error", "content": [{"text": NO_NUMBERS}]}

    return failing


def build(url: str, name: str, tools: tuple[Any, ...] = (), prompt: str | None = None, **config: Any) -> Any:
    """An agent of that name whose model is at `url`; its tool is `add` if none are given."""
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": url, "api_key": KEY, "max_retries": 0}, model_id="m", **config)
    options: Any = {"name": name, "system_prompt": prompt, "callback_handler": None}
    return Agent(model=model, tools=[*tools] or [tool(add)], **options)


class _Runs:
    def __init__(self, url: str, name: str, tools: tuple[Any, ...] = (), prompt: str | None = None) -> None:
        self.arguments: Any = (url, name, tools, prompt)

    def invoke(self, question: str) -> str:
        return str(build(*self.arguments)(question)).strip()

    async def ainvoke(self, question: str) -> str:
        return str(await build(*self.arguments).invoke_async(question)).strip()

    async def astream(self, question: str) -> str:
        events = [e async for e in build(*self.arguments).stream_async(question)]
        return "".join(e["data"] for e in events if "data" in e).strip()

    def apieces(self, question: str) -> AsyncIterator[Any]:
        return build(*self.arguments).stream_async(question)

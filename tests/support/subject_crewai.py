"""crewai under the conformance suite: an agent with the tool `add`, made anew for each run, as it keeps its history."""

from __future__ import annotations

import os
import tempfile
from typing import Any, ClassVar

from agl.adapters.crewai import CrewAITracer
from agl.testing.mcp_server import ARGUMENTS, COMMAND
from agl.testing.subject import KEY, NO_NUMBERS, Subject, add, sdk_requests

# crewai reads these when it is imported: no telemetry, no question about traces, no files in the user's folders.
os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_TESTING", "true")
os.environ.setdefault("CREWAI_STORAGE_DIR", tempfile.mkdtemp(prefix="agl-tests-crewai-"))


class CrewAI(Subject):
    name = "crewai"
    tracer = CrewAITracer
    requires = ("crewai", "openai")
    frameworks = ("crewai", "openai")
    ways: ClassVar[tuple[str, ...]] = ("invoke", "stream", "crew")
    async_ways: ClassVar[tuple[str, ...]] = ("ainvoke", "astream", "acrew")
    threads_async = True
    gaps: ClassVar[frozenset[str]] = frozenset({"tool_errors"})

    def agent(self, url: str, name: str) -> Any:
        return _Runs(url, name)

    def reporting(self, url: str, name: str) -> Any:
        return _Runs(url, name, (no_numbers(),))

    async def with_mcp(self, url: str, name: str, question: str) -> str:
        from crewai.mcp import MCPServerStdio

        server = MCPServerStdio(command=COMMAND, args=ARGUMENTS)
        return (await build(url, name, (), mcps=[server]).kickoff_async(question)).raw

    def wrappable(self, url: str, name: str) -> Any:
        return build(url, name)

    def changed(self) -> Any:
        from crewai import Agent
        from crewai.agents.agent_builder.base_agent import BaseAgent
        from crewai.tools.base_tool import BaseTool, Tool
        from crewai.tools.tool_usage import ToolUsage

        turns = [Agent.__dict__[name] for name in ("execute_task", "aexecute_task", "kickoff", "kickoff_async")]
        tools = Tool.__dict__["run"], BaseTool.__dict__["run"], ToolUsage.__dict__["use"]
        return sdk_requests(), turns, tools, BaseAgent.__dict__.get("__init_subclass__")


def no_numbers() -> Any:
    """A tool `add` whose result says that it failed."""
    from crewai.tools import tool
    from crewai.tools.tool_failure import ToolFailure

    def failing(a: int, b: int) -> Any:
        """Add two numbers."""
        return ToolFailure(message=NO_NUMBERS)

    failing.__annotations__ = {"a": int, "b": int}
    return tool("add")(failing)


def adder() -> Any:
    """The tool `add`."""
    from crewai.tools import tool

    return tool("add")(add)


def build(url: str, name: str, tools: tuple[Any, ...] = (), stream: bool = False, **options: Any) -> Any:
    """An agent of that role whose model is at `url`; its tool is `add` if none are given."""
    from crewai import LLM, Agent

    llm = LLM(model="openai/m", base_url=url, api_key=KEY, max_retries=0, stream=stream)
    # crewai runs a task again whose model call failed.
    options = {"goal": "Be right.", "backstory": "You add.", "max_retry_limit": 0, **options}
    return Agent(role=name, llm=llm, tools=[*tools] or [adder()], **options)


class _Runs:
    def __init__(self, url: str, name: str, tools: tuple[Any, ...] = ()) -> None:
        self.arguments: Any = (url, name, tools)

    def build(self, **options: Any) -> Any:
        return build(*self.arguments, **options)

    def invoke(self, question: str) -> str:
        return self.build().kickoff(question).raw.strip()

    async def ainvoke(self, question: str) -> str:
        return (await self.build().kickoff_async(question)).raw.strip()

    def stream(self, question: str) -> str:
        return self.build(stream=True).kickoff(question).raw.strip()

    async def astream(self, question: str) -> str:
        return (await self.build(stream=True).kickoff_async(question)).raw.strip()

    def crew(self, question: str) -> str:
        return crew_of(self.build()).kickoff({"question": question}).raw.strip()

    async def acrew(self, question: str) -> str:
        return (await crew_of(self.build()).akickoff({"question": question})).raw.strip()


def crew_of(*agents: Any, **options: Any) -> Any:
    """A crew in which each agent has the question as its task."""
    from crewai import Crew, Task

    tasks = [Task(description="{question}", expected_output="the answer", agent=agent) for agent in agents]
    return Crew(agents=[*agents], tasks=tasks, **options)

"""smolagents under the conformance suite: a `ToolCallingAgent`, made anew for each run, as it keeps its memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

from agl.adapters.smolagents import SmolagentsTracer
from agl.testing import subject
from agl.testing.mcp_server import ARGUMENTS, COMMAND
from agl.testing.provider import Reply, Script, last_said
from agl.testing.subject import KEY, Subject, sdk_requests, uses_add


class Smolagents(Subject):
    name = "smolagents"
    tracer = SmolagentsTracer
    requires = ("smolagents", "openai")
    frameworks = ("smolagents", "openai")
    takes_prompt = True
    finish_reasons = ("tool_calls", "tool_calls")
    ways: ClassVar[tuple[str, ...]] = ("invoke", "stream")
    sync_reads: ClassVar[tuple[str, ...]] = ("pieces",)
    gaps: ClassVar[frozenset[str]] = frozenset(
        {"tool_errors", "tool_reports", "call_errors"} | ({"mcp"} if find_spec("mcpadapt") is None else set())
    )

    async def with_mcp(self, url: str, name: str, question: str) -> str:
        with mcp_tools() as tools:
            agent = build(url, name, tools=tools)
            return str(await asyncio.to_thread(agent.run, question)).strip()

    def agent(self, url: str, name: str) -> Any:
        return _Runs(url, name, self.prompt)

    def wrappable(self, url: str, name: str) -> Any:
        return build(url, name)

    def script(self, a: int = 2, b: int = 3) -> Script:
        return uses_add(a, b, result=observed, answer=lambda text: Reply(None, (("final_answer", {"answer": text}),)))

    def call_id(self, body: dict[str, Any]) -> str:
        # smolagents tells the model what it called as a text of its own.
        return re.findall(r"'id': '([^']+)'", str(body["messages"][-2]["content"]))[-1]

    def changed(self) -> Any:
        from smolagents import MultiStepAgent, Tool, ToolCallingAgent
        from smolagents.local_python_executor import LocalPythonExecutor

        agents = MultiStepAgent.__dict__["_run_stream"], ToolCallingAgent.__dict__["execute_tool_call"]
        return sdk_requests(), *agents, Tool.__dict__["__call__"], LocalPythonExecutor.__dict__["__call__"]


def mcp_tools() -> Any:
    """The tools of `agl.testing.mcp_server`, in a `with`."""
    from mcp import StdioServerParameters
    from smolagents import MCPClient

    return MCPClient(StdioServerParameters(command=COMMAND, args=ARGUMENTS), structured_output=False)


def observed(body: dict[str, Any]) -> str | None:
    """The tool's result or error that a request ends with; smolagents gives it to the model as the user's words."""
    _, text = last_said(body)
    return text.partition("Observation:\n")[2] or (text if "Error:\n" in text else None)


def adder() -> Any:
    """The tool `add`; smolagents reads a tool's source, so it is written out."""
    from smolagents import tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the one.
            b: the other.
        """
        return subject.add(a, b)

    return add


def build(
    url: str,
    name: str | None = "solver",
    cls: Any = None,
    tools: Any = None,
    prompt: str | None = None,
    **options: Any,
) -> Any:
    """An agent, a `ToolCallingAgent` by default, whose model is at `url`; its tool is `add` if none are given."""
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    model = OpenAIModel("m", api_base=url, api_key=KEY, client_kwargs={"max_retries": 0})
    if prompt is not None:
        options["prompt_templates"] = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": prompt}
    options = {"description": "adds", "verbosity_level": LogLevel.OFF, **options}
    return (cls or ToolCallingAgent)([adder()] if tools is None else [*tools], model, name=name, **options)


class _Runs:
    def __init__(self, url: str, name: str, prompt: str | None) -> None:
        # Made once: Python 3.11 at times fails to parse a source in several threads, which `@tool` does.
        self.options: Any = {"url": url, "name": name, "prompt": prompt, "tools": [adder()]}

    def invoke(self, question: str) -> str:
        return str(build(**self.options).run(question)).strip()

    def stream(self, question: str) -> str:
        return str([*build(**self.options, stream_outputs=True).run(question, stream=True)][-1].output).strip()

    def pieces(self, question: str) -> Iterator[Any]:
        return build(**self.options, stream_outputs=True).run(question, stream=True)

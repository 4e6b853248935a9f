"""An agent that solves word problems with a calculator over MCP, in Microsoft Agent Framework and in AutoGen.

It imports nothing of agl.
"""

from __future__ import annotations

import asyncio
from typing import Any

from examples.calc_x import calculator as mcp_calculator

NAME = "MathAgent"
INSTRUCTIONS = "Solve the math problem and output answer after ###"
MAX_CALLS = 8
"""Rounds of tool calls in one problem; the longest chain in the data has 7."""

FRAMEWORKS = ("agent_framework", "autogen")


async def calculator(expression: str) -> str:
    """Calculate an expression of numbers, parentheses and + - * / // % **, such as (3 + 4) * 2."""
    return await mcp_calculator.shared().calculate(expression)


def build(
    base_url: str,
    model: str,
    api_key: str,
    *,
    framework: str = "agent_framework",
    server_per_rollout: bool = False,
) -> Any:
    """The agent, on the model of a server that speaks OpenAI's protocol.

    Args:
        framework: whose agent, of `FRAMEWORKS`.
        server_per_rollout: start a calculator for each problem, rather than one for all problems of a process.
    """
    if framework == "autogen":
        return (
            autogen_per_rollout(base_url, model, api_key) if server_per_rollout else autogen(base_url, model, api_key)
        )
    return per_rollout(base_url, model, api_key) if server_per_rollout else agent_framework(base_url, model, api_key)


# -- Microsoft Agent Framework -----------------------------------------------------------------------------------------


def agent_framework(base_url: str, model: str, api_key: str) -> Any:
    """An agent whose problems share a calculator."""
    from agent_framework import tool

    return _agent(base_url, model, api_key, tools=[tool(calculator)])


def per_rollout(base_url: str, model: str, api_key: str) -> Any:
    """The document's form: a function that starts the calculator and the agent for one problem."""
    from agent_framework import MCPStdioTool

    async def math_agent(task: Any) -> str:
        async with (
            MCPStdioTool(
                name="calculator",
                command=mcp_calculator.COMMAND,
                args=mcp_calculator.ARGUMENTS,
                load_prompts=False,
                request_timeout=int(mcp_calculator.SECONDS),
            ) as mcp_server,
            _agent(base_url, model, api_key) as agent,
        ):
            result = await agent.run(task["question"], tools=mcp_server)
            return result.text

    return math_agent


def _agent(base_url: str, model: str, api_key: str, **options: Any) -> Any:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(model=model, base_url=base_url, api_key=api_key)
    client.function_invocation_configuration["max_iterations"] = MAX_CALLS
    return Agent(client, name=NAME, instructions=INSTRUCTIONS, **options)


# -- AutoGen -----------------------------------------------------------------------------------------------------------


def autogen(base_url: str, model: str, api_key: str, calculate: Any = calculator) -> Any:
    """The same agent in AutoGen, whose own `McpWorkbench` needs mcp 1, with which Agent Framework does not go."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True,
    }  # fmt: skip
    client = OpenAIChatCompletionClient(model=model, base_url=base_url, api_key=api_key, model_info=info)
    return AssistantAgent(
        NAME,
        model_client=client,
        tools=[FunctionTool(calculate, calculator.__doc__ or "", name="calculator")],
        system_message=INSTRUCTIONS,
        max_tool_iterations=MAX_CALLS,
    )


def autogen_per_rollout(base_url: str, model: str, api_key: str) -> Any:
    """A function that starts the calculator and AutoGen's agent for one problem."""

    async def math_agent(task: Any) -> str:
        server = mcp_calculator.Calculator()
        try:
            result = await autogen(base_url, model, api_key, server.calculate).run(task=task["question"])
            return result.messages[-1].content
        finally:
            await asyncio.to_thread(server.close)

    return math_agent

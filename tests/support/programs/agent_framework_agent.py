"""Microsoft Agent Framework: an agent with a tool, over Chat Completions."""

import asyncio

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatCompletionClient


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    agent = Agent(OpenAIChatCompletionClient(model="m"), name="solver", tools=[add])
    print((await agent.run("What is 2 + 3?")).text)


asyncio.run(main())

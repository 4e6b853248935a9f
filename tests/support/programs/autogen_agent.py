"""AutoGen's AgentChat: an assistant with a tool."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": "unknown",
    "structured_output": False,
}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    client = OpenAIChatCompletionClient(model="m", model_info=INFO)
    agent = AssistantAgent("solver", model_client=client, tools=[add], reflect_on_tool_use=True, system_message=None)
    print((await agent.run(task="What is 2 + 3?")).messages[-1].content)
    await client.close()


asyncio.run(main())

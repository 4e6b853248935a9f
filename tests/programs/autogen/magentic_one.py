"""Magentic-One: an orchestrator that plans, asks two assistants, and answers."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import MagenticOneGroupChat
from autogen_agentchat.ui import Console
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def main() -> None:
    model_client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    surfer = AssistantAgent(
        "web_surfer",
        description="Reads web pages.",
        model_client=model_client,
        system_message="You read web pages.",
    )
    coder = AssistantAgent(
        "coder", description="Writes code.", model_client=model_client, system_message="You write code."
    )
    team = MagenticOneGroupChat([surfer, coder], model_client=model_client, max_turns=6)
    result = await Console(team.run_stream(task="Which is the largest prime below 100?"))
    print("answer:", result.messages[-1].to_text())
    await model_client.close()


asyncio.run(main())

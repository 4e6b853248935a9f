"""Agents and a team as tools of an assistant, whose answer is a pydantic object."""

import asyncio
from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import StructuredMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel


class Answer(BaseModel):
    verdict: Literal["good", "bad"]
    text: str


async def main() -> None:
    model_client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    one_by_one = OpenAIChatCompletionClient(model="gpt-4.1-mini", parallel_tool_calls=False)
    writer = AssistantAgent(
        "writer", description="Writes text.", model_client=model_client, system_message="Write well."
    )
    reviewers = [
        AssistantAgent(name, model_client=model_client, system_message=f"You judge {name}.")
        for name in ("spelling", "wit")
    ]
    panel = RoundRobinGroupChat(reviewers, termination_condition=MaxMessageTermination(3))
    assistant = AssistantAgent(
        "assistant",
        model_client=one_by_one,
        tools=[
            AgentTool(writer, return_value_as_last_message=True),
            TeamTool(panel, name="panel", description="Judges a text.", return_value_as_last_message=True),
        ],
        system_message="You use your tools.",
        max_tool_iterations=4,
        output_content_type=Answer,
    )
    result = await assistant.run(task="A line about the sea, and what the panel thinks of it.")
    for message in result.messages:
        if isinstance(message, StructuredMessage):
            print(message.content.verdict, message.content.text)
    await model_client.close()
    await one_by_one.close()


asyncio.run(main())

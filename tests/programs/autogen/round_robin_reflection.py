"""A writer and a critic in turn, until the critic approves or eight messages are reached; then once more."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def main() -> None:
    model_client = OpenAIChatCompletionClient(model="gpt-4.1-mini", temperature=0.3)
    primary = AssistantAgent("primary", model_client=model_client, system_message="You write poems.")
    critic = AssistantAgent(
        "critic", model_client=model_client, system_message="You give feedback. Say APPROVE when it is addressed."
    )
    team = RoundRobinGroupChat(
        [primary, critic], termination_condition=TextMentionTermination("APPROVE") | MaxMessageTermination(8)
    )
    async for message in team.run_stream(task="Write a short poem about the fall season."):
        if isinstance(message, TaskResult):
            print("stopped:", message.stop_reason)
        else:
            print(f"{message.source}: {message.content}")

    result = await team.run(task="Now in Norwegian.")
    print(result.messages[-1].content)
    await model_client.close()


asyncio.run(main())

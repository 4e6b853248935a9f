"""A Magentic team: a manager plans, asks the members one by one, and answers at the end."""

import asyncio

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import MagenticBuilder


def calculate(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    researcher = Agent(
        client=client, name="ResearcherAgent", description="Finds facts.", instructions="You find facts."
    )
    coder = Agent(
        client=client,
        name="CoderAgent",
        description="Computes things.",
        instructions="You compute things with your tool.",
        tools=[calculate],
    )
    manager = Agent(
        client=client,
        name="MagenticManager",
        description="Coordinates the team.",
        instructions="You coordinate a team.",
    )
    workflow = MagenticBuilder(
        participants=[researcher, coder], manager_agent=manager, max_round_count=6, max_stall_count=2
    ).build()

    result = await workflow.run("How much energy do 20 lamps of 9 W need in an hour?")
    for event in result:
        if event.type == "group_chat":
            print(type(event.data).__name__, event.data.participant_name)
    for output in result.get_outputs():
        print(output.text)


if __name__ == "__main__":
    asyncio.run(main())

"""Agents as tools of another agent; one of them is a workflow."""

import asyncio

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from agent_framework.orchestrations import SequentialBuilder


def look_up(word: str) -> str:
    """Look a word up in the dictionary."""
    return f"{word}: sykkel"


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    translator = Agent(
        client=client,
        name="translator",
        description="Translates to Norwegian.",
        instructions="You translate words.",
        tools=[look_up],
    )
    drafter = Agent(client=client, name="drafter", instructions="You draft a rhyme.")
    polisher = Agent(client=client, name="polisher", instructions="You polish a rhyme.")
    poets = SequentialBuilder(participants=[drafter, polisher]).build().as_agent(name="poets")

    coordinator = Agent(
        client=OpenAIChatClient(model="gpt-4.1-mini"),
        name="coordinator",
        instructions="You use your team.",
        tools=[
            translator.as_tool(name="translate", description="Translate a word.", arg_name="word"),
            poets.as_tool(name="rhyme", description="Write a rhyme on a word.", arg_name="topic"),
        ],
    )
    print((await coordinator.run("A rhyme on the Norwegian word for bicycle, please.")).text)


if __name__ == "__main__":
    asyncio.run(main())

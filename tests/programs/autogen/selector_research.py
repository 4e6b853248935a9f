"""A team whose model selects the next speaker: a planner, someone who searches, and someone who computes."""

import asyncio
from collections.abc import Sequence

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.messages import BaseAgentEvent, BaseChatMessage
from autogen_agentchat.teams import SelectorGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


def search_web(query: str) -> str:
    """Search the web."""
    return "Points: 1200 in 2007, 900 in 2008."


def percentage_change(start: float, end: float) -> float:
    """Compute the change from start to end in per cent."""
    return (end - start) / start * 100


def planner_first(messages: Sequence[BaseAgentEvent | BaseChatMessage]) -> str | None:
    return "planner" if messages[-1].source == "user" else None


async def main() -> None:
    model_client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    planner = AssistantAgent(
        "planner", description="Plans.", model_client=model_client, system_message="You plan. End with TERMINATE."
    )
    searcher = AssistantAgent(
        "web_searcher",
        description="Searches the web.",
        model_client=model_client,
        tools=[search_web],
        system_message="You search the web.",
    )
    analyst = AssistantAgent(
        "data_analyst",
        description="Computes.",
        model_client=model_client,
        tools=[percentage_change],
        system_message="You compute with your tool.",
    )
    team = SelectorGroupChat(
        [planner, searcher, analyst],
        model_client=model_client,
        termination_condition=TextMentionTermination("TERMINATE") | MaxMessageTermination(15),
        selector_func=planner_first,
        allow_repeated_speaker=True,
    )
    result = await team.run(task="How did the points change from 2007 to 2008?")
    for message in result.messages:
        print(f"{message.source}: {message.to_text()}")
    await model_client.close()


asyncio.run(main())

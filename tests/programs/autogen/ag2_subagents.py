"""AG2 1.x: a coordinator with a tool and a researcher to delegate to; the second question knows the first."""

import asyncio

from ag2 import Agent, tool
from ag2.config import OpenAIConfig

config = OpenAIConfig(model="gpt-4.1-mini")


@tool
def population(city: str) -> str:
    """How many people live in a city."""
    return f"{city}: 700,000"


@tool
async def write_down(note: str) -> str:
    """Write a note down."""
    return f"noted: {note}"


researcher = Agent("researcher", prompt="You look facts up.", config=config, tools=[population])
coordinator = Agent(
    "coordinator",
    prompt="You delegate research and take notes.",
    config=config,
    tools=[write_down, researcher.as_tool(description="Look facts up.", name="research")],
)


async def main() -> None:
    reply = await coordinator.ask("How many people live in Oslo?")
    print(reply.body)
    reply = await reply.ask("Write that down.")
    print(reply.body)


asyncio.run(main())

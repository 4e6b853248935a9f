"""An agent with tools that remembers: two turns in one session, over the Responses API."""

import asyncio
from typing import Annotated

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient
from opentelemetry import trace
from pydantic import Field

tracer = trace.get_tracer("shop")


@tool(approval_mode="never_require")
def get_stock(item: Annotated[str, Field(description="The name of the item.")]) -> str:
    """Say how many of an item are in stock."""
    with tracer.start_as_current_span("warehouse") as span:
        span.set_attribute("shop.item", item)
        return f"{item}: 3 left"


@tool(approval_mode="never_require")
async def reserve(item: str, count: int) -> str:
    """Reserve a number of items."""
    with tracer.start_as_current_span("reservation"):
        await asyncio.sleep(0)
        return f"reserved {count} of {item}"


async def main() -> None:
    agent = Agent(
        client=OpenAIChatClient(model="gpt-4.1-mini"),
        name="ShopAssistant",
        instructions="You help customers of a shop.",
        tools=[get_stock, reserve],
    )
    session = agent.create_session()
    for question in ("How many lamps are left?", "Reserve two of them, please."):
        result = await agent.run(question, session=session)
        print(f"{question} {result.text}")


if __name__ == "__main__":
    asyncio.run(main())

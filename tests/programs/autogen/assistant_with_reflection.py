"""An assistant with tools that reflects on what they return; the console shows two runs."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.ui import Console
from autogen_ext.models.openai import OpenAIChatCompletionClient
from opentelemetry import trace

tracer = trace.get_tracer("shop")


async def find_price(item: str) -> str:
    """Find the price of an item."""
    with tracer.start_as_current_span("price list") as span:
        span.set_attribute("shop.item", item)
        return f"{item}: 30 kr"


def convert(kroner: float) -> str:
    """Convert Norwegian kroner to euros."""
    with tracer.start_as_current_span("conversion"):
        return f"{kroner * 0.085:.2f} euros"


async def main() -> None:
    model_client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    agent = AssistantAgent(
        name="shop_assistant",
        model_client=model_client,
        tools=[find_price, convert],
        system_message="You answer questions about prices.",
        reflect_on_tool_use=True,
        model_client_stream=True,
    )
    await Console(agent.run_stream(task="What does a lamp cost?"))
    await Console(agent.run_stream(task="And in euros?"))
    await model_client.close()


asyncio.run(main())

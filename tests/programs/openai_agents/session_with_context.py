"""A session over two turns in memory, instructions made from the context, hooks, and a span of the user's in a tool."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from agents import Agent, RunContextWrapper, RunHooks, Runner, SQLiteSession, Tool, function_tool
from opentelemetry import trace

tracer = trace.get_tracer("shop")


@dataclass
class Customer:
    name: str
    basket: list[str] = field(default_factory=list)


class Log(RunHooks[Customer]):
    def __init__(self) -> None:
        self.events: list[str] = []

    async def on_agent_start(self, context: Any, agent: Agent[Customer]) -> None:
        self.events.append(f"{agent.name} starts")

    async def on_tool_end(self, context: Any, agent: Agent[Customer], tool: Tool, result: object) -> None:
        self.events.append(f"{tool.name} gave {result}")


@function_tool
async def put_in_basket(context: RunContextWrapper[Customer], product: str) -> str:
    """Put a product into the customer's basket.

    Args:
        product: Its name.
    """
    with tracer.start_as_current_span("update basket") as span:
        span.set_attribute("shop.product", product)
        await asyncio.sleep(0)
        context.context.basket.append(product)
        return f"{len(context.context.basket)} in the basket"


def instructions(context: RunContextWrapper[Customer], agent: Agent[Customer]) -> str:
    return f"You are a shop assistant. The customer is {context.context.name}."


assistant = Agent[Customer](name="Shop assistant", instructions=instructions, tools=[put_in_basket])


async def main() -> None:
    session, customer, log = SQLiteSession("customer-7"), Customer("Ada"), Log()
    for said in ("A teapot, please.", "What did I just take?"):
        result = await Runner.run(assistant, said, context=customer, session=session, hooks=log)
        print(result.final_output)
    print(customer.basket, len(await session.get_items()))
    print("\n".join(log.events))


asyncio.run(main())

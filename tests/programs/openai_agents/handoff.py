"""Triage: an agent that hands the conversation to a specialist, which has a tool."""

import asyncio

from agents import Agent, Runner, function_tool


@function_tool
def refund(order: str) -> str:
    """Refund an order."""
    return f"{order} refunded"


billing = Agent(
    name="Billing agent",
    handoff_description="Answers questions about invoices and refunds.",
    instructions="You refund orders.",
    tools=[refund],
)
history = Agent(name="History tutor", handoff_description="Answers questions about history.", instructions="Explain.")
triage = Agent(name="Triage agent", instructions="Hand the user to the right agent.", handoffs=[billing, history])


async def main() -> None:
    result = await Runner.run(triage, "Please refund order 17.")
    print(result.final_output)
    print("answered by", result.last_agent.name)


if __name__ == "__main__":
    asyncio.run(main())

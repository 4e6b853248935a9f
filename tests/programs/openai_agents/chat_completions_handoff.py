"""Chat Completions for every agent, tracing off, and a handoff with data and a filter that takes tool calls out."""

import asyncio

from agents import (
    Agent,
    HandoffInputData,
    RunContextWrapper,
    Runner,
    function_tool,
    handoff,
    set_default_openai_api,
    set_tracing_disabled,
)
from agents.extensions import handoff_filters
from agents.extensions.handoff_prompt import RECOMMENDED_PROMPT_PREFIX
from pydantic import BaseModel

set_default_openai_api("chat_completions")
set_tracing_disabled(True)


class Escalation(BaseModel):
    reason: str


@function_tool
def look_up_order(order: int) -> str:
    """Look an order up."""
    return f"order {order} is lost"


def only_the_last(data: HandoffInputData) -> HandoffInputData:
    data = handoff_filters.remove_all_tools(data)
    history = data.input_history
    return data.clone(input_history=history[-2:] if isinstance(history, tuple) else history)


async def escalated(context: RunContextWrapper[None], data: Escalation) -> None:
    print("escalated:", data.reason)


manager = Agent(
    name="Manager",
    model="gpt-4.1",
    instructions=f"{RECOMMENDED_PROMPT_PREFIX}\nYou settle complaints.",
)
clerk = Agent(
    name="Clerk",
    model="gpt-4.1-mini",
    instructions=f"{RECOMMENDED_PROMPT_PREFIX}\nYou answer customers, and escalate complaints.",
    tools=[look_up_order],
    handoffs=[handoff(manager, on_handoff=escalated, input_type=Escalation, input_filter=only_the_last)],
)


async def main() -> None:
    first = await Runner.run(clerk, "Hello, where is order 4?")
    print(first.final_output)
    again = [*first.to_input_list(), {"role": "user", "content": "I want to complain!"}]
    result = await Runner.run(first.last_agent, again)
    print(f"{result.last_agent.name}: {result.final_output}")


asyncio.run(main())

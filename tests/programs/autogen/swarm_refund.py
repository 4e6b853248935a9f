"""A swarm: agents hand the conversation to one another, and to the user, whose answer resumes it."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import HandoffTermination, TextMentionTermination
from autogen_agentchat.messages import HandoffMessage
from autogen_agentchat.teams import Swarm
from autogen_ext.models.openai import OpenAIChatCompletionClient


def refund_flight(flight_id: str) -> str:
    """Refund a flight."""
    return f"Flight {flight_id} refunded"


async def main() -> None:
    model_client = OpenAIChatCompletionClient(model="gpt-4.1-mini")
    travel_agent = AssistantAgent(
        "travel_agent",
        model_client=model_client,
        handoffs=["flights_refunder", "user"],
        system_message="You are a travel agent. Say TERMINATE when all is done.",
    )
    flights_refunder = AssistantAgent(
        "flights_refunder",
        model_client=model_client,
        handoffs=["travel_agent", "user"],
        tools=[refund_flight],
        system_message="You refund flights.",
    )
    team = Swarm(
        [travel_agent, flights_refunder],
        termination_condition=HandoffTermination(target="user") | TextMentionTermination("TERMINATE"),
    )
    result = await team.run(task="I need to refund my flight.")
    last = result.messages[-1]
    while isinstance(last, HandoffMessage) and last.target == "user":
        print(f"{last.source} asks the user")
        answer = HandoffMessage(source="user", target=last.source, content="It is flight 507811.")
        result = await team.run(task=answer)
        last = result.messages[-1]
    for message in result.messages:
        print(f"{message.type} from {message.source}")
    print(last.to_text())
    await model_client.close()


asyncio.run(main())

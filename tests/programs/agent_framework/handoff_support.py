"""Customer support by handoffs: triage sends the user to a specialist, and the user answers once more."""

import asyncio
from typing import Annotated

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import HandoffAgentUserRequest, HandoffBuilder


@tool(approval_mode="never_require")
def refund_order(order: Annotated[str, "The number of the order."]) -> str:
    """Refund an order."""
    return f"order {order} refunded"


def agent(name: str, instructions: str, tools: list | None = None) -> Agent:
    return Agent(
        client=OpenAIChatCompletionClient(model="gpt-4.1-mini"),
        name=name,
        instructions=instructions,
        tools=tools,
        require_per_service_call_history_persistence=True,
    )


async def main() -> None:
    triage = agent("triage_agent", "You send customers to the right specialist.")
    refunds = agent("refund_agent", "You refund orders.", [refund_order])
    orders = agent("order_agent", "You say where orders are.")
    workflow = (
        HandoffBuilder(name="support", participants=[triage, refunds, orders])
        .with_start_agent(triage)
        .add_handoff(triage, [refunds, orders])
        .add_handoff(refunds, [triage])
        .add_handoff(orders, [triage])
        .with_termination_condition(lambda conversation: "Goodbye" in conversation[-1].text)
        .build()
    )
    answers = iter(["It is order 17.", "No, thank you."])
    result = await workflow.run("I want my money back.")
    while True:
        for response in result.get_outputs():
            for message in response.messages:
                if message.text:
                    print(f"{message.author_name}: {message.text}")
        requests = [r for r in result.get_request_info_events() if isinstance(r.data, HandoffAgentUserRequest)]
        if not requests:
            break
        answer = next(answers)
        print("user:", answer)
        result = await workflow.run(
            responses={request.request_id: HandoffAgentUserRequest.create_response(answer) for request in requests}
        )


if __name__ == "__main__":
    asyncio.run(main())

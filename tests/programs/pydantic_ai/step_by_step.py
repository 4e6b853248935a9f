"""A run node by node, over the Responses API: what each node asks and gets, with the model's thinking."""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings

model = OpenAIResponsesModel("gpt-5-mini", settings=OpenAIResponsesModelSettings(openai_reasoning_effort="low"))
banker = Agent(model, name="banker", instructions="Convert money with your tools.")


@banker.tool_plain
async def rate(source: str, target: str) -> float:
    """How many units of the target one unit of the source is."""
    return {("EUR", "USD"): 1.25, ("EUR", "CHF"): 0.5}[source, target]


async def main() -> None:
    async with banker.iter("What are 10 EUR in USD and CHF?") as run:
        async for node in run:
            if Agent.is_model_request_node(node):
                print("asked with", [part.part_kind for part in node.request.parts])
            elif Agent.is_call_tools_node(node):
                print("answered with", [part.part_kind for part in node.model_response.parts])
            elif Agent.is_end_node(node):
                print("final", node.data.output)
    assert run.result is not None
    follow_up = await banker.run("Thanks. Which is more?", message_history=run.result.all_messages())
    print(follow_up.output)


asyncio.run(main())

"""Agents as tools: inside a function with the decorator, by `as_tool`, and directly in the list of tools."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(model_id="gpt-4.1-mini")


@tool
def distance(city: str) -> str:
    """The distance to a city."""
    return f"{city} is 640 km away"


@tool
def travel_expert(question: str) -> str:
    """Answer questions about journeys.

    Args:
        question: All that the expert has to know.
    """
    expert = Agent(
        name="travel_expert",
        model=model,
        system_prompt="You plan journeys.",
        tools=[distance],
        callback_handler=None,
    )
    return str(expert(question)).strip()


packer = Agent(
    name="packer",
    description="Says what to pack.",
    model=model,
    system_prompt="You list what to pack.",
    callback_handler=None,
)
cook = Agent(
    name="Cook", description="Suggests food.", model=model, system_prompt="You suggest food.", callback_handler=None
)
orchestrator = Agent(
    name="orchestrator",
    model=model,
    system_prompt="Send each question to the right specialist.",
    tools=[travel_expert, packer, cook.as_tool(name="ask_cook", preserve_context=True)],
    callback_handler=None,
)

print(str(orchestrator("I go to Oslo. How far is it, what do I pack, and what do I eat there?")).strip())
print(len(packer.messages), len(cook.messages), len(orchestrator.messages), "messages are kept")

"""The plugin of late_import.py: a Strands agent that asks a smolagents agent."""

from smolagents import CodeAgent, OpenAIModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel as StrandsModel

almanac = CodeAgent(
    tools=[], model=OpenAIModel(model_id="gpt-4.1-mini"), name="almanac", description="Adds times.", verbosity_level=0
)


@tool
def add_times(question: str) -> str:
    """Add times."""
    return str(almanac.run(question))


skipper = Agent(
    name="skipper",
    model=StrandsModel(model_id="gpt-4.1-mini"),
    system_prompt="You know the tides.",
    tools=[add_times],
    callback_handler=None,
)


def answer(question: str) -> str:
    return str(skipper(question)).strip()

"""Strands: an agent with a tool."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent(model=OpenAIModel(model_id="m"), tools=[add], name="solver", callback_handler=None)
print(str(agent("What is 2 + 3?")).strip())

"""Pydantic AI: an agent with a tool."""

from pydantic_ai import Agent


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent("openai-chat:m", tools=[add], name="solver")
print(agent.run_sync("What is 2 + 3?").output)

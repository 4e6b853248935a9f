"""smolagents: an agent with a tool."""

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the one.
        b: the other.
    """
    return a + b


agent = ToolCallingAgent([add], OpenAIModel("m"), name="solver", verbosity_level=LogLevel.OFF)
print(agent.run("What is 2 + 3?"))

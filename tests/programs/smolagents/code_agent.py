"""An agent that acts by code: it calls tools, imports a module, fails once, and remembers its variables."""

import statistics

from opentelemetry import trace
from smolagents import CodeAgent, OpenAIModel, tool

tracer = trace.get_tracer("shop")
PRICES = {"apple": 3, "pear": 5, "plum": 10}


@tool
def price(fruit: str) -> int:
    """
    Gets the price of a fruit.

    Args:
        fruit: The name of the fruit, in singular.
    """
    with tracer.start_as_current_span("read the price list", attributes={"fruit": fruit}):
        return PRICES[fruit]


agent = CodeAgent(
    tools=[price],
    model=OpenAIModel(model_id="gpt-4.1-mini"),
    name="greengrocer",
    description="Knows what fruit costs.",
    additional_authorized_imports=["statistics"],
    verbosity_level=0,
    max_steps=4,
)
answer = agent.run("What do these cost on average?", additional_args={"basket": ["apple", "pear", "plum"]})
print("answer:", answer, "right:", answer == statistics.mean(PRICES.values()))
print([type(step).__name__ for step in agent.memory.steps])

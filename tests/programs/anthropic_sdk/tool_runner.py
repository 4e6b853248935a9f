"""The SDK's own tool runner: functions become tools, and it asks until no tool is called any more."""

from anthropic import Anthropic, beta_tool
from opentelemetry import trace

client = Anthropic()
tracer = trace.get_tracer("kitchen")
PANTRY = {"eggs": 6, "flour": 0}


@beta_tool
def in_pantry(food: str) -> str:
    """How much of a food is left.

    Args:
        food: Its name.
    """
    with tracer.start_as_current_span("open the pantry"):
        return f"{PANTRY.get(food, 0)} {food}"


@beta_tool
def buy(food: str, amount: int) -> str:
    """Put a food on the shopping list.

    Args:
        food: Its name.
        amount: How much of it.
    """
    PANTRY[food] = PANTRY.get(food, 0) + amount
    return f"{amount} {food} bought"


runner = client.beta.messages.tool_runner(
    model="claude-sonnet-4-5",
    max_tokens=1024,
    system="You run a kitchen.",
    tools=[in_pantry, buy],
    messages=[{"role": "user", "content": "We want to bake a cake."}],
    max_iterations=5,
)
with tracer.start_as_current_span("bake"):
    for message in runner:
        print(message.stop_reason, [block.type for block in message.content])
print(message.content[0].text)
print(PANTRY)

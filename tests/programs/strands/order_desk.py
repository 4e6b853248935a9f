"""Tools with the agent's state and the invocation's, a hook that changes a call, and a span of the user's own."""

from opentelemetry import trace
from strands import Agent, ToolContext, tool
from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent
from strands.models.openai import OpenAIModel

tracer = trace.get_tracer("shop")


@tool(context=True)
def order(item: str, amount: int, tool_context: ToolContext) -> str:
    """Order something.

    Args:
        item: What to order.
        amount: How many.
    """
    with tracer.start_as_current_span("write the order", attributes={"item": item}):
        orders = tool_context.agent.state.get("orders")
        tool_context.agent.state.set("orders", [*orders, [item, amount]])
    return f"{amount} {item} for {tool_context.invocation_state['customer']}"


@tool
def stock(item: str) -> dict:
    """How many of an item there are."""
    if item == "unicorn":
        raise ValueError("we have never had a unicorn")
    return {"status": "success", "content": [{"json": {"item": item, "left": 12}}]}


def at_most_five(event: BeforeToolCallEvent) -> None:
    """Nobody orders more than five."""
    arguments = event.tool_use["input"]
    if event.tool_use["name"] == "order" and arguments["amount"] > 5:
        arguments["amount"] = 5


def loudly(event: AfterToolCallEvent) -> None:
    print("ran", event.tool_use["name"], event.result["status"])


clerk = Agent(
    name="clerk",
    model=OpenAIModel(model_id="gpt-4.1-mini", params={"temperature": 0.2}),
    system_prompt="You take orders.",
    tools=[order, stock],
    state={"orders": []},
    hooks=[at_most_five, loudly],
    callback_handler=None,
)
result = clerk("A unicorn and nine lamps, please.", invocation_state={"customer": "Mrs Gray"})
print(result.stop_reason, str(result).strip(), clerk.state.get("orders"))

"""The loop of an agent by hand: a model with tools, the tools it asks for, and what it says in the end."""

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

tracer = trace.get_tracer("shop")


@tool
def price(item: str) -> float:
    """The price of an item."""
    with tracer.start_as_current_span("price list") as span:
        span.set_attribute("item", item)
        return {"lamp": 30.0, "desk": 200.0}[item]


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


@tool
def order(item: str, count: int) -> str:
    """Order items."""
    raise ValueError(f"only 2 of {item} are left")


tools = {t.name: t for t in (price, multiply, order)}
model = ChatOpenAI(model="gpt-4.1-mini").bind_tools(list(tools.values()))


with tracer.start_as_current_span("visit") as visit:
    messages = [HumanMessage("Order three lamps, and say what they are.")]
    while (answer := model.invoke(messages)).tool_calls:
        messages.append(answer)
        for call in answer.tool_calls:
            try:
                messages.append(tools[call["name"]].invoke(call))
            except ValueError as error:
                visit.set_status(Status(StatusCode.ERROR, str(error)))
                messages.append({"role": "tool", "content": f"Error: {error}", "tool_call_id": call["id"]})
    print(answer.text, f"({len(messages)} messages)")
